"""Fact banks: find the facts for a question. Importing this loads neither Chroma nor scikit-learn nor an embedder."""

from __future__ import annotations

from kp_core.facts.base import Added, Fact, FactBank, Filter, Hit, NearDuplicate, Reranker
from kp_core.facts.disk import ChromaFactBank
from kp_core.facts.index import Calibration
from kp_core.facts.memory import MemoryFactBank
from kp_core.facts.rerank import CrossEncoderReranker, LexicalReranker

__all__ = [
    "Added",
    "Calibration",
    "ChromaFactBank",
    "CrossEncoderReranker",
    "Fact",
    "FactBank",
    "Filter",
    "Hit",
    "LexicalReranker",
    "MemoryFactBank",
    "NearDuplicate",
    "Reranker",
]
