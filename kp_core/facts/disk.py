"""Fact banks in a folder: a journal of facts, their rounded vectors, and Chroma beside them."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from kp_core.errors import BankError
from kp_core.facts.base import Fact
from kp_core.facts.checking import problems
from kp_core.facts.chroma import ChromaMirror, Entry, problem_beside
from kp_core.facts.embed import Embedder
from kp_core.facts.journal import Change, Journal
from kp_core.facts.layout import (
    BankFile,
    VectorFile,
    lock_folder,
    remove_other_parts,
    row_crc,
    write_labels,
)
from kp_core.facts.loading import load
from kp_core.facts.routing import RoutedBank
from kp_core.facts.rows import ByteRows, Rows, Vectors

__all__ = ["ChromaFactBank"]

logger = logging.getLogger(__name__)

# Changes after which the banks are written again, at least; and the share of all rows.
_SAVE_EVERY, _SAVE_SHARE = 4096, 8


class ChromaFactBank(RoutedBank):
    """A `FactBank` in a folder: one process writes to it at a time, any number read it.

    `facts.jsonl` is the truth: what a call has returned for is in it, whatever happens to the process. Vectors are kept
    in one byte per dimension, so that scores are within 0.005 of those of floats. Chroma holds them too, and is mended
    from the journal, with a log line, whenever it is missing, unreadable or holds something else; `mirror=False` does
    without it. A folder that was built before opens without embedding anything.

    `recall` is what searches are calibrated for (see `Calibration`), `near_duplicate` the cosine from which on two
    facts are reported to say the same. `bank_size`, `random_state` and `recall` count from the next `build` or
    `rebuild` on.
    With `read_only` nothing is locked or changed, and what the writer adds is seen. Use it as a context manager, or
    call `close`: until then no other can write to the folder.

    Raises `BankLockedError` when another writer does not close the folder within `wait` seconds; `BankError` when it
    was built with another embedder (both are named), its `facts.jsonl` is damaged (the line is named), or there is
    nothing to read; `MissingDependencyError` where Chroma is not installed.
    """

    def __init__(  # noqa: PLR0913 - every setting has a default that works
        self,
        path: str | os.PathLike[str],
        embedder: Embedder,
        *,
        bank_size: int = 20,
        random_state: int = 0,
        recall: float = 0.99,
        near_duplicate: float = 0.97,
        read_only: bool = False,
        wait: float = 0.0,
        mirror: bool = True,
    ) -> None:
        super().__init__(
            embedder, bank_size=bank_size, random_state=random_state, recall=recall, near_duplicate=near_duplicate
        )
        self.path, self.read_only, self._wants_mirror = Path(path), read_only, mirror and not read_only
        self._journal = Journal(self.path / "facts.jsonl")
        self._vectors = VectorFile(self.path, secrets.token_hex(8))
        self._mirror: ChromaMirror | None = None
        self._closed, self._unsaved, self._seen = False, 0, (0, 0, 0, 0)
        self._folder_lock = None
        if read_only:
            if not self._journal.path.exists():
                raise BankError(f"Got {self.path} to read; there is no bank in it. Build one there first.")
        else:
            self._folder_lock = lock_folder(self.path, wait)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the folder; a second call does nothing."""
        with self._writing, self._lock:
            try:
                if self._unsaved and not self._closed and self._index:
                    self._save()
            finally:
                self._closed = True
                if self._mirror:
                    self._mirror.close()
                    self._mirror = None
                if self._folder_lock:
                    self._folder_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {self.embedder!r})"

    def verify(self, *, repair: bool = False) -> list[str]:
        """What is wrong with the files, a sentence each; with `repair`, put right afterwards.

        Reads the journal again, compares the vectors on disk with their texts, the banks with the facts, and Chroma
        with both, vector by vector; opened with `read_only`, Chroma only where nobody writes to the bank. Raises
        `BankError` for a damaged line of the journal, which nothing can repair.
        """
        with self._writing:
            self._check_open()
            self._refresh()
            found = list(problems(self._journal.path, self._vectors, self._table, self._rows.dimensions, self._index))
            if chroma := self._chroma_problem():
                found.append(chroma)
            if repair and found:
                self._check_writes()
                if self._journal.torn:
                    self._journal.append(())
                self.rebuild()
                if self._mirror:
                    self._mirror.mend(self._all_entries(), deep=True)
            return found

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes on disk: `facts`, `vectors`, `banks`, `chroma`."""
        parts = {"facts": [self._journal.path], "vectors": [self._vectors.path]}
        parts["banks"] = [*self.path.glob("banks-*.npy"), self.path / "bank.json"]
        parts["chroma"] = [path for path in self.path.glob("chroma-*/**/*") if path.is_file()]
        return {name: sum(path.stat().st_size for path in paths if path.exists()) for name, paths in parts.items()}

    @property
    def torn_bytes(self) -> int:
        """Bytes of a last line of the journal that was not written to its end; the next change overwrites them."""
        return self._journal.torn

    def _open(self) -> None:
        about = BankFile.read(self.path)
        if about and about.embedder != self.embedder.name:
            raise BankError(
                f"{self.path} was built with the embedder {about.embedder!r}, got {self.embedder.name!r}; their "
                f"vectors cannot be compared. Open it with {about.embedder!r}, or build a bank in another folder."
            )
        self._seen = self._state()
        loaded = load(self._journal, about, self.path, self.embedder, self._embed)
        with self._lock:
            self._table, self._rows = loaded.table, loaded.rows
            self._index = loaded.index
            self._vectors = VectorFile(self.path, loaded.part)
            if self._index is None and len(self._table):
                logger.warning("%s: the index is missing or not of these facts; it is rebuilt.", self.path)
                self._index = self._clustered(self._rows, self._table.rows())
        if self.read_only:
            return
        self._journal.warn()
        if about and not len(self._table) and not self._journal.end:
            logger.warning("%s: %s holds no facts, but a bank was built.", self.path, self._journal.path.name)
        if loaded.renewed and loaded.texts:
            self._vectors.append(0, self._codes(slice(0, len(self._rows))), loaded.texts)
        if loaded.index is None and self._index:
            self._save()
        elif about:
            self._unsaved = loaded.later
            remove_other_parts(self.path, {about.vectors, about.banks})
        if self._wants_mirror:
            self._mirror = ChromaMirror(self.path, self._vectors_of, self._all_entries())

    def _new_rows(self) -> Rows:
        return ByteRows()

    def _keep(self, changes: Sequence[Change], first_row: int) -> None:
        self._check_writes()
        texts = [change.text for change in changes if isinstance(change, Fact)]
        try:
            if texts:
                self._vectors.append(first_row, self._codes(slice(first_row, len(self._rows))), texts)
            self._journal.append(changes)
        except BaseException:
            # The files may be ahead of what this object holds; opening the folder again sorts that out.
            self._unsaved = 0
            self.close()
            raise
        self._unsaved += len(changes)

    def _followed(self, added: Sequence[int], removed: Sequence[Fact]) -> None:
        if self.read_only or self._closed:
            return
        if self._mirror:
            entries = {fact.id: entry for fact, entry in self._entries(added)}
            self._mirror.follow([fact.id for fact in removed if fact.id not in entries], entries)

    def _settled(self) -> None:
        if self._unsaved > max(_SAVE_EVERY, len(self._rows) // _SAVE_SHARE):
            self._save()

    def _switched(self, *, compacted: bool) -> None:
        self._check_writes()
        if compacted:
            part = VectorFile(self.path, secrets.token_hex(8))
            facts = list(self.facts())
            part.append(0, self._codes(slice(0, len(facts))), [fact.text for fact in facts])
            self._journal.replace(facts)
            self._vectors = part
        self._save()

    def _save(self) -> None:
        """Write the banks as they are, and make them the ones that count."""
        assert self._index is not None  # noqa: S101 - for the type checker: nobody saves banks there are none of
        part, banks = secrets.token_hex(8), self._index.banks
        write_labels(self.path, part, banks.labels)
        BankFile(
            embedder=self.embedder.name,
            dimensions=self._rows.dimensions,
            bank_size=banks.bank_size,
            random_state=banks.random_state,
            journal_bytes=self._journal.end,
            journal_crc=self._journal.crc,
            vectors=self._vectors.part,
            banks=part,
            calibration=self._index.calibration,
        ).write(self.path)
        self._unsaved, self._seen = 0, self._state()
        remove_other_parts(self.path, {self._vectors.part, part})

    def _refresh(self) -> None:
        self._check_open()
        if self.read_only and self._state() != self._seen:
            # A switch takes a moment; what is read in between is made whole from the facts, which takes longer.
            time.sleep(0.01)
            with self._lock:
                if self._state() != self._seen:
                    self._open()
        super()._refresh()

    def _state(self) -> tuple[int, int, int, int]:
        """What changes when somebody writes: journal and `bank.json`."""
        found = []
        for path in (self._journal.path, self.path / "bank.json"):
            try:
                status = path.stat()
                found += [status.st_ino, status.st_size]
            except FileNotFoundError:
                found += [0, 0]
        return found[0], found[1], found[2], found[3]

    def _codes(self, rows: slice) -> Any:  # noqa: ANN401 - int8 of shape (rows, dimensions)
        return cast("ByteRows", self._rows).codes(rows)

    def _vectors_of(self, rows: NDArray[np.intp]) -> Vectors:
        # Not the bound method of the table, as a rebuild makes another table.
        return self._rows.vectors(rows)

    def _all_entries(self) -> dict[str, Entry]:
        return {fact.id: entry for fact, entry in self._entries(range(len(self._table.all)))}

    def _entries(self, rows: Sequence[int]) -> Iterator[tuple[Fact, Entry]]:
        for row in rows:
            fact = self._table.all[row]
            if fact is not None:
                yield fact, Entry(row, row_crc(self._codes(slice(row, row + 1))[0], fact.text))

    def _chroma_problem(self) -> str | None:
        if self._mirror:
            return self._mirror.problem(self._all_entries())
        return problem_beside(self.path, self._vectors_of, self._all_entries()) if self.read_only else None

    def _check_open(self) -> None:
        if self._closed:
            raise BankError(f"{self.path} was closed. Open it again with `ChromaFactBank(path, embedder)`.")

    def _check_writes(self) -> None:
        self._check_open()
        if self.read_only:
            raise BankError(f"{self.path} was opened with read_only=True. Open it without to change it.")
