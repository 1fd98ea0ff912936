"""Damaged files: packs, stores of packs, steerings, wrappers, fact stores, sources of facts.

What is read is what was written, or an error of ours; a store gives the pack back, with its KV or without.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import docx
import torch
from pypdf import PdfWriter

from kp_cli.sources import read_facts
from kp_core import Fact, PackStore, Steering
from kp_core.banks import ChromaFactStore
from kp_core.errors import PackCorruptError
from kp_core.packs.entry import encode_entry, open_entry
from kp_core.steering import load_steering, save_steering
from kp_methods import PacketComposer
from tests.attack.harness import Case, LostError, WrongError, refused
from tests.attack.mutate import damaged, text, warped
from tests.core.packs.made import FINGERPRINT, files_of, make_pack, rebuild, same
from tests.core.packs.test_entry import DATA, PACKS
from tests.core.packs.test_entry import same as same_entry
from tests.kits import HashEmbedder

SHORT = 75

_PAGES = {
    "jsonl": b'{"text": "The mill has four sails.", "title": "Mill", "year": 1802}\n{"text": "A heron.", "metadata": {"a": [1]}}\n',
    "csv": b'text,title,year\r\n"The mill, ""old"".",Mill,1802\r\nA heron.,,\r\n',
    "txt": b"The mill has four sails.\n\nA heron stands on the flag.\n",
    "md": b"# Guide\n## Mill\nIt has *four* sails.\n\n```sh\n# no heading\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    "html": b"<html><head><title>T</title></head><body><h1>Mill</h1><p>Four sails.</p><ul><li>one</ul><!-- c --></body></html>",
}  # fmt: skip


def _stored(draw: Random, folder: Path) -> None:
    store = PackStore(folder / "store")
    packs = {store.put(pack): pack for pack in (make_pack("One.", seed=1), make_pack("Two.", seed=2))}
    first, second = packs
    mine = files_of(store, first)
    hurt = []
    for file in draw.sample(mine, draw.choice((1, 1, 2))):
        other = files_of(store, second)[mine.index(file)].read_bytes()
        file.write_bytes(draw.choice((other, damaged(draw, file.read_bytes(), other), b"")))
        hurt.append(file)
    for name in draw.sample(("used", "changes"), draw.randrange(3)):
        (store.path / name).write_bytes(draw.randbytes(draw.choice((0, 9, 99))))
    opened = PackStore(folder / "store")
    for handle, pack in packs.items():
        try:
            found = opened.get(handle)
        except PackCorruptError as error:
            if mine[1] not in hurt or handle != first:
                raise LostError(f"{[each.name for each in hurt]} cost the text of {handle}") from error
            opened.put(pack)
            found = opened.get(handle)
        if found.text != pack.text or (found.kv is not None and not same(found, pack)):
            raise WrongError(f"{handle} is {found.text!r}")
        opened.put(pack)
        if len(hurt) == 2 and opened.get(handle).kv is None:
            opened.put(pack)  # A put reads no stored KV: damage beside a lost header is found by the next read.
        if not same(opened.get(handle), pack):
            raise LostError(f"{handle} was put anew and is not there")
    if any(opened.verify()) or set(opened) != set(packs):
        raise WrongError("what was mended is not whole")
    opened.remove(first)
    if first in opened or set(opened) != {second}:
        raise WrongError("what was removed is there")


def _signed(make: Callable[[Path], object], load: Callable[[Path], object]) -> Callable[[Random, Path], None]:
    def case(draw: Random, folder: Path) -> None:
        made = make(folder / "signed")
        data = (folder / "signed").read_bytes()
        (folder / "signed").write_bytes(damaged(draw, data, DATA[1]))
        with refused():
            if load(folder / "signed") != made:
                raise WrongError("another one was read")

    return case


def _steering(path: Path) -> Steering:
    made = Steering({0: torch.ones(2, 4), 1: torch.arange(8.0).view(2, 4)}, FINGERPRINT, coherent=(-2.0, float("inf")))
    save_steering(made, path)
    return made


def _wrapper(path: Path) -> PacketComposer:
    made = PacketComposer(torch.ones(3, 8), torch.arange(16.0).view(2, 8), FINGERPRINT, {"steps": 3})
    made.save(path)
    return made


def _entry_file(draw: Random, _folder: Path) -> None:
    which = draw.randrange(len(PACKS))
    broken = damaged(draw, DATA[which], draw.choice(DATA))
    if broken in DATA:  # All of another one, under this name.
        which = DATA.index(broken)
    with refused():
        if not same_entry(broken, PACKS[which]):
            raise WrongError("another entry was read")


def _entry_content(draw: Random, _folder: Path) -> None:
    """Another content under a valid digest: refused, or an entry that is written and read again as it is."""
    which = draw.randrange(len(PACKS))
    start = 8 + int.from_bytes(DATA[which][:8], "little")
    entries = json.loads(DATA[which][8:start])
    about = entries.pop("__metadata__")
    content, version = warped(draw, json.loads(about["entry"])), draw.choice((about["version"],) * 4 + tuple("4567"))
    with refused():
        try:
            file = rebuild(content, entries=warped(draw, entries) if draw.random() < 0.3 else entries,
                           data=DATA[which][start:], version=version)  # fmt: skip
        except (TypeError, ValueError, RecursionError):  # JSON cannot say it.
            return
        found = open_entry(file)
        written = open_entry(b"".join(encode_entry(found.entry, found.read(), found.compression).chunks()))
        if written.entry != found.entry or not written.read().equal(found.read()):
            raise WrongError("it is written as another entry")


def _source(draw: Random, folder: Path) -> None:
    kind = draw.choice([*_PAGES, "docx", "pdf"])
    data = _PAGES[kind] if kind in _PAGES else (folder.parent / f"whole.{kind}").read_bytes()
    file = folder / f"a.{kind}"
    file.write_bytes(damaged(draw, data, _PAGES["html"]) if draw.random() < 0.8 else text(draw).encode())
    with refused():
        for fact in read_facts(
            file, on_error=draw.choice(("raise", "skip")), encoding=draw.choice((None, "cp1252", "utf-16"))
        ):
            if not fact.text.strip() or Fact(fact.text).text.encode().decode() != fact.text:
                raise WrongError(f"{fact.text!r} is no fact")


def _row(draw: Random, folder: Path) -> None:
    """Rows of JSON with fields of other types: facts as they were said, or a refusal that names the line."""
    row = warped(
        draw, {"text": "A heron.", "title": "T", "id": "x", "expires": 9e9, "metadata": {"year": 1999, "tags": ["a"]}}
    )
    try:
        line = json.dumps(row)
    except (TypeError, ValueError, RecursionError):
        return
    (folder / "a.jsonl").write_text(line + "\n")
    with refused():
        [fact] = read_facts(folder / "a.jsonl") or [None]
        if fact.text != row["text"]:
            raise WrongError(f"{fact.text!r} for {line[:200]}")


def _marker(draw: Random, folder: Path) -> None:
    """The files of a fact store that are ours, and those beside."""
    place = folder / "facts"
    place.mkdir()
    (place / "kp.json").write_bytes(damaged(draw, b'{"kind": "facts", "schema": 1}'))
    if draw.random() < 0.5:
        (place / draw.choice(("chroma.sqlite3", "kp.lock", "packs", "notes.txt"))).write_bytes(draw.randbytes(200))
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.name == "notes.txt"}
    with refused(), ChromaFactStore(place, HashEmbedder()) as store:
        store.add([Fact("A heron.")])
        if [fact.text for fact in store.facts()] != ["A heron."]:
            raise WrongError("it was opened and does not hold what was added")
    if any((place / name).read_bytes() != data for name, data in before.items()):
        raise WrongError("a file that is not ours was changed")


_KINDS = (
    *[_entry_file] * 6, *[_entry_content] * 6, *[_stored] * 3, *[_source] * 4, *[_row] * 3, _marker,
    _signed(_steering, load_steering), _signed(_wrapper, PacketComposer.load),
)  # fmt: skip


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    written = docx.Document()
    written.add_heading("Mill", 1)
    written.add_paragraph("It has four sails.")
    written.save(str(folder / "whole.docx"))
    pages = PdfWriter()
    pages.add_blank_page(72, 72)
    pages.write(folder / "whole.pdf")

    def case(draw: Random) -> None:
        place = folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        draw.choice(_KINDS)(draw, place)

    yield case
