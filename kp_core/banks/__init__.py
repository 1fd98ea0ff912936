"""Fact banks: find the facts for a question. Importing this loads neither Chroma nor scikit-learn nor an embedder."""

from __future__ import annotations

from kp_core.banks.base import Fact, FactBank, Hit
from kp_core.banks.chroma import ChromaFactBank
from kp_core.banks.memory import MemoryFactBank

__all__ = ["ChromaFactBank", "Fact", "FactBank", "Hit", "MemoryFactBank"]
