"""`kp` on Chroma databases that somebody else made, holds, or runs."""

from __future__ import annotations

import json
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
from chromadb.utils.embedding_functions import HuggingFaceEmbeddingFunction, ONNXMiniLM_L6_V2

from kp_core import PackStore, SentenceTransformerEmbedder
from kp_core.facts.client import open_client
from tests.cli.conftest import ENVIRONMENT, FACTS, Kp, as_json
from tests.conftest import tiny_engine

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
    client = open_client(folder, migrations="validate")
    found = {each.name: each.get(include=["documents", "metadatas"]) for each in client.list_collections()}
    client.close()
    return found


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    client = open_client(tmp_path / "theirs")
    fill(client, "facts")
    client.close()
    return tmp_path / "theirs"


def test_a_strangers_folder_is_read_and_never_changed(kp: Kp, theirs: Path, tmp_path: Path) -> None:
    before = content(theirs)
    [hit] = as_json(kp("search", "theirs", QUESTION, "-k", "1", "--json"))["hits"]
    assert (hit["id"], hit["source"], hit["handle"]) == ("bird", "theirs", None)
    asked = as_json(kp("ask", "theirs", QUESTION, "-k", "1", "--collection", "facts", *TINY, "--json"))
    assert asked["answers"]["packs"]["usage"]["pack_tokens"] > 0
    [folder] = (tmp_path / "cache" / "knowledge-packs").iterdir()
    assert len(PackStore(folder)) == 1
    [hit] = as_json(kp("search", "theirs", QUESTION, "-k", "1", "--json"))["hits"]
    assert hit["handle"] == asked["sources"][0]["handle"]
    assert kp("ask", "theirs", QUESTION, "-k", "2", "--packs", "mine", *TINY)[0] == 0
    assert len(PackStore(tmp_path / "mine")) == 2
    for command in (
        ("build", "theirs", "facts.jsonl"),
        ("add", "theirs", "--fact", "The ferry leaves at six."),
        ("remove", "theirs", "bird"),
        ("remove", "theirs", "--source", "theirs"),
    ):
        (tmp_path / "facts.jsonl").write_text('{"text": "a"}\n')
        one_line(kp(*command), "that we did not make; it stays as it is")
    one_line(kp("search", "theirs", QUESTION, "--probes", "1"), "is not ours, so no banks are kept for it")
    assert as_json(kp("gc", "theirs", "--json")) == {"packs": 0, "left": 1, "vacuumed": False}
    assert not (theirs / "kp.json").exists()
    assert not (theirs / "packs").exists()
    assert content(theirs) == before


def test_a_namespace_is_that_of_a_strangers_packs_and_of_our_facts(kp: Kp, theirs: Path, tmp_path: Path) -> None:
    of_theirs = ("--collection", "facts", "--packs", "packs", "--namespace", "wiki")
    assert kp("ask", "theirs", QUESTION, "-k", "2", *of_theirs, *TINY)[0] == 0
    assert {handle.namespace for handle in PackStore(tmp_path / "packs").handles()} == {"wiki"}
    hits = as_json(kp("search", "theirs", QUESTION, "-k", "2", *of_theirs, "--json"))["hits"]
    assert all(hit["handle"].startswith("kp:wiki/") for hit in hits)
    Path("ours.txt").write_text("A mill stands here.")
    kp("build", "ours", "ours.txt")
    one_line(kp("ask", "ours", QUESTION, "--namespace", "wiki", *TINY), "no fact of the namespace 'wiki'", "default")


