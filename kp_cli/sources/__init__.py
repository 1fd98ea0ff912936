"""Reads facts from files of several formats, one at a time.

Nothing is dropped silently: a row or file that gives no fact is an error that names file and line, or is reported if
errors are skipped. Text files are read line by line, PDF page by page, other documents as a whole.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kp_cli.sources.converted import read_converted
from kp_cli.sources.texts import STDIN, Draft, read_csv, read_json_lines, read_text
from kp_core import Fact
from kp_core.errors import FactError, KnowledgePackError

__all__ = ["FORMATS", "OnError", "read_facts"]

logger = logging.getLogger(__name__)

OnError: TypeAlias = Literal["raise", "skip"]

_Reader: TypeAlias = Callable[[Path, int, str | None], Iterator[Draft]]
_OWN = ("text", "title", "source", "id", "namespace", "expires")


def read_facts(  # noqa: PLR0913 - every setting has a default that works
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    on_error: OnError = "raise",
    skipped: Callable[[FactError], None] | None = None,
    max_chars: int = 2000,
    namespace: str | None = None,
    encoding: str | None = None,
) -> Iterator[Fact]:
    """Yield the facts in files and folders, and for `-` in standard input, in the order of paths and lines.

    `docs/cli.md` says how each of `FORMATS` is read. Paragraphs of more than `max_chars` characters are cut at sentence
    ends. Unless a row says otherwise, the source of a fact is its file; metadata has the `line`, `page` or `slide` on
    which it begins. For a folder, all files in it and in its subfolders are read, except names that begin with a dot.
    `namespace` applies to facts that do not name one. `encoding` is the text encoding; the default is UTF-8, or what an
    HTML page declares.

    Raises `FactError`, naming file and line or page, for anything unreadable; `on_error="skip"` logs it, passes it to
    `skipped`, and goes on.
    """
    if on_error not in {"raise", "skip"}:
        raise FactError(f"Got on_error={on_error!r}; expected 'raise' or 'skip'.")
    if max_chars < 1:
        raise FactError(f"Got max_chars={max_chars}; expected at least 1.")
    try:
        "".encode(encoding or "utf-8")
    except LookupError as error:
        raise FactError(f"Got encoding={encoding!r}; expected one of text, e.g. 'utf-8' or 'cp1252'.") from error

    def read() -> Iterator[Fact]:
        for path in _files([paths] if isinstance(paths, str | os.PathLike) else paths):
            for fact in _read(path, max_chars, namespace, encoding):
                if isinstance(fact, Fact):
                    yield fact
                elif on_error == "raise":
                    raise FactError(f"{str(fact).rstrip('.')}; `--on-error skip` leaves it out.") from fact
                else:
                    logger.warning("Skipped: %s", fact)
                    if skipped is not None:
                        skipped(fact)

    return read()


def _read(path: Path, max_chars: int, namespace: str | None, encoding: str | None) -> Iterator[Fact | FactError]:
    is_stdin = str(path) == STDIN
    if not is_stdin and not path.exists():
        yield FactError(f"There is no file {path}. Check the path.")
    elif not is_stdin and path.suffix.lower() not in FORMATS:
        kinds = ", ".join(FORMATS)
        yield FactError(f"{path}: got a file of type {path.suffix or 'unknown'!r}; expected one of {kinds}.")
    elif not is_stdin and not path.is_file():
        yield FactError(f"{path}: got a pipe or device; expected a file. Write to a file first, or use -.")
    else:
        begins = sys.stdin.buffer.peek(1) if is_stdin and isinstance(sys.stdin.buffer, io.BufferedReader) else b""
        is_json = begins.lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n").startswith(b"{")
        reader = FORMATS[(".jsonl" if is_json else ".txt") if is_stdin else path.suffix.lower()]
        try:
            for place, row in reader(path, max_chars, encoding):
                yield _fact(str(path), place, row, namespace)
        except OSError as error:
            yield FactError(f"{path}: cannot be read ({error.strerror or error}).")


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for root in map(Path, paths):
        if root.is_dir():
            files = (path for path in sorted(root.rglob("*")) if path.is_file())
            yield from (path for path in files if not any(part[0] == "." for part in path.relative_to(root).parts))
        else:
            yield root


def _fact(source: str, place: str, row: Mapping[str, Any] | FactError, namespace: str | None) -> Fact | FactError:
    try:
        if isinstance(row, FactError):
            raise row
        fields = {name: row[name] for name in _OWN if row.get(name) is not None and row[name] != ""}
        if "text" not in fields:
            raise FactError(f"got the fields {sorted(row)}, and no `text` among them that holds any")
        metadata = row.get("metadata") or {}
        if not isinstance(metadata, Mapping):
            raise FactError(f"got {metadata!r} as `metadata`; expected an object")
        # `Fact` checks these values itself.
        extra = {name: value for name, value in row.items() if name not in {*_OWN, "metadata"} and value is not None}
        defaults = {"source": source} | ({} if namespace is None else {"namespace": namespace})
        return Fact(metadata={**metadata, **extra}, **{**defaults, **fields})
    except KnowledgePackError as error:
        return FactError(f"{source}, {place}: {error}")


FORMATS: dict[str, _Reader] = {
    ".jsonl": read_json_lines,
    ".csv": read_csv,
    ".txt": read_text,
    ".md": partial(read_text, markdown=True),
    **dict.fromkeys((".docx", ".pptx", ".xlsx", ".pdf", ".html", ".htm"), read_converted),
}
"""The reader of each file format, by suffix."""
