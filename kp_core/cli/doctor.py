"""`kp doctor`: what this machine and this model can do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kp_core.cli.shared import JsonFlag, WrongError, console, print_json
from kp_core.delivery import measure_rates
from kp_core.errors import KnowledgePackError

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


def doctor(
    *,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A folder, or a name on the hub. Default: the bundled one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where packs would lie; its disk is measured.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Machine, packages, whether a model is supported and why not (exit code 3), and whether storing KV pays."""
    about: dict[str, Any] = {"machine": _machine(), "packages": _packages(), "model": _model(model, dtype, folder)}
    if as_json:
        print_json(about)
    else:
        out = console()
        for part, rows in about.items():
            table = Table(title=part, title_justify="left", show_header=False, title_style="bold")
            for name, value in rows.items():
                table.add_row(name.replace("_", " "), _shown(value))
            out.print(table)
    if not about["model"]["supported"]:
        raise WrongError


def _machine() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(pages * size / 1e9, 1),
        "free_disk_gb": round(shutil.disk_usage(".").free / 1e9, 1),
        "accelerator": torch.cuda.get_device_name() if cuda else "none",
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _model(model: str | None, dtype: str | None, folder: Path | None) -> dict[str, Any]:
    from kp_core import load_engine

    name = model or "bundled SmolLM2-135M-Instruct"
    try:
        engine = load_engine(model, **({} if dtype is None else {"dtype": dtype}))
    except (KnowledgePackError, OSError, ValueError) as error:
        return {"name": name, "supported": False, "why_not": str(error)}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        rates = measure_rates(engine, Path(place))
    faster = rates.read_tokens_per_s / rates.prefill_tokens_per_s
    advice = (
        f"store KV: reading it is {faster:.1f} times as fast as computing it"
        if rates.stores
        else f"keep packs lazy: computing KV is {1 / faster:.1f} times as fast as reading it"
    )
    return {
        "name": name,
        "supported": True,
        "dtype": engine.fingerprint.dtype,
        "positions": engine.max_positions,
        "kv_bytes_per_token": round(rates.bytes_per_token),
        "prefill_tokens_per_s": round(rates.prefill_tokens_per_s),
        "read_mb_per_s": round(rates.read_bytes_per_s / 1e6),
        "read_tokens_per_s": round(rates.read_tokens_per_s),
        "advice": advice,
    }


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
