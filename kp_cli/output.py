"""What commands print: text that cannot steer a terminal, tables, JSON, and errors in one line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from kp_core import Fact, Handle, Hit, KnowledgePackError

_SIGNS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_SIGNS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

_REASONS = {FileNotFoundError: "does not exist", IsADirectoryError: "is a folder, not a file"}

ERRORS = (KnowledgePackError, ImportError, OSError, ValueError, RuntimeError, MemoryError)
"""Our own errors, and errors that libraries raise. They are shown in one line unless --debug is given."""


def message_of(error: Exception) -> str:
    """The message of an error. That of a library's error begins with the name of its class."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} {_REASONS.get(type(error), f'failed: {error.strerror}')}. Check the path."
    # An `OSError` without a number is ours, about a remote place.
    is_ours = isinstance(error, KnowledgePackError) or (isinstance(error, OSError) and not error.errno and error.args)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"


def plain(text: str) -> str:
    """`text` with visible signs for control characters: facts, titles, files and models must not steer a terminal."""
    return text.translate(_SIGNS)


class _Terminal(Console):
    """A console that passes only its own control codes to the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `Console.render`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def console() -> Console:
    """The terminal. A file or pipe gets lines of 80 characters. Text is printed unchanged, brackets included."""
    terminal = _Terminal(highlight=False, markup=False)
    return terminal if terminal.is_terminal else _Terminal(highlight=False, markup=False, width=80)


def warn(text: str) -> None:
    """Print to standard error, in the width of its terminal; a line stays one in a file or pipe."""
    terminal = _Terminal(stderr=True, highlight=False, markup=False)
    terminal.print(text, soft_wrap=not terminal.is_terminal)


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    encoded = json.dumps(data, ensure_ascii=False, indent=2, default=str)
    # `json.dumps` escapes only the first 32 control characters.
    sys.stdout.write(re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", encoded) + "\n")


def tell(data: Mapping[str, Any], readable: RenderableType, *, as_json: bool) -> None:
    """Print `data` as JSON, or else `readable`, its form for people."""
    if as_json:
        print_json(data)
    else:
        console().print(readable)


def table_of(rows: Mapping[str, Any], title: str | None = None) -> Table:
    """Names and values in two columns."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    # Fold fingerprints, so that they show in full on any terminal and can be compared.
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if isinstance(value, dict):
            cell = "\n".join(f"{key.replace('_', ' ')}: {_shown(item)}" for key, item in value.items())
        else:
            cell = _shown(value)
        table.add_row(name.replace("_", " "), cell)
    return table


def about_hit(hit: Hit, text: str, handle: Handle | None) -> dict[str, Any]:
    """A hit as JSON. `text` is what a model reads for it."""
    fact, name = hit.fact, None if handle is None else str(handle)
    about = {"id": fact.id, "handle": name, "title": fact.title, "source": fact.source}
    return {**about, "score": hit.score, "text": text}


def sourced(fact: Fact) -> str:
    """The source of a fact, with its page if known."""
    page = fact.metadata.get("page")
    return f"{fact.source}, page {page}" if fact.source and page is not None else fact.source


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, dict):
        return ", ".join(f"{name} ({_shown(item)})" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
