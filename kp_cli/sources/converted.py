"""Word, PDF, HTML, slides, sheets: markitdown makes Markdown of them, and the reader of Markdown facts of that.

What markitdown leaves out of an Office file is found by comparison: each text in the file's XML that its Markdown does
not hold is named in one warning per file. Of a PDF, comments and form fields are.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from kp_cli.sources.drafts import Draft, wrong
from kp_cli.sources.texts import markdown_drafts
from kp_core.bundled import needing

__all__ = ["read_html", "read_office", "read_pdf"]

logger = logging.getLogger(__name__)

_LARGEST, _TIMES = (
    100_000_000,
    20,
)  # An Office file may unpack to this many bytes, or this many times its own size; text compresses to a tenth.
_DEEPEST = 500  # Elements of XML in each other; mammoth descends by recursion.
_DEEPEST_FORMS = 6  # Forms of a PDF that draw each other; each may draw the next many times.
_MOST_CHARS = 1_000_000  # Of a page of PDF; forms that draw each other could make any number.
_PLAIN = {"strip": ["a", "b", "em", "i", "strong", "u"], "escape_asterisks": False, "escape_underscores": False}
_IMAGE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
_HEADLESS = re.compile(r"(?:^|\n\n)(?=\|.*\|(?:\n(?!\| ?-)|$))")  # Before a table without a header.
_SLIDE = re.compile(r"^<!-- Slide number: (\d+) -->$", re.MULTILINE)
_EMPTY_CELL = re.compile(r"(?<=\|) (?:NaN|Unnamed: \d+) (?=\|)")
_PARTS = re.compile(r"(?:word|ppt/slides|ppt/notesSlides|ppt/comments|ppt/diagrams|ppt/charts|xl)/.*\.xml$")
_NO_PARTS = re.compile(r"(?:glossary|theme|styles|numbering|settings|fontTable|people|Extended)")
_TEXTS = frozenset({"t", "text", "delText"})
_KINDS = {
    "del": "tracked deletions",
    "moveFrom": "tracked moves",
    "moveTo": "tracked moves",
    "customXml": "custom XML",
    "txbxContent": "text boxes",
    "txBody": "text boxes",
    "fldSimple": "fields",
    "bdo": "text of a set direction",
    "dir": "text of a set direction",
    "ruby": "ruby text",
    "oMath": "formulas",
}
_DROPPED = frozenset({"del", "moveFrom", "fldSimple", "bdo", "dir", "ruby"})  # Always, by mammoth.
_PART_KINDS = ("header", "footer", "footnote", "endnote", "comment", "diagram", "chart", "drawing")
_LINK = 2  # FPDF_ANNOT_LINK: holds no text.


def read_office(path: Path, max_chars: int, _: str | None = None) -> Iterator[Draft]:
    """Yield the paragraphs and table rows of a `.docx`, `.pptx` or `.xlsx`, under the headings above them.

    Those of slides have `slide` in their metadata. Text that is left out is named in a warning. Raises
    `MissingDependencyError` if markitdown is not installed.
    """
    converters = _converters(path)
    kind = path.suffix.lower()
    try:
        with zipfile.ZipFile(path) as archive:
            _check_size(archive, path.stat().st_size)
            texts = list(_texts(archive))
        text = _markdown(converters[kind], path.read_bytes())
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - of a damaged file the libraries raise whatever their codecs do
        yield wrong(path, "line 1", f"is not {kind}, or damaged ({error or type(error).__name__})")
        return
    if missing := _left_out(texts, text):
        told = ", ".join(f"{name} ({example[:40]!r})" for name, example in missing.items())
        logger.warning("%s: left out: %s", path, told)
    if kind == ".xlsx":
        text = _EMPTY_CELL.sub("  ", _EMPTY_CELL.sub("  ", text))
    before, *slides = _SLIDE.split(text)
    parts = [("", before), *zip(slides[::2], slides[1::2], strict=True)]
    drafts = (
        (f"slide {number}" if number else "page", {**fields, **({"slide": int(number)} if number else {})})
        for number, part in parts
        for _, fields in _facts_of(part, max_chars)
    )
    yield from _some(path, drafts)


def read_html(path: Path, max_chars: int, encoding: str | None = None) -> Iterator[Draft]:
    """Yield the paragraphs and table rows of a page, under the headings above them or the page's title.

    Raises `MissingDependencyError` if markitdown is not installed.
    """
    convert = _converters(path)[".html"]
    data = path.read_bytes()
    # The parser would search an unclosed comment to the end once for each comment that begins in it.
    unclosed = data.find(b"<!--", data.rfind(b"-->") + 1)
    try:
        from markitdown import StreamInfo

        with warnings.catch_warnings(action="ignore"):
            info = StreamInfo(extension=".html", charset=encoding)
            page = convert.convert(io.BytesIO(data if unclosed < 0 else data[:unclosed]), info, **_PLAIN)
    except Exception as error:  # noqa: BLE001 - as above
        yield wrong(path, "line 1", f"is not HTML, or damaged ({error or type(error).__name__})")
        return
    if "\0" in page.markdown:
        yield wrong(path, "line 1", "is not text in any known encoding")
        return
    title = " ".join((page.title or "").split())
    yield from _some(path, (("page", fields) for _, fields in _facts_of(page.markdown, max_chars, title)))


def read_pdf(path: Path, max_chars: int, _: str | None = None) -> Iterator[Draft]:
    """Yield the paragraphs and table rows of each page, with `page` in their metadata.

    A page with only images is an error. Comments and form fields are named in a warning. Raises
    `MissingDependencyError` if markitdown is not installed.
    """
    convert = _converters(path)[".pdf"]
    yield from _some(path, _of_pages(path, convert, max_chars))


def _of_pages(path: Path, convert: Any, max_chars: int) -> Iterator[Draft]:  # noqa: ANN401 - markitdown's own type
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(path) as document:
            title = document.get_metadata_value("Title").strip()
            pages = len(document)
            told = ["form fields"] * (document.get_formtype() != pypdfium2.raw.FORMTYPE_NONE)
        nested = _nested_pages(path)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        locked = "password" in str(error)
        reason = "is locked by a password; save it without one" if locked else f"is not PDF, or damaged ({error})"
        yield wrong(path, "page 1", reason)
        return
    for number in range(1, pages + 1):
        place = f"page {number}"
        if number in nested:
            yield wrong(path, place, f"is damaged (forms more than {_DEEPEST_FORMS} deep)")
            continue
        try:
            text, pictures, commented = _page(path, number, convert)
        except Exception as error:  # noqa: BLE001 - as above
            yield wrong(path, place, f"is damaged ({error or type(error).__name__})")
            continue
        told += [f"comments on page {number}"] * commented
        if pictures:
            yield wrong(path, place, "holds pictures and no text; run text recognition over it first")
        for _, found in _facts_of(text, max_chars, title):
            yield place, {**found, "page": number}
    if told:
        logger.warning("%s: left out: %s", path, ", ".join(told))


def _page(path: Path, number: int, convert: Any) -> tuple[str, bool, bool]:  # noqa: ANN401 - as above
    """Return a page's Markdown, and whether it has pictures and no text, and comments."""
    import pypdfium2

    with pypdfium2.PdfDocument(path) as document, pypdfium2.PdfDocument.new() as alone:
        page = document[number - 1]
        chars = page.get_textpage().count_chars()
        if chars > _MOST_CHARS:
            raise ValueError(f"{chars:,} characters; expected at most {_MOST_CHARS:,}")
        pictures = not chars and any(page.get_objects([pypdfium2.raw.FPDF_PAGEOBJ_IMAGE], max_depth=3))
        alone.import_pages(document, [number - 1])
        written = io.BytesIO()
        alone.save(written)
        text = _markdown(convert, written.getvalue()) if chars else ""
        return text, pictures and not text.strip(), _is_commented(page)


