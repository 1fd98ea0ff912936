"""Fact banks: find the facts for a question. Importing this loads neither Chroma nor scikit-learn nor an embedder."""

from __future__ import annotations

from kp_core.banks.base import Added, Fact, FactBank, Filter, Hit, NearDuplicate, Reranker
from kp_core.banks.disk import ChromaFactBank
from kp_core.banks.index import Calibration
from kp_core.banks.memory import MemoryFactBank
from kp_core.banks.rerank import CrossEncoderReranker, LexicalReranker

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
