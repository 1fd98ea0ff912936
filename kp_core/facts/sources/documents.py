"""PDF and HTML: a fact per paragraph of a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kp_core.errors import MissingDependencyError
from kp_core.facts.sources.drafts import Draft, cut, error_at

__all__ = ["read_html", "read_pdf"]

_EXTRA = '`pip install "knowledge-packs[files]"`'
_BLANK_LINE = re.compile(r"\n\s*\n")
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
# What begins and ends a paragraph; everything else runs on within one.
_BLOCK_NAMES = (
    "address article aside blockquote body caption dd details div dl dt fieldset figcaption figure footer form "
    "header hr html li main ol p pre section summary table tbody tfoot thead tr ul"
)
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_UNSEEN = ("script", "style", "template", "noscript", "title", "head", "nav")


def read_pdf(path: Path, max_chars: int) -> Iterator[Draft]:
    """Paragraphs of each page, with `page` in their metadata; a page of pictures alone is an error.

    Raises `MissingDependencyError` where pypdf is absent.
    """
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError as error:
        raise MissingDependencyError(f"{path}: reading PDF needs pypdf: {_EXTRA}.") from error
    broken = (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
    try:
        reader = PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            yield "page 1", error_at(path, "page 1", "is locked by a password; save it without one")
            return
        title = str((reader.metadata and reader.metadata.title) or "")
        pages = len(reader.pages)
    except broken as error:
        yield "page 1", error_at(path, "page 1", f"is not PDF, or damaged ({error or type(error).__name__})")
        return
    for number in range(1, pages + 1):
        place = f"page {number}"
        try:
            page = reader.pages[number - 1]
            text = page.extract_text()
            pictures = bool(text.strip()) or len(page.images)
        except broken as error:
            yield place, error_at(path, place, f"is damaged ({error or type(error).__name__})")
            continue
        if not text.strip() and pictures:
            yield place, error_at(path, place, "holds pictures and no text; run text recognition over it first")
        for paragraph in _BLANK_LINE.split(text):
            for part in cut(" ".join(paragraph.split()), max_chars):
                yield place, {"text": part, "title": title, "page": number}


def read_html(path: Path, max_chars: int) -> Iterator[Draft]:
    """Paragraphs, items and table rows, under the headings above them (else the page's title), with their line.

    Raises `MissingDependencyError` where Beautiful Soup is absent.
    """
    try:
        from bs4 import BeautifulSoup
    except ImportError as error:
        raise MissingDependencyError(f"{path}: reading HTML needs beautifulsoup4: {_EXTRA}.") from error
    soup = BeautifulSoup(path.read_bytes(), "html.parser")
    if "\0" in soup.get_text():
        yield "line 1", error_at(path, "line 1", "is not text in any known encoding")
        return
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    for unseen in soup(_UNSEEN):
        unseen.decompose()
    found = False
    headings: list[tuple[int, str]] = []
    for line, name, text in _blocks(soup):
        if name in _HEADINGS:
            headings = [each for each in headings if each[0] < int(name[1])] + [(int(name[1]), text)]
            continue
        for part in cut(text, max_chars):
            found = True
            yield (
                f"line {line}",
                {"text": part, "title": " > ".join(each for _, each in headings) or title, "line": line},
            )
    if not found:
        yield "line 1", error_at(path, "line 1", "holds no text")


def _blocks(soup: Any) -> Iterator[tuple[int, str, str]]:  # noqa: ANN401 - the library's own type
    """Each run of text that no block interrupts: its line, the tag around it that counts, the text."""
    from bs4.element import NavigableString, PreformattedString, Tag

    held: list[str] = []
    begun, around = 1, ""

    def flush() -> Iterator[tuple[int, str, str]]:
        text = "".join(held).strip() if around == "pre" else " ".join("".join(held).split())
        held.clear()
        if text:
            yield begun, around, text

    # Not by recursion, as pages may be nested deeper than Python allows.
    waiting: list[Any] = [soup]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Tag):
            block = node.name in _BLOCKS or node.name in _HEADINGS
            if block:
                yield from flush()
                begun, around = node.sourceline or begun, node.name
            elif node.name in {"br", "td", "th"}:
                held.append("\n" if node.name == "br" else " ")
            # A block within ends this one; what follows it is told apart by the end that is put behind it.
            waiting += [_End(node)] * block + list(reversed(node.contents))
        elif isinstance(node, _End):
            yield from flush()
            around = node.parent
        elif isinstance(node, NavigableString) and not isinstance(node, PreformattedString):
            held.append(str(node))
    yield from flush()


class _End:
    """Where a block ends; `parent` is the tag that goes on."""

    def __init__(self, tag: Any) -> None:  # noqa: ANN401 - the library's own type
        self.parent = tag.parent.name if tag.parent else ""
