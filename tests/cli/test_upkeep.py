"""Compiling, removing, verifying and inspecting a collection, as a user would."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kp_core import ChromaFactStore, load_engine
from kp_core.banks.chroma import open_client
from tests.cli.conftest import FACTS, Kp, as_json, started
from tests.conftest import until
from tests.ggufs import write_gguf

TINY = ("--engine", "tests.cli.engines:tiny")
COMPILE = ("build", "bank", "--compile", *TINY)


def on_disk(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_a_plan_says_what_compiling_takes(kp: Kp, bank: Path) -> None:
    done = as_json(kp(*COMPILE, "--json"))["plan"]
    packs = as_json(kp("status", "bank", "--json"))["packs"]
    assert (packs["packs"], packs["with_kv"]) == (4, 4)
    assert (done["packs"], done["stored"]) == (4, 0)
    assert (done["tokens"], done["bytes"]) == (packs["tokens"], pytest.approx(packs["bytes"], rel=0.1))
    again = as_json(kp(*COMPILE, "--json"))["plan"]
    assert (again["packs"], again["stored"]) == (0, 4)
    assert "Nothing was found" not in kp(*COMPILE)[1]


@pytest.mark.parametrize("compress", ["none", "lossless"])
def test_a_build_compresses_as_it_is_told_and_says_the_bytes(kp: Kp, bank: Path, compress: str) -> None:
    build = (*COMPILE, "--compress", compress)
    code, out, err = kp(*build, "--json")
    assert f"MB on disk ({compress})" in err or compress == "none"
    done = as_json((code, out, err))["plan"]
    packs = as_json(kp("status", "bank", "--json"))["packs"]
    assert packs["compression"] == {compress: 4}
    assert (done["compress"], done["bytes"]) == (compress, pytest.approx(packs["bytes"], rel=0.1))
    assert as_json(kp(*build, "--json"))["plan"]["stored"] == 4
    ask = ("ask", "bank", "How many sails?", "-k", "1", "--kv", "stored", "--max-tokens", "1", *TINY, "--json")
    usage = as_json(kp(*ask))["answers"]["packs"]["usage"]
    assert as_json(kp("status", "bank", "--json"))["packs"]["entries"] == 4, "what is there was not made again"
    assert usage["approximate_tokens"] == 0


def test_an_unknown_compression_is_refused_before_anything_is_done(kp: Kp, bank: Path) -> None:
    for compress in ("zip", "auto"):
        code, _, said = kp(*COMPILE, "--compress", compress)
        assert code == 2
        assert f"'{compress}' is not one of 'none', 'lossless'" in " ".join(said.replace("│", " ").split())
    assert not (bank / "packs").exists()


def test_a_build_says_its_plan_warns_of_gigabytes_and_goes_on_in_lines(
    kp: Kp, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kp_cli.knowledge.MUCH_BYTES", 1000)
    monkeypatch.setattr("kp_core.progress._LINE_EVERY_S", 0.0)
    code, out, err = kp(*COMPILE, "facts.jsonl", "--kv", "lazy")
    assert code == 0
    assert "To compile: 4 packs of" in out
    assert "MB on disk" in out
    assert "`--kv lazy` stores text alone" in err
    assert "Building packs: 100%" in err
    assert "\r" not in err
    assert as_json(kp("status", "bank", "--json"))["packs"]["with_kv"] == 0


def test_banks_are_made_when_they_are_asked_for(kp: Kp, bank: Path) -> None:
    about = as_json(kp("status", "bank", "--json"))
    assert (about["facts"], about["banks"], about["embedder"]) == (4, None, "all-MiniLM-L6-v2")
    assert about["namespaces"] == {"default": 4}
    assert about["bytes"]["chroma"] > about["bytes"]["text"] > 0
    assert kp("ask", "bank", "Which bird?", "--unit", "bank", "--max-tokens", "1", *TINY)[0] == 0
    assert as_json(kp("status", "bank", "--json"))["banks"] == 1
    assert "chroma" in kp("status", "bank")[1]


def test_what_is_removed_goes_with_its_packs(kp: Kp, bank: Path) -> None:
    assert kp(*COMPILE)[0] == 0
    said = as_json(kp("remove", "bank", "tid", "--dry-run", "--json"))
    assert said == {"removed": ["tide"], "dry_run": True, "facts": 4}
    code, out, _ = kp("remove", "bank", "tid")
    assert (code, out.splitlines()[0][:46]) == (0, "Facts removed: 1; packs: 1; facts left: 3. Chr")
    assert "`chroma vacuum --path bank`" in out
    assert b"Grey Tide" not in on_disk(bank / "packs")
    named = ("--where", '{"year": {"$gt": 1900}}', "--source", "facts.jsonl")
    said = as_json(kp("remove", "bank", *named, "--json"))
    assert (said["removed"], said["packs"], said["facts"]) == (["bird", "bread"], 2, 1)
    assert b"heron" not in on_disk(bank / "packs")
    assert b"four sails" in on_disk(bank / "packs")
    code, _, err = kp("remove", "bank", "--source", "other")
    assert code == 1
    assert "Got the source 'other'; no such fact has it. Write it as `kp search` shows it." in " ".join(err.split())


def test_what_to_do_next_can_be_pasted_for_any_path(kp: Kp, bank: Path) -> None:
    bank.rename("a b")
    assert "`kp build 'a b' --compile`" in " ".join(kp("status", "a b")[1].split())
    assert kp("build", "a b", "--compile", *TINY)[0] == 0
    assert "`chroma vacuum --path 'a b'`" in " ".join(kp("remove", "a b", "bread")[1].split())
    next(Path("a b/packs").glob("packs/*/*/*.safetensors")).write_bytes(b"damaged")
    with ChromaFactStore("a b") as facts:
        facts.delete([fact.id for fact in facts.facts()])
    said = " ".join(kp("verify", "a b")[1].split())
    assert "`kp remove 'a b' --unused`" in said
    assert "`kp verify 'a b' --repair`" in said


def test_packs_of_an_old_text_go_with_it(kp: Kp, bank: Path) -> None:
    assert kp(*COMPILE)[0] == 0
    assert kp("build", "bank", "--fact", "The mill has six sails.", "--id", "mill", "--replace")[0] == 0
    assert as_json(kp("status", "bank", "--json"))["packs"]["packs"] == 3
    (bank.parent / "bird.jsonl").write_text(json.dumps(FACTS[1] | {"text": "The bird on the flag is a gull."}))
    report = as_json(kp("build", "bank", "bird.jsonl", "--replace", "--json"))
    assert (report["added"], report["facts"]) == (1, 4)
    report = as_json(kp("status", "bank", "--json"))
    assert (report["updated"], report["packs"]["packs"]) == (2, 2)


@pytest.mark.slow
def test_verify_repairs_vectors_and_names_packs_that_no_fact_uses(kp: Kp, bank: Path) -> None:
    assert kp(*COMPILE)[0] == 0
    verify = ("verify", "bank")
    assert as_json(kp(*verify, "--json"))["orphans"] == []
    with ChromaFactStore(bank) as facts:
        facts.delete(["bread"])
    [orphan] = as_json(kp(*verify, "--json"))["orphans"]
    code, out, _ = kp(*verify)
    assert (code, f"uses any more: {orphan}; `kp remove bank --unused` removes them." in " ".join(out.split())) == (
        0,
        True,
    )
    assert as_json(kp("remove", "bank", "--unused", "--dry-run", "--json"))["packs"] == 1
    assert as_json(kp("remove", "bank", "--unused", "--json"))["packs"] == 1
    client = open_client(bank)
    client.get_collection("kp-default-facts").update(ids=["mill"], embeddings=np.eye(1, 384, dtype=np.float32))
    client.close()
    code, out, _ = kp(*verify)
    assert (code, "have the vector of another text, e.g. mill" in " ".join(out.split())) == (3, True)
    code, out, _ = kp(*verify, "--repair", "--json")
    assert (code, len(json.loads(out)["wrong"]), json.loads(out)["left"]) == (0, 1, [])
    assert kp(*verify)[0] == 0
    [hit] = as_json(kp("search", "bank", "How many sails has the mill?", "-k", "1", "--json"))["hits"]
    assert hit["id"] == "mill"


@pytest.mark.slow
def test_verify_looks_at_the_database_and_the_packs(kp: Kp, bank: Path) -> None:
    assert kp(*COMPILE)[0] == 0
    pack = next((bank / "packs").glob("packs/*/*/*.safetensors"))
    assert pack.name[:21] in as_json(kp("status", str(pack), "--json"))["owners"][0]
    data = bytearray(pack.read_bytes())
    data[-5] ^= 1
    pack.write_bytes(data)
    behind = bank / "packs/behind/00" / f"{'0' * 32}.safetensors"
    behind.parent.mkdir(parents=True)
    behind.write_bytes(b"torn")
    code, out, _ = kp("verify", "bank")
    assert (code, "The pack kp:default/" in out, f"packs, behind/00/{behind.name}: " in out) == (3, True, True)
    assert kp("verify", "bank", "--repair")[0] == 0
    assert not pack.exists()
    assert not behind.exists()
    assert kp("verify", "bank")[0] == 0
    (bank / "chroma.sqlite3").write_bytes(b"garbage" * 999)
    # In a process of its own, as Chroma remembers the files it has opened.
    with started("verify", str(bank), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert b"is no database, or damaged" in process.communicate()[0]
        assert process.returncode == 3


def test_standard_input_becomes_facts(kp: Kp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    with (tmp_path / "rows").open() as rows:
        monkeypatch.setattr("sys.stdin", rows)
        assert as_json(kp("build", "new", "-", "--json"))["facts"] == 4


@pytest.mark.slow
def test_an_interrupted_build_goes_on_with_nothing_twice(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"Fact number {number} is about the number {number}."}) for number in range(1000)]
    (tmp_path / "many.jsonl").write_text("\n".join(rows))
    command = ("build", "bank", "many.jsonl", "--json")
    database = f"{(tmp_path / 'bank' / 'chroma.sqlite3').as_uri()}?mode=ro"

    def some_are_stored() -> bool:
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database, uri=True)) as opened:
            return bool(opened.execute("SELECT count(*) FROM embeddings").fetchone()[0])
        return False

    with started(*command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        until(lambda: process.poll() is not None or some_are_stored(), 200)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    with ChromaFactStore(tmp_path / "bank", read_only=True) as facts:
        held = len(facts)
    assert 0 < held < 1000
    with started(*command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        report = json.loads(process.communicate()[0])
    assert (report["added"], report["duplicates"], report["facts"]) == (1000 - held, held, 1000)


def test_unpacked_models_are_listed_and_removed(
    kp: Kp, bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KP_CACHE", str(cache := tmp_path / "kept"))
    load_engine(write_gguf(tmp_path / "tiny.gguf"), engine="hf", dtype="float32")
    (folder,) = cache.glob("gguf-*")
    (cache / "notes").mkdir()  # Not ours.
    told = as_json(kp("status", "--json"))
    assert told[str(folder)]["source"] == "tiny.gguf"
    assert told[str(folder)]["bytes"] == sum(f.stat().st_size for f in folder.iterdir() if f.name != "converted.json")
    assert "tiny.gguf" in kp("status")[1]
    assert kp("remove", "bank", "--models")[0] == kp("remove")[0] == 2
    before = on_disk(bank)
    assert as_json(kp("remove", "--models", "--dry-run", "--json"))["removed"] == [str(folder)]
    assert folder.is_dir()
    assert "Unpacked models removed: 1, 0.0 GB." in kp("remove", "--models")[1]
    assert not folder.is_dir()
    assert (cache / "notes").is_dir()
    assert on_disk(bank) == before
    assert as_json(kp("status", "--json")) == {}
    assert as_json(kp("doctor", "--model", "tiny.gguf", "--json"))["model"]["supported"]
