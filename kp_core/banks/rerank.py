"""Reranking: reorders the hits of a search by their words. The scores of hits remain cosines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp_core.banks.base import Hit, Reranker
from kp_core.bundled import needing
from kp_core.errors import FactError


def hits_wanted(k: int, rerank: Reranker | None) -> int:
    """Return how many hits to fetch for the best `k`: the reranker's depth if that is larger.

    Raises `FactError` for `k` below 1, and if `rerank` is no `Reranker`.
    """
    if not isinstance(k, int) or k < 1:
        raise FactError(f"Got k={k!r}; expected at least 1.")
    if rerank is None:
        return k
    if not isinstance(rerank, Reranker):
        raise FactError(f"Got rerank={rerank!r}; expected a Reranker, e.g. `LexicalReranker()`, or None.")
    return max(k, rerank.depth)


class LexicalReranker:
    """Adds BM25 over the hits' titles and texts to their cosines, both scaled to [0, 1].

    This separates names and numbers that an embedder cannot tell apart. The sum of scaled scores found more than
    reciprocal rank fusion (`benchmarks.routing`; Bruch et al. 2023). The weight of a word depends on how few of the
    hits have it, so there is no index over all facts.

    Raises `FactError` for a depth below 1, `MissingDependencyError` if bm25s is not installed.
    """

    def __init__(self, depth: int = 50) -> None:
        if depth < 1:
            raise FactError(f"Got depth={depth}; expected at least 1.")
        self.depth = depth
        with needing("Lexical search needs bm25s", "lexical"):
            import bm25s
        # bm25s sets its logger to DEBUG, and would log every index it builds.
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        self._bm25s: Any = bm25s

    def __call__(self, question: str, hits: Sequence[Hit]) -> list[Hit]:
        """See `Reranker`."""
        texts = [f"{hit.fact.title}\n{hit.fact.text}" for hit in hits]
        words = self._bm25s.tokenize([question, *texts], stopwords=None, return_ids=False, show_progress=False)
        question_words = [
            word for word in dict.fromkeys(words[0]) if any(word in text_words for text_words in words[1:])
        ]
        if not question_words:
            return list(hits)
        ranker = self._bm25s.BM25()
        ranker.index(words[1:], show_progress=False)
        fused = _stretched(ranker.get_scores(question_words)) + _stretched(np.array([hit.score for hit in hits]))
        # Equal hits keep their order.
        return [hits[place] for place in np.argsort(-fused, kind="stable").tolist()]


def _stretched(scores: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Scale scores to [0, 1]; all 0 if they are equal."""
    spread = float(np.ptp(scores))
    return (scores - scores.min()) / spread if spread else np.zeros(len(scores))
