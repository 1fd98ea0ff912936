"""Facts, and what every fact store offers."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kp_core.errors import FactError
from kp_core.facts.embed import Embedder
from kp_core.packs.handle import check_namespace

__all__ = ["Added", "Fact", "FactStore", "Filter", "Hit", "NearDuplicate", "Reranker", "Value", "content_id"]

_DIGEST_BYTES = 16
_DEFAULT_NAMESPACE = "default"
_DEEPEST, _BITS = 16, 4096
LATEST = 1e15
"""The longest time, in seconds."""

Value: TypeAlias = str | int | float | bool | Sequence["Value"] | Mapping[str, "Value"] | None
"""What a metadata field may hold: what JSON can say."""

Filter: TypeAlias = Mapping[str, object]
"""Which facts to look at; see `kp_core.facts.filters`."""


@dataclass(frozen=True)
class Fact:
    """One piece of knowledge: `text` is what is embedded and what goes into a pack; the rest is for people.

    `id` is the BLAKE2b digest of the text (32 hexadecimal characters; outside the namespace `default`, of namespace and
    text) unless given. `namespace` keeps knowledge apart: a fact's is that of its pack, and a search may
    be held to one. From `expires` (seconds since 1970, UTC) on, no search finds the fact. `version` counts the texts
    that a store has held under this id, from 1.

    Raises `FactError` for a text that is blank or is not Unicode (half a surrogate pair), for an id that is not
    printable, and for metadata that is not what JSON can say; `HandleError` for a namespace that is not one.
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
            raise FactError(f"Got the blank text {self.text!r} (title {self.title!r}); expected a fact. Leave it out.")
        if not self.id.isprintable():
            raise FactError(f"Got the fact id {self.id!r}; expected printable characters.")
        check_namespace(self.namespace)
        if self.expires is not None and not (_is_number(self.expires) and abs(self.expires) <= LATEST):
            raise FactError(f"Got expires={self.expires!r}; expected seconds since 1970, or None for never.")
        if type(self.version) is not int or self.version < 1:
            raise FactError(f"Got version={self.version!r} of a fact; expected an integer from 1 on.")
        if not isinstance(self.metadata, Mapping):
            raise FactError(f"Got {self.metadata!r} as metadata of a fact; expected a dictionary.")
        for key, value in self.metadata.items():
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

    @property
    def digest(self) -> str:
        """What tells texts apart: the BLAKE2b digest of this one."""
        return content_id(self.text)

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
    """A fact that a search found: its cosine to the question, in [-1, 1], and its bank where banks were searched."""

    fact: Fact
    score: float
    bank: str | None = None


@dataclass(frozen=True)
class NearDuplicate:
    """A fact that says nearly what an earlier one of its namespace says: their ids, and the cosine between them."""

    id: str
    earlier: str
    score: float


@dataclass(frozen=True)
class Added:
    """What became of facts that were given to a store: how many are new, how many were held, which resemble others.

    A fact is held when one with the same text stands in its namespace. `near_duplicates` were added all the same.
    `superseded` are the ids under which the store holds a later version, that of a correction, which stays.
    """

    added: int = 0
    duplicates: int = 0
    near_duplicates: tuple[NearDuplicate, ...] = ()
    superseded: tuple[str, ...] = ()

    def __add__(self, other: Added) -> Added:
        near = self.near_duplicates + other.near_duplicates
        superseded = self.superseded + other.superseded
        return Added(self.added + other.added, self.duplicates + other.duplicates, near, superseded)


@runtime_checkable
class Reranker(Protocol):
    """A second look at what a search found, which puts it into a better order; see `kp_core.facts.rerank`."""

    @property
    def depth(self) -> int:
        """How many hits it wants to see, where fewer are asked for."""

    def __call__(self, question: str, hits: Sequence[Hit]) -> list[Hit]:
        """All of `hits`, which come nearest first, best first."""


