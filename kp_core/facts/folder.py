"""A folder of facts: whose it is, who may write to it, and whether a process was killed while it wrote an index.

Chroma writes an index in place, inside calls that change facts, and reads it as it is. A process that is killed in the
middle leaves files that do not fit together: Chroma then finds other records, does not open the collection, ends the
process, or fills the disk (its issue 7510). So a note stands in the folder during each such call. An index that was
written after a note that is still there is deleted before Chroma loads it, and made anew from the texts, which are safe
in the database.
"""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kp_core.errors import BankError, BankLockedError
from kp_core.packs.durable import replace_file

__all__ = [
    "FACTS",
    "SCHEMA",
    "blank_unused",
    "check_indexes",
    "check_unlocked",
    "demand_repair",
    "end_repair",
    "interrupted",
    "is_fact_store",
    "prepared",
    "writing",
]

logger = logging.getLogger(__name__)

FACTS, SCHEMA = "facts", 1
_MARKER, _LOCK, _NOTE = "kp.json", "kp.lock", "kp.writing"
_WRITTEN_SECONDS, _LOOK_SECONDS, _LOCKED_SECONDS = 5.0, 0.1, 4.0
# The folder of each index of ours, and the namespace of its facts or centroids.
_INDEXES = """
SELECT s.id, named.str_value FROM segments s
JOIN collection_metadata kind ON kind.collection_id = s.collection AND kind.key = 'kp:kind'
JOIN collection_metadata named ON named.collection_id = s.collection AND named.key = 'kp:namespace'
WHERE s.scope = 'VECTOR'
"""


def is_fact_store(path: Path) -> bool:
    """Whether a `ChromaFactStore` lies in this folder."""
    return (path / _MARKER).is_file()


def prepared(path: Path, *, read_only: bool, wait: float) -> FileLock | None:
    """The lock of a folder of ours, made where there is nothing; `None` for a reader."""
    if not is_fact_store(path):
        others = (
            sorted(each.name for each in path.iterdir() if not each.name.startswith("kp.")) if path.is_dir() else []
        )
        others = [name for name in others if name != "packs" and not name.endswith(".tmp")]
        if "facts.jsonl" in others:
            raise BankError(
                f"{path} holds facts of version 0.1, which kept them in files of its own. Build them again from their "
                f"sources into another folder, or from it: `kp build NEW {path / 'facts.jsonl'}`."
            )
        if "chroma.sqlite3" in others:
            raise BankError(
                f"{path} holds a Chroma database that we did not make; it stays as it is. Read it with "
                "`ChromaFactStore.from_collection(name, path=...)`, or give another folder."
            )
        if others:
            raise BankError(
                f"{path} holds other things ({', '.join(others[:3])}), and stays as it is. Give a new folder."
            )
        if read_only:
            raise BankError(f"Got {path} to read; there are no facts in it. Add some there first.")
        replace_file(path / _MARKER, [json.dumps({"kind": FACTS, "schema": SCHEMA}).encode()])
        with suppress(OSError):  # It may have been there; Chroma's files are readable by all who may enter it.
            path.chmod(0o700)
    if read_only:
        return None
    lock = FileLock(path / _LOCK, thread_local=False, is_singleton=True, mode=0o600)
    try:
        lock.acquire(timeout=wait)
    except Timeout as error:
        raise BankLockedError(
            f"{path} is open for writing in another process. Wait for it (`wait=seconds`), read with `read_only=True`, "
            "or let both use a server (`chroma run`)."
        ) from error
    return lock


