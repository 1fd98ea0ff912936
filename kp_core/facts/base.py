"""Facts, and what every fact bank offers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol, TypeAlias, runtime_checkable

from kp_core.errors import BankError
from kp_core.packs.handle import check_namespace

__all__ = ["Added", "Fact", "FactBank", "Filter", "Hit", "NearDuplicate", "Reranker", "Value", "content_id"]

_DIGEST_BYTES = 16
_DEFAULT_NAMESPACE = "default"

Value: TypeAlias = str | int | float | bool
"""What a metadata field may hold."""

Filter: TypeAlias = Mapping[str, object]
"""Which facts to look at; see `kp_core.facts.filters`."""


@dataclass(frozen=True)
class Fact:
    """One piece of knowledge: `text` is what is embedded and what goes into a pack; the rest is for people.

    `id` is the BLAKE2b digest of the text (32 hexadecimal characters; outside the namespace `default`, of namespace and
    text) unless given. `namespace` keeps knowledge apart: a fact's is that of its pack, and a search may
    be held to one. From `expires` (seconds since 1970, UTC) on, no search finds the fact. `version` counts the texts
    that a bank has held under this id, from 1.

    Raises `BankError` for a text that is blank or is not Unicode (half a surrogate pair), for an id that is not
    printable, and for metadata that maps anything but strings to strings, finite numbers or booleans; `HandleError` for
    a namespace that is not one.
    """

    text: str
    title: str = ""
    source: str = ""
    metadata: Mapping[str, Value] = field(default_factory=dict, hash=False)
    id: str = ""
    namespace: str = _DEFAULT_NAMESPACE
    expires: float | None = None
    version: int = 1

    def __post_init__(self) -> None:
        for name in ("text", "title", "source", "id", "namespace"):
            _check_text(name, getattr(self, name))
        if not self.text.strip():
            raise BankError(f"Got the blank text {self.text!r} (title {self.title!r}); expected a fact. Leave it out.")
        if not self.id.isprintable():
            raise BankError(f"Got the fact id {self.id!r}; expected printable characters.")
        check_namespace(self.namespace)
        if self.expires is not None and (not _is_number(self.expires) or not math.isfinite(self.expires)):
            raise BankError(f"Got expires={self.expires!r}; expected seconds since 1970, or None for never.")
        if type(self.version) is not int or self.version < 1:
            raise BankError(f"Got version={self.version!r} of a fact; expected an integer from 1 on.")
        for key, value in dict(self.metadata).items():
            _check_text("a metadata key", key)
            _check_value(f"metadata {key!r}", value)
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        if not self.id:
            object.__setattr__(self, "id", content_id(self.text, self.namespace))

    def moved(self, namespace: str | None) -> Fact:
        """The fact in `namespace`, unless that is `None` or the fact has one of its own: any but `default`."""
        if namespace is None or self.namespace != _DEFAULT_NAMESPACE or namespace == self.namespace:
            return self
        return replace(self, namespace=namespace, id="" if self.id == content_id(self.text) else self.id)

    def __reduce__(self) -> tuple[type[Fact], tuple[object, ...]]:
        # A mapping proxy cannot be pickled, and facts travel between processes.
        about = (self.text, self.title, self.source, dict(self.metadata), self.id, self.namespace)
        return Fact, (*about, self.expires, self.version)


def content_id(text: str, namespace: str = _DEFAULT_NAMESPACE) -> str:
    """The id of a fact that is given none."""
    content = text if namespace == _DEFAULT_NAMESPACE else f"{namespace}\0{text}"
    return hashlib.blake2b(content.encode(), digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True)
class Hit:
    """A fact that a search found: `score` is its cosine to the question, in [-1, 1]; `bank` the bank it stands in."""

    fact: Fact
    score: float
    bank: int


@dataclass(frozen=True)
class NearDuplicate:
    """A fact that says nearly what an earlier one of its bank says: their ids, and the cosine between them."""

    id: str
    earlier: str
    score: float


@dataclass(frozen=True)
class Added:
    """What became of facts that were given to a bank: how many are new, how many were held, which resemble others.

    A fact is held when one with the same text stands in its namespace. `near_duplicates` were added all the same.
    """

    added: int = 0
    duplicates: int = 0
    near_duplicates: tuple[NearDuplicate, ...] = ()

    def __add__(self, other: Added) -> Added:
        near = self.near_duplicates + other.near_duplicates
        return Added(self.added + other.added, self.duplicates + other.duplicates, near)


@runtime_checkable
class Reranker(Protocol):
    """A second look at what a search found, which puts it into a better order; see `kp_core.facts.rerank`."""

    @property
    def depth(self) -> int:
        """How many hits it wants to see, where fewer are asked for."""

    def __call__(self, question: str, hits: Sequence[Hit]) -> list[Hit]:
        """All of `hits`, which come nearest first, best first."""


@runtime_checkable
class FactBank(Protocol):
    """Finds facts for a question: routes to the nearest banks (clusters of about `bank_size` facts), ranks in them.

    Banks are numbered from 0 and keep their numbers until facts come or go; no bank is empty. All methods may be called
    from several threads. Everything but `build`, `add`, `facts`, `banks` and `len` raises `BankError` ("bank not
    built") as long as there are no facts.
    """

    @property
    def banks(self) -> int:
        """Number of banks; 0 before the first fact."""

    def __len__(self) -> int:
        """Number of facts."""

    def build(self, facts: Iterable[Fact]) -> Added:
        """Add `facts` to those held, then cluster all of them anew; nothing to add is nothing to do.

        A text that its namespace holds already is not stored again: its first fact stays. Raises `BankError`, with
        nothing changed, for an id that is held already with another text.
        """

    def add(self, facts: Iterable[Fact], *, ttl: float | None = None) -> Added:
        """As `build`, but each fact goes to the bank nearest to it, and a bank that grows too large is split.

        Facts are read, embedded and kept in batches, so any number of them may come; those of the batches before an
        error stay. `ttl`: seconds until those of them expire that do not say it themselves.
        """

    def update(self, fact: Fact) -> Fact:
        """Put `fact` in the place of the one with its id; gives it with its new version.

        Raises `BankError` when no fact has this id, or when another one has this text.
        """

    def delete(self, ids: Iterable[str]) -> int:
        """Remove the facts with these ids; how many there were. Banks that shrink too far are merged into others."""

    def facts(self) -> Iterator[Fact]:
        """All facts, in the order they came in."""

    def get(self, fact_id: str) -> Fact:
        """The fact with this id; raises `BankError` when there is none."""

    def bank_of(self, fact_id: str) -> int:
        """The bank of the fact with this id; raises `BankError` when there is none."""

    def bank_facts(self, bank: int) -> tuple[Fact, ...]:
        """The facts of one bank, in the order they came in; raises `BankError` when there is no such bank."""

    def route(self, question: str) -> int:
        """The bank whose centroid has the highest cosine to `question`; of equals the lowest number."""

    def search(  # noqa: PLR0913 - what may be asked for, each with a default that works
        self,
        question: str,
        k: int = 4,
        *,
        probes: int | None = None,
        where: Filter | None = None,
        namespace: str | None = None,
        rerank: Reranker | None = None,
    ) -> list[Hit]:
        """The `k` best facts of the `probes` banks nearest to `question`, best first, equals by id.

        `probes=None` takes as many as the bank's calibration says; `probes=bank.banks` searches everything. `where` and
        `namespace` say which facts count (see `kp_core.facts.filters`); banks that hold none of them are passed over.
        Where those banks hold fewer than `k` facts, further banks, nearest first, are ranked with them until there are
        `k`; so the result is shorter only when there are fewer than `k` facts. With `rerank` the best `rerank.depth`
        are found so, and put into its order, of which the first `k` count.

        Raises `BankError` for a blank question, for `k` or `probes` below 1, for a filter that makes no sense, and for
        a `rerank` that is no `Reranker`.
        """


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_value(name: str, value: object) -> None:
    if isinstance(value, bool) or (_is_number(value) and math.isfinite(value)):  # type: ignore[arg-type]
        return
    if not isinstance(value, str):
        raise BankError(f"Got {value!r} as {name} of a fact; expected a string, a finite number or a boolean.")
    _check_text(name, value)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise BankError(f"Got {value!r} ({type(value).__name__}) as {name} of a fact; expected a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BankError(
            f"Got {value!r} as {name} of a fact, which no file can hold ({error.reason}). "
            f"Repair it, e.g. with `.encode(errors='replace').decode()`."
        ) from error
