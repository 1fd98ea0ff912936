"""The index of a bank on disk: `bank.json`, and the parts it names.

    facts.jsonl           the truth (see `journal`)
    bank.json             what the parts were made from; replacing it is what makes new parts count
    banks-<part>.npz      labels and centroids
    chroma-<part>/        the vectors, in Chroma
    .lock                 held while the folder is open

Every build makes a new part, so that a crash at any moment leaves the old index or the new one, never a mixture.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import zipfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_type_hints

import numpy as np
from filelock import FileLock, Timeout

from kp_core.banks.routing import Clustering
from kp_core.durable import make_dirs, publish, stage
from kp_core.errors import BankError

__all__ = [
    "BankFile",
    "arrays_path",
    "lock_folder",
    "read_arrays",
    "remove_other_parts",
    "vectors_path",
    "write_arrays",
]

_NAME = "bank.json"
_FORMAT = 1
_PART = re.compile(r"[0-9a-f]{16}")
_PARTS = re.compile(r"(?:banks|chroma)-([0-9a-f]{16})(?:\.npz)?|.*\.tmp")


@dataclass(frozen=True)
class BankFile:
    """The content of `bank.json`. `digest` is `digest_of` the facts that the parts called `part` hold."""

    embedder: str
    dimensions: int
    bank_size: int
    random_state: int
    facts: int
    digest: str
    part: str
    format: int = _FORMAT

    @classmethod
    def read(cls, folder: Path) -> BankFile | None:
        """The file in `folder`, or `None` when there is none that makes sense.

        Raises `BankError` for a file of a later format.
        """
        try:
            record = json.loads((folder / _NAME).read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        if not isinstance(record, dict):
            return None
        version = record.get("format")
        if isinstance(version, int) and version > _FORMAT:
            raise BankError(
                f"{folder / _NAME} has format {version}; this version of knowledge-packs reads up to {_FORMAT}. "
                f"Upgrade it with `pip install -U knowledge-packs`."
            )
        kinds = get_type_hints(cls)
        if record.keys() != {field.name for field in fields(cls)}:
            return None
        # The part becomes a path: only what we write ourselves will do.
        if any(type(record[name]) is not kind for name, kind in kinds.items()) or not _PART.fullmatch(record["part"]):
            return None
        return cls(**record)

    def write(self, folder: Path) -> None:
        """Replace the file in `folder` in one step; on return it is on the disk."""
        publish(stage(folder, [json.dumps(asdict(self), indent=2).encode()]), folder / _NAME)


def lock_folder(folder: Path) -> FileLock:
    """Take the lock of `folder`, made where it is missing; raises `BankError` when somebody has it."""
    if folder.exists() and not folder.is_dir():
        raise BankError(f"Got {folder} as the folder of a bank; it is a file.")
    make_dirs(folder)
    # Not per thread: a bank may be closed by another thread than the one that opened it.
    lock = FileLock(folder / ".lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BankError(
            f"{folder} is open already, in another process or in a ChromaFactBank of this one that was not closed. "
            f"Embedded Chroma is for one process; a second writer would corrupt it. Close the other one, or use "
            f"another folder."
        ) from error
    return lock


def arrays_path(folder: Path, part: str) -> Path:
    """Where labels and centroids of `part` are."""
    return folder / f"banks-{part}.npz"


def vectors_path(folder: Path, part: str) -> Path:
    """Where the Chroma folder of `part` is."""
    return folder / f"chroma-{part}"


def write_arrays(folder: Path, part: str, clustering: Clustering) -> None:
    """Write labels and centroids; on return they are on the disk."""
    data = io.BytesIO()
    np.savez(data, labels=clustering.labels, centroids=clustering.centroids)
    publish(stage(folder, [data.getbuffer()]), arrays_path(folder, part))


def read_arrays(folder: Path, about: BankFile) -> Clustering | None:
    """The clustering that `about` describes, or `None` when its file is missing, damaged or of something else."""
    try:
        with np.load(arrays_path(folder, about.part), allow_pickle=False) as arrays:
            labels, centroids = arrays["labels"], arrays["centroids"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    expected = labels.shape == (about.facts,) and centroids.shape[1:] == (about.dimensions,)
    if not expected or labels.dtype != np.int64 or centroids.dtype != np.float32 or not np.isfinite(centroids).all():
        return None
    if set(labels.tolist()) != set(range(len(centroids))):
        return None
    return Clustering(labels, centroids, about.bank_size, about.random_state)


def remove_other_parts(folder: Path, part: str) -> None:
    """Delete the parts that `bank.json` does not name: older ones, and those of a build that did not finish."""
    for path in folder.iterdir():
        match = _PARTS.fullmatch(path.name)
        if match and match[1] != part:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
