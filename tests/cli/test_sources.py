"""Knowledge from files: what becomes a fact, and how what does not is reported."""

from __future__ import annotations

import io
import itertools
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docx
import openpyxl
import pptx
import pytest
from docx.oxml import OxmlElement
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject, NumberObject

from kp_cli.sources import read_facts
from kp_core.banks import Fact
from kp_core.errors import FactError, MissingDependencyError


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_json_lines(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        '\ufeff{"text": "a", "title": "T", "year": 1999}\n\n'
        '{"text": "b", "id": "x", "source": "s", "metadata": {"p": 1}}',
    )
    assert list(read_facts(path, namespace="n")) == [
        Fact("a", title="T", source=str(path), metadata={"year": 1999}, namespace="n"),
        Fact("b", id="x", source="s", metadata={"p": 1}, namespace="n"),
    ]


def test_csv(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,title,lang\r\n"a, ""b""\nc",T,en\r\nd,,\r\n')
    assert list(read_facts(path)) == [
        Fact('a, "b"\nc', title="T", source=str(path), metadata={"lang": "en"}),
        Fact("d", source=str(path)),
    ]


def test_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "One.\nStill one.\n\n\n# Two.\n")
    assert [(fact.text, fact.metadata["line"]) for fact in read_facts(path)] == [("One.\nStill one.", 1), ("# Two.", 5)]


def test_markdown(tmp_path: Path) -> None:
    content = "Before.\n# Guide #\n## Install\nRun it.\n```sh\n# no heading\n\nkp\n```\n\n# Other\nLast."
    path = written(tmp_path / "a.md", content)
    assert [(fact.text, fact.title, fact.metadata["line"]) for fact in read_facts(path)] == [
        ("Before.", "", 1),
        ("Run it.\n```sh\n# no heading\n\nkp\n```", "Guide > Install", 4),
        ("Last.", "Other", 12),
    ]


@pytest.mark.parametrize("limit", [7, 20, 50])
def test_long_paragraphs_are_cut_and_nothing_is_lost(tmp_path: Path, limit: int) -> None:
    text = "A short one. Then a somewhat longer sentence, of many words! Andonewithoutanyspacesatall?"
    parts = [fact.text for fact in read_facts(written(tmp_path / "a.txt", text), max_chars=limit)]
    assert all(len(part) <= limit for part in parts)
    assert "".join(parts).replace(" ", "") == text.replace(" ", "")
    assert limit < 50 or parts[0] == "A short one."


