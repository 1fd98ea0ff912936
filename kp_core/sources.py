"""Knowledge from files: JSON lines, CSV, plain text and Markdown become facts, one at a time.

Nothing is dropped in silence: a row or file that makes no fact is an error that names file and line, or, where it is
to be skipped, is reported. Files are read line by line, so that their size does not matter.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kp_core.banks.base import Fact
from kp_core.errors import KnowledgePackError, SourceError

__all__ = ["FORMATS", "OnError", "read_facts"]

logger = logging.getLogger(__name__)

OnError: TypeAlias = Literal["raise", "skip"]
_Draft: TypeAlias = tuple[int, Mapping[str, object] | SourceError]

_OWN = ("text", "title", "source", "id", "namespace", "expires")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*$")
_FENCE = re.compile(r"(`{3,}|~{3,})")
_BOM = "\ufeff"


def read_facts(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    on_error: OnError = "raise",
    skipped: Callable[[SourceError], None] | None = None,
    max_chars: int = 2000,
    namespace: str | None = None,
) -> Iterator[Fact]:
    """The facts in files and folders, in the order of their paths and lines.

    - `.jsonl`: one object per line; `text` is required, `title`, `source`, `id`, `namespace`, `expires` and `metadata`
      are the fact's own, any other field goes to its metadata.
    - `.csv`: the same by the names in its first line, all metadata being strings.
    - `.txt`: a fact per paragraph; paragraphs are parted by blank lines.
    - `.md`: as text, under the headings above it (`Guide > Install`) as title; a fenced block is one paragraph.

    Paragraphs of more than `max_chars` characters are cut at ends of sentences. The source of a fact is its file, and
    `line` in its metadata where its paragraph begins, unless the row says otherwise. Of a folder, all files in it and
    below whose names do not begin with a dot are read. `namespace` is that of facts that do not name one.

    Raises `SourceError`, naming file and line, for what cannot be read; with `on_error="skip"` it is logged, given to
    `skipped`, and passed over.
    """
    if on_error not in {"raise", "skip"} or max_chars < 1:
        raise SourceError(f"Got on_error={on_error!r}, max_chars={max_chars}; expected 'raise' or 'skip', and above 0.")

    def fail(error: SourceError) -> None:
        if on_error == "raise":
            raise error
        logger.warning("Skipped: %s", error)
        if skipped is not None:
            skipped(error)

    for path in _files([paths] if isinstance(paths, str | os.PathLike) else paths):
        reader = FORMATS.get(path.suffix.lower())
        if reader is None:
            known = ", ".join(FORMATS)
            fail(SourceError(f"{path}: got a file of type {path.suffix or 'unknown'!r}; expected one of {known}."))
            continue
        for fact in _read(path, reader(path, max_chars), namespace):
            if isinstance(fact, SourceError):
                fail(fact)
            else:
                yield fact


def _read(path: Path, drafts: Iterator[_Draft], namespace: str | None) -> Iterator[Fact | SourceError]:
    try:
        for number, draft in drafts:
            try:
                yield draft if isinstance(draft, SourceError) else _fact(path, draft, namespace)
            except KnowledgePackError as error:
                yield _error(path, number, str(error))
    except OSError as error:
        yield SourceError(f"{path}: cannot be read ({error.strerror or error}).")


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for given in map(Path, paths):
        if given.is_dir():
            found = (path for path in sorted(given.rglob("*")) if path.is_file())
            yield from (path for path in found if not any(part[0] == "." for part in path.relative_to(given).parts))
        else:
            yield given


def _fact(path: Path, row: Mapping[str, Any], namespace: str | None) -> Fact:
    fields = {name: row[name] for name in _OWN if row.get(name) is not None and row[name] != ""}
    if "text" not in fields:
        raise SourceError(f"got the fields {sorted(row)}, and no `text` among them that holds any")
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise SourceError(f"got {metadata!r} as `metadata`; expected an object")
    # What these hold, a fact checks itself.
    others = {name: value for name, value in row.items() if name not in {*_OWN, "metadata"} and value is not None}
    fields.setdefault("source", str(path))
    if namespace is not None:
        fields.setdefault("namespace", namespace)
    return Fact(metadata={**metadata, **others}, **fields)


def _error(path: Path, line: int, reason: str) -> SourceError:
    return SourceError(f"{path}, line {line}: {reason}")


def _lines(path: Path) -> Iterator[tuple[int, str | SourceError]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                yield number, _error(path, number, f"is not UTF-8 ({error.reason} at byte {error.start + 1})")
                continue
            yield number, (text.removeprefix(_BOM) if number == 1 else text).rstrip("\r\n")


def _json_lines(path: Path, _: int) -> Iterator[_Draft]:
    for number, line in _lines(path):
        if isinstance(line, SourceError):
            yield number, line
            continue
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, _error(path, number, f"is not JSON ({error})")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            yield number, _error(path, number, f"got {type(row).__name__}; expected an object with `text`")


def _csv(path: Path, _: int) -> Iterator[_Draft]:
    bad: list[tuple[int, SourceError]] = []

    def good() -> Iterator[str]:
        for number, line in _lines(path):
            if isinstance(line, SourceError):
                bad.append((number, line))
            else:
                yield line + "\n"

    rows = csv.reader(good(), strict=True)
    names: list[str] | None = None
    for row in _parsed(path, rows):
        if isinstance(row, SourceError):
            yield rows.line_num, row
        elif names is None:
            names = row
            if "text" not in names:
                yield 1, _error(path, 1, f"got the columns {names}; expected one called `text`")
                return
        elif len(row) == len(names):
            yield rows.line_num, {name: cell for name, cell in zip(names, row, strict=True) if cell}
        elif row:
            yield rows.line_num, _error(path, rows.line_num, f"got {len(row)} cells; expected {len(names)}")
    yield from bad


def _parsed(path: Path, rows: Any) -> Iterator[list[str] | SourceError]:  # noqa: ANN401 - the csv module's own type
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield _error(path, rows.line_num, f"is not CSV ({error})")


def _text(path: Path, max_chars: int) -> Iterator[_Draft]:
    yield from _paragraphs(path, max_chars, markdown=False)


def _markdown(path: Path, max_chars: int) -> Iterator[_Draft]:
    yield from _paragraphs(path, max_chars, markdown=True)


def _paragraphs(path: Path, max_chars: int, *, markdown: bool) -> Iterator[_Draft]:
    held: list[str] = []
    headings: list[tuple[int, str]] = []
    begun, fence = 1, ""

    def flush() -> Iterator[_Draft]:
        title = " > ".join(name for _, name in headings)
        for part in _cut("\n".join(held), max_chars):
            yield begun, {"text": part, "title": title, "line": begun}
        held.clear()

    for number, line in _lines(path):
        if isinstance(line, SourceError):
            yield number, line
            continue
        mark = _FENCE.match(line.strip()) if markdown else None
        heading = _HEADING.match(line) if markdown and not fence else None
        if (not line.strip() and not fence) or heading:
            yield from flush()
            if heading:
                depth = len(heading[1])
                headings = [each for each in headings if each[0] < depth]
                headings.append((depth, heading[2]))
            continue
        if not held:
            begun = number
        held.append(line)
        if mark and (not fence or (line.strip() == mark[1] and mark[1].startswith(fence))):
            fence = "" if fence else mark[1]
    yield from flush()


def _cut(text: str, max_chars: int) -> Iterator[str]:
    """`text` in parts of at most `max_chars`, at ends of sentences where there are any, else between words."""
    part = ""
    for sentence in _SENTENCE_END.split(text) if len(text) > max_chars else [text]:
        for piece in [sentence] if len(sentence) <= max_chars else _words(sentence, max_chars):
            if part and len(part) + 1 + len(piece) > max_chars:
                yield part
                part = ""
            part = f"{part} {piece}" if part else piece
    if part.strip():
        yield part


def _words(text: str, max_chars: int) -> Iterator[str]:
    while len(text) > max_chars:
        at = text.rfind(" ", 1, max_chars + 1)
        at = at if at > 0 else max_chars
        yield text[:at]
        text = text[at:].lstrip()
    yield text


FORMATS: dict[str, Callable[[Path, int], Iterator[_Draft]]] = {
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".txt": _text,
    ".md": _markdown,
}
"""The reader of each type of file, by its suffix."""
