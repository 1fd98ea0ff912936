"""A second look at what a search found."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest

from kp_core.banks import Fact, Hit, LexicalReranker, MemoryFactStore, Reranker
from kp_core.errors import FactError, MissingDependencyError
from tests.core.banks.test_facts import build, facts_of
from tests.kits import HashEmbedder


def hits_of(*texts: str) -> list[Hit]:
    return [Hit(Fact(text), 0.9 - place / 10, 0) for place, text in enumerate(texts)]


def texts_of(hits: Sequence[Hit]) -> list[str]:
    return [hit.fact.text for hit in hits]


def test_words_move_the_fact_that_has_them_up_and_leave_scores_alone() -> None:
    hits = hits_of(
        "The trade of Bator is baker.", "The trade of Mazag is baker.", "The trade of Kelor is judge.", "Rain."
    )
    found = LexicalReranker()("What is the trade of Mazag?", hits)
    assert texts_of(found)[0] == "The trade of Mazag is baker."
    assert sorted(hit.score for hit in found) == sorted(hit.score for hit in hits)
    assert sorted(texts_of(found)) == sorted(texts_of(hits))


def test_fusion_adds_both_scores_stretched() -> None:
    import bm25s

    hits = hits_of("one", "two two pear", "three", "four apple", "five apple apple pear")
    ranker = bm25s.BM25()
    words = [["one"], ["two", "two", "pear"], ["three"], ["four", "apple"], ["five", "apple", "apple", "pear"]]
    ranker.index(words, show_progress=False)
    bm25 = ranker.get_scores(["apple", "pear"])
    fused = bm25 / bm25.max() + (np.array([hit.score for hit in hits]) - 0.5) / 0.4
    found = LexicalReranker()("Apple pear? Apple!", hits)
    assert texts_of(found) == [hits[place].fact.text for place in np.argsort(-fused)]
    assert texts_of(found) != texts_of(hits)


@pytest.mark.parametrize("question", ["?!", "zebra", "a"])
def test_questions_without_known_words_change_nothing(question: str) -> None:
    hits = hits_of("one", "two", "?")
    assert LexicalReranker()(question, hits) == hits


def test_titles_count() -> None:
    hits = [Hit(Fact("It opened in 1990."), 0.5, 0), Hit(Fact("It closed in 1991.", title="Marrow Inn"), 0.4, 0)]
    hits.append(Hit(Fact("Rain."), 0.1, 0))
    assert LexicalReranker()("When did the Marrow Inn close?", hits)[0].fact.title == "Marrow Inn"


def test_a_bank_gives_the_reranker_as_many_as_it_wants_and_the_caller_as_many_as_asked_for() -> None:
    bank = MemoryFactStore(HashEmbedder(), bank_size=5)
    build(bank, facts_of(60))
    seen: list[int] = []

    class Backwards:
        depth = 12

        def __call__(self, question: str, hits: Sequence[Hit]) -> list[Hit]:
            seen.append(len(hits))
            return list(reversed(hits))

    assert isinstance(Backwards(), Reranker)
    question = facts_of(60)[7].text
    nearest = bank.search(question, 12)
    assert bank.search(question, 3, rerank=Backwards()) == list(reversed(nearest))[:3]
    assert bank.search(question, 20, rerank=Backwards()) == list(reversed(bank.search(question, 20)))
    assert seen == [12, 20]


def test_a_senseless_depth_is_refused() -> None:
    with pytest.raises(FactError, match="depth=0"):
        LexicalReranker(depth=0)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingDependencyError, match=r"knowledge-packs\[lexical\]"):
        LexicalReranker()
