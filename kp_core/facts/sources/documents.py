"""Readers of PDF, HTML and Word: a fact per paragraph."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import IO, Any

from kp_core.bundled import needing
from kp_core.facts.sources.drafts import Draft, Headings, below, cut, title_of, wrong
from kp_core.facts.sources.tables import page_tables, row_texts

__all__ = ["read_docx", "read_html", "read_pdf"]

_DEEPEST = 1000  # Reading time grows with the square of the depth.
_LARGEST, _TIMES = (
    100_000_000,
    20,
)  # A .docx may unpack to this many bytes, or this many times its own size; text compresses to a tenth.
_MOST_SPANNED, _MOST_PLACES = 100, 1_000_000  # Of a cell in HTML, and of all cells of a table.
_WIDEST = 1000  # Columns of a cell; python-docx returns the cell once per column.
_TAG = re.compile(rb"<(/?)([a-zA-Z][a-zA-Z0-9-]*)")
_VOID = frozenset(b"area base br col embed hr img input link meta source track wbr".split())
_AFTER_BLANK = re.compile(r"\S [-+$€£]?\d")
_BLANK_LINE = re.compile(r"\n\s*\n")
_HEADING = re.compile(r"(?:h|Heading )([1-9])$")
# Tags that begin and end a paragraph; text continues across all others.
_BLOCK_NAMES = (
    "address article aside blockquote body caption dd details div dl dt fieldset figcaption figure footer form "
    "header hr html li main ol p pre section summary table tbody tfoot thead tr ul"
)
_HEADINGS = [f"h{depth}" for depth in range(1, 7)]
_BLOCKS = frozenset([*_BLOCK_NAMES.split(), *_HEADINGS])
_UNSEEN = ("script", "style", "template", "noscript", "title", "head", "nav")


def read_pdf(path: Path, max_chars: int, _: str | None = None) -> Iterator[Draft]:
    """Yield the paragraphs of each page, with `page` in their metadata; a page with only images is an error.

    Raises `MissingDependencyError` if pypdf is not installed.
    """
    with needing(f"{path}: reading PDF needs pypdf", "files"):
        from pypdf import PdfReader
    try:
        reader = PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            yield wrong(path, "page 1", "is locked by a password; save it without one")
            return
        title = str((reader.metadata and reader.metadata.title) or "")
        pages = len(reader.pages)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - of a damaged file the libraries raise whatever their codecs do
        yield wrong(path, "page 1", f"is not PDF, or damaged ({error or type(error).__name__})")
        return
    for number in range(1, pages + 1):
        place = f"page {number}"
        try:
            page = reader.pages[number - 1]
            text = page.extract_text()
            pictures = bool(text.strip()) or len(page.images)
            may_have_rows = sum(bool(_AFTER_BLANK.search(line)) for line in text.splitlines()) > 1
            # Only this slower way keeps columns apart.
            apart = page.extract_text(extraction_mode="layout") if may_have_rows else ""
        except Exception as error:  # noqa: BLE001 - as above
            yield wrong(path, place, f"is damaged ({error or type(error).__name__})")
            continue
        if not text.strip() and pictures:
            yield wrong(path, place, "holds pictures and no text; run text recognition over it first")
        tables = list(page_tables(apart))
        in_tables = {" ".join(row) for _, rows in tables for row in rows}.union(caption for caption, _ in tables)
        lines = (" ".join(line.split()) for line in text.splitlines())
        paragraphs = _BLANK_LINE.split("\n".join("" if line in in_tables else line for line in lines))
        for paragraph in (*paragraphs, *(row for caption, rows in tables for row in row_texts(rows, caption) or ())):
            for piece in cut(" ".join(paragraph.split()), max_chars):
                yield place, {"text": piece, "title": title, "page": number}


def read_html(path: Path, max_chars: int, encoding: str | None = None) -> Iterator[Draft]:
    """Yield paragraphs, list items and table rows with their line, under the headings above or the page's title.

    Raises `MissingDependencyError` if Beautiful Soup is not installed.
    """
    with needing(f"{path}: reading HTML needs beautifulsoup4", "files"):
        from bs4 import BeautifulSoup
    data = path.read_bytes()
    # The parser would search an unclosed comment to the end once for each comment that begins in it.
    unclosed = data.find(b"<!--", data.rfind(b"-->") + 1)
    data = data if unclosed < 0 else data[:unclosed]
    if data.count(b"<") > _DEEPEST and _depth(data) > _DEEPEST:
        yield wrong(path, "line 1", f"is nested more than {_DEEPEST:,} elements deep")
        return
    soup = BeautifulSoup(data, "html.parser", from_encoding=encoding)
    if "\0" in soup.get_text():
        yield wrong(path, "line 1", "is not text in any known encoding")
        return
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    for unseen in soup(_UNSEEN):
        unseen.decompose()
    yield from _sections(path, "line", _blocks(soup), title, max_chars)


def _depth(data: bytes) -> int:
    """Return the largest nesting depth, if every element continues until its closing tag."""
    depth = deepest = 0
    for closing, name in _TAG.findall(data):
        if closing:
            depth = max(0, depth - 1)
        elif name.lower() not in _VOID:
            deepest = max(deepest, depth := depth + 1)
    return deepest


def read_docx(path: Path, max_chars: int, _: str | None = None) -> Iterator[Draft]:
    """Yield paragraphs and table rows with their number, under the headings above or the document's title.

    Raises `MissingDependencyError` if python-docx is not installed.
    """
    with needing(f"{path}: reading Word needs python-docx", "files"):
        import docx
        from docx.table import Table
    try:
        document = _opened(path, docx.Document)
        title = document.core_properties.title or ""
        # One at a time, so that the caller may stop early.
        above = chain([None], document.iter_inner_content())
        blocks = (
            entry
            for before, item in zip(above, document.iter_inner_content(), strict=False)
            for entry in (
                _rows(item, _caption(before))
                if isinstance(item, Table)
                else [(getattr(item.style, "name", ""), item.text)]
            )
        )
        numbered = ((number, *block) for number, block in enumerate(blocks, start=1))
        yield from _sections(path, "paragraph", numbered, title, max_chars)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - as for PDF
        yield wrong(path, "paragraph 1", f"is not .docx, or damaged ({error or type(error).__name__})")


def _opened(path: Path, read: Callable[[IO[bytes]], Any]) -> Any:  # noqa: ANN401 - the library's own type
    """Open the document; raises `ValueError` for one that would fill the memory."""
    with path.open("rb") as file:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size, unpacked = path.stat().st_size, sum(member.file_size for member in members)
            if unpacked > max(_LARGEST, _TIMES * size):
                raise ValueError(f"{size:,} bytes that unpack to {unpacked:,}")
            for member in members:
                # The archive may state false sizes, so unpack it in small pieces to check them.
                with archive.open(member) as opened:
                    while opened.read(1 << 20):
                        pass
        document = read(file)
    if any(int(span) > _WIDEST for span in document.element.xpath("//w:gridSpan/@w:val")):
        raise ValueError(f"a cell of more than {_WIDEST:,} columns")
    return document


def _caption(before: Any) -> str:  # noqa: ANN401 - the library's own type
    return before.text.strip() if getattr(getattr(before, "style", None), "name", "") == "Caption" else ""


def _rows(table: Any, caption: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - the library's own type
    rows = []
    for row in table.rows:
        cells = row.cells  # python-docx returns a wide cell once per column.
        rows.append(
            ["" if cell is left else cell.text.strip() for left, cell in zip((None, *cells), cells, strict=False)]
        )
    is_marked = bool(table._tbl.xpath("./w:tr[1]/w:trPr/w:tblHeader"))  # noqa: SLF001 - read nowhere else
    texts = row_texts(rows, caption, is_marked=is_marked)
    yield from (("", text) for text in texts or (" ".join(filter(None, row)) for row in rows))


def _sections(
    path: Path, unit: str, blocks: Iterable[tuple[int, str, str]], title: str, max_chars: int
) -> Iterator[Draft]:
    """Turn blocks (number, kind, text) into drafts; a kind may be a heading."""
    headings: Headings = ()
    has_text = False
    for number, kind, text in blocks:
        if heading := _HEADING.match(kind):
            headings = below(headings, int(heading[1]), text)
            continue
        for piece in cut(text.strip(), max_chars):
            has_text = True
            yield f"{unit} {number}", {"text": piece, "title": title_of(headings) or title, unit: number}
    if not has_text:
        yield wrong(path, f"{unit} 1", "holds no text")


def _blocks(soup: Any) -> Iterator[tuple[int, str, str]]:  # noqa: ANN401 - the library's own type
    """Yield each run of text between blocks: the line of the block around it, the block's tag, the text."""
    from bs4.element import NavigableString, PreformattedString

    for tag in soup(["br", "td", "th", *_BLOCKS]):
        tag.append("\n" if tag.name == "br" else " ")  # It ends a line, a cell, or a block, which may be empty.
    for table in soup("table"):
        _name_columns(table)
    nodes = (node for node in soup.descendants if isinstance(node, NavigableString))
    texts = (node for node in nodes if not isinstance(node, PreformattedString))  # Such as comments.
    # Tags are equal if their contents are, so the runs are told apart by the identity of the block.
    for _, run in groupby(((text, _block_of(text)) for text in texts), lambda pair: id(pair[1])):
        pieces = list(run)
        block = pieces[0][1]
        text = "".join(piece for piece, _ in pieces)
        if text.strip():
            yield block.sourceline or 1, block.name, text.strip() if block.name == "pre" else " ".join(text.split())


