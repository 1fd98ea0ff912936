"""The command line: hostile arguments and files. An exit code that is documented, one line for an error, no control characters."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from kp_cli.app import run
from kp_core import PackStore
from tests.attack.harness import Case, WrongError
from tests.attack.mutate import CONTROLS, damaged, text
from tests.cli.conftest import FACTS
from tests.conftest import tiny_engine

SHORT = 8

_CODES = {0, 1, 2, 3, 130}
_NUMBERS = ("0", "1", "3", "-1", "1e9", "nan", "x", "99999999999999999999", "2", "0.5")
_TINY = ("--engine", "tests.cli.engines:tiny", "--max-tokens", "2")
_JSON = (
    '{"year": 1987}',
    '{"year": {"$gt": 1900}}',
    "{",
    "[]",
    '{"$or": []}',
    '{"a": {"$near": 1}}',
    "null",
    '{"a\\u0000": "\\ud800"}',
)


def _said(arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return code, out.getvalue(), err.getvalue()


def _checked(arguments: list[str], code: int, out: str, err: str) -> None:
    shown = f"kp {arguments!r}: {code}, {out[-200:]!r}, {err[-300:]!r}"
    if code not in _CODES:
        raise WrongError(f"an exit code of its own: {shown}")
    # Bars begin their lines with a carriage return; that of a library was imported before `kp` could switch it off.
    err = "\n".join(line for line in re.split(r"[\r\n]|\x1b\[A", err) if "Loading weights" not in line)
    if CONTROLS & set(out) or CONTROLS & set(err):
        raise WrongError(f"control characters: {shown}")
    lines = [line for line in err.split("\n") if line.strip()]
    if code == 1 and not (
        lines and lines[-1].startswith("kp: ") and sum(line.startswith("kp: ") for line in lines) == 1
    ):
        raise WrongError(f"no one line: {shown}")
    if "Traceback" in err:
        raise WrongError(f"a traceback: {shown}")
    if "--json" in arguments and code in {0, 3}:
        json.loads(out)


def _arguments(draw: Random, folder: Path, handles: list[str]) -> list[str]:
    def said() -> str:
        # What the operating system hands over is bytes: names that are not UTF-8 come as half surrogates.
        word = text(draw, ("bird", "mill", "Aldburgh", *handles)) if draw.random() < 0.9 else "\udcff\udc80"
        return word.replace("\0", "")

    def file(kind: str) -> str:
        path = folder / f"a.{kind}"
        whole = b"".join(json.dumps(fact).encode() + b"\n" for fact in FACTS)
        path.write_bytes(draw.choice((damaged(draw, whole), said().encode(errors="replace"))))
        return str(path)

    place = draw.choice(("bank", "bank", "bank", "packs", "nothing", "a.txt", said() or "bank"))
    ids = ("mill", "b", "", said(), draw.choice(handles))
    where = ["--where", draw.choice((*_JSON, said()))] if draw.random() < 0.4 else []
    space = ["--namespace", draw.choice(("default", "Übung", said()))] if draw.random() < 0.2 else []
    count = ["-k", draw.choice(_NUMBERS)] if draw.random() < 0.4 else []
    command = draw.choice(
        (
            ["search", place, said(), *where, *space, *count],
            ["ask", place, said(), *where, *count, *_TINY, *draw.choice(([], ["--text"], ["--explain"], ["--composer", said()]))],
            ["status", place], ["verify", place], ["verify", "bank", "--repair"],
            ["remove", place, draw.choice(ids), *where], ["remove", "bank", "--source", said(), "--dry-run"],
            ["build", place, "--fact", said(), *space, *draw.choice(([], ["--id", said()]))],
            ["build", "bank", "--fact", said(), "--id", draw.choice(ids), "--replace"],
            ["build", "bank", file(draw.choice(("jsonl", "csv", "txt", "md", "html", "pdf"))), *draw.choice(([], ["--on-error", "skip"]))],
            ["build", draw.choice(("bank", "other", said() or "x")), file("jsonl"), *space],
            ["remove", place, "--unused"], ["edit", draw.choice(("bank", "packs")), draw.choice(ids), "--old", said(), "--new", said(), *_TINY[:2]],
            [said(), said()], ["packet", said()], ["steer", said(), said()], ["search"], ["ask", "bank", said(), f"--{said()}"],
        )
    )  # fmt: skip
    return [*command, *(["--json"] if draw.random() < 0.3 else [])]


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    with contextlib.chdir(folder), _environment(COLUMNS="120", XDG_CACHE_HOME=str(folder / "cache")):
        (folder / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
        if _said(["build", "made", "facts.jsonl"])[0]:
            raise WrongError("the collection could not be made")
        # Closed by now, so that it may be copied.
        store = PackStore(folder / "made" / "packs")
        handles = [str(store.put(tiny_engine().build_pack(str(fact["text"])))) for fact in FACTS[:2]]

        def case(draw: Random) -> None:
            place = folder / "case"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            shutil.copytree(folder / "made", place / "bank")
            shutil.copytree(folder / "made" / "packs", place / "packs")
            (place / "a.txt").write_text("A heron.")
            with contextlib.chdir(place):
                arguments = _arguments(draw, place, handles)
                _checked(arguments, *_said(arguments))

        yield case


@contextmanager
def _environment(**names: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(names)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
