"""`kp doctor`: what this machine and this model can do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group

from kp_cli import waiting
from kp_cli.options import JsonFlag, ModelOptions, spread
from kp_cli.output import ERRORS, message_of, table_of, tell
from kp_core import KnowledgePack, KVTensors, PackStore

_PACKAGES = "torch transformers chromadb scikit-learn sentence-transformers langchain-core llama-index-core vllm"
_PROBE_TEXT = "The lighthouse keeper counts ships, and writes each of them into a long book.\n" * 32
_TIMES = 8  # The entry whose reading is timed has the KV of the probe so often, which is some 100 MB of a small model.


@spread
def doctor(
    *,
    model: ModelOptions,
    packs: Annotated[
        str, typer.Option(metavar="PLACE", help="Measure how fast packs are read here: a folder, or a URL.")
    ] = ".",
    as_json: JsonFlag = False,
) -> None:
    """Machine, packages, whether a model is supported and why not (exit code 3), and where storing KV pays."""
    packages = dict.fromkeys(_PACKAGES.split(), "not installed")
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    about: dict[str, Any] = {"name": model.model or model.engine or "bundled SmolLM2-135M-Instruct"}
    try:
        about |= {"supported": True, **_measured(model, packs)}
    except ERRORS as error:
        about |= {"supported": False, "why_not": str(error)}
    report = {"machine": _machine(), "packages": packages, "model": about}
    tell(report, Group(*(table_of(rows, part) for part, rows in report.items())), as_json=as_json)
    if not about["supported"]:
        raise typer.Exit(3)


def _machine() -> dict[str, Any]:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_gb": round(pages * size / 1e9, 1),
        "free_disk_gb": round(shutil.disk_usage(".").free / 1e9, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _measured(model: ModelOptions, place: str) -> dict[str, Any]:
    session = model.load()
    features, lacks = session.supports, session.lacks
    report: dict[str, Any] = {
        "dtype": session.fingerprint.dtype,
        "positions": session.max_positions,
        "offers": ", ".join(sorted(features)) or "nothing but greedy answers",
    }
    if lacks:
        report["lacks"] = "; ".join(f"{capability}, as {why}" for capability, why in sorted(lacks.items()))
    is_same = "bitwise" in features
    report["bits"] = "of a pack are those of its text" if is_same else "of a pack may round differently from text"
    if "kv" not in features:
        return report | {"advice": "keep packs lazy: this engine gives no KV to store"}
    text = _PROBE_TEXT[: session.max_positions * 3 // 4]
    with waiting("Measuring"):
        session.build_pack(text)  # Warm up: kernels load with the first pack.
        began = time.perf_counter()
        pack = session.build_pack(text)
        pace = len(pack.prefix + pack.token_ids) / (time.perf_counter() - began)
        try:
            speed = _store_speed(pack, place)
            if "://" not in place and not Path(place).is_dir():
                report["store"] = f"there is no folder {place}; measured in {_folder_near(place)}"
        except ERRORS as error:
            report["store"] = f"cannot be measured: {message_of(error)}"
            speed = None
    size = pack.nbytes / len(pack.token_ids)
    if session.state_bytes:
        report["state_bytes"] = session.state_bytes
    report |= {"kv_bytes_per_token": round(size), "prefill_tokens_per_s": round(pace)}
    if speed is not None:
        report["store_mb_per_s"] = round(speed / 1e6)
        from_store = f"{1000 * size / speed:.3f} s from the store"
        report["pack_of_1000_tokens"] = f"takes {from_store}, {1000 / pace:.3f} s from text"
    return report | {
        "advice": f"store KV where the store gives more than {size * pace / 1e6:,.1f} MB a second; "
        "elsewhere keep packs lazy: computing is faster",
    }


def _folder_near(place: str) -> Path:
    """The folder `place`, or the nearest one above it: one that is still to be made lies there."""
    return next(filter(Path.is_dir, (Path(place).absolute(), *Path(place).absolute().parents)))


def _store_speed(pack: KnowledgePack, place: str) -> float:
    """Bytes of KV a second that a store at `place` gives, of a large entry that is read for the first time."""
    if pack.kv is not None:
        pack = replace(pack, kv=KVTensors.concat([pack.kv] * _TIMES), token_ids=pack.token_ids * _TIMES)
    is_folder = "://" not in place
    with tempfile.TemporaryDirectory(prefix="kp-", dir=_folder_near(place) if is_folder else None) as folder:
        store = PackStore(folder if is_folder else f"{place}/{Path(folder).name.replace('_', '-')}", secret="0" * 64)
        try:
            handle = store.put(pack)
            for path in Path(folder).rglob("*.safetensors") if hasattr(os, "posix_fadvise") else ():
                with path.open("rb") as file:  # Not from the system's copy in memory.
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            store.get(handle)
            return pack.nbytes / (time.perf_counter() - began)
        finally:
            for key, _ in [] if is_folder else [*store.blobs.list()]:
                store.blobs.delete(key)