def test_packs_of_what_a_stranger_deleted_go(kp: Kp, theirs: Path, tmp_path: Path) -> None:
    options = ("--packs", "packs", "--collection", "facts")
    assert as_json(kp("gc", "theirs", *options, "--json")) == {"packs": 0, "left": 0, "vacuumed": False}
    kp("ask", "theirs", QUESTION, "-k", "4", *options, *TINY)
    client = open_client(theirs, migrations="validate")
    client.get_collection("facts").delete(ids=["bird"])
    client.get_collection("facts").update(ids=["mill"], documents=["The mill is gone."], embeddings=[[1.0] * 384])
    before = content(theirs)
    client.close()
    store = PackStore(tmp_path / "packs")
    gone = {str(store.handle(str(fact["text"]), "default")) for fact in FACTS[:2]}
    kept = {str(handle) for handle in store} - gone
    told = as_json(kp("gc", "theirs", *options, "--json"))
    assert (told["packs"], told["left"], {str(handle) for handle in store}) == (2, 2, kept)
    assert content(theirs) == before
    assert kp("gc", "theirs", *options)[1] == "Packs removed: 0; left: 2.\n"
    for wrong in (["--packs", "nowhere"], ["--namespace", "other"]):
        code, out, _ = kp("gc", "theirs", *options, *wrong)
        assert (code, "There are no packs of the namespace" in out) == (0, True)
    client = open_client(theirs, migrations="validate")
    client.get_collection("facts").delete(ids=client.get_collection("facts").get()["ids"])
    client.close()
    one_line(kp("gc", "theirs", *options), "theirs has no documents, so all packs would go")
    assert {str(handle) for handle in store} == kept


def test_of_several_collections_one_is_named(kp: Kp, theirs: Path) -> None:
    client = open_client(theirs)
    client.create_collection("notes")
    client.close()
    one_line(kp("search", "theirs", QUESTION), "Name a collection of theirs; there are", "'facts'", "'notes'")
    one_line(kp("ask", "theirs", QUESTION, "--collection", "fact", *TINY), "'fact' in theirs; there are", "'notes'")
    assert kp("search", "theirs", QUESTION, "--collection", "facts")[0] == 0


def test_gc_of_a_strangers_packs_follows_their_facts(kp: Kp, theirs: Path) -> None:
    assert kp("ask", "theirs", QUESTION, "-k", "4", "--packs", "mine", *TINY)[0] == 0
    # A retriever that compiles what it finds in this collection may have a namespace of its own.
    other = PackStore("mine").put(tiny_engine().build_pack("A mill.", namespace="b", provenance={"unit": "fact"}))
    client = open_client(theirs, migrations="validate")
    client.get_collection("facts").delete(ids=["bird"])
    client.close()
    assert as_json(kp("gc", "theirs", "--packs", "mine", "--json"))["packs"] == 1
    assert other in PackStore("mine")


def test_an_embedder_of_other_vectors_is_refused(kp: Kp, tmp_path: Path) -> None:
    client = open_client(tmp_path / "theirs")
    client.create_collection("facts", embedding_function=None).add(ids=["a"], documents=["A."], embeddings=[[1.0, 0.0]])
    client.close()
    one_line(kp("search", "theirs", QUESTION), "vectors of 2 dimensions", "'all-MiniLM-L6-v2' makes 384")


def test_folders_of_other_things_are_named(kp: Kp, bank: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    shutil.copy(tmp_path / "facts.jsonl", tmp_path / "old")
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "facts.jsonl", tmp_path / "other" / "mine.txt")
    one_line(kp("build", "other", "facts.jsonl"), "other holds other things (mine.txt), and stays as it is")
    one_line(kp("search", "old", QUESTION), "holds facts of version 0.1", "`kp build NEW old/facts.jsonl`")


