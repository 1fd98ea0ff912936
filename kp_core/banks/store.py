"""`FactStore`: adds, finds and groups facts into banks (§2.3); its subclasses store the rows."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp_core.banks.base import LATEST, Added, Fact, Filter, Hit
from kp_core.banks.embed import Embedder, as_embedder, checked_vectors, normalised
from kp_core.banks.filters import predicate
from kp_core.bundled import needing
from kp_core.errors import FactError
from kp_core.pickling import Shared
from kp_core.threads import make_anew

logger = logging.getLogger(__name__)

Vectors = NDArray[np.float32]

BANK_SIZE = 20
"""Default number of facts in a bank, as in the paper."""

LARGEST = 2
"""A new bank with more than this many times the bank size is split in half."""

_PLUS_PLUS_UP_TO = 5000
_ROUNDS = 20
_SEED = 0
_BATCH, _SAMPLE = 512, 32
_FIRST, _GROWTH = 8, 4
# Minimum cosine between the stored vector of a text and a new one: rounding and batch padding differ.
_SAME = 0.999
_NO_VECTORS = np.zeros((0, 0), np.float32)


class Row(NamedTuple):
    """A fact, its vector (empty if not requested), and the number of its bank."""

    fact: Fact
    vector: Vectors
    bank: int | None = None


class FactStore(Shared, ABC):
    """Finds facts for a question. Facts are grouped by namespace, and within it into banks of about `bank_size` (§2.3).

    The name of a bank is its namespace and its number there, e.g. `default/3`. `rebuild`, or their first use, makes the
    banks. A later fact joins the bank with the nearest centroid. When banks hold twice `bank_size` on average, their
    next use makes them anew. All methods are thread-safe. `namespace=None` means all namespaces.

    A subclass stores the rows by namespace, in the order they were added, expired ones included. It creates a namespace
    when it is first used.
    """

    def __init__(self, embedder: Embedder, *, bank_size: int = BANK_SIZE) -> None:
        if bank_size < 1:
            raise FactError(f"Got bank_size={bank_size}; expected at least 1.")
        self.embedder = as_embedder(embedder)
        self.bank_size = bank_size
        self.forked()
        make_anew(self)

    def forked(self) -> None:
        """In a forked process: another thread may have held the lock."""
        self._writing = threading.RLock()

    @abstractmethod
    def _spaces(self, namespace: str | None) -> list[str]:
        """Return this namespace if it exists, or all in alphabetical order; a namespace may be empty."""

    @abstractmethod
    def _count(self, space: str) -> int:
        """Number of rows."""

    @abstractmethod
    def _rows(
        self, space: str, *, ids: Sequence[str] | None = None, where: Filter | None = None, vectors: bool = False
    ) -> Iterator[Row]:
        """Yield the rows with these ids, or all, in the order they were added.

        `where`, which may name `kp:bank`, `kp:digest` and `kp:expires`, may be applied only in part. Rows that are
        written meanwhile may be missing.
        """

    @abstractmethod
    def _nearest(self, space: str, vector: Vectors, count: int, where: Filter | None = None) -> list[Hit]:
        """Return the `count` living facts that match and are nearest to `vector`, `(dimensions,)`, of length 1."""

    @abstractmethod
    def _put(self, space: str, facts: Sequence[Fact], vectors: Vectors, banks: Sequence[int] | None = None) -> None:
        """Store facts, replacing those with the same ids, which keep their place. Durable on return.

        They stand in the banks of these numbers, or in none.
        """

    @abstractmethod
    def _set_expires(self, space: str, times: Mapping[str, float | None]) -> None:
        """Set `expires` of the facts with these ids; durable on return."""

    @abstractmethod
    def _remove(self, space: str, ids: Sequence[str]) -> None:
        """Delete the facts with these ids; durable on return."""

    @abstractmethod
    def _bank_count(self, space: str) -> int | None:
        """Number of banks made, numbered from 0, also without facts; `None` if banks were never made, or dropped."""

    @abstractmethod
    def _nearest_banks(self, space: str, vectors: Vectors, count: int) -> list[list[tuple[int, float]]]:
        """For each of `vectors`, return the `count` banks with the nearest centroids: (number, cosine), best first."""

    @abstractmethod
    def _set_banks(self, space: str, numbers: Mapping[str, int], centroids: Vectors) -> None:
        """Put each fact into the bank of its number; `centroids` has one row per bank; without any, banks are dropped.

        If the process is killed meanwhile, the namespace has no banks, or all of them.
        """

    def _check_writes(self) -> None:
        """Raise `FactError` if the store may not be changed."""

    def __len__(self) -> int:
        """Number of facts."""
        return sum(self._count(space) - len(self._expired(space)) for space in self._spaces(None))

    def facts(
        self, *, ids: Sequence[str] | None = None, where: Filter | None = None, namespace: str | None = None
    ) -> Iterator[Fact]:
        """Yield the facts that match, by namespace and in the order they were added; missing `ids` are skipped."""
        return filter(alive, self.stored(ids=ids, where=where, namespace=namespace))

    def stored(
        self, *, ids: Sequence[str] | None = None, where: Filter | None = None, namespace: str | None = None
    ) -> Iterator[Fact]:
        """As `facts`, with expired facts that are still stored."""
        # Read page by page, so concurrent changes may or may not be seen.
        test = predicate(where)
        for space in self._spaces(namespace):
            rows = self._rows(space, ids=ids, where=where)
            yield from (row.fact for row in rows if test(row.fact))

    def get(self, fact_id: str, *, namespace: str | None = None) -> Fact:
        """Return the fact with this id; raises `FactError` if there is none."""
        for fact in self.facts(ids=[fact_id], namespace=namespace):
            return fact
        where = "" if namespace is None else f" in the namespace {namespace!r}"
        raise FactError(f"There is no fact with the id {fact_id!r}{where}.")

    def search(
        self,
        question: str,
        k: int = 4,
        *,
        probes: int | None = None,
        where: Filter | None = None,
        namespace: str | None = None,
    ) -> list[Hit]:
        """Return the `k` facts nearest to `question`, best first; fewer only if there are fewer.

        `probes=None` searches all facts. A number searches only the `probes` banks with the nearest centroids, as in
        the paper, and further ones until there are `k` facts. Facts with equal texts are separate hits. `where`
        filters facts (see `kp_core.banks.filters`).

        Raises `FactError` for a blank question, invalid arguments, and an empty store.
        """
        for name, number in {"k": k, "probes": 1 if probes is None else probes}.items():
            if not isinstance(number, int) or number < 1:
                raise FactError(f"Got {name}={number!r}; expected at least 1.")
        predicate(where)
        query, spaces = self._query(question), self._spaces(namespace)
        if probes is None:
            hits = [hit for space in spaces for hit in self._nearest(space, query, k, where)]
        else:
            hits = self._probed(spaces, query, k, probes, where)
        if not hits and not self.namespaces():
            raise FactError("The store holds no facts yet. Add at least one first.")
        return sorted(hits, key=lambda hit: (-hit.score, hit.fact.id))[:k]

    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that have facts, in alphabetical order."""
        return tuple(space for space in self._spaces(None) if self._count(space))

    def banks(self, namespace: str | None = None) -> tuple[str, ...]:
        """The names of all banks."""
        with self._writing:
            spaces = self._with_banks(self._spaces(namespace))
            living = {(space, row.bank) for space in spaces for row in self._rows(space) if alive(row.fact)}
        return tuple(f"{space}/{bank}" for space, bank in sorted((s, b) for s, b in living if b is not None))

    def bank_facts(self, bank: str) -> tuple[Fact, ...]:
        """Return the facts of one bank, in the order they were added; raises `FactError` for an unknown bank."""
        space, _, number = bank.rpartition("/")
        with self._writing:
            for namespace in self._with_banks(self._spaces(space)) if space and number.isdecimal() else ():
                if living := self._living(namespace, int(number)):
                    return tuple(row.fact for row in living)
        raise FactError(f"Got the bank {bank!r}; expected one of `banks()`, e.g. 'default/0'.")

    def bank_of(self, facts: Sequence[Fact]) -> list[str]:
        """Return the bank of each fact; raises `FactError` for a fact in no bank."""
        names: dict[tuple[str, str], str] = {}
        for space in dict.fromkeys(fact.namespace for fact in facts):
            ids = [fact.id for fact in facts if fact.namespace == space]
            with self._writing:
                for namespace in self._with_banks(self._spaces(space)):
                    rows = self._rows(namespace, ids=ids)
                    names |= {(space, row.fact.id): f"{space}/{row.bank}" for row in rows if row.bank is not None}
        if missing := [fact.id for fact in facts if (fact.namespace, fact.id) not in names]:
            raise FactError(
                f"The facts {missing} stand in no bank: they were deleted, were never in this store, or were added "
                "while another process made banks. `rebuild()` puts all facts into banks."
            )
        return [names[fact.namespace, fact.id] for fact in facts]

    def _probed(self, spaces: list[str], query: Vectors, wanted: int, probes: int, where: Filter | None) -> list[Hit]:
        """Return hits in the `probes` nearest banks, and in further ones, nearest first, until there are enough."""
        test, hits, probed = predicate(where), list[Hit](), 0
        with self._writing:
            for space, number in self._ranked(spaces, query):
                if probed >= probes and len(hits) >= wanted:
                    break
                rows = self._living(space, number, vectors=True)
                probed += bool(rows)
                matching = [row for row in rows if test(row.fact)]
                hits += [Hit(row.fact, float(np.dot(row.vector, query)), f"{space}/{number}") for row in matching]
        return hits

    def _ranked(self, spaces: list[str], query: Vectors) -> Iterator[tuple[str, int]]:
        """Yield the banks of all these namespaces, nearest centroid first."""
        spaces, count, yielded = self._with_banks(spaces), _FIRST, 0
        while True:
            near = [(cosine, s, n) for s in spaces for n, cosine in self._nearest_banks(s, query[None], count)[0]]
            best = sorted(near, key=lambda bank: -bank[0])[:count]
            yield from ((space, number) for _, space, number in best[yielded:])
            if len(best) < count:
                return
            count, yielded = _GROWTH * count, count

    def _living(self, space: str, number: int, *, vectors: bool = False) -> list[Row]:
        rows = self._rows(space, where={"kp:bank": number}, vectors=vectors)
        return [row for row in rows if row.bank == number and alive(row.fact)]

    def _remove_expired(self, space: str) -> None:
        if expired := self._expired(space):
            self._remove(space, expired)

    def _expired(self, space: str) -> list[str]:
        now = time.time()
        rows = self._rows(space, where={"kp:expires": {"$lte": now}})
        return [row.fact.id for row in rows if row.fact.expires is not None and row.fact.expires <= now]

    def _query(self, question: str) -> Vectors:
        if not question.strip():
            raise FactError(f"Got the blank question {question!r}; expected words to search for.")
        if any("\ud800" <= letter <= "\udfff" for letter in question):
            raise FactError(f"Got the question {question!r}, which is not Unicode. Decode it with errors='replace'.")
        query: Vectors = checked_vectors(np.asarray(self.embedder.embed_query(question))[None], 1, self.embedder)[0]
        return query

    def add(self, facts: Iterable[Fact], *, ttl: float | None = None, overwrite: bool = False) -> Added:
        """Add `facts` in batches, so any number is fine; batches before an error stay.

        A fact whose id is stored is not stored again, nor is one without an id of its own whose source has its text.
        `ttl`: seconds until facts without `expires` expire. Raises `FactError` for an id that its namespace has with
        another text, unless that text is a correction (version above 1), which stays.

        With `overwrite`, a fact replaces the one with its id, and is its next version if the text differs.
        """
        if ttl is not None and not 0 < ttl <= LATEST:
            raise FactError(f"Got ttl={ttl}; expected seconds above 0, or None for never.")
        self._check_writes()
        report, source = Added(), iter(facts)
        while batch := list(itertools.islice(source, _BATCH)):
            if ttl is not None:
                batch = [replace(fact, expires=time.time() + ttl) if fact.expires is None else fact for fact in batch]
            report += self._add(batch, overwrite)
        return report

    def update(self, fact: Fact) -> Fact:
        """Replace the fact with the same id and namespace by `fact`; returns it with its new version.

        Raises `FactError` if no fact has this id.
        """
        self._check_writes()
        self.get(fact.id, namespace=fact.namespace)
        vectors = self._embed([fact])
        with self._writing:
            stored = self.get(fact.id, namespace=fact.namespace)
            fact = replace(fact, version=stored.version + 1)
            self._put_near(fact.namespace, [fact], vectors)
            return fact

    def renew(self, facts: Iterable[Fact]) -> None:
        """Set `expires` of stored facts to that of `facts`, except where they have expired or changed otherwise."""
        self._check_writes()
        renewed = {(fact.namespace, fact.id): fact for fact in facts}
        with self._writing:
            for space in dict.fromkeys(space for space, _ in renewed):
                rows = self._rows(space, ids=[fact_id for of, fact_id in renewed if of == space])
                pairs = [(row.fact, renewed[space, row.fact.id]) for row in rows if alive(row.fact)]
                same = {new.id: new.expires for old, new in pairs if replace(old, expires=new.expires) == new}
                if same:
                    self._set_expires(space, same)

    def purge(self, prefix: str) -> list[str]:
        """Delete expired facts in the namespaces that begin with `prefix`; returns these, empty ones included."""
        self._check_writes()
        with self._writing:
            spaces = [space for space in self._spaces(None) if space.startswith(prefix)]
            for space in spaces:
                self._remove_expired(space)
        return spaces

    def delete(self, ids: Iterable[str], *, namespace: str | None = None) -> int:
        """Delete the facts with these ids; returns how many existed."""
        self._check_writes()
        unique, count = list(dict.fromkeys(ids)), 0
        with self._writing:
            for space in self._spaces(namespace) if unique else ():
                if present := [row.fact.id for row in self._rows(space, ids=unique)]:
                    self._remove(space, present)
                count += len(present)
        return count

    def rebuild(self) -> None:
        """Make all banks anew."""
        self._check_writes()
        with self._writing:
            for space in self._spaces(None):
                self._make_banks(space)

    def verify(self, *, repair: bool = False) -> list[str]:
        """Return the problems in counts, vectors of a sample and banks; `repair` embeds damaged namespaces anew."""
        problems = []
        with self._writing:
            for space in self._spaces(None):
                wrong = list(self._problems(space))
                problems += [f"Namespace {space!r}: {problem}" for problem in wrong]
                if wrong and repair:
                    self._check_writes()
                    rows = self._rows(space)
                    while batch := [row.fact for row in itertools.islice(rows, _BATCH)]:
                        self._put(space, batch, self._embed(batch))
                    self._set_banks(space, {}, _NO_VECTORS)
        return problems

    def _add(self, batch: Sequence[Fact], overwrite: bool) -> Added:  # noqa: FBT001
        if wrong := next((item for item in batch if not isinstance(item, Fact)), None):
            raise FactError(f"Got {wrong!r} ({type(wrong).__name__}); expected a Fact, e.g. `Fact(text)`.")
        vectors: dict[str, Vectors] = {}
        while True:
            with self._writing:
                new, superseded = list[Fact](), list[str]()
                for space in dict.fromkeys(fact.namespace for fact in batch):
                    self._remove_expired(space)
                    given = [fact for fact in batch if fact.namespace == space]
                    missing, later = (self._next_versions(space, given), []) if overwrite else self._new(space, given)
                    new, superseded = new + missing, superseded + later
                todo = {fact.text: fact for fact in new if fact.text not in vectors}
                if not todo:
                    for space in dict.fromkeys(fact.namespace for fact in new):
                        facts = [fact for fact in new if fact.namespace == space]
                        self._put_near(space, facts, np.stack([vectors[fact.text] for fact in facts]))
                        # Banks with twice their size on average are best made anew.
                        if (banks := self._bank_count(space)) and self._count(space) > LARGEST * self.bank_size * banks:
                            self._set_banks(space, {}, _NO_VECTORS)
                    return Added(len(new), len(batch) - len(new) - len(superseded), tuple(superseded))
            # Embed without the lock, for which searches in banks wait; then look again what is missing.
            vectors |= zip(todo, self._embed(list(todo.values())), strict=True)

    def _new(self, space: str, given: Sequence[Fact]) -> tuple[list[Fact], list[str]]:
        """Return the facts that the namespace does not have, and the ids for which it has a later version."""
        digests = list(dict.fromkeys(fact.digest for fact in given))
        rows = self._rows(space, where={"kp:digest": {"$in": digests}})
        texts = {(row.fact.source, row.fact.text) for row in rows}
        stored = {row.fact.id: row.fact for row in self._rows(space, ids=[fact.id for fact in given])}
        new, superseded = dict[str, Fact](), dict[str, None]()
        for fact in given:
            same = new.get(fact.id) or stored.get(fact.id)
            if same is None:
                if fact.is_named or (fact.source, fact.text) not in texts:
                    new[fact.id] = fact
                    texts.add((fact.source, fact.text))
            elif same.text != fact.text:
                if fact.id in new or same.version == 1:
                    raise FactError(
                        f"Got the id {fact.id!r} for {fact.text!r}; {space!r} holds it for {same.text!r}. "
                        "Use `update` (`kp build --replace`; at a server, delete it first), or give another id."
                    )
                superseded[fact.id] = None
                logger.warning("Version %d of fact %r stays; not added: %r.", same.version, fact.id, fact.text)
        return list(new.values()), list(superseded)

    def _next_versions(self, space: str, given: Sequence[Fact]) -> list[Fact]:
        """Return the last given fact of each id, with its version, unless the namespace has the same fact."""
        new = {fact.id: fact for fact in given}
        for row in list(self._rows(space, ids=list(new))):
            fact, version = new.pop(row.fact.id), row.fact.version
            if replace(fact, version=version) != row.fact:
                new[fact.id] = replace(fact, version=version + (fact.text != row.fact.text))
        return list(new.values())

    def _put_near(self, space: str, facts: Sequence[Fact], vectors: Vectors) -> None:
        """Store facts, each in the bank with the nearest centroid if there are banks."""
        near = [] if self._bank_count(space) is None else self._nearest_banks(space, vectors, 1)
        # Another process may have removed the banks meanwhile.
        self._put(space, facts, vectors, [banks[0][0] for banks in near] if near and all(near) else None)

    def _embed(self, facts: Sequence[Fact]) -> Vectors:
        if not facts:
            return _NO_VECTORS
        return checked_vectors(self.embedder.embed([fact.text for fact in facts]), len(facts), self.embedder)

    def _with_banks(self, spaces: list[str]) -> list[str]:
        """Make banks in those of these namespaces that have facts but no banks; returns `spaces`."""
        with self._writing:
            for space in spaces:
                if self._bank_count(space) is None and self._count(space):
                    self._check_writes()
                    self._make_banks(space)
        return spaces

    def _make_banks(self, space: str) -> None:
        rows = list(self._rows(space, vectors=True))
        if not rows:
            self._set_banks(space, {}, _NO_VECTORS)
            return
        labels, centroids = cluster(_stacked(rows), self.bank_size)
        self._set_banks(space, {row.fact.id: int(label) for row, label in zip(rows, labels, strict=True)}, centroids)
        # Another process may have added facts while there were no banks.
        if unassigned := [row.fact.id for row in self._rows(space) if row.bank is None]:
            late_rows = list(self._rows(space, ids=unassigned, vectors=True))
            self._put_near(space, [row.fact for row in late_rows], _stacked(late_rows))
        logger.info("Made %d banks of %d facts of %r.", len(centroids), len(rows), space)

    def _problems(self, space: str) -> Iterator[str]:
        numbers = {row.fact.id: row.bank for row in self._rows(space)}
        if len(numbers) != self._count(space):
            yield f"it counts {self._count(space)} facts and lists {len(numbers)}."
        chosen = np.random.default_rng(0).permutation(len(numbers))[:_SAMPLE]
        rows = list(self._rows(space, ids=[list(numbers)[at] for at in chosen.tolist()], vectors=True))
        facts, computed = [row.fact for row in rows], self._embed([row.fact for row in rows])
        wrong = [f.id for f, row, vector in zip(facts, rows, computed, strict=True) if not _alike(row.vector, vector)]
        if wrong:
            yield f"of {len(facts)} facts looked at, {len(wrong)} have the vector of another text, e.g. {wrong[0]}."
        if (banks := self._bank_count(space)) is None:
            return
        lost = [fact_id for fact_id, bank in numbers.items() if bank is None or bank >= banks]
        if lost:
            yield f"{len(lost)} facts stand in none of its {banks} banks, e.g. {lost[0]}."


