"""Conformance kits for two seams: `check_blobs` for `Blobs`, `check_fact_store` for `FactStore`.

Run one in a test of your own implementation. The first broken rule is an `AssertionError` that states the rule.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kp_core.banks import Fact, FactStore, Hit
from kp_core.banks.embed import Embedder
from kp_core.errors import FactError
from kp_core.packs.blobs import Blobs, BlobStat, Buffer

__all__ = ["HashEmbedder", "check_blobs", "check_fact_store", "holds"]

_THREADS = 8


class HashEmbedder:
    """An embedder without a model: each text has a random unit vector; what stands behind `|` does not change it."""

    def __init__(self, name: str = "hash", dimensions: int = 8) -> None:
        self.name, self.dimensions, self.embedded = name, dimensions, 0

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed`; adds to `embedded`, the number of texts so far."""
        self.embedded += len(texts)
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`."""
        seed = hashlib.blake2b(text.partition("|")[0].encode(), digest_size=8).digest()
        vector = np.random.default_rng(int.from_bytes(seed)).standard_normal(self.dimensions)
        return np.asarray(vector / np.linalg.norm(vector), np.float32)


def check_blobs(make: Callable[[], Blobs]) -> None:
    """Check the rules of `Blobs` on storages from `make`, which returns a new and empty one each time.

    Raises `AssertionError` with the broken rule.
    """
    for check in (_check_bytes, _check_absence, _check_stats, _check_listing, _check_if_absent, _check_wholeness):
        check(make())


def _check_bytes(blobs: Blobs) -> None:
    key, text = "a/b.txt", b"one two three"
    chunks: list[Buffer] = [b"one ", memoryview(b"two"), bytearray(b" three")]
    written = blobs.write(key, iter(chunks))
    holds("`write` returns True when it wrote.", written is True)
    _same("`read` returns the chunks in order.", bytes(blobs.read(key)), text)
    for start, stop in ((4, None), (4, 7), (0, 3), (8, 99), (50, 60)):
        rule = f"`read(key, {start}, {stop})` returns these bytes, as far as there are any."
        _same(rule, bytes(blobs.read(key, start, stop)), text[start:stop])
    for shorter in (b"1", b""):
        blobs.write(key, [shorter])
        _same("A second `write` replaces the whole blob.", bytes(blobs.read(key)), shorter)


def _check_absence(blobs: Blobs) -> None:
    blobs.write("a", [b"x"])
    for key in ("gone", "b/gone", "a/below", "never"):
        if key.endswith("gone"):
            blobs.write(key, [b"x"])
            holds("`delete` returns True for a blob.", blobs.delete(key) is True)
        _fails("`read` of an absent key raises FileNotFoundError.", partial(blobs.read, key), FileNotFoundError)
        _same("`stat` of an absent key is None.", (blobs.stat(key), blobs.stat(key, recent=True)), (None, None))
        _same("`list` does not name an absent key.", list(blobs.list(key)), [])
        holds("`delete` of an absent key returns False.", blobs.delete(key) is False)
    blobs.write("never", [b"x"])
    holds("`stat(recent=True)` never caches absence.", blobs.stat("never", recent=True) is not None)


def _check_stats(blobs: Blobs) -> None:
    versions = set()
    for number in range(20):
        blobs.write("a", [b"same %4d" % number])
        stat = blobs.stat("a") or BlobStat(-1, "", 0.0)
        _same("`stat` gives the size in bytes.", stat.size, 9)
        _same("`stat` of an unchanged blob is the same.", blobs.stat("a"), stat)
        holds("`modified` is in seconds since 1970.", abs(stat.modified - time.time()) < 60)
        versions.add(stat.version)
    _same("The version changes whenever other bytes are written, also of the same size.", len(versions), 20)


def _check_listing(blobs: Blobs) -> None:
    keys = {"a/b/one", "a/b/two", "a/bc", "a.b", "b/one"}
    for key in keys:
        blobs.write(key, [key.encode()])
    for prefix in ("", "a/b/", "a/b", "a", "a/b/t", "b/one", "c", "a/b/one/"):
        expected = {key: blobs.stat(key) for key in keys if key.startswith(prefix)}
        _same(
            f"`list({prefix!r})` yields exactly the keys that start so, with what `stat` gives.",
            dict(blobs.list(prefix)),
            expected,
        )


def _check_if_absent(blobs: Blobs) -> None:
    for number in range(5):
        key = f"k{number}"
        with ThreadPoolExecutor(_THREADS) as pool:
            won = list(pool.map(lambda who, key=key: blobs.write(key, [b"%d" % who], if_absent=True), range(_THREADS)))
        _same("Of several `write(if_absent=True)` at once, exactly one writes and returns True.", won.count(True), 1)
        _same(
            "`write(if_absent=True)` that returns False changes nothing.",
            bytes(blobs.read(key)),
            b"%d" % won.index(True),
        )


def _check_wholeness(blobs: Blobs) -> None:
    def failing() -> Iterator[Buffer]:
        yield b"half"
        raise OSError("the writer fails")

    blobs.write("a", [b"old"])
    for key in ("a", "b"):
        _fails("`write` passes on an error of its chunks.", partial(blobs.write, key, failing()), OSError)
    _same("A `write` that fails leaves the old blob.", bytes(blobs.read("a")), b"old")
    _same("A `write` that fails leaves no new blob.", blobs.stat("b"), None)
    whole = [bytes([letter]) * size for letter, size in ((65, 200_000), (66, 100_000))]
    blobs.write("a", [whole[0]])
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(lambda: [blobs.write("a", [data[:9], data[9:]]) for data in whole * 20])
        while not writing.done():
            holds("A reader sees the old blob or the new one, never a mix.", bytes(blobs.read("a")) in whole)
        writing.result()


def check_fact_store(make: Callable[[Embedder], FactStore]) -> None:
    """Check the rules of `FactStore` on stores from `make`, which returns a new and empty one over the given embedder.

    Raises `AssertionError` with the broken rule.
    """
    for check in (_check_empty, _check_adding, _check_search, _check_changes, _check_scope, _check_banks):
        embedder = HashEmbedder()
        check(make(embedder), embedder)


def _check_empty(store: FactStore, _: HashEmbedder) -> None:
    holds("A store is a `FactStore`.", isinstance(store, FactStore))
    empty = (len(store), store.namespaces(), store.banks(), list(store.facts()))
    _same("An empty store has no facts, namespaces or banks.", empty, (0, (), (), []))
    _fails("`search` in an empty store raises FactError.", lambda: store.search("q"))
    _fails("`get` of an unknown id raises FactError.", lambda: store.get("x"))
    _fails("`bank_facts` of an unknown bank raises FactError.", lambda: store.bank_facts("default/0"))


def _check_adding(store: FactStore, _: HashEmbedder) -> None:
    first = store.add(iter([Fact("a", title="first"), Fact("b"), Fact("a")]))
    _same("A text that its source has is not stored again.", (first.added, first.duplicates, len(store)), (2, 1, 2))
    both = [Fact("a", source="a.md"), Fact("a", id="other")]
    reports = [store.add(both) for _ in range(2)]
    counts = [(report.added, report.duplicates) for report in reports]
    _same("A text of two sources, or with two ids, is two facts, each stored once.", counts, [(2, 0), (0, 2)])
    _same("`delete` leaves facts with the same text.", (store.delete([fact.id for fact in both]), len(store)), (2, 2))
    _same("`facts` yields the facts in the order they were added.", [fact.text for fact in store.facts()], ["a", "b"])
    _same("`get` returns the stored fact.", store.get(Fact("a").id), Fact("a", title="first"))
    _fails(
        "`add` refuses an id that its namespace has with another text.", lambda: store.add([Fact("c", id=Fact("a").id)])
    )
    store.add([Fact("new", id=Fact("a").id), Fact("b", id="twin")], overwrite=True)
    _same(
        "With `overwrite`, a fact replaces the one with its id, as its next version.",
        store.get(Fact("a").id),
        Fact("new", id=Fact("a").id, version=2),
    )
    _same("With `overwrite`, facts of several ids may have one text.", store.get("twin").text, "b")
    _same("A fact that is replaced keeps its place.", [fact.text for fact in store.facts()], ["new", "b", "b"])
    whole = Fact("whole", "title", "source", {"none": None, "deep": [1, {"x": "y"}]}, "id 1", expires=2e9, version=3)
    store.add([whole])
    _same("`get` returns every field of a fact.", store.get("id 1"), whole)
    store.add([Fact("past", expires=time.time() - 1), Fact("later")], ttl=1e6)
    _same("An expired fact is not listed.", {fact.text for fact in store.facts()} & {"past", "later"}, {"later"})
    holds("A search ignores an expired fact.", "past" not in {hit.fact.text for hit in store.search("past", 9)})
    expires = store.get(Fact("later").id).expires or 0
    holds("`ttl` sets `expires`, in seconds since 1970.", abs(expires - time.time() - 1e6) < 60)


def _check_changes(store: FactStore, _: HashEmbedder) -> None:
    store.add([Fact("nine", id="hours"), Fact("blue", id="colour")])
    _same("`update` returns the fact with its next version.", store.update(Fact("ten", id="hours")).version, 2)
    _same("`search` finds the text of an update.", store.search("ten", 1)[0].fact, Fact("ten", id="hours", version=2))
    _fails("`update` of an unknown id raises FactError.", lambda: store.update(Fact("x", id="nothing")))
    _same("Two facts may have one text.", store.update(Fact("blue", id="hours")).version, 3)
    store.update(Fact("ten", id="hours"))
    store.add([Fact("nine", id="hours")])
    _same("`add` leaves a correction as it is.", store.get("hours").text, "ten")
    _same("`delete` returns how many facts it deleted.", store.delete(["hours", "hours", "nothing"]), 1)
    _same("A deleted fact is not found.", [hit.fact.id for hit in store.search("ten", 9)], ["colour"])


def _check_search(store: FactStore, embedder: HashEmbedder) -> None:
    facts = [Fact(f"fact {number}", metadata={"odd": number % 2}) for number in range(40)]
    store.add(facts)
    query = embedder.embed_query("q")
    scores = {fact.id: float(embedder.embed_query(fact.text) @ query) for fact in facts}
    nearest = sorted(facts, key=lambda fact: -scores[fact.id])
    for k, where in itertools.product((1, 5, 99), (None, {"odd": 1})):
        expected = [fact.id for fact in nearest if where is None or fact.metadata["odd"]][:k]
        hits = store.search("q", k, where=where)
        _same("`search` returns the `k` nearest facts that match, nearest first.", _ids(hits), expected)
        close = [abs(hit.score - scores[hit.fact.id]) < 1e-3 for hit in hits]
        holds("The score of a hit is its cosine with the question.", all(close))
    for rule, call in {
        "`search` refuses a blank question.": lambda: store.search(" "),
        "`search` refuses `k` below 1.": lambda: store.search("q", 0),
        "`search` refuses `probes` below 1.": lambda: store.search("q", probes=0),
        "`search` refuses an invalid filter.": lambda: store.search("q", where={"odd": {"$near": 1}}),
    }.items():
        _fails(rule, call)


def _check_scope(store: FactStore, _: HashEmbedder) -> None:
    store.add([Fact("a", id="1"), Fact("a", id="1", namespace="guests"), Fact("b", id="2")])
    _same("Each namespace has its own ids and texts.", (len(store), store.namespaces()), (3, ("default", "guests")))
    found = [hit.fact.namespace for hit in store.search("b", 9, namespace="guests")]
    _same("A search in a namespace finds its facts alone.", found, ["guests"])
    _same("`delete` in a namespace leaves the others.", (store.delete(["1"], namespace="guests"), len(store)), (1, 2))
    _same("A namespace without facts is not listed.", store.namespaces(), ("default",))


def _check_banks(store: FactStore, _: HashEmbedder) -> None:
    facts = [Fact(f"fact {number}", namespace="n" if number % 4 else "m") for number in range(90)]
    store.add(facts)
    for _round in range(2):
        inside = {bank: store.bank_facts(bank) for bank in store.banks()}
        stored = sorted(fact.id for members in inside.values() for fact in members)
        _same("Every fact stands in exactly one bank.", stored, sorted(fact.id for fact in facts))
        of_fact = {fact.id: bank for bank, members in inside.items() for fact in members}
        _same("`bank_of` names the bank of each fact.", store.bank_of(facts), [of_fact[fact.id] for fact in facts])
        _same(
            "The banks of a namespace are named after it.",
            store.banks("m"),
            tuple(bank for bank in store.banks() if bank.rpartition("/")[0] == "m"),
        )
        _same(
            "A search in all banks finds what a search without banks finds.",
            _ids(store.search("q", 9, probes=999)),
            _ids(store.search("q", 9)),
        )
        near = store.search("q", 3, probes=1)
        _same(
            "A hit of a search in banks names its bank.",
            [hit.bank for hit in near],
            store.bank_of([hit.fact for hit in near]),
        )
        _same("A search in too few banks goes on in further ones.", len(store.search("q", 80, probes=1)), 80)
        facts.append(Fact("one more", namespace="m"))
        store.add(facts[-1:])
        store.rebuild()
    _fails("`bank_of` refuses a fact in no bank.", lambda: store.bank_of([Fact("unknown")]))


def _ids(hits: Sequence[Hit]) -> list[str]:
    return [hit.fact.id for hit in hits]


def holds(rule: str, truth: bool) -> None:  # noqa: FBT001 - it is what an `assert` is given
    """Raise `AssertionError` with the `rule` if it is broken."""
    if not truth:
        raise AssertionError(rule)


def _same(rule: str, got: object, expected: object) -> None:
    if got != expected:
        raise AssertionError(f"{rule} Got {got!r:.300}; expected {expected!r:.300}.")


def _fails(rule: str, call: Callable[[], object], error: type[Exception] = FactError) -> None:
    try:
        got = call()
    except error:
        return
    except Exception as other:
        raise AssertionError(f"{rule} Got {other!r}.") from other
    raise AssertionError(f"{rule} Got {got!r:.300}.")
