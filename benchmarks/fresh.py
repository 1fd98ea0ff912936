"""One request in a fresh process, for `benchmarks.ttft`: its time to first token from disk, and its memory.

Prints one line of JSON: `ttft_s`, `reused_tokens`, `pack_tokens`, `peak_bytes`.

- `ttft_s`: the engine is loaded, says one word to something unrelated, and then gets the pack's handle for the first
  time: the store is opened, the file read into the request's buffer (the system's copy of it dropped before, where
  the system lets us; not with `--cached`) and verified, the question prefilled.
- `peak_bytes`: what a request needs at its peak beyond what the process holds, the pack being in memory and no
  buffer waiting: the high-water mark of resident memory (Linux), or of allocated memory (CUDA); `None` elsewhere.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import torch

from benchmarks import common
from benchmarks.disk import drop_from_page_cache
from kp_core import PackStore

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--handle", required=True)
    parser.add_argument("--question", nargs=2, required=True)
    parser.add_argument("--cached", action="store_true", help="leave the file in the system's page cache")
    arguments = parser.parse_args(argv)
    engine = common.load_engine(arguments)
    engine.generate("Say hello.", max_tokens=1)
    if not arguments.cached:
        drop_from_page_cache(arguments.store)
    store = PackStore(arguments.store)
    view, (first, second) = store.view("default"), arguments.question
    usage = engine.generate(f"{arguments.handle}\n\n{first}", view=view, max_tokens=1).usage
    with closing(engine.stream(f"{arguments.handle}\n\n{first}", view=view, max_tokens=2)) as stream:
        next(stream)
        engine.clear_cache()  # All but what the open stream uses: the pack.
        meter = _Meter()
        engine.generate(f"{arguments.handle}\n\n{second}", view=view, max_tokens=1)
    figures = {
        "ttft_s": usage.ttft_s,
        "reused_tokens": usage.reused_tokens,
        "pack_tokens": usage.pack_tokens,
        "peak_bytes": meter.peak(),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


class _Meter:
    """The peak of memory from now on, above what is held now."""

    def __init__(self) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._before: int | None = torch.cuda.memory_allocated()
            return
        # Give freed memory back to the system, so that the request cannot hide in it.
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._before = None
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Sets the high-water mark back to the present.
            self._before = _status("VmRSS")

    def peak(self) -> int | None:
        """Bytes, or `None` where the system does not tell."""
        if self._before is None:
            return None
        return (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")) - self._before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
