"""The playground's files, texts and questions: empty, huge, of the wrong type, broken, bombs, under hostile names.

Whatever is given, an error of ours or documents that say what was given; those that were there before stay as they were,
are found, and are the same prompt as packs and as text.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import docx
from pypdf import PdfWriter
from pypdf.generic import ArrayObject, DecodedStreamObject, DictionaryObject, NameObject, NumberObject

from kp_cli.play.world import Document, World
from kp_core.errors import KnowledgePackError
from tests.attack.harness import Case, LostError, WrongError, refused
from tests.attack.mutate import damaged, text
from tests.conftest import roomy_engine
from tests.kits import HashEmbedder

SHORT = 15

_HERON = "The heron of Veyl stands on the flag, on one leg, and looks to the west."
_SECONDS = 30  # Of a core, for what takes one at most.
_TYPES = (".txt", ".md", ".csv", ".jsonl", ".html", ".htm", ".docx", ".pdf", ".exe", "", ".txt.zip", ".PDF", ".doc")
_STEMS = (
    "heron",
    "-rf",
    ".hidden",
    "..",
    "a b",
    "a\nb",
    "\x1b[2J",
    "<img src=x onerror=alert(1)>",
    "%s",
    "{0}",
    "con",
    "\u202etxt.exe",
    "é" * 90,
    "kp:play/" + "a" * 21,
)


def _squeezed(said: str) -> str:
    return "".join(said.split())


def _archive(parts: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return made.getvalue()


def _documents() -> tuple[dict[str, bytes], bytes]:
    """The parts of a Word document of one table, and a PDF of one page that says something."""
    written, made = docx.Document(), io.BytesIO()
    written.add_table(1, 2).cell(0, 0).text = "It has four sails."
    written.save(made)
    with zipfile.ZipFile(made) as archive:
        return {name: archive.read(name) for name in archive.namelist()}, _pdf(b"BT /F 12 Tf (Four sails.) Tj ET")


def _pdf(content: bytes, forms: int = 0) -> bytes:
    """A page that says `content`; with `forms`, a form that draws the next one ten times, that the one after, and so on."""
    pages, made = PdfWriter(), io.BytesIO()
    page = pages.add_blank_page(72, 72)
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    resources = DictionaryObject({NameObject("/Font"): DictionaryObject({NameObject("/F"): font})})
    for depth in range(forms):
        form = DecodedStreamObject()
        form.set_data(b"/X Do " * 10 if depth else content)
        form.update(
            {
                NameObject("/Type"): NameObject("/XObject"),
                NameObject("/Subtype"): NameObject("/Form"),
                NameObject("/BBox"): ArrayObject([NumberObject(0)] * 4),
                NameObject("/Resources"): resources,
            }
        )
        resources = DictionaryObject(
            {NameObject("/XObject"): DictionaryObject({NameObject("/X"): pages._add_object(form)})}
        )
    stream = DecodedStreamObject()
    stream.set_data(b"/X Do" if forms else content)
    page[NameObject("/Resources")] = resources
    page[NameObject("/Contents")] = pages._add_object(stream.flate_encode())
    pages.write(made)
    return made.getvalue()


def _bombs(word: dict[str, bytes]) -> dict[str, tuple[str, bytes]]:
    """What would take the memory or the day: the suffix, and the bytes."""
    body = word["word/document.xml"]
    large = _archive({**word, "word/document.xml": body.replace(b"<w:body>", b"<w:body>" + b" " * 120_000_000)})
    lies, at = bytearray(large), large.rindex(b"word/document.xml") - 46
    lies[at + 24 : at + 28] = len(body).to_bytes(4, "little")  # The directory at the end says how much there is.
    laughs = b'<!DOCTYPE b [<!ENTITY a "ha">' + b"".join(
        b'<!ENTITY %c "%s">' % (98 + n, b"&%c;" % (97 + n) * 10) for n in range(12)
    )
    return {
        "large": (".docx", large),
        "lies": (".docx", bytes(lies)),
        "wide": (".docx", _archive({**word, "word/document.xml": body.replace(b"<w:tcPr>", b'<w:tcPr><w:gridSpan w:val="2000000000"/>', 1)})),
        "laughs": (".docx", _archive({**word, "word/document.xml": body.replace(b"<w:document", laughs + b"]><w:document", 1).replace(b"It has", b"&m;")})),
        "deep": (".docx", _archive({**word, "word/document.xml": body.replace(b"<w:body>", b"<w:body>" + b"<w:p>" * 100_000)})),
        "stream": (".pdf", _pdf(b"(Four sails.) Tj " + b" " * 80_000_000)),
        "forms": (".pdf", _pdf(b"(Four sails.) Tj", forms=12)),
        "rows": (".csv", b"text,title\n" + b"a mill,b\n" * 100_000),
        "titles": (".jsonl", json.dumps({"text": "a", "title": "Mill " * 100_000}).encode()),
        "line": (".txt", b"word " * 60_000),
        "gone": (".jsonl", b'{"text": "The mill of Veyl has four sails.", "expires": 1.0}\n'),
        "braces": (".jsonl", b'{"a":' * 100_000),
    }  # fmt: skip


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    word, page = _documents()
    bombs = _bombs(word)
    honest = {
        ".docx": _archive(word), ".pdf": page, ".txt": b"The mill has four sails.\n\nA crab.", ".md": b"# Guide\n\nThe mill has *four* sails.",
        ".csv": b'text,title\n"The mill, ""old"".",Mill\n', ".jsonl": b'{"text": "The mill has four sails.", "title": "Mill"}\n',
        ".html": b"<h1>Mill</h1><p>Four sails.</p><ul><li>one</ul>",
    }  # fmt: skip

    def opened() -> World:
        shutil.rmtree(folder / "case", ignore_errors=True)
        (folder / "case" / "uploads").mkdir(parents=True)
        world = World(roomy_engine(), HashEmbedder(), folder / "case")
        (folder / "case" / "heron.md").write_text(_HERON)
        list(world.add([folder / "case" / "heron.md"]))
        return world

    def file(draw: Random, at: int) -> Path:
        suffix, data = draw.choice(list(honest.items()))
        kind = draw.random()
        if kind < 0.15:
            suffix, data = draw.choice(list(bombs.values()))
        elif kind < 0.5:
            data = damaged(draw, data, honest[".pdf"])
        elif kind < 0.7:
            suffix, data = (
                draw.choice(_TYPES),
                draw.choice((data, b"", b"\0" * 99, draw.randbytes(200), text(draw).encode())),
            )
        stem = draw.choice((draw.choice(_STEMS), text(draw))).encode()[:150].decode(errors="ignore")
        name = stem.replace("/", "").replace("\0", "") + suffix
        path = folder / "case" / "uploads" / str(at) / ("file" if name in {"", ".", ".."} else name)
        path.parent.mkdir()
        path.write_bytes(data)
        return path

    def checked(world: World, before: dict[str, Document], replaced: set[str]) -> None:
        for name, document in before.items():
            if name not in replaced and world.documents.get(name) is not document:
                raise LostError(f"{name!r} is gone, or another: {world.documents.get(name)!r}")
        for name, document in world.documents.items():
            if not document.text.strip() or document.tokens < 1 or document.name != name:
                raise WrongError(f"{document!r} is not what was given as {name!r}")
        if "heron.md" not in replaced and _HERON not in world.search(_HERON, 1)[0].text:
            raise WrongError("what was there before is not found by its own words")

    def uploading(draw: Random, world: World) -> None:
        files, before = [file(draw, at) for at in range(draw.choice((1, 1, 1, 2)))], dict(world.documents)
        try:
            for made in world.add(files):
                if not any(made.file.endswith(path.name) for path in files):
                    raise WrongError(f"{files} make {made}")
        except KnowledgePackError as error:
            if not str(error) or str(folder) in str(error):
                raise WrongError(f"{type(error).__name__} says {str(error)!r}") from error
        checked(world, before, {path.name for path in files})

    def pasting(draw: Random, world: World) -> None:
        said, before = text(draw), dict(world.documents)
        with refused():
            for made in world.paste(said):
                pieces = re.split("\n| > ", made.text)  # Headings stand above a paragraph, one behind another.
                if wrong := [each for each in pieces if _squeezed(each) not in _squeezed(said)]:
                    raise WrongError(f"{said!r} says {wrong}")
        if {path.name for path in (folder / "case").glob("*.md")} != {"heron.md"}:
            raise WrongError("a pasted text leaves a file")
        checked(world, before, set())

    def asking(draw: Random, world: World) -> None:
        with refused():
            list(world.paste(text(draw, (str(world.documents["heron.md"].handle),))))
        options = {"composer": draw.choice(("exact", "splice", text(draw)))}
        with refused():
            requests, plan = world.ask(draw.choice((_HERON, text(draw))), draw.choice((1, 2, 10**9)), **options)
            prompts = {
                way: world.session.generate(**request | {"max_tokens": 1}).prompt.token_ids
                for way, request in requests.items()
            }
            if prompts["packs"] != prompts["text"]:
                raise WrongError(f"{plan}: another prompt from packs than from text")

    def case(draw: Random) -> None:
        world, began = opened(), time.process_time()
        kinds: tuple[Callable[[Random, World], None], ...] = (
            uploading,
            uploading,
            uploading,
            pasting,
            asking,
        )
        draw.choice(kinds)(draw, world)
        if (took := time.process_time() - began) > _SECONDS:
            raise WrongError(f"took {took:.0f} s")

    yield case
