"""`kp` with engines, composers and plans, on models of random weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kp_core import Handle, PackStore
from kp_core.packs.objects import ObjectBlobs
from tests.cli.conftest import FACTS, Kp, as_json
from tests.cli.engines import tiny
from tests.kits import tiny_tokenizer
from tests.parity.families import model_of

TINY = ("--engine", "tests.cli.engines:tiny")
BARE = ("--engine", "tests.cli.engines:bare")
QUESTION = ("Which bird is on the flag?", "-k", "2", "--max-tokens", "4")


def last(err: str) -> str:
    """The last line, behind the bars of libraries that were imported before `kp` could switch them off."""
    return err.splitlines()[-1]


def test_ask_explains_its_plan_and_computes_nothing(kp: Kp, bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # Were anything computed, it would be by one of these two.
        for name in ("run", "kv"):
            patch.setattr(tiny().engine, name, None)
        code, out, _ = kp("ask", "bank", *QUESTION, *TINY, "--explain", "--kv", "stored")
        assert code == 0
        assert out.splitlines()[0].split() == ["tokens", "from", "to", "source", "what"]
        assert "; the answer may take 4 tokens" in " ".join(out.split())
        assert "Sources" not in out
        about = as_json(kp("ask", "bank", *QUESTION, *TINY, "--explain", "--json"))
        text = as_json(kp("ask", "bank", *QUESTION, *TINY, "--explain", "--text", "--json"))["plan"]
    assert set(about) == {"question", "sources", "plan"}
    usage = as_json(kp("ask", "bank", *QUESTION, *TINY, "--json"))["answers"]["packs"]["usage"]
    assert sum(about["plan"]["tokens"].values()) == usage["prompt_tokens"] + usage["pack_tokens"]
    assert any("heron" in row["what"] or "kp:default/" in row["what"] for row in about["plan"]["regions"])
    assert [row["what"] for row in text["regions"]] == ["text"]
    assert "pack" not in about["plan"]["tokens"]
    assert kp("ask", "bank", *QUESTION, *TINY, "--kv", "stored")[0] == 0
    tiny().clear_cache()
    stored = as_json(kp("ask", "bank", *QUESTION, *TINY, "--explain", "--json"))["plan"]["tokens"]
    assert stored["pack"] > 0
    assert sum(stored.values()) == sum(about["plan"]["tokens"].values())


def test_ask_says_how_many_tokens_are_approximate(kp: Kp, bank: Path) -> None:
    asked = ("ask", "bank", *QUESTION, *TINY, "--kv", "stored")
    code, out, _ = kp(*asked)
    assert (code, "approximate" in out) == (0, False)
    about = as_json(kp(*asked, "--composer", "splice", "--json"))
    usage, second = about["answers"]["packs"]["usage"], Handle.parse(about["sources"][1]["handle"])
    # The second pack stands behind the first; that one stands where it was compiled.
    assert usage["approximate_tokens"] == len(PackStore(bank / "packs").get(second).token_ids)
    code, out, _ = kp(*asked, "--composer", "splice")
    assert (code, f"({usage['approximate_tokens']} approximate)" in out) == (0, True)
    code, _, err = kp(*asked, "--composer", "mend")
    assert (code, "expected one of auto, exact, packet, select, splice" in " ".join(err.split())) == (1, True)


def test_ask_rebuilds_packs_of_another_model_only_when_told(kp: Kp, bank: Path) -> None:
    from tests.conftest import tiny_engine

    store = PackStore(bank / "packs")
    handle = store.put(tiny_engine("qwen3").build_pack("The heron is grey."))
    asked = ("ask", "bank", f"{handle} Which bird?", "-k", "1", "--max-tokens", "2", *TINY)
    code, _, err = kp(*asked)
    assert (code, "was not made by this model" in last(err)) == (1, True)
    assert kp(*asked, "--mismatch", "rebuild")[0] == 0
    assert kp(*asked, "--mismatch", "ignore")[0] == 2


def test_an_engine_that_offers_nothing_else_answers(kp: Kp, bank: Path) -> None:
    about = as_json(kp("ask", "bank", *QUESTION, *BARE, "--json"))
    assert about["answers"]["packs"]["text"] == "a heron"
    assert kp("ask", "bank", *QUESTION, *BARE, "--explain")[0] == 0
    model = as_json(kp("doctor", *BARE, "--json"))["model"]
    assert (model["supported"], model["advice"]) == (True, "keep packs lazy: this engine gives no KV to store")
    for arguments in (("ask", "bank", *QUESTION, "--kv", "stored"), ("steer", "make", "formal", "-o", "s")):
        code, out, err = kp(*arguments, *BARE)
        assert (code, out) == (1, "")
        assert last(err).startswith("kp: Bare does not offer ")


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ("nothing:make", (), "expected 'package.module:function'"),
        ("tests.cli.engines", (), "expected 'package.module:function'"),
        ("tests.cli.engines:nothing", (), "expected 'package.module:function'"),
        ("tests.cli.engines:number", (), "Got a int as engine"),
        ("tests.cli.engines:tiny", ("--dtype", "float32"), "tests.cli.engines:tiny refused its arguments"),
    ],
)
def test_what_is_no_engine_is_refused_in_one_line(
    kp: Kp, bank: Path, engine: str, options: tuple[str, ...], words: str
) -> None:
    for command in (("ask", "bank", "Which bird?"), ("ask", "bank"), ("steer", "make", "formal", "-o", "s")):
        code, out, err = kp(*command, "--engine", engine, *options)
        assert (code, out) == (1, "")
        assert words in err
        assert len(err.strip().splitlines()) == 1
    code, out, _ = kp("doctor", "--engine", engine, *options, "--json")
    assert (code, words in json.loads(out)["model"]["why_not"]) == (3, True)


@pytest.mark.parametrize("place", [".", "memory://doctor"])
def test_the_doctor_measures_a_store_and_leaves_nothing_there(kp: Kp, place: str) -> None:
    model = as_json(kp("doctor", "--packs", place, *TINY, "--json"))["model"]
    taken = re.match(r"takes ([\d.]+) s from the store, [\d.]+ s from text", model["pack_of_1000_tokens"])
    assert taken
    rate = model["store_mb_per_s"] * 1e6
    expected = [1000 * model["kv_bytes_per_token"] / (rate + half) for half in (5e5, -5e5)]
    assert expected[0] - 1e-3 <= float(taken[1]) <= expected[1] + 1e-3 or rate <= 1e6
    assert not list(Path().glob("kp-*"))
    assert not list(ObjectBlobs("memory://doctor").list())


def test_the_doctor_says_what_a_cache_does_not_allow(kp: Kp, tmp_path: Path) -> None:
    model_of("deepseek_v3").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = as_json(kp("doctor", "--model", tmp_path, "--json"))["model"]
    assert "compose, as its cache holds latents of multi-head latent attention" in model["lacks"]
    assert "batch, as one pass over several answers is not written for a cache with latent" in model["lacks"]
    assert "steer" not in model["offers"]


def test_namespaces_that_cannot_be_are_refused_before_anything_is_done(kp: Kp, bank: Path, tmp_path: Path) -> None:
    for command in (
        ("build", "new", "facts.jsonl"),
        ("build", "bank", "--fact", "The ferry leaves at six."),
        ("search", "bank", "x"),
        ("ask", "bank", "x", "--model", "./nothing"),
        ("ask", "bank", "--model", "./nothing"),
    ):
        code, out, err = kp(*command, "--namespace", "Acme Corp")
        assert (code, out) == (1, "")
        assert err.startswith("kp: Got the namespace 'Acme Corp'; expected")
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()
    assert as_json(kp("status", "bank", "--json"))["facts"] == len(FACTS)