def test_folders_are_read_in_order_and_hidden_files_are_not(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/.hidden.txt", ".git/x.txt"):
        written(tmp_path / name, name)
    assert [fact.text for fact in read_facts(tmp_path)] == ["a/z.md", "b.txt"]


BAD = {
    "a.jsonl": ('{"text": "a"}\n{"text": \n', "line 2: is not JSON"),
    "b.jsonl": ("[1]\n", "line 1: got list; expected an object"),
    "c.jsonl": ('{"title": "a"}\n', "line 1: got the fields ['title'], and no `text`"),
    "d.jsonl": ('{"text": "a", "metadata": 3}\n', "line 1: got 3 as `metadata`"),
    "e.jsonl": ('{"text": "a", "far": Infinity}\n', "line 1: Got inf as metadata 'far'"),
    "e2.jsonl": ('{"text": ["a"]}\n', "line 1: Got ['a'] (list) as text"),
    "f.jsonl": (b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: is not UTF-8"),
    "g.csv": ("text,title\na\n", "line 2: got 1 cells; expected 2"),
    "h.csv": ("body\na\n", "line 1: got the columns ['body']; expected one called `text`, or two names"),
    "h2.csv": ("billing,8,800\nsales,3,75\n", "line 1: got the columns ['billing', '8', '800']; expected one called"),
    "i.csv": ('text\n"a" b\n', "line 2: is not CSV"),
    "j.csv": (b"text\na\n\xff\n", "line 3: is not UTF-8"),
    "k.txt": (b"a\n\n\xe9\n", "line 3: is not UTF-8 (at character 1); give its --encoding"),
    "l.doc": ("", "got a file of type '.doc'; expected one of .jsonl, .csv, .txt, .md, .docx, .pptx, .xlsx, .pdf,"),
    "l.docx": ("", "line 1: is not .docx, or damaged"),
    "m.pdf": ("", "page 1: is not PDF, or damaged"),
    "n.pdf": (b"%PDF-1.4\n1 0 obj <<", "page 1: is not PDF, or damaged"),
    "o.html": ("<body><script>x()</script></body>", "line 1: holds no text"),
    "p.htm": (b"\x7fELF\x02\x01\x00\x00<p>\x81\xff\x8f\x00", "line 1: is not text in any known encoding"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path: Path, name: str) -> None:
    content, words = BAD[name]
    path = written(tmp_path / name, content)
    with pytest.raises(FactError) as raised:
        list(read_facts(path))
    assert str(raised.value).startswith(str(path))
    assert words in str(raised.value)
    skipped: list[FactError] = []
    good = list(read_facts([path, written(tmp_path / "good.txt", "good")], on_error="skip", skipped=skipped.append))
    assert good[-1].text == "good"
    [error] = skipped
    assert str(raised.value) == f"{str(error).rstrip('.')}; `--on-error skip` leaves it out."


@pytest.mark.parametrize(
    ("name", "content", "places", "texts"),
    [
        ("a.txt", b"At seven,\nnot in \xe9t\xe9,\nfrom the pier.\n\nOther.\n", ["line 2"], [("Other.", "")]),
        ("a.md", b"# A\n```\nx\n\n\xe9\n```\n# B\nb\n## \xc4\nc\n", ["line 5", "line 9"], [("b", "B"), ("c", "B")]),
        ("a.md", b"Table:\na|b\n-|-\n1|2\n3|\xe9\n5|6\n", ["line 5"], [("a: 1; b: 2", ""), ("a: 5; b: 6", "")]),
        ("a.md", b"a|\xe9\n-|-\n1|2\n\nb\n", ["line 1"], [("b", "")]),
        ("a.csv", b'id,text\n1,"good\nbad \xe9,\n\xe9"\n2,"two\nlines"\n', ["line 3"], [("two\nlines", "")]),
        ("a.csv", b"Name,Gr\xf6\xdfe,Ort\nAlpha,klein,Veyl\nBeta,viel,Sorrel\n", ["line 1"], []),
        ("a.csv", b'"text" b,title\ntext,title\na,b\n', ["line 1"], []),
    ],
    ids=["text", "markdown", "table", "names", "cell", "header", "quotes"],
)
def test_what_has_an_unreadable_line_is_left_out_as_a_whole(
    tmp_path: Path, name: str, content: bytes, places: list[str], texts: list[tuple[str, str]]
) -> None:
    path, skipped = written(tmp_path / name, content), list[FactError]()
    found = [(fact.text, fact.title) for fact in read_facts(path, on_error="skip", skipped=skipped.append)]
    expected = [(f"Table. {text}" if text.startswith("a: ") else text, title) for text, title in texts]
    assert (found, [str(error).split(", ")[1].split(":")[0] for error in skipped]) == (expected, places)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FactError, match="There is no file"):
        list(read_facts(tmp_path / "nothing.txt"))
    with pytest.raises(FactError, match="on_error='ignore'"):
        read_facts(tmp_path, on_error="ignore")  # type: ignore[arg-type]


def test_facts_come_before_the_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "a"}\n' + "not json\n")
    assert [fact.text for fact in itertools.islice(read_facts(path), 1)] == ["a"]


def pdf(*pages: str, title: str = "", password: str = "", picture: bool = False) -> bytes:
    """A PDF with a page per text, a line of it per line; or, without any text, with a picture of one pixel."""
    writer = PdfWriter()
    writer.add_metadata({"/Title": title})
    font = DictionaryObject({NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1")})
    font[NameObject("/BaseFont")] = NameObject("/Helvetica")
    for text in pages:
        page = writer.add_blank_page(600, 800)
        content = DecodedStreamObject()
        lines = "".join(f"({line}) Tj 0 -24 Td " for line in text.split("\n"))
        content.set_data(f"BT /F1 12 Tf 50 700 Td {lines}ET".encode())
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        page[NameObject("/Contents")] = writer._add_object(content)
    if picture:
        pixel: Any = DecodedStreamObject()
        pixel.set_data(b"\x00")
        for key, value in (("/Type", "/XObject"), ("/Subtype", "/Image"), ("/ColorSpace", "/DeviceGray")):
            pixel[NameObject(key)] = NameObject(value)
        for key, value in (("/Width", 1), ("/Height", 1), ("/BitsPerComponent", 8)):
            pixel[NameObject(key)] = NumberObject(value)
        page = writer.add_blank_page(600, 800)
        images = DictionaryObject({NameObject("/Im0"): writer._add_object(pixel)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/XObject"): images})
        drawn = DecodedStreamObject()
        drawn.set_data(b"q 100 0 0 100 50 50 cm /Im0 Do Q")
        page[NameObject("/Contents")] = writer._add_object(drawn)
    if password:
        writer.encrypt(password)
    data = io.BytesIO()
    writer.write(data)
    return data.getvalue()


def test_pdf(tmp_path: Path) -> None:
    path = written(tmp_path / "a.pdf", pdf("The mill has four sails.", "", "A ferry leaves at six.", title="Guide"))
    assert list(read_facts(path)) == [
        Fact("The mill has four sails.", title="Guide", source=str(path), metadata={"page": 1}),
        Fact("A ferry leaves at six.", title="Guide", source=str(path), metadata={"page": 3}),
    ]
    path.write_bytes(pdf("The mill has four sails.", title="untitled"))
    assert [fact.title for fact in read_facts(path)] == [""]


TEAMS = [("Team", "People", "Seats"), ("billing", "8", "800"), ("support desk", "", "950")]
ROWS = ["Team: billing; People: 8; Seats: 800", "Team: support desk; Seats: 950"]


def bare_document() -> Any:
    """A Word document without python-docx's styles and lists, which take most of the time of reading a short one."""
    document: Any = docx.Document()
    document.styles.element.clear()
    document.part.numbering_part.element.clear()
    return document


def word_table(path: Path, rows: list[tuple[str, ...]], caption: str = "", *, marked: bool = False) -> Path:
    document = docx.Document()
    document.add_paragraph("Before.")
    if caption:
        document.add_paragraph(caption, style="Caption")
    table = document.add_table(0, len(rows[0]))
    for row in rows:
        for cell, text in zip(table.add_row().cells, row, strict=True):
            cell.text = text
    if marked:
        table.rows[0]._tr.get_or_add_trPr().append(OxmlElement("w:tblHeader"))
    document.save(str(path))
    return path


def html_table(rows: list[tuple[str, ...]], caption: str = "", cell: str = "td") -> str:
    first, *rest = (
        "".join(f"<{kind}>{text}</{kind}>" for text in row)
        for kind, row in zip([cell, *["td"] * len(rows)], rows, strict=False)
    )
    about = f"<caption>{caption}</caption>" if caption else ""
    return f"<p>Before.</p><table>{about}<tr>{first}</tr>" + "".join(f"<tr>{row}</tr>" for row in rest) + "</table>"


def pdf_table(rows: list[tuple[str, ...]], *above: str) -> bytes:
    """A page with lines, and below them a table whose cells are placed one by one."""
    cells = [(50, 740 - 20 * at, line) for at, line in enumerate(above)]
    top = 700 - 20 * len(above)
    cells += [(50 + 150 * at, top - 20 * y, text) for y, row in enumerate(rows) for at, text in enumerate(row) if text]
    return pdf(*["".join(f") Tj ET BT /F1 12 Tf {x} {y} Td ({text}" for x, y, text in cells)])


@pytest.mark.parametrize("caption", ["", "Table 1: Staff in May."])
@pytest.mark.parametrize("kind", ["csv", "html", "th", "md", "docx", "marked", "pdf"])
def test_a_row_says_what_its_columns_and_its_table_are(tmp_path: Path, kind: str, caption: str) -> None:
    said = [caption] if caption else []
    rows = [*TEAMS[:2], ("support desk", "12", "950")] if kind == "pdf" else TEAMS
    lines = ["| " + " | ".join(row) + " |" for row in TEAMS]
    files: dict[str, Callable[[], Path]] = {
        "csv": lambda: written(tmp_path / "a.csv", "".join(",".join(row) + "\n" for row in TEAMS)),
        "html": lambda: written(tmp_path / "a.html", html_table(TEAMS, caption)),
        "th": lambda: written(tmp_path / "a.html", html_table(TEAMS, caption, "th")),
        "md": lambda: written(tmp_path / "a.md", "\n".join(["Before.", "", *said, lines[0], "|:-|-|-:|", *lines[1:]])),
        "docx": lambda: word_table(tmp_path / "a.docx", TEAMS, caption),
        "marked": lambda: word_table(tmp_path / "a.docx", TEAMS, caption, marked=True),
        "pdf": lambda: written(tmp_path / "a.pdf", pdf_table(rows, "Before.", *said)),
    }
    found = [fact.text for fact in read_facts(files[kind]())]
    expected = ROWS if kind != "pdf" else [ROWS[0], "Team: support desk; People: 12; Seats: 950"]
    if kind == "csv":
        assert found == expected
        return
    if kind == "pdf":  # Lines have no blank ones between them there.
        assert "Before." in found[0]
        assert [row for row in expected if any(row in text for text in found)] == expected
        return
    assert found[0] == "Before."
    assert found[-2:] == [f"{caption.rstrip('.')}. {row}" if caption and kind == "md" else row for row in expected]
    assert found[1:-2] == [caption] * (bool(caption) and kind != "md")


@pytest.mark.parametrize("kind", ["html", "docx"])
@pytest.mark.parametrize(
    "rows",
    [
        [("Name", "Orla Venn"), ("Age", "40"), ("Place", "Veyl")],
        [("Sails", "4"), ("Doors", "2")],
        [("one", "two", "three")],
    ],
    ids=["pairs", "numbers", "one row"],
)
def test_a_table_without_a_header_is_read_row_by_row(tmp_path: Path, kind: str, rows: list[tuple[str, ...]]) -> None:
    path = word_table(tmp_path / "a.docx", rows) if kind == "docx" else written(tmp_path / "a.html", html_table(rows))
    assert [fact.text for fact in read_facts(path)] == ["Before.", *map(" ".join, rows)]


def test_a_csv_of_any_columns_keeps_them_as_metadata(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "id,Team,Seats\n1,billing,800\n")
    [fact] = read_facts(path)
    assert (fact.text, dict(fact.metadata)) == (
        "id: 1; Team: billing; Seats: 800",
        {"id": "1", "Team": "billing", "Seats": "800"},
    )
    assert fact.id != "1"  # Rows of other files may have the same number.


def test_tables_in_markdown_keep_their_lines_and_pipes(tmp_path: Path) -> None:
    content = (
        "# Staff\n\nTwo lines\nabove.\nTeam | Seats\n--- | ---\na\\|b | 8\n\n```\na | b\n--|--\n1 | 2\n```\n\na | b\n"
    )
    facts = read_facts(written(tmp_path / "a.md", content))
    assert [(fact.text, fact.title, fact.metadata["line"]) for fact in facts] == [
        ("Two lines\nabove.", "Staff", 3),
        ("Team: a|b; Seats: 8", "Staff", 7),
        ("```\na | b\n--|--\n1 | 2\n```", "Staff", 9),
        ("a | b", "Staff", 15),
    ]


def test_pages_without_text_and_locked_files_are_said(tmp_path: Path) -> None:
    scan = written(tmp_path / "scan.pdf", pdf("The first page.", picture=True))
    with pytest.raises(FactError, match=r"scan\.pdf, page 2: holds pictures and no text"):
        list(read_facts(scan))
    assert [fact.text for fact in read_facts(scan, on_error="skip")] == ["The first page."]
    locked = written(tmp_path / "locked.pdf", pdf("Secret.", password="open"))  # noqa: S106 - of nothing
    with pytest.raises(FactError, match=r"locked\.pdf, page 1: is locked by a password"):
        list(read_facts(locked))


def test_html(tmp_path: Path) -> None:
    content = """<html><head><title>The
      Guide</title><style>p {}</style></head><body>
    Before <b>all</b>.<h1>Install</h1><p>Run kp_build &amp; <a href="x.html">wait</a>.</p><!-- never -->
    <h2>Parts</h2><p><img src="data:image/png;base64,AAAA" alt="A cog"></p>
    <table><tr><th>Sail</th><td>4</td></tr></table><script>x()</script><h1>Alone</h1></body></html>"""
    path = written(tmp_path / "a.html", content)
    assert [(fact.text, fact.title) for fact in read_facts(path)] == [
        ("Before all.", "The Guide"),
        ("Run kp_build & wait.", "Install"),
        ("A cog", "Install > Parts"),
        ("Sail 4", "Install > Parts"),
        ("Alone", "The Guide"),
    ]


def test_word(tmp_path: Path) -> None:
    document = docx.Document()
    document.add_paragraph("Before all.")
    document.add_heading("Install", 1)
    document.add_heading("Parts", 2)
    document.add_paragraph("One cog.")
    document.add_heading("Use", 1)
    document.add_paragraph("Last.")
    path = tmp_path / "a.docx"
    document.save(str(path))
    assert [(fact.text, fact.title) for fact in read_facts(path)] == [
        ("Before all.", ""),
        ("One cog.", "Install > Parts"),
        ("Last.", "Use"),
    ]
    whole, at = path.read_bytes(), zipfile.ZipFile(path).getinfo("word/document.xml").header_offset + 30 + 17
    broken = written(tmp_path / "broken.docx", whole[:at] + b"\xff" * 20 + whole[at + 20 :])
    with pytest.raises(FactError, match=r"broken\.docx, line 1: is not \.docx, or damaged"):
        list(read_facts(broken))
    docx.Document().save(str(tmp_path / "empty.docx"))
    with pytest.raises(FactError, match=r"empty\.docx, line 1: holds no text"):
        list(read_facts(tmp_path / "empty.docx"))


def test_slides_and_sheets(tmp_path: Path) -> None:
    slides, book = pptx.Presentation(), openpyxl.Workbook()
    for title in ("Mill", "Ferry"):
        slide = slides.slides.add_slide(slides.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, f"About the {title}."
    slides.save(str(tmp_path / "a.pptx"))
    found = [(fact.text, fact.title, fact.metadata["slide"]) for fact in read_facts(tmp_path / "a.pptx")]
    assert found == [("About the Mill.", "Mill", 1), ("About the Ferry.", "Ferry", 2)]
    sheet: Any = book.active
    for row in (("Team", "Share", "Note"), ("billing", 0.123456789, "x" * 80), ("sales", None, "open")):
        sheet.append(row)
    book.save(tmp_path / "a.xlsx")
    assert [fact.text for fact in read_facts(tmp_path / "a.xlsx")] == [
        f"Team: billing; Share: 0.123456789; Note: {'x' * 80}",
        "Team: sales; Note: open",
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["a.md", "a.txt", "a.csv", "a.jsonl"])
def test_lines_end_as_on_any_machine(tmp_path: Path, name: str, end: str) -> None:
    lines = {
        "a.md": ["# Mill", "One.", "", "Two."],
        "a.txt": ["One.", "", "Two."],
        "a.csv": ["text", "One.", "Two."],
        "a.jsonl": ['{"text": "One."}', '{"text": "Two."}'],
    }[name]
    assert [fact.text for fact in read_facts(written(tmp_path / name, end.join(lines)))] == ["One.", "Two."]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("# Closed on Mondays", [("Closed on Mondays", "")]),
        ("# A\n## B\n## C\nText.\n# D\n", [("B", "A"), ("Text.", "A > C"), ("D", "")]),
        ("# A\n## B\n# C\n", [("B", "A"), ("C", "")]),
        ("# A\n\n```\nx\n```\n## B", [("```\nx\n```", "A"), ("B", "A")]),
        ("# ##\nText.\n", [("Text.", "")]),
        ("# ##\n", []),
    ],
)
def test_a_heading_with_nothing_below_is_a_fact(tmp_path: Path, content: str, expected: list[tuple[str, str]]) -> None:
    found = read_facts(written(tmp_path / "a.md", content))
    assert [(fact.text, fact.title) for fact in found] == expected


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"<w:body>", b"<w:body>" + b" " * 110_000_000, r"[\d,]+ bytes that unpack to 110,\d{3},\d{3}"),
    ],
)
def test_word_that_would_fill_the_memory_is_named(tmp_path: Path, old: bytes, new: bytes, said: str) -> None:
    document, path = docx.Document(), tmp_path / "a.docx"
    document.add_table(1, 2).cell(0, 0).text = "Sail"
    document.save(str(tmp_path / "whole.docx"))
    with zipfile.ZipFile(tmp_path / "whole.docx") as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name in whole.namelist():
            made.writestr(name, whole.read(name).replace(old, new, 1), compresslevel=1)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(FactError, match=rf"a\.docx, line 1: is not \.docx, or damaged \({said}\)"):
        list(read_facts(path))


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-8-sig"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.md", "a.html"])
def test_other_encodings_are_read_when_they_are_named(tmp_path: Path, name: str, encoding: str) -> None:
    rows = {".jsonl": '{"text": "Käfer"}\n', ".csv": "text\nKäfer\n", ".html": "<p>Käfer</p>"}
    path = written(tmp_path / name, rows.get(Path(name).suffix, "Käfer\n").encode(encoding))
    assert [fact.text for fact in read_facts(path, encoding=encoding)] == ["Käfer"]


