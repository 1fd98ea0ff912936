"""The conformance kit of fact stores: on our own, and on stores that break a rule."""

from dataclasses import replace

import pytest

from kp_core import MemoryFactStore
from kp_core.banks.base import Hit
from kp_core.banks.store import alive
from tests.kits import check_fact_store


def test_every_store_keeps_the_rules(make_store):
    check_fact_store(make_store)


class Twice(MemoryFactStore):
    def add(self, facts, **options):
        return super().add(facts, overwrite=True)


class Furthest(MemoryFactStore):
    def search(self, question, k=4, **options):
        return super().search(question, 99 if k > 0 else k, **options)[::-1][:k]


class Unfiltered(MemoryFactStore):
    def search(self, question, k=4, *, where=None, **options):
        return super().search(question, k, **options)


class Open(MemoryFactStore):
    def search(self, question, k=4, *, namespace=None, **options):
        return super().search(question, k, **options)


class Forgetful(MemoryFactStore):
    def update(self, fact):
        return replace(self.get(fact.id, namespace=fact.namespace), version=2)


class Bankless(MemoryFactStore):
    def search(self, question, k=4, *, probes=None, **options):
        return super().search(question, k if probes != 0 else 0, **options)


class Lost(MemoryFactStore):
    def get(self, fact_id, **options):
        return next((fact for fact in self.facts(ids=[fact_id])), None)


class Moved(MemoryFactStore):
    def _put(self, space, facts, vectors, banks=None):
        self._remove(space, [fact.id for fact in facts])
        super()._put(space, facts, vectors, banks)


class Sourceless(MemoryFactStore):
    def get(self, fact_id, **options):
        return replace(super().get(fact_id, **options), source="")


class Late(MemoryFactStore):
    def search(self, question, k=4, **options):
        expired = [row.fact for space in self._spaces(None) for row in self._rows(space) if not alive(row.fact)]
        return [*super().search(question, k, **options), *(Hit(fact, 0.0) for fact in expired)]


class Stranger:
    def __init__(self, embedder):
        self.embedder = embedder


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Twice, "`get` returns the stored fact"),
        (Furthest, "returns the `k` nearest facts that match, nearest first"),
        (Unfiltered, "returns the `k` nearest facts that match"),
        (Open, "A search in a namespace finds its facts alone"),
        (Forgetful, "`search` finds the text of an update"),
        (Bankless, "A hit of a search in banks names its bank"),
        (Lost, "`get` of an unknown id raises FactError"),
        (Moved, "A fact that is replaced keeps its place"),
        (Sourceless, "`get` returns every field of a fact"),
        (Late, "A search ignores an expired fact"),
        (Stranger, "A store is a `FactStore`"),
    ],
)
def test_the_broken_rule_is_named(broken, rule):
    with pytest.raises(AssertionError, match=rule):
        check_fact_store(broken)
