"""Bytes of stored packs and the time to load them, plain and compressed.

Each passage is compiled once and stored in two stores: plain, and `lossless` (bit for bit the same KV). Loading is
`PackStore.get` from a warm disk: file, digests, decoding; both are read in turn, so that a noisy machine is noisy to
all alike, and each pack counts with the median of its repetitions.

- bytes per token: of the pack files, heads included.
- load: seconds per 1,000 tokens; `ratio` is over plain.
- speed: of one entry of 100 MB (the KV of one passage, repeated), over that of reading its uncompressed bytes from the
  page cache into new memory, with one `readinto`.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import track

from benchmarks import common
from kp_core import KnowledgePack, PackStore, Session
from kp_core.kv import KVTensors
from kp_core.memory import new_memory

__all__ = ["main", "run"]

_COMPRESSIONS = ("none", "lossless")
_LARGE = 100_000_000


def run(engine: Session, texts: list[str], folder: Path, repeats: int = 9) -> dict[str, Any]:
    """One row per compression; all packs are in `folder` meanwhile."""
    stores = {name: PackStore(folder / name) for name in _COMPRESSIONS}
    seconds: dict[str, float] = dict.fromkeys(_COMPRESSIONS, 0.0)
    tokens = 0
    for pack in track(engine.build_packs(texts, progress=False), "Packs", total=len(texts)):
        tokens += len(pack.token_ids)
        handles = {name: store.put(pack.compressed(name)) for name, store in stores.items()}
        times: dict[str, list[float]] = {name: [] for name in _COMPRESSIONS}
        for _ in range(repeats):
            for name, store in stores.items():
                began = time.perf_counter()
                found = store.get(handles[name])
                times[name].append(time.perf_counter() - began)
                if name == "lossless" and not (pack.kv and found.kv and found.kv.equal(pack.kv)):
                    raise SystemExit("Lossless compression changed KV.")
        for name in _COMPRESSIONS:
            seconds[name] += median(times[name])
    plain = stores["none"].nbytes
    speeds = _speeds(pack, folder / "large", repeats)
    rows = [
        {
            "compression": name,
            "bytes_per_token": store.nbytes / tokens,
            "bytes_ratio": store.nbytes / plain,
            "load_s_per_1000": 1000 * seconds[name] / tokens,
            "load_ratio": seconds[name] / seconds["none"],
            "speed_of_read": speeds[name],
        }
        for name, store in stores.items()
    ]
    return {"packs": len(texts), "tokens": tokens, "dtype": engine.fingerprint.dtype, "rows": rows}


def _speeds(pack: KnowledgePack, folder: Path, repeats: int) -> dict[str, float]:
    """The median speed of `PackStore.get` for an entry of 100 MB over that of a plain read, by compression."""
    times, kv = -(-_LARGE // pack.nbytes), pack.kv
    if kv is None:
        raise ValueError("Got a pack without KV; expected a compiled one.")
    large = replace(pack, kv=KVTensors.concat([kv] * times), token_ids=pack.token_ids * times)
    stores = {name: PackStore(folder / name) for name in _COMPRESSIONS}
    handles = {name: store.put(large.compressed(name)) for name, store in stores.items()}
    [path] = (path for path in (folder / "none").rglob("*.safetensors"))

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            if file.readinto(new_memory(path.stat().st_size).data) != path.stat().st_size:
                raise OSError("The file was not read whole.")

    speeds = defaultdict[str, list[float]](list)
    for _ in range(repeats):
        for name, store in stores.items():
            began = time.perf_counter()
            read()
            between = time.perf_counter()
            store.get(handles[name])
            speeds[name].append((between - began) / (time.perf_counter() - between))
    return {name: median(found) for name, found in speeds.items()}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run from the command line."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--folder", type=Path, help="where packs are written meanwhile; default: a temporary folder")
    parser.add_argument("--repeats", type=int, default=9, help="readings of each pack; default: %(default)s")
    asked = parser.parse_args(arguments)
    texts = list(dict.fromkeys(str(each) for each in common.read_passages(asked.data, asked.limit)))
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        report = run(common.load_engine(asked), texts, Path(folder), asked.repeats)
    columns = ("compression", "bytes/token", "bytes ratio", "load s/1000", "load ratio", "speed of read")
    rows = [tuple(row.values()) for row in report["rows"]]
    common.show_table(f"{report['packs']} packs, {report['tokens']} tokens, {report['dtype']}", columns, rows)
    common.write_json(asked.json, report)
    return report


if __name__ == "__main__":
    main()