def test_an_encoding_that_is_none_is_refused_and_a_wrong_one_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "Käfer")
    for encoding in ("utf-9", "base64"):
        with pytest.raises(FactError, match=f"Got encoding='{encoding}'"):
            read_facts(path, encoding=encoding)
    with pytest.raises(FactError, match="line 1: is not ascii"):
        list(read_facts(path, encoding="ascii"))
    for content in (b"\xff\xfea\0b", b"a\0b\0"):
        with pytest.raises(FactError, match="line 1: is not utf-16"):
            list(read_facts(written(tmp_path / "b.txt", content), encoding="utf-16"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'\n {"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        (b"One.\nStill one.\n\nTwo.", ["One.\nStill one.", "Two."]),
        ("\ufeff{}".replace("{}", '{"text": "ä"}').encode("utf-16-le"), ["ä"]),
        (b"", []),
    ],
)
def test_standard_input_is_json_lines_or_text(
    content: bytes, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))  # type: ignore[arg-type]
    facts = list(read_facts("-", encoding="utf-16-le" if b"\0" in content else None))
    assert [fact.text for fact in facts] == expected
    assert {fact.source for fact in facts} <= {"-"}
    assert not sys.stdin.buffer.closed


def test_deeply_nested_html_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.html", "<p>" + "<b>" * 300 + "deep" + "</b>" * 300)
    assert [fact.text for fact in read_facts(path)] == ["deep"]


