"""What a fact store is made of: a table per namespace, which keeps facts, their vectors and their banks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from kp_core.facts.banking import Vectors
from kp_core.facts.base import Fact, Filter, Hit

__all__ = ["Row", "Table", "alive", "next_versions"]


class Row(NamedTuple):
    """A fact, its vector (without numbers where that was not asked for), and the number of its bank."""

    fact: Fact
    vector: Vectors
    bank: int | None = None


class Table(Protocol):
    """The facts and banks of one namespace. Facts come back in the order they came in, expired ones too."""

    namespace: str

    def __len__(self) -> int:
        """Number of facts."""

    def ids(self) -> list[str]:
        """The ids of all facts."""

    def rows(self, ids: Sequence[str], *, vectors: bool = False) -> list[Row]:
        """The facts with these ids, as far as there are any."""

    def page(self, start: int, count: int, *, vectors: bool = False, where: Filter | None = None) -> list[Row]:
        """`count` facts from number `start` on; of those that match `where`, where it can tell, else of all."""

    def holding(self, texts: Sequence[str]) -> dict[str, str]:
        """Of `texts`, those that a fact has, each with its id."""

    def put(self, facts: Sequence[Fact], vectors: Vectors, banks: Sequence[int] | None = None) -> None:
        """Keep facts, in the place of those with their ids, in banks of these numbers; lasting on return."""

    def remove(self, ids: Sequence[str]) -> None:
        """Remove the facts with these ids; lasting on return."""

    def expired(self, now: float) -> list[str]:
        """The ids of facts that have expired."""

    def nearest(self, vectors: Vectors, count: int, where: Filter | None = None) -> list[list[Hit]]:
        """For each of `vectors` (normalised, shape `(n, dimensions)`) the `count` nearest living facts that match."""

    def bank_count(self) -> int | None:
        """How many banks were made, numbered from 0 on, those included that lost all facts since; `None` for none."""

    def bank(self, number: int, *, vectors: bool = False) -> list[Row]:
        """The facts of one bank."""

    def nearest_banks(self, vectors: Vectors, count: int) -> list[list[tuple[int, float]]]:
        """For each of `vectors` the `count` banks with the nearest centroids: number and cosine, nearest first."""

    def set_banks(self, numbers: Mapping[str, int], centroids: Vectors) -> None:
        """Put each fact into the bank of its number; `centroids` has a row for each bank.

        Before it is done there are no banks, also where a process is killed meanwhile.
        """

    def drop_banks(self) -> None:
        """There are no banks any more."""


def alive(fact: Fact) -> bool:
    """Whether the fact has not expired."""
    return fact.expires is None or fact.expires > time.time()


def next_versions(table: Table, given: Sequence[tuple[int, Fact]]) -> list[tuple[int, Fact]]:
    """The last of `given` under each id, as the version that it is, unless the table holds just that."""
    new = {fact.id: (at, fact) for at, fact in given}
    for row in table.rows(list(new)):
        at, fact = new.pop(row.fact.id)
        version = row.fact.version
        if replace(fact, version=version) != row.fact:
            new[fact.id] = at, replace(fact, version=version + (fact.text != row.fact.text))
    return list(new.values())