def check_unlocked(path: Path, *, writing: bool) -> None:
    """Raise `BankLockedError` for a database that someone holds: Chroma would wait for minutes, deaf to signals.

    With `writing` that is also one which someone else is writing to. What is locked later, within a call, is not seen.
    """
    file = path / "chroma.sqlite3"
    if not file.is_file():
        return
    uri = f"{file.resolve().as_uri()}?mode={'rw' if writing else 'ro'}"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=_LOCKED_SECONDS, isolation_level=None)) as opened:
            opened.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if writing:
                opened.execute("BEGIN IMMEDIATE")
                opened.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        # Anything else, such as what a killed writer left to be rolled back, is Chroma's to deal with.
        if "locked" in str(error):
            raise BankLockedError(f"{file} is locked; another process holds it. Wait for that, or end it.") from error
    except sqlite3.DatabaseError as error:
        raise BankError(f"{file} is no database, or damaged ({error}). Restore the folder from a copy.") from error


@contextmanager
def writing(folder: Path | None) -> Iterator[None]:
    """Around a call in which Chroma may write an index: a note in the folder.

    It stays behind a process that is killed, and behind a call that fails after an index was written.
    """
    if folder is None or (note := folder / _NOTE).exists():
        yield
        return
    note.touch()
    failed = False
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        if not (failed and interrupted(folder)):
            note.unlink()


def interrupted(folder: Path) -> dict[Path, str]:
    """The indexes of our collections that are half written, or to be made anew, each with its namespace.

    Those are the ones written since a note that is still there: by a process that was killed, or by one that is at it.
    """
    note, file = folder / _NOTE, folder / "chroma.sqlite3"
    if not (note.is_file() and file.is_file()):
        return {}
    check_unlocked(folder, writing=False)
    with (
        suppress(FileNotFoundError),
        closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=rw", uri=True)) as opened,
    ):
        began, named = note.stat().st_mtime_ns, note.read_text().split()
        indexes = [(folder / name, space) for name, space in opened.execute(_INDEXES)]
        return {index: space for index, space in indexes if space in named or _is_written_since(index, began)}
    return {}


def check_indexes(folder: Path, lock: FileLock | None) -> list[str]:
    """Before Chroma reads its indexes: the namespaces whose index is gone, for their facts to be embedded anew.

    The first writer of this process deletes indexes that are half written, for Chroma to begin anew. A reader, who has
    no lock, waits for a writer that may be writing one; raises `BankError` where that does not help.
    """
    if lock is not None:
        if lock.lock_counter > 1:
            return []
        if not (indexes := interrupted(folder)):
            end_repair(folder)
            return []
        spaces = sorted(set(indexes.values()))
        logger.warning("%s: an index is half written; it is made anew from the texts in %s.", folder, ", ".join(spaces))
        demand_repair(folder, spaces)
        for index in indexes:
            shutil.rmtree(index, ignore_errors=True)
        return spaces
    until = time.monotonic() + _WRITTEN_SECONDS
    while interrupted(folder):
        if time.monotonic() > until:
            raise BankError(
                f"{folder}: an index is damaged, or still being written. Open the folder once for writing, e.g. with "
                "`kp verify --repair`, which makes it anew from the texts."
            )
        time.sleep(_LOOK_SECONDS)
    return []


def demand_repair(folder: Path, namespaces: Iterable[str]) -> None:
    """Note that the indexes of these namespaces are to be made anew, until `end_repair`."""
    replace_file(folder / _NOTE, ["\n".join(namespaces).encode()])


def end_repair(folder: Path) -> None:
    """See `demand_repair`."""
    (folder / _NOTE).unlink(missing_ok=True)


def blank_unused(folder: Path) -> None:
    """Overwrite the room in indexes that hold nothing yet: Chroma leaves there what memory held, removed text too."""
    for room in (*folder.glob("*-*-*-*-*/data_level0.bin"), *folder.glob("*-*-*-*-*/length.bin")):
        # Without this file Chroma reads none of the others.
        if not room.with_name("index_metadata.pickle").exists():
            with suppress(FileNotFoundError), room.open("r+b") as opened:
                opened.write(bytes(room.stat().st_size))


def _is_written_since(index: Path, began_ns: int) -> bool:
    with suppress(FileNotFoundError):
        return any(file.stat().st_mtime_ns >= began_ns for file in index.iterdir())
    return False
