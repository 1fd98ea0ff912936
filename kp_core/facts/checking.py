"""Whether the files of a bank agree with one another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kp_core.facts.base import Fact
from kp_core.facts.index import Index
from kp_core.facts.journal import Journal
from kp_core.facts.layout import VectorFile
from kp_core.facts.table import FactTable

__all__ = ["problems"]


def problems(path: Path, vectors: VectorFile, held: FactTable, dimensions: int, index: Index | None) -> Iterator[str]:
    """What is wrong with a journal, and with vectors, facts and banks beside it, a sentence each.

    Raises `BankError` for a damaged line of the journal.
    """
    journal, texts, table = Journal(path), list[str](), FactTable()
    for change, _ in journal.read():
        table.apply(change)
        if isinstance(change, Fact):
            texts.append(change.text)
    table.expire(time.time())
    if journal.torn:
        yield f"{path.name}: the last line was not written to its end; its {journal.torn} bytes are void."
    if table.all != held.all:
        yield f"{path.name}: it holds other facts than were read; somebody else wrote to it."
    _, whole = vectors.read(0, texts, dimensions)
    if not whole.all():
        lost = f"{int((~whole).sum())} of {len(texts)}"
        yield f"{vectors.path.name}: {lost} rows are missing or not of their text."
    if index and not np.array_equal(np.flatnonzero(index.banks.labels >= 0), held.rows()):
        yield "The banks hold other facts than the journal."
