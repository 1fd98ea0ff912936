"""Facts: stores that find the facts for a question. Importing this loads no Chroma, scikit-learn or embedding model."""

from __future__ import annotations

from kp_core.facts.base import Added, Fact, Filter, Hit, Reranker
from kp_core.facts.chroma import ChromaFactStore
from kp_core.facts.memory import MemoryFactStore
from kp_core.facts.rerank import LexicalReranker
from kp_core.facts.store import FactStore

__all__ = [
    "Added",
    "ChromaFactStore",
    "Fact",
    "FactStore",
    "Filter",
    "Hit",
    "LexicalReranker",
    "MemoryFactStore",
    "Reranker",
]
