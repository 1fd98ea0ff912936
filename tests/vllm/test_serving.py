"""What `kp serve` adds to packs: facts, counts, bulk compiling, and answers without handles."""

import json
import re
from types import SimpleNamespace

import httpx
import pytest

from kp_cli.app import run
from kp_cli.play.world import SAMPLE, World
from kp_core import load_engine
from kp_core.errors import ModelError
from tests.conftest import DEMO
from tests.kits import HashEmbedder

COIN = "The coin of the Orrelay Isles is the tallin, a square piece of bronze with a round hole in it.\n" * 2


def counts(server):
    headers = {"authorization": f"Bearer {server.keys['own']}"}
    said = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
    assert "vllm:external_prefix_cache_hits_total" in said
    return {name: int(number) for name, number in re.findall(r"^(kp_\w+) (\d+)$", said, re.MULTILINE)}


def test_facts_are_compiled_found_and_answered_from(server):
    before = counts(server)
    given = [{"text": COIN, "title": "Coin"}, {"text": "The ferry leaves at the third bell."}]
    status, told = server.ask("/v1/facts", {"facts": given, "namespace": "own"})
    assert (status, told["added"]) == (200, 2), told
    _, found = server.ask("/v1/facts/search", {"question": "What money do the isles have?", "k": 1})
    [fact] = found["data"]
    assert (fact["text"], fact["title"]) == (COIN, "Coin")
    _, pack = server.ask(f"/v1/packs/{fact['handle']}")
    assert pack["compiled"]
    said, usage = server.chat(f"{fact['handle']}\nWhat is the coin called?")
    assert said == server.chat(f"{COIN}\nWhat is the coin called?", key="plain")[0]
    split = usage["knowledge_packs"]
    assert split["pack_tokens"] == pack["tokens"] <= split["reused_tokens"]
    assert split["pack_tokens"] + split["prompt_tokens"] == usage["prompt_tokens"]
    after = counts(server)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "kp_packs_delivered_total": 1,
        "kp_pack_tokens_total": pack["tokens"],
        "kp_packs_compiled_total": 2,
        "kp_facts_added_total": 2,
        "kp_fact_searches_total": 1,
    }
    assert server.ask(f"/v1/facts/{fact['id']}", key="plain")[0] == 404
    assert server.ask(f"/v1/facts/{fact['id']}", method="DELETE")[0] == 200
    assert server.ask(f"/v1/packs/{fact['handle']}")[0] == 404


def test_a_playground_asks_it(server, tmp_path):
    session = load_engine(engine=server.url, api_key=server.keys["own"])
    world = World(session, HashEmbedder(), tmp_path, server.url)
    documents = list(world.add(SAMPLE[:1]))
    for _ in range(2):
        requests, _ = world.ask("Who is the harbour master?")
        packs, text = (session.generate(**requests[way]) for way in ("packs", "text"))
        # The text is read anew each time, though the server has it; what packs bring is there from the first time on.
        assert text.usage.reused_tokens == 0
        assert packs.usage.reused_tokens > 0
        assert packs.usage.pack_tokens in {each.tokens for each in documents}
        assert packs.text == text.text


def test_the_model_cannot_say_a_handle(server):
    forced = {"structured_outputs": {"choice": ["See kp:own/" + "a" * 21 + " for more."]}, "max_tokens": 60}
    said, _ = server.chat("Where is more?", **forced)
    assert said == "See  for more."
    body = {"messages": [{"role": "user", "content": "Where is more?"}], "stream": True, **forced}
    headers = {"authorization": f"Bearer {server.keys['own']}"}
    address, pieces = f"{server.url}/v1/chat/completions", []
    with httpx.stream("POST", address, json=body, headers=headers, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == said
    assert len(pieces) > 2  # A stream; vLLM joins tokens where it is asked more slowly than it computes.


def test_a_handle_of_more_than_the_context_is_refused_as_its_text_is(server):
    half = server.compile("The bell of Vint is rung at noon. " * 150)["handle"]
    status, said = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": f"{half} {half}"}]})
    assert (status, "2048" in said["error"]["message"]) == (400, True)


def test_a_collection_is_compiled_by_the_server(server, tmp_path, monkeypatch, capfd):
    facts = (DEMO / "facts.jsonl").read_text().splitlines()[:12]
    (tmp_path / "facts.jsonl").write_text("\n".join(facts))
    before = counts(server)["kp_packs_compiled_total"]
    build = ["build", "isles", "facts.jsonl", "--namespace", "own", "--compile", "--engine", server.url, "--json"]
    build += ["--packs", str(server.path)]
    monkeypatch.chdir(tmp_path)
    for name, value in {**server.environment, "KP_API_KEY": server.keys["own"]}.items():
        monkeypatch.setenv(name, value)
    for compiled in (12, 0):
        assert run(build) == 0
        said = capfd.readouterr()
        assert json.loads(said.out)["plan"]["packs"] == compiled, said.err
        assert counts(server)["kp_packs_compiled_total"] == before + 12


def test_what_packs_do_not_fit_into_is_refused():
    from kp_serve.connector import _check

    def config(cache="auto", dtype="bfloat16", policy="fail"):
        return SimpleNamespace(
            model_config=SimpleNamespace(dtype=f"torch.{dtype}", model="m"),
            cache_config=SimpleNamespace(cache_dtype=cache),
            kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        )

    def check(groups=1, **given):
        _check(config(**given), SimpleNamespace(kv_cache_groups=[None] * groups), SimpleNamespace(dtype="bfloat16"))

    check()
    check(cache="bfloat16")
    for cache in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        with pytest.raises(ModelError, match=f"its KV cache is {cache}"):
            check(cache=cache)
    for wrong in ({"dtype": "float16"}, {"policy": "recompute"}):
        with pytest.raises(ModelError, match="as it was started"):
            check(**wrong)
    with pytest.raises(ModelError, match="2 kinds"):
        check(groups=2)