@pytest.mark.timeout(20)  # Each took minutes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.md", "# a" + " " * 60_000 + "b ##\n\ntext", ["text"]),
        ("a.html", "<p>before</p>" + "<!--" * 100_000, ["before"]),
        ("a.html", "<p>one</p><!-- not this --><p>two</p><!-- to the end <p>three</p>", ["one", "two"]),
        ("a.html", "<br>" * 50_000 + "<p>text</p>" * 2, ["text", "text"]),
    ],
    ids=["heading", "comments", "comment", "breaks"],
)
def test_what_looks_long_is_read_in_time(tmp_path: Path, name: str, content: str, texts: list[str]) -> None:
    facts = list(read_facts(written(tmp_path / name, content)))
    assert [fact.text for fact in facts] == texts
    assert all(fact.title.endswith(" b") for fact in facts if name == "a.md")


@pytest.mark.timeout(20)
def test_what_would_take_for_ever_is_named(tmp_path: Path) -> None:
    pipe, device = tmp_path / "pipe.md", tmp_path / "zero.md"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    deep = written(tmp_path / "deep.html", "<div>" * 100_000)
    for path, said in ((pipe, "a pipe or device"), (device, "a pipe or device"), (deep, "holds no text")):
        with pytest.raises(FactError, match=said):
            list(read_facts(path))
    deep.unlink()
    # In a folder they are not looked at.
    assert list(read_facts(tmp_path, on_error="skip")) == []


@pytest.mark.parametrize("name", ["a.pdf", "a.html", "a.docx", "a.pptx", "a.xlsx"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "markitdown.converters", None)
    with pytest.raises(MissingDependencyError, match=r"knowledge-packs\[files\]"):
        list(read_facts(written(tmp_path / name, "x")))
