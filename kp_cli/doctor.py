"""`kp doctor`: what this machine and this model can do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from statistics import median
from typing import Any

import typer
from rich.console import Group

from kp_cli import waiting
from kp_cli.shared import ERRORS, JsonFlag, ModelOptions, spread, table_of, tell
from kp_core.packs.blobs import FolderBlobs
from kp_core.packs.store import default_keep_bytes

__all__ = ["doctor"]

_PACKAGES = (
    "torch",
    "transformers",
    "chromadb",
    "scikit-learn",
    "sentence-transformers",
    "langchain-core",
    "llama-index-core",
    "vllm",
)
_REPEATS = 3
_PROBE_TEXT = "The lighthouse keeper counts ships, and writes each of them into a long book.\n" * 32


@spread
def doctor(*, model: ModelOptions, as_json: JsonFlag = False) -> None:
    """Machine, packages, whether a model is supported and why not (exit code 3), and where storing KV pays."""
    with waiting("Loading libraries"):
        machine = _machine()  # First: what is measured below makes a load of its own.
    name = model.model or model.engine or "bundled SmolLM2-135M-Instruct"
    model_report: dict[str, Any] = {"supported": True}
    try:
        model_report |= _measured(model)
    except ERRORS as error:
        model_report = {"supported": False, "why_not": str(error)}
    report = {"machine": machine, "packages": _packages(), "model": {"name": name, **model_report}}
    tell(report, Group(*(table_of(rows, part) for part, rows in report.items())), as_json=as_json)
    if not model_report["supported"]:
        raise typer.Exit(3)


def _machine() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    kept = default_keep_bytes(FolderBlobs("."))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": cores,
        "threads": torch.get_num_threads(),
        "load": round(load, 1),
        "busy": "yes: others use its cores, so times below are longer" if load > cores else "no",
        "memory_gb": round(pages * size / 1e9, 1),
        "free_disk_gb": round(shutil.disk_usage(".").free / 1e9, 1),
        "store_of_packs": f"packs without a bound (max_bytes), KV behind them up to {kept / 1e9:.1f} GB (keep_bytes)",
        "accelerator": torch.cuda.get_device_name() if cuda else "none",
    }


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _measured(model: ModelOptions) -> dict[str, Any]:
    session = model.load()
    features = session.engine.supports
    report = {
        "dtype": session.fingerprint.dtype,
        "positions": session.max_positions,
        "offers": ", ".join(sorted(features)) or "nothing but greedy answers",
    }
    if lacks := session.engine.lacks:
        report["lacks"] = "; ".join(f"{capability}, as {why}" for capability, why in sorted(lacks.items()))
    report["bits"] = (
        "of a pack are those of its text" if "bitwise" in features else "of a pack may round differently from text"
    )
    if "kv" not in features:
        return report | {"advice": "keep packs lazy: this engine gives no KV to store"}
    text = _PROBE_TEXT[: session.max_positions * 3 // 4]
    paces = []
    with waiting("Measuring"):
        session.build_pack(text)  # Warm up: kernels load with the first pack.
        for _ in range(_REPEATS):
            began = time.perf_counter()
            pack = session.build_pack(text)
            paces.append(len(pack.prefix + pack.token_ids) / (time.perf_counter() - began))
    pace = median(paces)
    size = pack.nbytes / len(pack.token_ids)
    return report | {
        "kv_bytes_per_token": round(size),
        **({"state_bytes": session.state_bytes} if "cache" in features and session.state_bytes else {}),
        "prefill_tokens_per_s": round(pace),
        "prefill_spread": f"{min(paces):,.0f} to {max(paces):,.0f} in {_REPEATS} runs",
        "advice": f"store KV where the store gives more than {size * pace / 1e6:,.1f} MB a second; "
        "elsewhere keep packs lazy: computing is faster",
    }
