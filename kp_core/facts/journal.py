"""The file that is the truth about a bank on disk: one line per change, only ever appended to.

A line is a JSON object. One with `text` is a fact: its fields, without those that are as by default; under an id that
is held it replaces that fact, and has a higher version. One with `delete` removes the facts with these ids. `digest` is
the BLAKE2b digest (16 bytes, hexadecimal) of the object without it, written with sorted keys and without spaces.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kp_core.errors import BankError
from kp_core.facts.base import Fact, content_id
from kp_core.packs.durable import publish, stage, sync_dir

__all__ = ["Change", "Deletion", "Journal"]

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Deletion:
    """Facts that were removed, by their ids."""

    ids: tuple[str, ...]


Change: TypeAlias = Fact | Deletion
_DEFAULTS: dict[str, object] = {
    "title": "",
    "source": "",
    "metadata": {},
    "namespace": "default",
    "expires": None,
    "version": 1,
}


class Journal:
    """Append-only file of changes; one process appends, any number read.

    `read` comes before `append`: it finds where the last whole line ends. `end` and `crc` are that place (in bytes) and
    the CRC-32 of what is before it, `lines` how many lines that is; `torn` is how many bytes are behind it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.end = self.crc = self.torn = self.lines = 0
        self._open_line = False

    def read(self) -> Iterator[tuple[Change, int]]:
        """Every change from the start, each with the place where its line ends; an absent file holds none.

        A last line that was not written to its end is left out, and overwritten by the next `append`. Raises
        `BankError`, naming file and line, for a damaged line before that.
        """
        self._reset()
        yield from self.read_on()

    def read_on(self) -> Iterator[tuple[Change, int]]:
        """As `read`, what was appended since the last reading."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self.end)
            for line in file:
                if self._open_line and line == b"\n":
                    self._count(line)
                    continue
                try:
                    change = _parse(line)
                except (ValueError, RecursionError) as error:
                    rest = file.read(1)
                    if rest:
                        raise self.damaged(self.lines + 1, error) from error
                    self.torn = len(line)
                    return
                self.lines += 1
                self._count(line)
                yield change, self.end
        self.torn = 0

    def damaged(self, line: int, reason: object) -> BankError:
        """The error that names a damaged line."""
        return BankError(
            f"{self.path}, line {line} is damaged ({reason}). Nothing was changed. Restore the file from a copy, or "
            f"delete this line to go on without its change."
        )

    def warn(self) -> None:
        """Say it when the last line was not written to its end."""
        if self.torn:
            logger.warning(
                "%s: the last line (%d) was not written to its end; its %d bytes are dropped.",
                self.path,
                self.lines + 1,
                self.torn,
            )

    def append(self, changes: Sequence[Change]) -> None:
        """Write `changes` behind the last whole line; on return they are on the disk."""
        data = b"\n" * self._open_line + b"".join(map(_line, changes))
        created = not self.path.exists()
        with self.path.open("wb" if created else "r+b") as file:
            file.seek(self.end)
            file.truncate()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if created:
            sync_dir(self.path.parent)
        self._count(data)
        self.lines += len(changes)
        self.torn = 0

    def replace(self, facts: Iterable[Fact]) -> None:
        """Make a journal of these facts alone the one that counts, in one step."""
        self._reset()

        def lines() -> Iterator[bytes]:
            for fact in facts:
                line = _line(fact)
                self._count(line)
                self.lines += 1
                yield line

        publish(stage(self.path.parent, lines()), self.path)

    def _count(self, data: bytes) -> None:
        self.end += len(data)
        self.crc = zlib.crc32(data, self.crc)
        self._open_line = bool(data) and not data.endswith(b"\n")


def _line(change: Change) -> bytes:
    record: dict[str, object]
    if isinstance(change, Deletion):
        record = {"delete": list(change.ids)}
    else:
        record = {"text": change.text}
        if change.id != content_id(change.text, change.namespace):
            record["id"] = change.id
        for name, default in _DEFAULTS.items():
            value = dict(change.metadata) if name == "metadata" else getattr(change, name)
            if value != default:
                record[name] = value
    return json.dumps(record | {"digest": _digest(record)}, ensure_ascii=False).encode() + b"\n"


def _parse(line: bytes) -> Change:
    record = json.loads(line)
    if not isinstance(record, dict) or "digest" not in record:
        raise BankError("it is not a change with its digest")
    digest = record.pop("digest")
    if digest != _digest(record):
        raise BankError(f"its content does not have the digest {digest!r}")
    if record.keys() == {"delete"}:
        return Deletion(tuple(record["delete"]))
    if not {"text"} <= record.keys() <= {"text", "id", *_DEFAULTS}:
        raise BankError(f"it has the fields {sorted(record)}")
    return Fact(**record)


def _digest(record: Mapping[str, object]) -> str:
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=_DIGEST_BYTES).hexdigest()