def test_a_folder_that_another_process_holds_is_read_and_not_written(kp: Kp, bank: Path) -> None:
    script = "import kp_core, sys; held = kp_core.ChromaFactStore(sys.argv[1]); print(1, flush=True); input()"
    command = [sys.executable, "-c", script, str(bank)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as holder:  # noqa: S603 - our own
        assert holder.stdout is not None
        holder.stdout.readline()
        for given in (("add", "bank", "--fact", "a"), ("remove", "bank", "bird"), ("gc", "bank", "--wait", "0.1")):
            one_line(kp(*given), "is open for writing in another process")
        assert kp("search", "bank", QUESTION)[0] == 0
        holder.communicate(b"\n")
    assert kp("add", "bank", "--fact", "The ferry leaves at six.")[0] == 0


@pytest.mark.slow
def test_a_server_is_a_place_as_well(kp: Kp, tmp_path: Path, emptied: str) -> None:
    (tmp_path / "facts.txt").write_text("\n\n".join(str(fact["text"]) for fact in FACTS))
    one_line(kp("search", emptied, QUESTION), f"Name a collection of {emptied}; there are []")
    fill(open_client(emptied), "docs")
    [hit] = as_json(kp("search", emptied, QUESTION, "-k", "1", "--json"))["hits"]
    assert hit["id"] == "bird"
    assert as_json(kp("build", emptied, "facts.txt", "--json"))["facts"] == 4
    [hit] = as_json(kp("search", emptied, QUESTION, "-k", "1", "--probes", "1", "--json"))["hits"]
    assert (hit["source"], hit["bank"]) == ("facts.txt", "default/0")
    assert kp("ask", emptied, QUESTION, "-k", "1", *TINY)[0] == 0
    assert as_json(kp("inspect", emptied, "--json"))["packs"]["packs"] == 1
    assert kp("verify", emptied, "--no-template")[0] == 0
    code, out, _ = kp("remove", emptied, "--source", "facts.txt")
    assert (code, "packs: 1; facts left: 0." in out) == (0, True)
    assert "until `chroma vacuum --path FOLDER` is run there" in out
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
    there = ("--database", "team", "--header", "x-token: abc")
    assert as_json(kp("build", emptied, "facts.txt", *there, "--json"))["facts"] == 4
    assert len(as_json(kp("search", emptied, QUESTION, *there, "--json"))["hits"]) == 4
    one_line(kp("search", emptied, QUESTION), "Name a collection of")
    one_line(kp("search", emptied, QUESTION, "--header", "token"), "'token'; expected 'NAME: VALUE'")
    one_line(kp("search", "here", QUESTION, "--tenant", "nobody"), "no collection in here")
    one_line(kp("build", "here", "facts.txt", "--header", "a: b"), "headers go to a server")


def test_a_server_that_is_away_is_named(kp: Kp, tmp_path: Path) -> None:
    (tmp_path / "facts.txt").write_text("A.")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for command in (("search", url, QUESTION), ("build", url, "facts.txt"), ("verify", url), ("inspect", url)):
        one_line(kp(*command), f"There is no Chroma server at {url}", "chroma run")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch) -> None:
    """No proxy leads anywhere, and Chroma's default embedding function has not been downloaded."""
    monkeypatch.setattr(ONNXMiniLM_L6_V2, "DOWNLOAD_PATH", tmp_path / "none")
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def test_the_bundled_embedder_stands_for_the_default_of_chroma(kp: Kp, tmp_path: Path, nowhere) -> None:
    client = open_client(tmp_path / "default")
    vectors = SentenceTransformerEmbedder().embed(["A mill.", "A light."]).tolist()
    client.create_collection("notes").add(ids=["a", "b"], documents=["A mill.", "A light."], embeddings=vectors)
    client.close()
    code, out, _ = kp("search", str(tmp_path / "default"), "mill", "-k", "1", "--json")
    assert (code, json.loads(out)["hits"][0]["text"]) == (0, "A mill.")


def test_an_embedding_function_that_fails_is_said_in_one_line_and_not_needed_for_listing(
    kp: Kp, tmp_path: Path, nowhere, monkeypatch
) -> None:
    monkeypatch.setenv("A_KEY", "none")
    client = open_client(tmp_path / "theirs")
    function = HuggingFaceEmbeddingFunction(api_key_env_var="A_KEY")
    collection = client.create_collection("notes", embedding_function=function)
    collection.add(ids=["a"], documents=["A mill."], embeddings=[[1.0] * 384])
    client.close()
    code, _, told = kp("search", str(tmp_path / "theirs"), "mill")
    assert code == 1
    assert told.splitlines()[-1].startswith("kp: The collection's own embedding function, 'huggingface', fails (")
    assert as_json(kp("gc", str(tmp_path / "theirs"), "--packs", "packs", "--json"))["left"] == 0


@pytest.mark.parametrize(
    "command",
    [
        ("steer", "show", "formal.st"),
        ("steer", "calibrate", "formal.st"),
        ("ask", "notes", QUESTION, "--steering", "formal.st"),
        ("steer", "calibrate", "formal", "--questions", "formal.st"),
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