def _converters(path: Path) -> dict[str, Any]:
    with needing(f"{path}: reading {path.suffix} needs markitdown", "files"):
        from markitdown.converters import DocxConverter, HtmlConverter, PdfConverter, PptxConverter, XlsxConverter
    kinds = {".docx": DocxConverter, ".pptx": PptxConverter, ".xlsx": XlsxConverter, ".pdf": PdfConverter}
    return {suffix: kind() for suffix, kind in kinds.items()} | {".html": HtmlConverter()}


def _markdown(converter: Any, data: bytes) -> str:  # noqa: ANN401 - markitdown's own type
    import pandas as pd
    from markitdown import StreamInfo

    # pandas would round the numbers of a sheet.
    exact = pd.option_context("display.precision", 15)
    with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()), exact:
        return str(converter.convert(io.BytesIO(data), StreamInfo(), **_PLAIN).markdown)


def _facts_of(text: str, max_chars: int, title: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """Facts of Markdown that was made of another format, whose lines are not lines of the file."""
    text = _HEADLESS.sub("\n\n|  |\n| --- |\n", _IMAGE.sub(r"\1", text))
    lines = enumerate(text.splitlines(), start=1)
    for place, fields in markdown_drafts(lines, max_chars):
        if isinstance(fields, Mapping):  # None is an error, since no line is.
            yield place, {"text": fields["text"], "title": fields["title"] or title}


def _some(path: Path, drafts: Iterable[Draft]) -> Iterator[Draft]:
    empty = True
    for draft in drafts:
        empty = False
        yield draft
    if empty:
        yield wrong(path, "line 1", "holds no text")


def _check_size(archive: zipfile.ZipFile, size: int) -> None:
    """Raise `ValueError` for a file that would fill the memory."""
    members = archive.infolist()
    unpacked = sum(member.file_size for member in members)
    if unpacked > max(_LARGEST, _TIMES * size):
        raise ValueError(f"{size:,} bytes that unpack to {unpacked:,}")
    for member in members:
        # The archive may state false sizes, so unpack it in small pieces to check them.
        with archive.open(member) as opened:
            while opened.read(1 << 20):
                pass


def _texts(archive: zipfile.ZipFile) -> Iterator[tuple[str, str, bool]]:
    """Yield each text in the parts of an Office file: its kind, itself, and whether it is surely left out."""
    from defusedxml.ElementTree import fromstring

    for name in filter(_PARTS.match, archive.namelist()):
        if _NO_PARTS.search(name):
            continue
        by_part = next((f"{kind}s" for kind in _PART_KINDS if kind in name.lower()), "")
        stack = [(fromstring(archive.read(name)), "", False, 0)]
        while stack:
            element, kind, dropped, depth = stack.pop()
            if depth > _DEEPEST:
                raise ValueError(f"more than {_DEEPEST:,} elements deep")
            tag = str(element.tag).rpartition("}")[2]
            kind, dropped = _KINDS.get(tag, kind), dropped or tag in _DROPPED
            if tag in _TEXTS and element.text:
                yield by_part or kind or "other text", element.text.strip(), dropped
            stack.extend((child, kind, dropped, depth + 1) for child in reversed(element))


def _left_out(texts: Iterable[tuple[str, str, bool]], markdown: str) -> dict[str, str]:
    """Return each kind of text that the Markdown has not, with the first example."""
    output, at = _letters(markdown), 0
    missing: dict[str, str] = {}
    for kind, text, dropped in texts:
        letters = _letters(text)
        found = output.find(letters, at)  # Mostly just behind the text before.
        at = max(found, at)
        if letters and (dropped or (found < 0 and letters not in output)):
            missing.setdefault(kind, text)
    return missing


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def _nested_pages(path: Path) -> set[int]:
    """Return the numbers of the pages with forms so deep in each other that drawing them may never end."""
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


def _is_commented(page: Any) -> bool:  # noqa: ANN401 - pypdfium2's own type
    from pypdfium2 import raw

    for index in range(raw.FPDFPage_GetAnnotCount(page)):
        annotation = raw.FPDFPage_GetAnnot(page, index)
        kind = raw.FPDFAnnot_GetSubtype(annotation)
        raw.FPDFPage_CloseAnnot(annotation)
        if kind not in {_LINK, raw.FPDF_ANNOT_WIDGET, raw.FPDF_ANNOT_POPUP}:
            return True
    return False
