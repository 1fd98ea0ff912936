"""Facts, and what every fact bank offers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from kp_core.errors import BankError

__all__ = ["Fact", "FactBank", "Hit"]

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Fact:
    """One piece of knowledge: `text` is what is embedded and what goes into a pack; the rest is for people.

    `id` is the BLAKE2b digest of the text (32 hexadecimal characters) unless given.

    Raises `BankError` for a text that is blank or is not Unicode (half a surrogate pair), for an id with characters
    that do not print, and for metadata that maps anything but strings to strings.
    """

    text: str
    title: str = ""
    source: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    id: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "title", "source", "id"):
            _check_text(name, getattr(self, name))
        if not self.text.strip():
            raise BankError(f"Got the blank text {self.text!r} (title {self.title!r}); expected a fact. Leave it out.")
        if not self.id.isprintable():
            raise BankError(f"Got the fact id {self.id!r}; expected printable characters.")
        for key, value in dict(self.metadata).items():
            _check_text("a metadata key", key)
            _check_text(f"metadata {key!r}", value)
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        if not self.id:
            object.__setattr__(self, "id", hashlib.blake2b(self.text.encode(), digest_size=_DIGEST_BYTES).hexdigest())

    def __reduce__(self) -> tuple[type[Fact], tuple[str, str, str, dict[str, str], str]]:
        # A mapping proxy cannot be pickled, and facts travel between processes.
        return Fact, (self.text, self.title, self.source, dict(self.metadata), self.id)


@dataclass(frozen=True)
class Hit:
    """A fact that a search found: `score` is its cosine to the question, in [-1, 1]; `bank` the bank it stands in."""

    fact: Fact
    score: float
    bank: int


@runtime_checkable
class FactBank(Protocol):
    """Finds facts for a question: routes to the nearest banks (clusters of about `bank_size` facts), ranks in them.

    Banks are numbered from 0 and keep their numbers until facts are added; no bank is empty. All methods may be called
    from several threads. Everything but `build`, `facts`, `banks` and `len` raises `BankError` ("bank not built") as
    long as there are no facts.
    """

    @property
    def banks(self) -> int:
        """Number of banks; 0 before the first fact."""

    def __len__(self) -> int:
        """Number of facts."""

    def build(self, facts: Iterable[Fact]) -> None:
        """Add `facts` to those held, then cluster all of them anew; nothing to add is nothing to do.

        A text that is held already is not stored again: its first fact stays. Raises `BankError`, with nothing changed,
        for an id that is held already with another text.
        """

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

    def search(self, question: str, k: int = 4, *, probes: int = 1) -> list[Hit]:
        """The `k` best facts of the `probes` banks nearest to `question`, best first, equals by id.

        Where those banks hold fewer than `k` facts, further banks, nearest first, are ranked with them until there are
        `k`; so the result is shorter only when there are fewer than `k` facts. `probes=bank.banks` searches everything.

        Raises `BankError` for a blank question and for `k` or `probes` below 1.
        """


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