@runtime_checkable
class FactStore(Protocol):
    """Finds facts for a question. Facts stand in namespaces, and within these in banks of about `bank_size` (§2.3).

    A bank is named by its namespace and its number there, e.g. `default/3`. Banks are made by `rebuild`, and where
    there are none when they are first asked for. A fact that is added or updated later joins the bank with the nearest
    centroid, however large that is; once banks hold twice `bank_size` on average, they are made anew when next asked
    for. All methods may be called from several threads. `namespace=None` is all of them.
    """

    embedder: Embedder

    def __len__(self) -> int:
        """Number of facts."""

    def add(
        self,
        facts: Iterable[Fact],
        *,
        ttl: float | None = None,
        vectors: NDArray[np.float32] | None = None,
        overwrite: bool = False,
    ) -> Added:
        """Keep `facts`, in batches, so that any number may come; those of the batches before an error stay.

        A text that its namespace holds already is not stored again: its first fact stays. `ttl`: seconds until those
        expire that do not say it themselves. `vectors`, one normalised row per fact, spare the embedder. Raises
        `FactError` for an id that its namespace holds with another text, but for one that was corrected since (its
        version is above 1): the correction stays, and the report names it.

        With `overwrite` ids count, not texts: a fact takes the place of the one with its id, as the next version where
        its text is another, and facts with other ids may say the same, as chunks of several documents do.
        """

    def update(self, fact: Fact) -> Fact:
        """Put `fact` in the place of the one with its id in its namespace; gives it with its new version.

        Raises `FactError` when no fact has this id, or when another one has this text.
        """

    def delete(self, ids: Iterable[str], *, namespace: str | None = None) -> int:
        """Remove the facts with these ids; how many there were."""

    def facts(
        self, *, ids: Sequence[str] | None = None, where: Filter | None = None, namespace: str | None = None
    ) -> Iterator[Fact]:
        """The facts that match, of `ids` those that there are, namespace by namespace, in the order they came in."""

    def get(self, fact_id: str, *, namespace: str | None = None) -> Fact:
        """The fact with this id; raises `FactError` when there is none."""

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
        """The `k` facts nearest to `question`, best first; fewer only where there are fewer.

        `probes=None` searches all facts; a number, the facts of so many banks with the nearest centroids, as in the
        paper, and of further ones, nearest first, where those hold fewer than `k`. `where` says which facts count (see
        `kp_core.facts.filters`). With `rerank` the best `rerank.depth` are found so, and put into its order, of which
        the first `k` count.

        Raises `FactError` for a blank question, for `k` or `probes` below 1, for a filter that makes no sense, for a
        `rerank` that is no `Reranker`, and as long as there are no facts.
        """

    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that hold facts, in alphabetical order."""

    def banks(self, namespace: str | None = None) -> tuple[str, ...]:
        """The names of all banks."""

    def bank_facts(self, bank: str) -> tuple[Fact, ...]:
        """The facts of one bank, in the order they came in; raises `FactError` when there is no such bank."""

    def bank_of(self, facts: Sequence[Fact]) -> list[str]:
        """The bank that each of these facts stands in; raises `FactError` for one that stands in none."""

    def route(self, question: str, *, namespace: str | None = None) -> str:
        """The bank whose centroid has the highest cosine to `question`."""

    def rebuild(self) -> None:
        """Make all banks anew."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_value(name: str, value: object, depth: int = 0) -> None:
    if isinstance(value, int) and value.bit_length() > _BITS:
        bits = value.bit_length()
        raise FactError(f"Got a number of {bits} bits as {name} of a fact; expected at most {_BITS}. Write it as text.")
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return
    if isinstance(value, Mapping | list | tuple) and depth < _DEEPEST:
        for key, each in value.items() if isinstance(value, Mapping) else zip(itertools.repeat(name), value):
            _check_text(f"a key in {name}", key)
            _check_value(name, each, depth + 1)
        return
    if not isinstance(value, str):
        raise FactError(f"Got {value!r} as {name} of a fact; expected what JSON can say: text, finite numbers, lists.")
    _check_text(name, value)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise FactError(f"Got {value!r} ({type(value).__name__}) as {name} of a fact; expected a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FactError(
            f"Got {value!r} as {name} of a fact, which no file can hold ({error.reason}). "
            f"Repair it, e.g. with `.encode(errors='replace').decode()`."
        ) from error
