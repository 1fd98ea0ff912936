"""Checks Chroma's index files before Chroma loads them: it writes them in place and does not check them itself.

A process killed while writing leaves inconsistent files. Chroma then returns wrong records, cannot open the collection,
crashes the process, or fills the disk (its issue 7510). The database still has all texts, so a damaged index is made
anew from them.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import struct
import time
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from kp_core.errors import FactError

__all__ = ["blank_room", "check_index", "damaged_indexes", "repair_mark"]

logger = logging.getLogger(__name__)

# Version, offset, capacity, elements; bytes per element, offsets of its label and vector; highest level, entry point;
# links per element on upper levels, on the lowest level, as configured; and two build settings.
_HEADER = struct.Struct("=iQQQQQQiIQQQdQ")
_VERSION, _AT_ONCE = 1, 4096
_WRITTEN_SECONDS, _LOOK_SECONDS = 5.0, 0.1
_OTHERS = ("length.bin", "link_lists.bin", "index_metadata.pickle")
_OURS = """
SELECT s.id FROM segments s JOIN collection_metadata m ON m.collection_id = s.collection
WHERE s.scope = 'VECTOR' AND m.key = 'kp:kind'
"""


def damaged_indexes(folder: Path) -> list[Path]:
    """Return the folders of our indexes whose files are inconsistent; during a write they may be.

    Checks counts, sizes, every link, and the length of every vector.
    """
    return [index for index in _our_indexes(folder) if not _is_sound(index)]


def check_index(folder: Path, lock: FileLock | None) -> None:
    """Check the indexes before Chroma reads them: the first writer of this process deletes damaged ones.

    The folder is then marked (`repair_mark`) until its vectors are made anew. A reader waits in case a writer is still
    writing; raises `FactError` if the damage stays.
    """
    if lock is not None:
        if lock.lock_counter == 1 and (damaged := damaged_indexes(folder)):
            logger.warning("%s: an index is damaged; it is made anew from the texts of all facts.", folder)
            repair_mark(folder).touch()
            for index in damaged:
                shutil.rmtree(index)
        return
    until = time.monotonic() + _WRITTEN_SECONDS
    while repair_mark(folder).exists() or damaged_indexes(folder):
        if time.monotonic() > until:
            raise FactError(
                f"{folder}: an index is damaged, or still being written. Open the folder once for writing, e.g. with "
                "`kp verify`, which makes it anew from the texts."
            )
        time.sleep(_LOOK_SECONDS)


def blank_room(folder: Path) -> None:
    """Overwrite the unused space at the end of each index file; no process may be writing them.

    Chroma creates an index with space for a hundred elements, filled with leftover memory that may hold deleted text.
    """
    for index in _our_indexes(folder):
        with suppress(OSError, struct.error):
            version, _, _, count, size, *_ = _HEADER.unpack((index / "header.bin").read_bytes())
            for name, element in (("data_level0.bin", size), ("length.bin", 4)) if version == _VERSION else ():
                with (index / name).open("r+b") as opened:
                    opened.seek(count * element)
                    if (room := opened.read()).strip(b"\0"):
                        opened.seek(count * element)
                        opened.write(bytes(len(room)))


def repair_mark(folder: Path) -> Path:
    """The file that exists from the start of a repair to its end."""
    return folder / "kp.repair"


def _our_indexes(folder: Path) -> list[Path]:
    file = folder / "chroma.sqlite3"
    if file.is_file():
        uri = f"{file.resolve().as_uri()}?mode=rw"
        with suppress(sqlite3.Error), closing(sqlite3.connect(uri, uri=True)) as opened:
            return [index for (name,) in opened.execute(_OURS) if (index := folder / name).is_dir()]
    return []


def _is_sound(index: Path) -> bool:
    if not any(index.iterdir()):
        return True
    try:
        header = (index / "header.bin").read_bytes()
        version, _, room, count, size, label, vector, highest, entry, upper, lowest, *_ = _HEADER.unpack_from(header)
        if version != _VERSION or len(header) > _HEADER.size:
            return True  # Written by another version of Chroma, which must read its own files.
        if not count:
            return bool(highest < 0)  # Space for the first elements, still empty.
        lengths, links, ids = ((index / name).read_bytes() for name in _OTHERS)
        file_size = (index / "data_level0.bin").stat().st_size
    except (OSError, struct.error):
        return False
    fits = count <= room and entry < count and 4 + 4 * lowest <= vector < label == size - 8
    # There may be unused space behind the elements. A pickle ends with a full stop.
    is_whole = count * size <= file_size and file_size * 4 == len(lengths) * size and ids.endswith(b".")
    if not fits or not is_whole:
        return False
    elements = np.memmap(index / "data_level0.bin", np.uint8, mode="r", shape=(count, size))
    labels = elements[:, label:].copy().view(np.uint64)
    return (
        len(np.unique(labels)) == count
        and all(
            _elements_are_sound(elements[at : at + _AT_ONCE], count, lowest, vector, label)
            for at in range(0, count, _AT_ONCE)
        )
        and _levels_are_sound(links, count, highest, 4 + 4 * upper)
    )


def _elements_are_sound(rows: NDArray[np.uint8], count: int, lowest: int, vector: int, label: int) -> bool:
    """Whether links point to existing elements and all vectors have length 1."""
    link_counts, neighbours = rows[:, :2].copy().view(np.uint16), rows[:, 4 : 4 + 4 * lowest].copy().view(np.uint32)
    vectors = rows[:, vector:label].copy().view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        lengths_squared = (vectors * vectors).sum(axis=1)
    is_linked = (link_counts <= lowest).all() and (neighbours[np.arange(lowest) < link_counts] < count).all()
    return bool(is_linked and np.allclose(lengths_squared, 1, atol=2e-3))


def _levels_are_sound(links: bytes, count: int, highest: int, size: int) -> bool:
    """Whether the links of every element on upper levels are complete and valid."""
    at = 0
    for _ in range(count):
        length = int.from_bytes(links[at : at + 4], "little")
        at += 4
        if not length:
            continue
        if at + length > len(links) or length % size or length > size * max(highest, 0):
            return False
        of_each = np.frombuffer(links[at : at + length], np.uint32).reshape(-1, size // 4)
        counts = of_each[:, :1] & 0xFFFF
        linked = np.arange(1, size // 4) <= counts
        if (counts >= size // 4).any() or (of_each[:, 1:][linked] >= count).any():
            return False
        at += length
    return at == len(links)
