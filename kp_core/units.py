"""The content of a pack: one fact, all facts of a bank, or all facts of a document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kp_core.errors import FactError
from kp_core.facts import Fact, FactStore

__all__ = ["Unit", "Units", "estimate_units"]

Unit: TypeAlias = Literal["fact", "bank", "document"]


@dataclass(frozen=True)
class Units:
    """Groups the facts of `store` by `unit`. A unit is a fact with the texts of its members, one per line, in order.

    A fact without a source is its own document. Without a `store`, only single facts work.
    """

    store: FactStore | None
    unit: Unit

    @property
    def facts(self) -> FactStore:
        """The fact store; raises `FactError` if there is none."""
        if self.store is None:
            raise FactError("There is no fact store to search or change; pass one: `Delivery(facts, engine, store)`.")
        return self.store

    def keys(self, facts: Sequence[Fact]) -> list[object]:
        """Return a key per fact that identifies its unit."""
        if self.unit == "bank":
            return list(self.facts.bank_of(facts)) if facts else []
        by_source = self.unit == "document"
        return [(f.namespace, f.source, "") if by_source and f.source else (f.namespace, "", f.text) for f in facts]

    def of(self, facts: Iterable[Fact]) -> list[Fact]:
        """Return the units of these facts, each once."""
        facts = list(facts)
        by_key: dict[object, Fact] = {}
        for key, fact in zip(self.keys(facts), facts, strict=True):
            by_key.setdefault(key, fact)
        return [self.around(fact) for fact in by_key.values()]

    def around(self, fact: Fact) -> Fact:
        """Return the unit of `fact`; its metadata lists the ids of its members."""
        if self.unit == "fact" or (self.unit == "document" and not fact.source):
            return fact
        title, source = "", fact.source
        if self.unit == "bank":
            [title] = self.facts.bank_of([fact])
            members, source = self.facts.bank_facts(title), ""
        else:
            members = tuple(self.facts.facts(where={"kp:source": source}, namespace=fact.namespace))
        titles = {member.title for member in members}
        return Fact(
            _joined(member.text for member in members),
            title=title or (titles.pop() if len(titles) == 1 else ""),
            source=source,
            metadata={"facts": " ".join(member.id for member in members)},
            namespace=fact.namespace,
        )


def estimate_units(facts: Iterable[Fact], unit: Unit, bank_size: int) -> list[Fact]:
    """Return the units that facts of no store will make, to estimate their cost; banks are consecutive facts."""
    groups = defaultdict[object, list[str]](list)
    for number, (space, text) in enumerate(sources := {(fact.namespace, fact.text): fact.source for fact in facts}):
        key = {"fact": number, "bank": number // bank_size, "document": sources[space, text] or number}[unit]
        groups[space, key].append(text)
    return [Fact(_joined(texts), namespace=key[0]) for key, texts in groups.items()]  # type: ignore[index]


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(texts)
