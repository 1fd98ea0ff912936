"""Two servers at a time over one bucket, as `docs/scale.md` has them: what one compiles the other answers from.

They come before the server of all other tests (by the name of this file), as three take much memory.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from llama_index.core.llms import ChatMessage

from benchmarks import s3server
from kp_cli.app import run
from kp_core import KVTensors, PackStore, bundled_model, load_engine
from kp_core.packs.handle import Handle
from kp_core.packs.pack import PackKey
from kp_core.steering import preset
from kp_langchain import ChatKnowledgePacks
from kp_llamaindex import KnowledgePackLLM
from kp_methods import PacketComposer
from tests.conftest import DEMO
from tests.vllm.conftest import Both, Server
from tests.vllm.test_served import ISLES, loaded

PLACE = "s3://packs/team"
COIN = "What is the coin called?"


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """Two servers with one key of their own and one secret, on a real S3 server; each with a disk cache of its own."""
    folder, (key, secret), model = tmp_path_factory.mktemp("team"), s3server.KEYS["owner"], bundled_model()
    (folder / "cache").mkdir()
    (folder / "cache" / model.name).symlink_to(model)
    with s3server.server(folder / "s3") as address, pytest.MonkeyPatch.context() as patch:
        given = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_ENDPOINT_URL": address}
        given |= {"KP_SECRET": "5e" * 32, "KP_CACHE": str(folder / "cache")}
        for name, value in given.items():
            patch.setenv(name, value)
        servers = []
        for name in "ab":
            (folder / name).mkdir()
            settings = {"KP_SERVE_KEY": "7e" * 32, "KP_CACHE": str(folder / name / "cache")}
            servers.append(Server(folder / name, PLACE, settings))
        try:
            with ThreadPoolExecutor() as pool:
                list(pool.map(Server.start, servers))
            yield SimpleNamespace(a=servers[0], b=servers[1], store=PackStore(PLACE), folder=folder)
        finally:
            for each in servers:
                each.stop()


def session_of(server):
    return load_engine(engine=server.url, api_key=server.keys["own"])


def test_what_one_compiles_both_adapters_and_the_openai_client_ask_the_other(team, monkeypatch):
    openai = pytest.importorskip("openai")
    facts = (DEMO / "facts.jsonl").read_text().splitlines()[:4]
    (team.folder / "facts.jsonl").write_text("\n".join(facts))
    build = ["build", "isles", "facts.jsonl", "--namespace", "own", "--compile", "--engine", team.a.url, "--json"]
    with monkeypatch.context() as patch:
        patch.chdir(team.folder)
        for name, value in {**team.a.environment, "KP_API_KEY": team.a.keys["own"]}.items():
            patch.setenv(name, value)
        assert run([*build, "--packs", PLACE]) == 0
    fact = json.loads(facts[0])["text"]
    handle = str(team.store.handle(fact, "own"))
    asked = f"{handle}\nWhat is told here?"
    was = loaded(team.b)
    right, _ = team.b.chat(f"{fact}\nWhat is told here?", key="plain", max_tokens=12)
    said, usage = team.b.chat(asked, max_tokens=12)
    assert said == right
    assert loaded(team.b) - was == usage["prompt_tokens_details"]["cached_tokens"] > 0
    ours = {"base_url": team.b.url, "api_key": team.b.keys["own"], "store": PLACE, "namespaces": ["own"]}
    ours["max_tokens"] = 12
    assert ChatKnowledgePacks(**ours).invoke(asked).content == right
    assert KnowledgePackLLM(**ours).chat([ChatMessage(asked)]).message.content == right
    # A balancer learns which of them has it at hand: this one, from which both kinds of clients were answered.
    assert team.b.ask("/v1/packs?hot=1")[1]["data"] == [handle]
    assert team.a.ask("/v1/packs?hot=1")[1]["data"] == []
    client = openai.OpenAI(base_url=f"{team.b.url}/v1", api_key=team.b.keys["own"], max_retries=0)
    [model] = client.models.list().data
    messages = [{"role": "user", "content": asked}]
    whole = client.chat.completions.create(model=model.id, messages=messages, temperature=0, max_tokens=12)
    assert whole.choices[0].message.content == right


def test_what_one_altered_or_moved_the_other_loads(team, smol, questions):
    formal = smol.make_steering(preset("formal")[:4], progress=False)
    question, text = questions[13]
    steered = {"steering": (formal, 1.5), "scope": "pack"}
    for lines, options in (([text], steered), (text.splitlines(), {"composer": "splice"})):
        found = []
        for server in (team.a, team.b):
            session = session_of(server)
            handles = [team.store.put(session.build_pack(each, namespace="own")) for each in lines]
            content = "\n".join(map(str, [*handles, question]))
            found.append(session.generate(content, view=team.store.view("own"), max_tokens=8, **options))
        first, second = found
        assert second.text == first.text
        assert second.usage.computed_tokens < first.usage.computed_tokens / 2


def test_packets_are_those_of_the_local_engine(team, smol, questions, tmp_path):
    """Packs between soft tokens: compiled by the server from embeddings, once, and moved."""
    both, composer, different = Both(team.a, smol, tmp_path), PacketComposer.load(), []
    for question, text in questions[:2]:
        lines = [f"Read aloud: {line}" for line in text.splitlines()]
        content = "\n".join(f"{{{at}}}" for at in range(len(lines))) + f"\n{question}"
        there, here = both.ask(content, lines, composer=composer, max_tokens=12)
        assert there.prompt.token_ids == here.prompt.token_ids
        assert there.usage.approximate_tokens == here.usage.approximate_tokens > 0
        again, plain = (both.ask(content, lines, composer=each, max_tokens=12)[0] for each in (composer, "exact"))
        assert again.text == there.text
        assert again.usage.computed_tokens <= len(there.prompt) - there.prompt.spans[-1].stop
        assert len(plain.prompt) < len(there.prompt)
        different += [(question, there.text, here.text)] if there.text != here.text else []
    assert not different


def test_what_no_server_sealed_is_read_by_none(team, smol):
    """Neither what was forged nor what another engine stored; both are computed."""
    ask = partial(team.b.chat, max_tokens=8)
    forged = Handle.parse(
        team.a.compile("The ferry of Wick carries forty goats at most, never on a Sunday. " * 3)["handle"]
    )
    key = PackKey(session_of(team.a).fingerprint)
    pack = team.store.get(forged, key)
    wrong = KVTensors(pack.kv.keys, tuple(value * 3 for value in pack.kv.values))
    team.store.put(replace(pack, kv=wrong))
    foreign = team.store.put(
        smol.build_pack("The foundry of Oriel casts one bell a year, in spring. " * 3, namespace="own")
    )
    for handle in (forged, foreign):
        was = loaded(team.b)
        text = team.store.peek(handle).text
        assert ask(f"{handle}\nWhat is told?")[0] == ask(f"{text}\nWhat is told?", key="plain")[0]
        assert loaded(team.b) == was


def test_one_is_killed_and_comes_back(team):
    pack = team.a.compile(ISLES)
    asked = f"{pack['handle']}\n{COIN}"
    said, _ = team.a.chat(asked)
    team.a.kill()
    assert team.b.chat(asked)[0] == said
    team.a.start()
    again, usage = team.a.chat(asked)
    assert again == said
    assert usage["prompt_tokens_details"]["cached_tokens"] == loaded(team.a) >= pack["tokens"]
    # What one deletes is gone for the other.
    assert team.b.ask(f"/v1/packs/{pack['handle']}", method="DELETE")[0] == 200
    assert team.a.ask(f"/v1/packs/{pack['handle']}")[0] == 404
    body = {"messages": [{"role": "user", "content": asked}], "max_tokens": 1}
    assert team.a.ask("/v1/chat/completions", body)[0] == 404
