"""Word, PDF, HTML, slides, sheets: markitdown makes Markdown of them, and the reader of Markdown facts of that."""

from __future__ import annotations

import importlib
import io
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from kp_cli.sources.texts import Draft, paragraphs
from kp_core.bundled import needing
from kp_core.errors import FactError

# An Office file may unpack to this many bytes, or this many times its own size; text compresses to a tenth.
_LARGEST, _TIMES = 100_000_000, 20
_DEEPEST = 500  # Elements of XML in each other; converters descend by recursion.
_DEEPEST_FORMS = 6  # Forms of a PDF that draw each other; each may draw the next many times.
_UNTITLED = "untitled"  # What ReportLab writes as the title of a PDF that has none.
_MOST_CHARS = 1_000_000  # Of a page of PDF; forms that draw each other could make any number.
_PLAIN = {"strip": ["a", "b", "em", "i", "strong", "u"], "escape_asterisks": False, "escape_underscores": False}
_IMAGE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
_HEADLESS = re.compile(r"(?:^|\n\n)(?=\|.*\|(?:\n(?!\| ?-)|$))")  # Before a table without a header.
_SLIDE = re.compile(r"^<!-- Slide number: (\d+) -->$", re.MULTILINE)
_EMPTY_CELL = re.compile(r"(?<=\|) (?:NaN|Unnamed: \d+) (?=\|)")

_Convert = Callable[[bytes], Any]


def read_converted(path: Path, max_chars: int, encoding: str | None = None) -> Iterator[Draft]:
    """Yield the paragraphs and table rows of a document, under the headings above them or its title.

    Those of a PDF have `page` in their metadata, those of slides `slide`. A PDF's page with only images is an error.
    What markitdown leaves out (comments, headers, tracked deletions) is left out. Raises `MissingDependencyError` if
    markitdown is not installed.
    """
    with needing(f"{path}: reading {path.suffix} needs markitdown", "files"):
        converters = importlib.import_module("markitdown.converters")
        import pandas as pd
        from markitdown import StreamInfo
    suffix = path.suffix.lower()
    kind = "Html" if suffix == ".htm" else suffix[1:].title()
    converter, info = getattr(converters, f"{kind}Converter")(), StreamInfo(extension=suffix, charset=encoding)

    def convert(data: bytes) -> Any:  # noqa: ANN401 - markitdown's own type
        # pandas would round the numbers of a sheet.
        exact = pd.option_context("display.precision", 15)
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()), exact:
            return converter.convert(io.BytesIO(data), info, **_PLAIN)

    is_empty = True
    for draft in _pages(path, convert, max_chars) if kind == "Pdf" else _document(path, kind, convert, max_chars):
        is_empty = False
        yield draft
    if is_empty:
        yield "line 1", FactError("holds no text")


def _document(path: Path, kind: str, convert: _Convert, max_chars: int) -> Iterator[Draft]:
    data = path.read_bytes()
    if kind == "Html":
        # The parser would search an unclosed comment to the end once for each comment that begins in it.
        unclosed = data.find(b"<!--", data.rfind(b"-->") + 1)
        data = data if unclosed < 0 else data[:unclosed]
    try:
        if kind != "Html":
            _check_office(data)
        converted = convert(data)
    except Exception as error:  # noqa: BLE001 - of a damaged file the libraries raise whatever their codecs do
        yield "line 1", FactError(f"is not {path.suffix.lower()}, or damaged ({error or type(error).__name__})")
        return
    text = converted.markdown
    if "\0" in text:
        yield "line 1", FactError("is not text in any known encoding")
        return
    if kind == "Xlsx":
        text = _EMPTY_CELL.sub("  ", _EMPTY_CELL.sub("  ", text))
    before, *slides = _SLIDE.split(text)
    title = " ".join((converted.title or "").split()) if kind == "Html" else ""
    for fields in _facts_of(before, max_chars, title):
        yield "page", fields
    for number, slide in zip(slides[::2], slides[1::2], strict=True):
        for fields in _facts_of(slide, max_chars):
            yield f"slide {number}", fields | {"slide": int(number)}


