"""The conformance kit of fact stores: on our own, on a toy that knows the protocol alone, and on toys that break it."""

import time
from dataclasses import replace

import pytest

from kp_core.errors import FactError
from kp_core.facts import Added, Hit, Reranker
from kp_core.facts.filters import predicate
from kp_core.testing import check_fact_store


class ToyStore:
    """All that a fact store has to have; its banks are the first letters of ids."""

    def __init__(self, embedder):
        self.embedder, self.held = embedder, {}

    def __len__(self):
        return len(list(self.facts()))

    def add(self, facts, *, ttl=None, vectors=None, overwrite=False):
        added = duplicates = 0
        for number, given in enumerate(facts):
            fact = replace(given, expires=given.expires or (time.time() + ttl if ttl else None))
            stored = self.held.get((fact.namespace, fact.id), (None, None))[0]
            if overwrite and stored:
                fact = replace(fact, version=stored.version + (stored.text != fact.text))
            elif not overwrite and any(fact.text == other.text for other in self.facts(namespace=fact.namespace)):
                duplicates += 1
                continue
            elif stored and stored.version == 1:
                raise FactError("That id has another text.")
            elif stored:
                continue
            vector = self.embedder.embed([fact.text])[0] if vectors is None else vectors[number]
            self.held[fact.namespace, fact.id] = fact, vector
            added += 1
        return Added(added, duplicates)

    def update(self, fact):
        stored = self.get(fact.id, namespace=fact.namespace)
        if any(fact.text == other.text for other in self.facts(namespace=fact.namespace) if other.id != fact.id):
            raise FactError("Another fact has this text.")
        fact = replace(fact, version=stored.version + 1)
        self.held[fact.namespace, fact.id] = fact, self.embedder.embed([fact.text])[0]
        return fact

    def delete(self, ids, *, namespace=None):
        keys = [key for key in self.held if key[1] in set(ids) and namespace in (None, key[0])]
        return len([self.held.pop(key) for key in keys])

    def facts(self, *, ids=None, where=None, namespace=None):
        for space in sorted({space for space, _ in self.held}) if namespace is None else [namespace]:
            for fact in [fact for fact, _ in self.held.values() if fact.namespace == space]:
                is_alive = fact.expires is None or fact.expires > time.time()
                if is_alive and (ids is None or fact.id in ids) and predicate(where or {})(fact):
                    yield fact

    def get(self, fact_id, *, namespace=None):
        for fact in self.facts(ids=[fact_id], namespace=namespace):
            return fact
        raise FactError("There is no such fact.")

    def search(self, question, k=4, *, probes=None, where=None, namespace=None, rerank=None):
        if (
            not question.strip()
            or k < 1
            or (probes is not None and probes < 1)
            or not isinstance(rerank, Reranker | None)
        ):
            raise FactError("That is no search.")
        query = self.embedder.embed_query(question)
        facts = list(self.facts(where=where, namespace=namespace))
        if not self.held:
            raise FactError("There are no facts yet.")
        hits = [
            Hit(fact, float(self.held[fact.namespace, fact.id][1] @ query), probes and self.bank_of([fact])[0])
            for fact in facts
        ]
        nearest = sorted(hits, key=lambda hit: -hit.score)
        return (rerank(question, nearest[: rerank.depth]) if rerank else nearest)[:k]

    def namespaces(self):
        return tuple(sorted({fact.namespace for fact in self.facts()}))

    def banks(self, namespace=None):
        return tuple(sorted(set(self.bank_of(list(self.facts(namespace=namespace))))))

    def bank_facts(self, bank):
        if facts := tuple(fact for fact in self.facts() if self.bank_of([fact]) == [bank]):
            return facts
        raise FactError("There is no such bank.")

    def bank_of(self, facts):
        if any((fact.namespace, fact.id) not in self.held for fact in facts):
            raise FactError("That fact is in no bank.")
        return [f"{fact.namespace}/{fact.id[0]}" for fact in facts]

    def rebuild(self):
        pass


def test_every_store_keeps_the_rules(make_store):
    check_fact_store(make_store)


def test_a_store_of_the_protocol_alone_keeps_the_rules():
    check_fact_store(ToyStore)


class Twice(ToyStore):
    def add(self, facts, **options):
        return super().add(facts, overwrite=True)


class Furthest(ToyStore):
    def search(self, question, k=4, **options):
        return super().search(question, 99 if k > 0 else k, **options)[::-1][:k]


class Unfiltered(ToyStore):
    def search(self, question, k=4, *, where=None, **options):
        return super().search(question, k, **options)


class Open(ToyStore):
    def search(self, question, k=4, *, namespace=None, **options):
        return super().search(question, k, **options)


class Forgetful(ToyStore):
    def update(self, fact):
        self.held[fact.namespace, fact.id] = fact, self.held[fact.namespace, fact.id][1]
        return replace(fact, version=2)


class Bankless(ToyStore):
    def search(self, question, k=4, *, probes=None, **options):
        return super().search(question, k if probes != 0 else 0, **options)


class Lost(ToyStore):
    def get(self, fact_id, **options):
        return next((fact for fact in self.facts(ids=[fact_id])), None)


class Incomplete:
    def __init__(self, embedder):
        self.embedder = embedder


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Twice, "A text that its namespace has is not stored again"),
        (Furthest, "returns the `k` nearest facts that match, nearest first"),
        (Unfiltered, "returns the `k` nearest facts that match"),
        (Open, "A search in a namespace finds its facts alone"),
        (Forgetful, "`search` finds the text of an update"),
        (Bankless, "A hit of a search in banks names its bank"),
        (Lost, "`get` of an unknown id raises FactError"),
        (Incomplete, "A store has all members of `FactStore`"),
    ],
)
def test_the_broken_rule_is_named(broken, rule):
    with pytest.raises(AssertionError, match=rule):
        check_fact_store(broken)