def alive(fact: Fact) -> bool:
    """Whether the fact has not expired."""
    return fact.expires is None or fact.expires > time.time()


def ranked(vectors: Vectors, others: Vectors, count: int) -> list[list[tuple[int, float]]]:
    """For each of `vectors`, return the rows of the `count` nearest `others` with their cosines, nearest first."""
    cosines = vectors @ others.T
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
    return [[(int(at), float(row[at])) for at in indices] for row, indices in zip(cosines, order, strict=True)]


def _stacked(rows: Sequence[Row]) -> Vectors:
    return np.array([row.vector for row in rows], np.float32)


def _alike(held: Vectors, made: Vectors) -> bool:
    return held.shape == made.shape and float(normalised(held) @ made) >= _SAME


def cluster(vectors: Vectors, bank_size: int) -> tuple[NDArray[np.int32], Vectors]:
    """Cluster `vectors`, `(n, dimensions)`; returns the bank of each, and the centroids, `(banks, dimensions)`.

    Banks hold about `bank_size` vectors, at most `LARGEST` times that. A centroid is the normalised mean.
    """
    with needing("Making banks needs scikit-learn", "chroma"):
        from sklearn.cluster import KMeans
    count = -(-len(vectors) // bank_size)
    labels = np.zeros(len(vectors), np.int32)
    if count > 1:
        # For thousands of vectors, k-means++ takes most of the time and changes little.
        begin = "k-means++" if len(vectors) <= _PLUS_PLUS_UP_TO else "random"
        means = KMeans(count, init=begin, n_init=1, max_iter=_ROUNDS, random_state=_SEED)
        labels = np.asarray(means.fit_predict(vectors), np.int32)
    largest = LARGEST * bank_size
    while (sizes := np.bincount(labels)).max() > largest:
        for label in np.flatnonzero(sizes > largest).tolist():
            rows = np.flatnonzero(labels == label)
            labels[rows[_half(vectors[rows])]] = labels.max() + 1
    labels = np.unique(labels, return_inverse=True)[1].astype(np.int32)
    sums = np.zeros((labels.max() + 1, vectors.shape[1]), np.float32)
    np.add.at(sums, labels, vectors)
    return labels, _normalised(sums)


def _half(vectors: Vectors) -> NDArray[np.intp]:
    """Return the rows of one of two groups; for identical vectors, every second row."""
    from sklearn.cluster import KMeans

    spread = float(np.ptp(vectors, axis=0).max())
    labels = KMeans(2, n_init=1, random_state=_SEED).fit_predict(vectors) if spread > 0 else None
    rows = np.arange(len(vectors))[1::2] if labels is None else np.flatnonzero(labels == 1)
    return rows if 0 < len(rows) < len(vectors) else np.arange(len(vectors))[1::2]


def _normalised(sums: Vectors) -> Vectors:
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    # Vectors that cancel out have no mean direction; any direction will do.
    first_axis = np.eye(1, sums.shape[1], dtype=np.float32)
    return np.where(lengths > 1e-6, sums / np.maximum(lengths, 1e-6), first_axis).astype(np.float32)
