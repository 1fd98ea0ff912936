"""Kills: what survives when the process that writes to a fact store or a pack store dies.

A process adds, updates, deletes and rebuilds facts, and another puts and removes packs, until it is killed (`SIGKILL`)
at a random moment, `--kills` times each, always on the same folder, while another process reads. After each kill every
change that was acknowledged must be there, a change under way must be done as a whole or not at all, the store must
pass `verify`, nothing half written may be left behind, and no reader may have seen anything else. The database of the
facts has a collection of somebody else in it, of which nothing may change.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track

from benchmarks import common
from kp_core import ChromaFactStore, Fact, KnowledgePack, KVTensors, ModelFingerprint, PackStore, Prefix
from kp_core.banks.chroma import open_client
from kp_core.errors import KnowledgePackError, PackNotFoundError

__all__ = ["kill_facts", "kill_packs", "main", "run"]

# Few at once, and so many that Chroma writes its index, which it does after a thousand changes.
_AT_ONCE, _GONE = (5, 400), (4, 350)
_PACKS, _TOKENS, _TEXT_ALONE = 6, 200, -1
_LONGEST = 1.0

Floats = NDArray[np.float32]
Figures = dict[str, int]


class Numbered:
    """A random unit vector per text, the same in every process."""

    name, dimensions = "numbered", 32

    def embed(self, texts: Sequence[str]) -> Floats:
        """See `kp_core.Embedder`."""
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text: str) -> Floats:
        """See `kp_core.Embedder`."""
        vector = np.random.default_rng(list(text.encode())).standard_normal(self.dimensions)
        return np.asarray(vector / np.linalg.norm(vector), np.float32)


def kill_facts(rounds: int, seed: int, folder: Path) -> Figures:
    """How many changes to facts were acknowledged and lost; how often `verify` or a reader found something wrong, what
    was left behind, and strangers' rows that changed.
    """
    draw, texts = random.Random(seed), set[str]()  # noqa: S311 - moments need not be secret
    figures = dict.fromkeys(("kills", "acknowledged", "lost", "unclean", "misread", "left", "foreign"), 0)
    ChromaFactStore(folder, Numbered()).close()
    foreign = _foreign(folder)
    with ChromaFactStore(folder, Numbered()) as store:
        texts = {fact.text for fact in store.facts()}
    for number in range(rounds):
        said = _killed((_change_facts, _read_facts), folder, f"{seed}.{number}", draw.uniform(0, _LONGEST), figures)
        for kind, named in said:
            if kind == "+":
                texts |= {f"{named}/{part}" for part in range(_count(_AT_ONCE, named))}
            else:
                texts = (texts - set(named)) | ({f"{named[0]}'"} if kind == "*" else set())
        with ChromaFactStore(folder, Numbered(), bank_size=10) as store:
            held = {fact.text for fact in store.facts()}
            # One change may have been under way when the process died: done, not done, but never half of it.
            gone, more = texts - held, held - texts
            may = {(0, 0), (1, 1), *((count, 0) for count in _GONE), *((0, count) for count in _AT_ONCE)}
            figures["lost"] += (len(gone), len(more)) not in may
            figures["unclean"] += bool(store.verify())
            texts = held
        with closing(open_client(folder)) as client:
            collections = client.list_collections()
        banks = [each.name for each in collections if (each.metadata or {}).get("kp:kind") == "banks"]
        figures["left"] += len(banks) > 1 or any(folder.glob("*.tmp"))
    figures["foreign"] = int(_foreign(folder) != foreign)
    return figures


def kill_packs(rounds: int, seed: int, folder: Path) -> Figures:
    """The same of packs: what is there of each is what was put last, or what was under way, to the last bit."""
    draw = random.Random(seed)  # noqa: S311 - as above
    figures = dict.fromkeys(("kills", "acknowledged", "lost", "unclean", "misread", "left"), 0)
    there = _there(PackStore(folder))
    for number in range(rounds):
        said = _killed((_change_packs, _read_packs), folder, f"{seed}.{number}", draw.uniform(0, _LONGEST), figures)
        begun: tuple[int, int | None] | None = None
        for kind, change in said:
            begun = change if kind == "begin" else None
            if kind == "done":
                there[change[0]] = change[1]
        store = PackStore(folder)
        found = _there(store)
        # What was under way may have left the text alone, whose KV is computed again.
        may = {begun[0]: {there[begun[0]], begun[1], _TEXT_ALONE}} if begun else {}
        wrong = [which for which in range(_PACKS) if found[which] not in may.get(which, {there[which]})]
        figures["lost"] += bool(wrong)
        figures["unclean"] += any(store.verify())
        store.put(_pack(_PACKS, 0))  # The next one to write takes away what a killed one left.
        figures["left"] += any(path.is_file() for path in (folder / "staging").glob("*"))
        there = found
    return figures


def _killed(
    acts: tuple[Callable[[Path, str, Connection], None], Callable[[Path, Connection], None]],
    folder: Path,
    name: str,
    after_s: float,
    figures: Figures,
) -> list[Any]:
    """What a process acknowledged before it was killed, beside a reader; counts what that one found wrong.

    `acts` are what the two do.
    """
    write, read = acts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kp_core", "chromadb", "sklearn.cluster"])
    (hear, say), (seen, look) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    processes = (
        context.Process(target=write, args=(folder, name, say)),
        context.Process(target=read, args=(folder, look)),
    )
    for process, end in zip(processes, (say, look), strict=True):
        process.start()
        end.close()
    writer, reader = processes
    try:
        if hear.recv() != "ready":
            raise RuntimeError("the process that is to be killed did not start")
        time.sleep(after_s)
        # A reader that is killed before it writes a word leaves nothing either.
        writer.kill()
        said = []
        with suppress(EOFError, OSError):
            while True:
                said.append(hear.recv())
        writer.join()
        reader.kill()
        with suppress(EOFError, OSError):
            while True:
                figures["misread"] += bool(seen.recv())
        reader.join()
    finally:
        for process in processes:
            process.kill()
    figures["kills"] += 1
    figures["acknowledged"] += sum(kind != "begin" for kind, _ in said)
    return said


def _change_facts(folder: Path, name: str, told: Connection) -> None:
    store, step = ChromaFactStore(folder, Numbered(), bank_size=10), 0
    store.banks()
    told.send("ready")
    while True:
        step += 1
        named = f"{name}/{step}"
        store.add([Fact(f"{named}/{number}") for number in range(_count(_AT_ONCE, named))])
        told.send(("+", named))
        if step % 2 == 0:
            gone = [fact for fact, _ in zip(store.facts(), range(_count(_GONE, named)), strict=False)]
            store.delete(fact.id for fact in gone)
            told.send(("-", [fact.text for fact in gone]))
        if step % 3 == 0:
            old = next(store.facts())
            store.update(Fact(old.text + "'", id=old.id))
            told.send(("*", [old.text]))
        if step % 7 == 0:
            store.rebuild()


def _count(of: tuple[int, int], named: str) -> int:
    return of[int(named.rpartition("/")[2]) % 4 == 0]


def _read_facts(folder: Path, told: Connection) -> None:
    """Every fact that was there before the folder was opened, and still is, is found by its own text; or says so."""
    before: list[Fact] = []
    while True:
        with suppress(KnowledgePackError), ChromaFactStore(folder, Numbered(), read_only=True) as store:
            for fact in before:
                found = store.search(fact.text, 1)[0].fact.text
                if found != fact.text and fact in store.facts(ids=[fact.id]):
                    told.send(f"{fact.text} finds {found}")
            before = [fact for fact, _ in zip(store.facts(), range(20), strict=False)]


def _change_packs(folder: Path, name: str, told: Connection) -> None:
    store, draw = PackStore(folder), random.Random(name)  # noqa: S311 - as above
    told.send("ready")
    while True:
        which, seed = draw.randrange(_PACKS), draw.choice((None, *range(1000)))
        told.send(("begin", (which, seed)))
        if seed is None:
            with suppress(PackNotFoundError):
                store.remove(store.handle(f"Pack {which}.", "kills"))
        else:
            store.put(_pack(which, seed))
        told.send(("done", (which, seed)))


def _read_packs(folder: Path, told: Connection) -> None:
    """Every pack that is read is whole, and one that somebody put; says what is not."""
    store = PackStore(folder)
    while True:
        for which in range(_PACKS):
            with suppress(PackNotFoundError):
                pack = store.get(store.handle(f"Pack {which}.", "kills"))
                # None, if it is removed at this moment. Its provenance is in another file, and may be older or newer.
                if pack.kv is not None and _seed(which, pack.kv) is None:
                    told.send(f"{pack.text} has other KV")


def _pack(which: int, seed: int) -> KnowledgePack:
    generator = torch.Generator().manual_seed(1000 * which + seed)
    halves = [torch.randn(2, _TOKENS, 8, generator=generator).bfloat16() for _ in range(4)]
    halves[0][0, 0, :2] = torch.tensor([seed // 100, seed % 100])
    fingerprint = ModelFingerprint.unknown()
    known = type(fingerprint)(**dict.fromkeys(fingerprint.to_dict(), "kills"))
    kv = KVTensors(tuple(halves[:2]), tuple(halves[2:]))
    return KnowledgePack(f"Pack {which}.", "kills", tuple(range(_TOKENS)), Prefix(), known, kv, {"seed": str(seed)})


def _seed(which: int, kv: KVTensors) -> int | None:
    """The seed of this KV, which its first numbers tell; `None` for other KV than that of `_pack`."""
    hundreds, rest = (int(number) for number in kv.keys[0][0, 0, :2])
    expected = _pack(which, 100 * hundreds + rest).kv
    return 100 * hundreds + rest if expected and kv.equal(expected) else None


def _there(store: PackStore) -> dict[int, int | None]:
    """Which KV of each pack is stored: its seed, `None` for no pack, `_TEXT_ALONE` for one without KV."""
    found: dict[int, int | None] = {}
    for which in range(_PACKS):
        handle = store.handle(f"Pack {which}.", "kills")
        pack = store.get(handle) if handle in store else None
        found[which] = None if pack is None else _seed(which, pack.kv) if pack.kv else _TEXT_ALONE
    return found


def _foreign(folder: Path) -> tuple[object, ...]:
    """All that somebody else's collection in the same database holds; made when it is not there."""
    with closing(open_client(folder)) as client:
        collection = client.get_or_create_collection("facts", embedding_function=None, metadata={"theirs": True})
        if not collection.count():
            texts = [f"theirs {number}" for number in range(50)]
            collection.add(ids=texts, documents=texts, embeddings=Numbered().embed(texts))
        held = collection.get(include=["documents", "metadatas", "embeddings"])
        about = str(collection.metadata), str(collection.configuration_json)
        return *about, held["ids"], held["documents"], held["metadatas"], held["embeddings"].tolist()


def run(arguments: argparse.Namespace) -> dict[str, Figures]:
    """The figures of each store, as the JSON file holds them."""
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, kill in (("facts", kill_facts), ("packs", kill_packs)):
            figures[name] = {}
            for number in track(range(arguments.kills), f"Kills, {name}", transient=True):
                for key, count in kill(1, arguments.seed + number, Path(folder) / name).items():
                    figures[name][key] = figures[name].get(key, 0) + count
    return figures


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="how often to kill; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    rows = [(name, *(str(each.get(name, "")) for each in figures.values())) for name in figures["facts"]]
    common.show_table("Killed", ("", *figures), rows)
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
