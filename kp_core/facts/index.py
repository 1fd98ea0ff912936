"""Chroma's index files, checked before they are loaded: it writes them in place and reads them as they are.

A process that is killed in the middle of that leaves files that do not fit together. Chroma then finds other records,
does not open the collection, ends the process, or fills the disk (its issue 7510). Texts are safe in the database, so
what does not hold together is made anew from them.
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

__all__ = ["blank_room", "check_index", "damaged_indexes", "end_repair", "needs_repair"]

logger = logging.getLogger(__name__)

_UNDER_WAY = "kp.repair"
# Version, offset, room, elements; bytes of an element, where its label and its vector begin; highest level, entry;
# links for each level, on the lowest, as asked; and two settings of how it is built.
_HEADER = struct.Struct("=iQQQQQQiIQQQdQ")
_VERSION, _AT_ONCE = 1, 4096
_WRITTEN_SECONDS, _LOOK_SECONDS = 5.0, 0.1
_OTHERS = ("length.bin", "link_lists.bin", "index_metadata.pickle")
_OURS = """
SELECT s.id FROM segments s JOIN collection_metadata m ON m.collection_id = s.collection
WHERE s.scope = 'VECTOR' AND m.key = 'kp:kind'
"""


def damaged_indexes(folder: Path) -> list[Path]:
    """Folders of the indexes of our collections whose files do not hold together; while they are written they may not.

    Looks at counts, at sizes, at every link, and at the length of every vector.
    """
    return [index for index in _our_indexes(folder) if not _is_sound(index)]


def check_index(folder: Path, lock: FileLock | None) -> None:
    """Before Chroma reads its index: the first writer of this process deletes what is damaged, to be made anew.

    Until `end_repair` the folder says then that vectors are missing. A reader, who has no lock, waits for a writer that
    may be writing it; raises `FactError` where that does not help.
    """
    if lock is not None:
        if lock.lock_counter == 1 and (damaged := damaged_indexes(folder)):
            logger.warning("%s: an index is damaged; it is made anew from the texts of all facts.", folder)
            (folder / _UNDER_WAY).touch()
            for index in damaged:
                shutil.rmtree(index)
        return
    until = time.monotonic() + _WRITTEN_SECONDS
    while needs_repair(folder) or damaged_indexes(folder):
        if time.monotonic() > until:
            raise FactError(
                f"{folder}: an index is damaged, or still being written. Open the folder once for writing, e.g. with "
                "`kp verify`, which makes it anew from the texts."
            )
        time.sleep(_LOOK_SECONDS)


def blank_room(folder: Path) -> None:
    """Overwrite the room behind the elements of each index, in files that nobody is writing.

    Chroma makes an index with room for a hundred elements, into which it writes what memory held, removed text too. It
    writes each element whole, and the room never again.
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


def needs_repair(folder: Path) -> bool:
    """Whether a repair was begun and not ended."""
    return (folder / _UNDER_WAY).exists()


def end_repair(folder: Path) -> None:
    """See `check_index`."""
    (folder / _UNDER_WAY).unlink()


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
            return True  # Of another Chroma, whose files are its own to read.
        if not count:
            return bool(highest < 0)  # Room for the first elements, with nothing in it.
        lengths, links, ids = ((index / name).read_bytes() for name in _OTHERS)
        found = (index / "data_level0.bin").stat().st_size
    except (OSError, struct.error):
        return False
    fits = count <= room and entry < count and 4 + 4 * lowest <= vector < label == size - 8
    # Behind the elements there may be room for more. A full stop ends a pickle.
    is_whole = count * size <= found and found * 4 == len(lengths) * size and ids.endswith(b".")
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
    """Whether elements are linked to others that there are, and have vectors of length 1."""
    of_each, others = rows[:, :2].copy().view(np.uint16), rows[:, 4 : 4 + 4 * lowest].copy().view(np.uint32)
    vectors = rows[:, vector:label].copy().view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        lengths_squared = (vectors * vectors).sum(axis=1)
    is_linked = (of_each <= lowest).all() and (others[np.arange(lowest) < of_each] < count).all()
    return bool(is_linked and np.allclose(lengths_squared, 1, atol=2e-3))


def _levels_are_sound(links: bytes, count: int, highest: int, size: int) -> bool:
    """Whether each element is followed by its links on higher levels, of which there are not too many."""
    at = 0
    for _ in range(count):
        held = int.from_bytes(links[at : at + 4], "little")
        at += 4
        if not held:
            continue
        if at + held > len(links) or held % size or held > size * max(highest, 0):
            return False
        of_each = np.frombuffer(links[at : at + held], np.uint32).reshape(-1, size // 4)
        counts = of_each[:, :1] & 0xFFFF
        linked = np.arange(1, size // 4) <= counts
        if (counts >= size // 4).any() or (of_each[:, 1:][linked] >= count).any():
            return False
        at += held
    return at == len(links)
