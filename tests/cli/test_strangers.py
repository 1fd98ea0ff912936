"""`kp` on Chroma databases that somebody else made, holds, or runs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from chromadb import AdminClient
from chromadb.config import Settings
from chromadb.utils.embedding_functions import ONNXMiniLM_L6_V2

from kp_cli.sources import read_facts
from kp_core import ChromaFactStore, SentenceTransformerEmbedder
from kp_core.banks.chroma import open_client
from tests.cli.conftest import ENVIRONMENT, FACTS, Kp, as_json

TINY = ("--engine", "tests.cli.engines:tiny", "--max-tokens", "2")
QUESTION = "Which bird is on the flag?"


def one_line(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert (code, out) == (1, "")
    # Of a library that was imported before `kp` could switch its bars off.
    [said] = [line for line in err.splitlines() if line.strip() and "Loading weights" not in line]
    assert said.startswith("kp: ")
    assert all(word in said for word in words), said


def fill(client: Any, name: str) -> None:
    """A collection as another program makes it."""
    texts = [str(fact["text"]) for fact in FACTS]
    made = client.create_collection(name, embedding_function=None)
    about = [{"source": "theirs", "year": fact["year"]} for fact in FACTS]
    vectors = SentenceTransformerEmbedder().embed(texts)
    made.add(ids=[str(fact["id"]) for fact in FACTS], documents=texts, metadatas=about, embeddings=vectors)


def content(folder: Path) -> dict[str, Any]:
    client = open_client(folder)
    found = {each.name: each.get(include=["documents", "metadatas"]) for each in client.list_collections()}
    client.close()
    return found


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    client = open_client(tmp_path / "theirs")
    fill(client, "facts")
    client.close()
    return tmp_path / "theirs"


def test_a_strangers_folder_is_refused_and_never_changed(kp: Kp, theirs: Path, tmp_path: Path) -> None:
    before = content(theirs)
    (tmp_path / "facts.jsonl").write_text('{"text": "a"}\n')
    for command in (
        ("search", "theirs", QUESTION),
        ("ask", "theirs", QUESTION, *TINY),
        ("status", "theirs"),
        ("build", "theirs", "facts.jsonl"),
        ("build", "theirs", "--fact", "The ferry leaves at six."),
        ("remove", "theirs", "bird"),
        ("remove", "theirs", "--unused"),
    ):
        one_line(kp(*command), "theirs")
    assert not (theirs / "kp.json").exists()
    assert not (theirs / "packs").exists()
    assert content(theirs) == before


def test_a_namespace_without_facts_is_named(kp: Kp) -> None:
    Path("ours.txt").write_text("A mill stands here.")
    kp("build", "ours", "ours.txt")
    one_line(kp("ask", "ours", QUESTION, "--namespace", "wiki", *TINY), "no fact of the namespace 'wiki'", "default")


def test_folders_of_other_things_are_named(kp: Kp, bank: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "facts.jsonl", tmp_path / "other" / "mine.txt")
    one_line(kp("build", "other", "facts.jsonl"), "other holds other things (mine.txt), and stays as it is")


def test_a_folder_that_another_process_holds_is_read_and_not_written(kp: Kp, bank: Path) -> None:
    script = "import kp_core, sys; held = kp_core.ChromaFactStore(sys.argv[1]); print(1, flush=True); input()"
    command = [sys.executable, "-c", script, str(bank)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as holder:  # noqa: S603 - our own
        assert holder.stdout is not None
        holder.stdout.readline()
        for given in (
            ("build", "bank", "--fact", "a"),
            ("remove", "bank", "bird"),
            ("remove", "bank", "--unused", "--wait", "0.1"),
        ):
            one_line(kp(*given), "is open for writing in another process", "--wait SECONDS")
        assert kp("search", "bank", QUESTION)[0] == 0
        holder.communicate(b"\n")
    assert kp("build", "bank", "--fact", "The ferry leaves at six.")[0] == 0


@pytest.mark.slow
def test_a_server_is_a_place_as_well(kp: Kp, tmp_path: Path, emptied: str) -> None:
    (tmp_path / "facts.txt").write_text("\n\n".join(str(fact["text"]) for fact in FACTS))
    one_line(kp("search", emptied, QUESTION), "The store holds no facts yet")
    fill(open_client(emptied), "docs")
    one_line(kp("search", emptied, QUESTION), "The store holds no facts yet")
    assert as_json(kp("build", emptied, "facts.txt", "--json"))["facts"] == 4
    [hit] = as_json(kp("search", emptied, QUESTION, "-k", "1", "--json"))["hits"]
    assert hit["source"] == "facts.txt"
    assert kp("ask", emptied, QUESTION, "-k", "1", *TINY)[0] == 0
    assert as_json(kp("status", emptied, "--json"))["packs"]["packs"] == 1
    assert kp("verify", emptied)[0] == 0
    code, out, _ = kp("remove", emptied, "--source", "facts.txt")
    assert (code, "packs: 1; facts left: 0." in out) == (0, True)
    assert "`chroma vacuum --path FOLDER` on its server" in out
    assert len(open_client(emptied).get_collection("docs").get()["ids"]) == 4


def test_another_database_of_a_server(kp: Kp, tmp_path: Path, emptied: str) -> None:
    (tmp_path / "facts.txt").write_text("\n\n".join(str(fact["text"]) for fact in FACTS))
    address = urlsplit(emptied)
    settings = Settings(
        chroma_api_impl="chromadb.api.fastapi.FastAPI",
        chroma_server_host=address.hostname,
        chroma_server_http_port=address.port,
    )
    AdminClient(settings).create_database("team")
    with ChromaFactStore(emptied, database="team", headers={"x-token": "abc"}) as facts:
        facts.add(read_facts(tmp_path / "facts.txt"))
        assert len(facts.search(QUESTION)) == 4
    one_line(kp("search", emptied, QUESTION), "The store holds no facts yet")


def test_a_server_that_is_away_is_named(kp: Kp, tmp_path: Path) -> None:
    (tmp_path / "facts.txt").write_text("A.")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for command in (("search", url, QUESTION), ("build", url, "facts.txt"), ("verify", url), ("status", url)):
        one_line(kp(*command), f"There is no Chroma server at {url}", "chroma run")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch) -> None:
    """No proxy leads anywhere, and Chroma's default embedding function has not been downloaded."""
    monkeypatch.setattr(ONNXMiniLM_L6_V2, "DOWNLOAD_PATH", tmp_path / "none")
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    "command",
    [
        ("steer", "show", "formal.st"),
        ("ask", "notes", QUESTION, "--steering", "formal.st"),
        ("build", "new", "formal.st"),
        pytest.param(("packet", "train", "formal.st", "-o", "w"), marks=pytest.mark.slow),
        ("play", "formal.st"),
    ],
)
def test_a_file_that_is_not_there_is_named_in_one_line(kp: Kp, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "formal").write_text("{}")
    if command[-2] == "--questions":
        kp("steer", "make", "formal", "-o", "formal", "--engine", "tests.cli.engines:tiny")
    one_line(kp(*command), "There is no file formal.st. Did you mean formal?")
    one_line(kp("steer", "show", "nothing"), "There is no file nothing. `kp steer make PAIRS -o FILE` makes one.")
    one_line(kp("steer", "show", "."), ". is a folder, not a file")


def test_a_folder_without_anything_to_read_says_so(kp: Kp, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    code, out, _ = kp("build", "new", str(tmp_path / "none"))
    assert (code, "Nothing was found there." in out) == (0, True)
    assert all(len(line) <= 80 for line in out.splitlines())
