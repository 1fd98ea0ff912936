"""Facts: stores that find the facts for a question. Importing this loads no Chroma, scikit-learn or embedding model."""

from __future__ import annotations

from kp_core.facts.base import Added, Fact, FactStore, Filter, Hit, NearDuplicate, Reranker
from kp_core.facts.chroma import ChromaFactStore
from kp_core.facts.memory import MemoryFactStore
from kp_core.facts.rerank import CrossEncoderReranker, LexicalReranker

__all__ = [
    "Added",
    "ChromaFactStore",
    "CrossEncoderReranker",
    "Fact",
    "FactStore",
    "Filter",
    "Hit",
    "LexicalReranker",
    "MemoryFactStore",
    "NearDuplicate",
    "Reranker",
]
