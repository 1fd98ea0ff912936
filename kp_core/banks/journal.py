"""The file that is the truth about a bank on disk: one fact per line, only ever appended to.

A line is a JSON object with the fields of a fact and, under `digest`, the BLAKE2b digest (16 bytes, hexadecimal) of the
same object without it, written with sorted keys and without spaces.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kp_core.banks.base import Fact
from kp_core.durable import sync_dir
from kp_core.errors import BankError

__all__ = ["Journal", "digest_of"]

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 16
_FIELDS = {"text", "title", "source", "metadata", "id"}


class Journal:
    """Append-only file of facts; for one process at a time.

    `read` comes before `append`: it finds where the last whole line ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0
        self._open_line = False

    def read(self) -> list[Fact]:
        """Every fact, in order; an absent file holds none.

        A last line that was not written to its end is left out with a warning, and overwritten by the next `append`.
        Raises `BankError`, naming file and line, for a damaged line before that.
        """
        self._end, self._open_line = 0, False
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().splitlines(keepends=True)
        facts: list[Fact] = []
        seen: set[str] = set()
        for number, line in enumerate(lines, start=1):
            try:
                fact = _parse(line)
                if not seen.isdisjoint((fact.id, fact.text)):
                    raise BankError("its id or text stands in an earlier line too")
            except (ValueError, RecursionError) as error:
                if number < len(lines):
                    raise BankError(
                        f"{self.path}, line {number} is damaged ({error}). Nothing was changed. Restore the file from "
                        f"a copy, or delete this line to go on without its fact."
                    ) from error
                logger.warning("%s: the last line (%d) was not written to its end; it is dropped.", self.path, number)
                break
            facts.append(fact)
            seen.update((fact.id, fact.text))
            self._end += len(line)
            self._open_line = not line.endswith(b"\n")
        return facts

    def append(self, facts: Sequence[Fact]) -> None:
        """Write `facts` behind the last whole line; on return they are on the disk."""
        data = b"\n" * self._open_line + b"".join(_line(fact) for fact in facts)
        created = not self.path.exists()
        with self.path.open("wb" if created else "r+b") as file:
            file.seek(self._end)
            file.truncate()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if created:
            sync_dir(self.path.parent)
        self._end, self._open_line = self._end + len(data), False


def digest_of(facts: Iterable[Fact]) -> str:
    """Digest of ids and texts in order: what vectors and banks were made from."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for fact in facts:
        digest.update(json.dumps([fact.id, fact.text]).encode())
    return digest.hexdigest()


def _line(fact: Fact) -> bytes:
    record = {
        "id": fact.id,
        "text": fact.text,
        "title": fact.title,
        "source": fact.source,
        "metadata": dict(fact.metadata),
    }
    return json.dumps(record | {"digest": _digest(record)}, ensure_ascii=False).encode() + b"\n"


def _parse(line: bytes) -> Fact:
    record = json.loads(line)
    if not isinstance(record, dict) or record.keys() != _FIELDS | {"digest"}:
        raise BankError("it is not a fact with its digest")
    digest = record.pop("digest")
    if digest != _digest(record):
        raise BankError(f"its content does not have the digest {digest!r}")
    return Fact(**record)


def _digest(record: Mapping[str, object]) -> str:
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=_DIGEST_BYTES).hexdigest()
