"""A bank on disk.

    facts.jsonl           the truth (see `journal`)
    vectors-<part>.bin    a row per fact of the journal: one signed byte per dimension, then a CRC-32 (little-endian) of
                          text and bytes, which ties the row to its fact
    banks-<part>.npy      int32, the bank of each row at the place of the journal that `bank.json` names; -1 is none
    bank.json             what counts of these, and how it was made; replacing it is what makes new parts count
    chroma-<part>/        the same vectors in Chroma, made from the others
    .lock                 held by the one process that writes

All but `facts.jsonl` can be made from it. A crash at any moment leaves old parts or new ones, never a mixture.
"""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from kp_core.errors import BankError, BankLockedError
from kp_core.facts.index import Calibration
from kp_core.packs.durable import make_dirs, publish, stage, sync_dir

__all__ = ["BankFile", "VectorFile", "lock_folder", "read_labels", "remove_other_parts", "row_crc", "write_labels"]

_NAME = "bank.json"
_FORMAT = 2
_CRC_BYTES = 4
_PART = re.compile(r"[0-9a-f]{16}")
# Those of format 1 too, which are made anew.
_PARTS = re.compile(r"(?:banks|vectors)-([0-9a-f]{16})(?:\.npy|\.npz|\.bin)|.*\.tmp")


@dataclass(frozen=True)
class BankFile:
    """The content of `bank.json`: `banks` is of the first `journal_bytes` of the journal, whose CRC-32 is given too."""

    embedder: str
    dimensions: int
    bank_size: int
    random_state: int
    journal_bytes: int
    journal_crc: int
    vectors: str
    banks: str
    calibration: Calibration | None
    format: int = _FORMAT

    @classmethod
    def read(cls, folder: Path) -> BankFile | None:
        """The file in `folder`, or `None` when there is none that makes sense.

        Raises `BankError` for a file of a later format.
        """
        try:
            record = json.loads((folder / _NAME).read_bytes())
            version = record["format"]
        except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError, TypeError, KeyError):
            return None
        if isinstance(version, int) and version > _FORMAT:
            raise BankError(
                f"{folder / _NAME} has format {version}; this version of knowledge-packs reads up to {_FORMAT}. "
                f"Upgrade it with `pip install -U knowledge-packs`."
            )
        if record.keys() != {field.name for field in fields(cls)}:
            return None
        # The parts become paths: only what we write ourselves will do.
        if not all(isinstance(record[part], str) and _PART.fullmatch(record[part]) for part in ("vectors", "banks")):
            return None
        with suppress(TypeError):
            calibration = record.pop("calibration")
            return cls(calibration=Calibration(**calibration) if calibration else None, **record)
        return None

    def write(self, folder: Path) -> None:
        """Replace the file in `folder` in one step; on return it is on the disk."""
        publish(stage(folder, [json.dumps(asdict(self), indent=2).encode()]), folder / _NAME)


class VectorFile:
    """Rounded vectors, a row per fact of the journal; one process appends."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part, self.path = folder, part, folder / f"vectors-{part}.bin"

    def append(self, first: int, codes: NDArray[np.int8], texts: Sequence[str]) -> None:
        """Write rows from number `first` on, over whatever is there; on return they are on the disk."""
        data = b"".join(
            row.tobytes() + row_crc(row, text).to_bytes(_CRC_BYTES, "little")
            for row, text in zip(codes, texts, strict=True)
        )
        created = not self.path.exists()
        with self.path.open("wb" if created else "r+b") as file:
            file.seek(first * (codes.shape[1] + _CRC_BYTES))
            file.truncate()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if created:
            sync_dir(self.folder)

    def read(self, first: int, texts: Sequence[str], dimensions: int) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
        """The rows from `first` on, one per text, and which of them are there, whole and of their text."""
        size = dimensions + _CRC_BYTES
        codes, whole = np.zeros((len(texts), dimensions), np.int8), np.zeros(len(texts), np.bool_)
        try:
            with self.path.open("rb") as file:
                file.seek(first * size)
                data = file.read(len(texts) * size)
        except FileNotFoundError:
            return codes, whole
        table = np.frombuffer(data[: len(data) // size * size], np.uint8).reshape(-1, size)
        stored = np.ascontiguousarray(table[:, dimensions:]).view("<u4")[:, 0].tolist()
        codes[: len(table)] = table[:, :dimensions].view(np.int8)
        for row, crc in enumerate(stored):
            whole[row] = crc == row_crc(codes[row], texts[row])
        codes[~whole] = 0
        return codes, whole


def row_crc(codes: NDArray[np.int8], text: str) -> int:
    """What ties a rounded vector to its text."""
    return zlib.crc32(codes.data, zlib.crc32(text.encode()))


def write_labels(folder: Path, part: str, labels: NDArray[np.int32]) -> None:
    """Write the bank of each row; on return they are on the disk."""
    data = io.BytesIO()
    np.save(data, labels, allow_pickle=False)
    publish(stage(folder, [data.getbuffer()]), folder / f"banks-{part}.npy")


def read_labels(folder: Path, part: str, count: int) -> NDArray[np.int32] | None:
    """The bank of each of `count` rows, or `None` when the file is missing, damaged or of something else."""
    try:
        labels = np.load(folder / f"banks-{part}.npy", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if labels.shape != (count,) or labels.dtype != np.int32 or (labels < -1).any():
        return None
    used = np.unique(labels[labels >= 0])
    return labels if np.array_equal(used, np.arange(len(used))) else None


def lock_folder(folder: Path, wait: float) -> FileLock:
    """Take the lock of `folder`, made where it is missing.

    Raises `BankLockedError` when somebody has it and does not let go of it within `wait` seconds.
    """
    if folder.exists() and not folder.is_dir():
        raise BankError(f"Got {folder} as the folder of a bank; it is a file.")
    make_dirs(folder)
    # Not per thread: a bank may be closed by another thread than the one that opened it.
    lock = FileLock(folder / ".lock", thread_local=False)
    try:
        lock.acquire(timeout=wait)
    except Timeout as error:
        raise BankLockedError(
            f"{folder} is open already, in another process or in a ChromaFactBank of this one that was not closed. One "
            f"may write at a time: close the other one, wait for it with `wait=60`, or only read with `read_only=True`."
        ) from error
    return lock


def remove_other_parts(folder: Path, keep: set[str]) -> None:
    """Delete the parts that `bank.json` does not name: older ones, and those of a build that did not finish."""
    for path in folder.iterdir():
        match = _PARTS.fullmatch(path.name)
        if match and match[1] not in keep:
            path.unlink(missing_ok=True)