def _pages(path: Path, convert: _Convert, max_chars: int) -> Iterator[Draft]:
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(path) as document:
            title, pages = document.get_metadata_value("Title").strip(), len(document)
        title = "" if title == _UNTITLED else title
        nested = _nested_pages(path)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        locked = "password" in str(error)
        reason = "is locked by a password; save it without one" if locked else f"is not PDF, or damaged ({error})"
        yield "page 1", FactError(reason)
        return
    for number in range(1, pages + 1):
        try:
            text = _page(path, number, convert, is_nested=number in nested)
        except Exception as error:  # noqa: BLE001 - as above
            damage = FactError(f"is damaged ({error or type(error).__name__})")
            yield f"page {number}", error if isinstance(error, FactError) else damage
            continue
        for fields in _facts_of(text, max_chars, title):
            yield f"page {number}", fields | {"page": number}


def _page(path: Path, number: int, convert: _Convert, *, is_nested: bool) -> str:
    """A page's Markdown. Raises `FactError` if it has pictures and no text."""
    import pypdfium2

    if is_nested:
        raise ValueError(f"forms more than {_DEEPEST_FORMS} deep")
    with pypdfium2.PdfDocument(path) as document, pypdfium2.PdfDocument.new() as alone:
        page = document[number - 1]
        chars = page.get_textpage().count_chars()
        if chars > _MOST_CHARS:
            raise ValueError(f"{chars:,} characters; expected at most {_MOST_CHARS:,}")
        if not chars and any(page.get_objects([pypdfium2.raw.FPDF_PAGEOBJ_IMAGE], max_depth=3)):
            raise FactError("holds pictures and no text; run text recognition over it first")
        alone.import_pages(document, [number - 1])
        written = io.BytesIO()
        alone.save(written)
    return str(convert(written.getvalue()).markdown) if chars else ""


def _facts_of(text: str, max_chars: int, title: str = "") -> Iterator[dict[str, object]]:
    """Facts of Markdown that was made of another format, whose lines are not lines of the file."""
    text = _HEADLESS.sub("\n\n|  |\n| --- |\n", _IMAGE.sub(r"\1", text))
    lines = ((number, line, None) for number, line in enumerate(text.splitlines(), start=1))
    for _, fields in paragraphs(lines, max_chars, markdown=True):
        if isinstance(fields, Mapping):  # None is an error, since no line is.
            yield {"text": fields["text"], "title": fields["title"] or title}


def _check_office(data: bytes) -> None:
    """Raise `ValueError` for an Office file that would fill the memory, or take for ever."""
    from defusedxml.ElementTree import iterparse

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > max(_LARGEST, _TIMES * len(data)):
            raise ValueError(f"{len(data):,} bytes that unpack to {unpacked:,}")
        if damaged := archive.testzip():  # It unpacks in small pieces, as the archive may state false sizes.
            raise ValueError(f"{damaged} is damaged")
        for name in [name for name in archive.namelist() if name.endswith(".xml")]:
            depth = 0
            for event, _ in iterparse(archive.open(name), ("start", "end")):
                depth += 1 if event == "start" else -1
                if depth > _DEEPEST:
                    raise ValueError(f"more than {_DEEPEST} elements deep")


def _nested_pages(path: Path) -> set[int]:
    """The numbers of the pages with forms so deep in each other that drawing them may never end."""
    from pdfminer.pdfpage import PDFPage
    from pdfminer.pdftypes import PDFStream, resolve1

    nested = set()
    with path.open("rb") as file:
        for number, page in enumerate(PDFPage.get_pages(file), start=1):
            layer = [page.resources]
            for _ in range(_DEEPEST_FORMS):
                objects = [value for each in layer for value in (resolve1(each.get("XObject")) or {}).values()]
                forms = {id(form): form for form in map(resolve1, objects) if isinstance(form, PDFStream)}
                layer = [inner for form in forms.values() if (inner := resolve1(form.attrs.get("Resources")))]
            if layer:
                nested.add(number)
    return nested
