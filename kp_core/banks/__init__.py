"""Facts: stores that find the facts for a question. Importing this loads no Chroma, scikit-learn or embedding model."""

from __future__ import annotations

from kp_core.banks.base import Added, Fact, Filter, Hit
from kp_core.banks.chroma import ChromaFactStore
from kp_core.banks.memory import MemoryFactStore
from kp_core.banks.store import FactStore

__all__ = [
    "Added",
    "ChromaFactStore",
    "Fact",
    "FactStore",
    "Filter",
    "Hit",
    "MemoryFactStore",
]
