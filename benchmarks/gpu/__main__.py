"""What the engine is worth on an accelerator: parity, speed at size, and which arithmetic is row-invariant there.

For a bare machine: PyTorch, transformers, accelerate, peft, pytest and xxhash, a checkout of this repository, no
network and no weights of models, which are random. The parts run in this order, and each row is written as soon as it
is measured, so that an interrupted run keeps its results. What cannot run is said in one line.

- parity: see `benchmarks.gpu.parity`
- speed: see `benchmarks.gpu.speed`
- rows: see `benchmarks.gpu.rows`

The exit status is 1 if answers differ that should not, if the device was lost, or if there is none.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import parity, rows, speed
from benchmarks.gpu.report import DeviceLostError, Report

__all__ = ["main"]

_PARTS = {"parity": parity.run, "speed": speed.run, "rows": rows.run}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything; default: %(default)s")
    parser.add_argument("--device", help="cuda, mps or cpu; default: the accelerator of this machine")
    parser.add_argument("--shape", choices=[*speed.SHAPES], help="of the speed part; default: those that fit")
    parser.add_argument("--json", type=Path, default=Path("bench-results/gpu.json"), help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=[*_PARTS], default=[*_PARTS], help="default: all")
    arguments = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in ("transformers", "kp_core"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        device = _device(arguments.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        print(f"No device: {str(error).strip().partition(chr(10))[0]}")
        return 1
    arguments.json.with_suffix(".txt").unlink(missing_ok=True)
    report = Report(arguments.json, arguments.minutes, device, _about(device))
    print(", ".join(f"{name} {value}" for name, value in report.figures["about"].items()))
    shapes = [arguments.shape] if arguments.shape else ["tiny"] if device.type == "cpu" else speed.LARGE
    try:
        for part in arguments.parts:
            if part == "speed":
                speed.run(report, shapes)
            else:
                _PARTS[part](report)
    except DeviceLostError as error:
        print(f"The device is gone: {error}. What was measured before is in {arguments.json}.")
        return 1
    except KeyboardInterrupt:
        print(f"Interrupted. What was measured before is in {arguments.json}.")
        return 130
    print(f"\nWritten to {arguments.json}.")
    return int(bool(report.figures.get("parity_differs")))


def _device(name: str | None) -> torch.device:
    """The device of that name, or the accelerator of this machine; raises `RuntimeError` if it cannot compute."""
    with warnings.catch_warnings(record=True) as said:  # torch warns of a driver that is too old, and finds no device.
        warnings.simplefilter("always")
        found = torch.device(name) if name else torch.accelerator.current_accelerator()
        if found is None or (found.type == "cuda" and not torch.cuda.is_available()):
            reason = next((str(warning.message) for warning in said), "torch finds no accelerator on this machine")
            raise RuntimeError(
                f"{reason.rstrip('.')}. To try the command on a CPU: --device cpu --shape tiny --minutes 2"
            )
    torch.zeros(1, device=found).add_(1).item()
    return found


def _about(device: torch.device) -> dict[str, Any]:
    """What was measured where."""
    about: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "device": properties.name,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return about


if __name__ == "__main__":
    sys.exit(main())