def _name_columns(table: Any) -> None:  # noqa: ANN401 - as above
    """Give each row of a table the names of its columns and the caption; leave tables without a header alone."""
    if table.find(["table", "ul", "ol", "pre", *_HEADINGS]):
        return
    lines = table("tr")
    heads = [line for line in lines if line.find_parent("thead")] or lines[:1]
    places = sum(_span(cell, "colspan") * _span(cell, "rowspan") for cell in table(["td", "th"]))
    if len(heads) == len(lines) or places > _MOST_PLACES:
        return
    is_marked = bool(table.thead) or not heads[0].find("td")
    rows = _grid(lines, len(heads) if is_marked else 0)
    names = [" ".join(dict.fromkeys(filter(None, column))) for column in zip_longest(*rows[: len(heads)], fillvalue="")]
    caption = " ".join(table.caption.get_text().split()) if table.caption else ""
    texts = row_texts([names, *rows[len(heads) :]], caption, is_marked=is_marked)
    for line, text in zip(lines[len(heads) :], texts[1:] if texts else (), strict=False):
        line.clear()
        line.append(f"{text} ")
    for told in (*heads, *table("caption")) if texts else ():
        told.decompose()


def _grid(lines: Sequence[Any], heads: int) -> list[list[str]]:
    """Return the cells of a table's rows by column.

    A cell of several columns is in the first of them, but in the first `heads` rows in all.
    """
    rows: list[dict[int, str]] = [{} for _ in lines]
    for number, line in enumerate(lines):
        column = 0
        for cell in line(["td", "th"]):
            while column in rows[number]:  # A cell of a row above reaches down here.
                column += 1
            text, width = " ".join(cell.get_text().split()), _span(cell, "colspan")
            for row in rows[number : number + _span(cell, "rowspan")]:
                row |= {column + at: text if not at or number < heads else "" for at in range(width)}
            column += width
    return [[row.get(column, "") for column in range(max(row, default=-1) + 1)] for row in rows]


def _span(cell: Any, name: str) -> int:  # noqa: ANN401 - as above
    said = str(cell.get(name, "1"))
    return min(max(int(said), 1), _MOST_SPANNED) if said.isdecimal() else 1


def _block_of(text: Any) -> Any:  # noqa: ANN401 - as above
    """The innermost block around a text; the document if there is none."""
    parents = list(text.parents)
    return next((tag for tag in parents if tag.name in _BLOCKS), parents[-1])
