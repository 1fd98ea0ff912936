"""A bank from its files: what of them still counts, and what has to be made anew."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kp_core.errors import BankError
from kp_core.facts.base import Fact
from kp_core.facts.embed import Embedder
from kp_core.facts.index import Index
from kp_core.facts.journal import Change, Journal
from kp_core.facts.layout import BankFile, VectorFile, read_labels
from kp_core.facts.rows import ByteRows, Vectors, quantise
from kp_core.facts.table import FactTable

__all__ = ["Loaded", "load"]

logger = logging.getLogger(__name__)


@dataclass
class Loaded:
    """A bank as its files have it: `index` is `None` when the banks have to be made anew.

    `part` names the file of vectors, `renewed` says that it lacks some of `rows`; `texts` are those of all rows, also
    of facts that went. `later` changes came after the banks were written.
    """

    table: FactTable
    rows: ByteRows
    index: Index | None
    part: str
    texts: list[str]
    renewed: bool
    later: int


def load(
    journal: Journal,
    about: BankFile | None,
    folder: Path,
    embedder: Embedder,
    embed: Callable[[Sequence[Fact]], Vectors],
) -> Loaded:
    """Read journal, vectors and banks; facts without a vector that is theirs are embedded.

    Raises `BankError`, naming the line, for a damaged journal.
    """
    table, changes, saved = _replay(journal, about)
    facts = [change for change in changes if isinstance(change, Fact)]
    texts, rows = [fact.text for fact in facts], ByteRows()
    if not texts:
        return Loaded(table, rows, None, secrets.token_hex(8), [], renewed=False, later=0)
    dimensions = about.dimensions if about else embedder.dimensions
    part, codes, whole = _read_vectors(folder, about, texts, dimensions)
    if not whole.all():
        missing = np.flatnonzero(~whole)
        if about:
            logger.warning("%s: %d of %d vectors are missing; they are rebuilt.", folder, len(missing), len(texts))
        made = quantise(embed([facts[row] for row in missing.tolist()]))
        if made.shape[1] != dimensions:
            raise BankError(
                f"The embedder {embedder.name!r} gave vectors of {made.shape[1]} dimensions; the bank in {folder} has "
                f"{dimensions}. Open it with the embedder it was built with."
            )
        codes[missing] = made
    rows.append_codes(codes)
    index = None
    if about and saved:
        table = FactTable()
        for change in changes[:saved]:
            table.apply(change)
        index = _read_index(folder, about, table, rows)
        for change in changes[saved:]:
            table.apply(change, index)
    return Loaded(table, rows, index, part, texts, not whole.all(), len(changes) - saved)


def _replay(journal: Journal, about: BankFile | None) -> tuple[FactTable, list[Change], int]:
    """The facts, the changes that led to them, and how many of these the banks on disk follow."""
    table, changes, saved = FactTable(), list[Change](), 0
    for change, end in journal.read():
        try:
            table.apply(change)
        except BankError as error:
            raise journal.damaged(journal.lines, error) from error
        changes.append(change)
        if about and (end, journal.crc) == (about.journal_bytes, about.journal_crc):
            saved = len(changes)
    return table, changes, saved


def _read_vectors(
    folder: Path, about: BankFile | None, texts: Sequence[str], dimensions: int
) -> tuple[str, NDArray[np.int8], NDArray[np.bool_]]:
    """The file of vectors that has most rows of these texts: its part, the rows, and which of them count."""
    # A crash between the new journal and the new `bank.json` leaves the right file under a name that is not in it.
    named = [about.vectors] if about else []
    others = [path.stem.removeprefix("vectors-") for path in sorted(folder.glob("vectors-*.bin"))]
    best = None
    for part in [*named, *(other for other in others if other not in named)]:
        codes, whole = VectorFile(folder, part).read(0, texts, dimensions)
        if best is None or whole.sum() > best[2].sum():
            best = part, codes, whole
        if whole.all():
            break
    nothing = np.zeros((len(texts), dimensions), np.int8), np.zeros(len(texts), np.bool_)
    return best or (secrets.token_hex(8), *nothing)


def _read_index(folder: Path, about: BankFile, table: FactTable, rows: ByteRows) -> Index | None:
    """The banks as they were written, when they are of the facts in `table`; what expired since is taken out."""
    labels = read_labels(folder, about.banks, len(table.all))
    gone = table.expire(time.time())
    if labels is None:
        return None
    expired = np.array([row for row, _ in gone], np.intp)
    held, alive = np.flatnonzero(labels >= 0), table.rows()
    if not (np.isin(alive, held).all() and np.isin(held, np.append(alive, expired)).all()):
        return None
    index = Index(rows, labels, about.bank_size, about.random_state, about.calibration)
    for row in expired.tolist():
        index.banks.remove(row)
    return index
