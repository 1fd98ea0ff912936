"""What markitdown leaves out of a document, for one warning per file.

Of an Office file, each text in its XML that its Markdown does not hold; of a PDF, comments and form fields.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

_DEEPEST = 500  # Elements of XML in each other; converters descend by recursion.
_PARTS = re.compile(r"(?:word|ppt/slides|ppt/notesSlides|ppt/comments|ppt/diagrams|ppt/charts|xl)/.*\.xml$")
_NO_PARTS = re.compile(r"glossary|theme|styles|numbering|settings|fontTable|people|Extended")
_PART_KINDS = ("header", "footer", "footnote", "endnote", "comment", "diagram", "chart", "drawing")
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


def texts_of(archive: zipfile.ZipFile) -> Iterator[tuple[str, str, bool]]:
    """Yield each text of an Office file: its kind, itself, and whether it is surely left out.

    Raises `ValueError` for XML that is nested too deep to convert.
    """
    from defusedxml.ElementTree import iterparse

    for name in archive.namelist():
        if not name.endswith(".xml"):
            continue
        is_part = _PARTS.match(name) and not _NO_PARTS.search(name)
        by_part = next((f"{kind}s" for kind in _PART_KINDS if kind in name.lower()), "")
        above = [("", False)]  # The kind of the text in each open element, and whether that is left out.
        for event, element in iterparse(archive.open(name), ("start", "end")):
            tag = str(element.tag).rpartition("}")[2]
            if event == "start":
                if len(above) > _DEEPEST:
                    raise ValueError(f"more than {_DEEPEST} elements deep")
                kind, dropped = above[-1]
                above.append((_KINDS.get(tag, kind), dropped or tag in _DROPPED))
                continue
            kind, dropped = above.pop()
            # Charts have labels among their values.
            if is_part and (tag in _TEXTS or (tag == "v" and by_part == "charts")) and element.text:
                yield by_part or kind or "other text", element.text.strip(), dropped


def left_out_of_office(texts: Iterable[tuple[str, str, bool]], markdown: str) -> list[str]:
    """Return each kind of text that the Markdown has not, with its first example."""
    output, at = _letters(markdown), 0
    missing = dict[str, str]()
    for kind, text, dropped in texts:
        letters = _letters(text)
        found = output.find(letters, at)  # Mostly just behind the text before.
        at = max(found, at)
        if letters and (dropped or (found < 0 and letters not in output)):
            missing.setdefault(kind, text)
    return [f"{kind} ({example[:40]!r})" for kind, example in missing.items()]


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def left_out_of_pdf(path: Path) -> list[str]:
    """Return "form fields" and "comments on page 3" of an intact PDF."""
    from pypdfium2 import PdfDocument, raw

    with PdfDocument(path) as document:
        told = ["form fields"] * (document.get_formtype() != raw.FORMTYPE_NONE)
        for number, page in enumerate(document, start=1):
            kinds = set()
            for index in range(raw.FPDFPage_GetAnnotCount(page)):
                annotation = raw.FPDFPage_GetAnnot(page, index)
                kinds.add(raw.FPDFAnnot_GetSubtype(annotation))
                raw.FPDFPage_CloseAnnot(annotation)
            if kinds - {raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_WIDGET, raw.FPDF_ANNOT_POPUP}:
                told.append(f"comments on page {number}")
    return told
