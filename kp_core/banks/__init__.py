"""Fact banks: find the facts for a question. Importing this loads neither Chroma nor scikit-learn nor an embedder."""

from __future__ import annotations

from kp_core.banks.base import Added, Fact, FactBank, Filter, Hit, NearDuplicate
from kp_core.banks.disk import ChromaFactBank
from kp_core.banks.index import Calibration
from kp_core.banks.memory import MemoryFactBank

__all__ = [
    "Added",
    "Calibration",
    "ChromaFactBank",
    "Fact",
    "FactBank",
    "Filter",
    "Hit",
    "MemoryFactBank",
    "NearDuplicate",
]
