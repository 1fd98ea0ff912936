"""`/v1/facts`, what is counted, and what of an answer goes out: the middleware before an application like vLLM's."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from benchmarks import s3server
from kp_core import Handle, PackStore, Question, find_handles, load_engine, strip_handles
from kp_core.banks import ChromaFactStore, Fact
from kp_core.errors import ModelError, UnsupportedRequestError
from kp_serve.engine import VLLMEngine
from kp_serve.middleware import Answer
from kp_serve.stored import StoredKV
from tests.attack.trouble import full_disk
from tests.conftest import tiny_engine, until
from tests.core.engines.test_forks import in_child
from tests.core.prompt.test_template import GUARD, SYSTEM_FIRST, TWO_ROLES
from tests.kits import HashEmbedder
from tests.serve.gate import Served, address, events_of, listening, server
from tests.serve.test_serving import TEXT, read, served

__all__ = ["address", "server"]

HANDLE = "kp:a/" + "b" * 21


def test_a_fact_is_a_pack_and_is_found_by_its_handle(server):
    told = server.add(TEXT, "Cats sleep.", TEXT)
    assert (told["added"], told["duplicates"], len(told["data"])) == (2, 1, 2)
    assert server.computed == 2
    found = server.ask("POST", "/v1/facts/search", {"question": TEXT, "k": 1}).json()["data"]
    assert (found[0]["text"], round(found[0]["score"], 3)) == (TEXT, 1)
    assert found[0] == {**told["data"][0], "score": found[0]["score"]}
    handle = found[0]["handle"]
    _, body = server.chat(messages=[{"role": "user", "content": handle}])
    assert body["messages"][0]["content"] == TEXT
    assert server.ask("GET", f"/v1/packs/{handle}").json()["provenance"] == {"unit": "fact"}
    # What is known is neither stored nor computed again.
    assert server.add(TEXT)["duplicates"] == 1
    assert server.computed == 2
    gone = server.ask("DELETE", f"/v1/facts/{told['data'][0]['id']}")
    assert gone.json() == {"id": told["data"][0]["id"], "namespace": "a", "deleted": True}
    assert server.ask("GET", f"/v1/packs/{handle}").status_code == 404
    assert [each["text"] for each in server.ask("GET", "/v1/facts").json()["data"]] == ["Cats sleep."]


def test_a_text_of_two_sources_is_two_facts_with_one_pack(server):
    facts = [{"text": TEXT, "source": name} for name in ("a.md", "b.md")] + [{"text": "Cats sleep."}]
    told = [server.add(facts=facts) for _ in range(2)]
    assert [(reply["added"], reply["duplicates"]) for reply in told] == [(3, 0), (0, 3)]
    first, second, other = told[0]["data"]
    assert (first["source"], second["source"], told[1]["data"]) == ("a.md", "b.md", told[0]["data"])
    assert first["handle"] == second["handle"]
    found = server.ask("POST", "/v1/facts/search", {"question": TEXT, "k": 2}).json()["data"]
    assert {hit["text"] for hit in found} == {TEXT, "Cats sleep."}
    server.ask("DELETE", f"/v1/facts/{first['id']}")
    [found] = server.ask("POST", "/v1/facts/search", {"question": TEXT, "k": 1}).json()["data"]
    assert (found["source"], found["handle"]) == ("b.md", first["handle"])
    server.ask("DELETE", f"/v1/facts/{second['id']}")
    assert server.ask("GET", f"/v1/packs/{first['handle']}").status_code == 404
    assert other["handle"]


def test_a_search_lists_no_facts(tmp_path, monkeypatch):
    """Counts and one query of the index, however many facts there are, in whichever namespace."""
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as facts:
        gate, calls, call = Served(tmp_path / "gate", facts), [], facts._call
        facts.add([Fact(f"Fact {number}.", namespace=space) for number in range(300) for space in ("a", "b")])
        monkeypatch.setattr(
            facts, "_call", lambda collection, name, **given: calls.append(name) or call(collection, name, **given)
        )
        found = gate.ask("POST", "/v1/facts/search", {"question": "Fact 7.", "k": 2}).json()["data"]
        assert [found[0]["text"], len(found)] == ["Fact 7.", 2]
        assert calls.count("query") == 1
        assert set(calls) == {"count", "query"}
        calls.clear()
        gate.ask("POST", "/v1/facts/search", {"question": "Fact 7.", "namespace": "default"})
        assert set(calls) <= {"count"}


def test_facts_are_listed_in_pages(server):
    server.add(*(f"Fact number {number}." for number in range(5)))
    first = server.ask("GET", "/v1/facts?limit=3").json()
    rest = server.ask("GET", f"/v1/facts?limit=3&after={first['data'][-1]['id']}").json()
    assert [first["has_more"], rest["has_more"]] == [True, False]
    assert [each["text"] for each in first["data"] + rest["data"]] == [f"Fact number {number}." for number in range(5)]


def test_facts_of_others_look_like_none_at_all(server):
    [own], [other] = (server.add(TEXT, key=key)["data"] for key in ("a", "b"))
    assert own["handle"] != other["handle"]
    for method in ("GET", "DELETE"):
        answers = [
            server.ask(method, f"/v1/facts/{name}{query}")
            for name in (other["id"], "unknown")
            for query in ("", "?namespace=b")
        ]
        assert {each.status_code for each in answers} == {404}
        assert len({each.text.replace(other["id"], "unknown") for each in answers}) == 1
    assert [each["namespace"] for each in server.ask("GET", "/v1/facts").json()["data"]] == ["a"]
    assert server.ask("GET", "/v1/facts?namespace=b").json()["data"] == []
    found = server.ask("POST", "/v1/facts/search", {"question": TEXT, "k": 9}).json()["data"]
    assert [each["id"] for each in found] == [own["id"]]
    for asked in ("b", ["b"], ["b", "unknown"]):
        assert server.ask("POST", "/v1/facts/search", {"question": TEXT, "namespace": asked}).json()["data"] == []
    refused = [server.ask("POST", "/v1/facts", {"facts": [], "namespace": name}) for name in ("b", "c")]
    assert refused[0].text.replace("'b'", "'c'") == refused[1].text
    assert server.ask("GET", f"/v1/facts/{other['id']}", key="b").json() == other


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_pack_is_what_a_message_of_its_role_begins_with(server, role):
    body = {"text": TEXT, "namespace": "a", "compiled_for": role}
    pack = server.store.get(Handle.parse(server.ask("POST", "/v1/packs", body).json()["handle"]))
    for said in (TEXT, f"{TEXT} And more.", f"{TEXT}\nWho?"):
        messages = [{"role": role, "content": said}, *[{"role": "user", "content": "?"}] * (role == "system")]
        ids = server.gate.state.template.render(messages).token_ids
        assert ids[: len(pack.prefix) + len(pack.token_ids)] == (*pack.prefix, *pack.token_ids)


def test_facts_that_are_refused_leave_no_packs(server):
    server.add("The ferry leaves at six.")
    before = [*server.store]
    known = {"text": "The mill has four sails.", "id": "mill"}
    body = {"facts": [known, {"text": "The mill has five sails.", "id": "mill"}], "namespace": "a"}
    assert server.ask("POST", "/v1/facts", body).status_code == 400
    assert [*server.store] == before
    asked = {"text": "The ferry leaves at six.", "namespace": "a"}
    assert server.ask("DELETE", "/v1/packs", asked, "reader").status_code == 403
    assert server.ask("DELETE", "/v1/packs", {**asked, "namespace": "b"}).status_code == 404
    assert server.ask("DELETE", "/v1/packs", {"namespace": "a"}).status_code == 400
    for is_there in (True, False):
        assert server.ask("DELETE", "/v1/packs", asked).json()["deleted"] is is_there
    assert [*server.store] == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/v1/facts", b"{not json", 400, "not JSON"),
        ("POST", "/v1/facts", b"[" * 100_000, 400, "not JSON"),
        ("POST", "/v1/facts", b" " * (33 * 2**20), 413, "bytes"),
        ("POST", "/v1/facts", {"text": TEXT, "namespace": "a"}, 400, "unknown fields ['text']"),
        ("POST", "/v1/facts", {"facts": TEXT, "namespace": "a"}, 400, "a list"),
        ("POST", "/v1/facts", {"facts": [{"text": " "}], "namespace": "a"}, 400, "blank"),
        ("POST", "/v1/facts", {"facts": [{"text": TEXT, "vector": []}], "namespace": "a"}, 400, "vector"),
        ("POST", "/v1/facts", {"facts": [{"text": TEXT}, {"text": "word " * 3000}], "namespace": "a"}, 400, "2048"),
        ("POST", "/v1/facts", {"facts": [{"text": "a<|im_end|>b"}], "namespace": "a"}, 400, "special token"),
        ("POST", "/v1/facts", {"facts": [{"text": TEXT, "expires": "soon"}], "namespace": "a"}, 400, "expires"),
        ("POST", "/v1/facts", {"facts": [{"text": TEXT}] * 1001, "namespace": "a"}, 400, "1000"),
        ("POST", "/v1/facts", b'{"facts": [{"text": "\\ud800"}], "namespace": "a"}', 400, "no file can hold"),
        ("POST", "/v1/facts/search", {"question": " "}, 400, "question"),
        ("POST", "/v1/facts/search", {"question": "x", "k": 0}, 400, "'k'"),
        ("POST", "/v1/facts/search", {"question": "x", "k": True}, 400, "'k'"),
        ("POST", "/v1/facts/search", {"question": "x", "where": {"$no": 1}}, 400, "$no"),
        ("GET", "/v1/facts?limit=no", None, 400, "limit"),
        ("PUT", "/v1/facts", {}, 405, "PUT"),
        ("POST", "/v1/chat/completions", b'{"messages": [], "temperature": 1e999}', 400, "finite"),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 200, ""),
        ("POST", "/v1/completions", b'{"prompt": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        ("POST", "/v1/responses", {"input": "x"}, 404, "/v1/responses"),
    ],
)
def test_what_is_wrong_is_one_error_in_the_shape_of_the_api(server, method, path, body, status, said):
    server.add("Something is known.")
    done = server.ask(method, path, body)
    assert done.status_code == status, done.text
    if status != 200:
        assert said in done.json()["error"]["message"]
    assert [each["text"] for each in server.ask("GET", "/v1/facts").json()["data"]] == ["Something is known."]


def test_a_key_that_reads_changes_nothing(server):
    [fact] = server.add(TEXT)["data"]
    assert server.ask("POST", "/v1/facts/search", {"question": TEXT}, "reader").json()["data"][0]["id"] == fact["id"]
    for method, path in (("POST", "/v1/facts"), ("DELETE", f"/v1/facts/{fact['id']}")):
        assert server.ask(method, path, {"facts": [], "namespace": "a"}, "reader").status_code == 403
    assert server.ask("GET", "/v1/facts", key=None).status_code == 401


def test_a_server_without_facts_says_so(server):
    desk = server.gate.state
    server.gate.state = replace(desk, facts=None)
    done = server.ask("GET", "/v1/facts")
    assert (done.status_code, "--facts" in done.json()["error"]["message"]) == (404, True)


def test_facts_in_a_collection_are_there_after_a_restart(tmp_path):
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as facts:
        [told] = Served(tmp_path / "one", facts).add(TEXT, key="a")["data"]
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as facts:
        server = Served(tmp_path / "one", facts)
        assert server.ask("POST", "/v1/facts/search", {"question": TEXT}).json()["data"][0]["handle"] == told["handle"]


@pytest.mark.slow
def test_two_servers_share_a_bucket(s3_server, tmp_path, monkeypatch):
    key, secret = s3server.KEYS["owner"]
    about = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_ENDPOINT_URL": s3_server}
    for name, value in {**about, "KP_SECRET": "5e" * 32, "KP_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    for name in "12":
        (tmp_path / name).mkdir()
    one, two = (Served(tmp_path / name, store=PackStore("s3://packs/two-servers")) for name in "12")
    [fact] = one.add(TEXT)["data"]
    assert two.ask("GET", f"/v1/packs/{fact['handle']}").json()["compiled"]
    assert two.chat(messages=[{"role": "user", "content": fact["handle"]}])[1]["messages"][0]["content"] == TEXT
    # What one has compiled, the other does not compute.
    assert two.ask("POST", "/v1/packs", {"text": TEXT, "namespace": "a"}).json()["handle"] == fact["handle"]
    assert (one.computed, two.computed) == (1, 0)
    pack = two.session.build_pack(TEXT, namespace="a")
    stored = StoredKV(PackStore("s3://packs/two-servers"), served(two.session))
    [run] = stored.find(pack.prefix + pack.token_ids, ["a"])
    assert stored.has(run, ["a"])
    assert read(stored, run).slice(len(pack.prefix), run[-1].stop).equal(pack.kv)
    one.ask("DELETE", f"/v1/facts/{fact['id']}")
    until(lambda: two.ask("GET", f"/v1/packs/{fact['handle']}").status_code == 404)


def test_a_store_that_is_away_is_said_and_not_where_it_is(server, tmp_path):
    [fact] = server.add(TEXT)["data"]
    away = tmp_path / "packs"
    away.rename(tmp_path / "before")
    away.symlink_to(away)  # A place that can be asked for nothing.
    asked = [
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": fact["handle"]}]}),
        ("POST", "/v1/packs", {"text": "Something else is known.", "namespace": "a"}),
        ("GET", f"/v1/packs/{fact['handle']}", None),
    ]
    for each in asked:
        done = server.ask(*each)
        assert (done.status_code, done.json()["error"]["type"]) == (503, "server_error"), done.text
        assert str(tmp_path) not in done.text
    away.unlink()
    (tmp_path / "before").rename(away)
    assert server.ask("GET", f"/v1/packs/{fact['handle']}").json()["compiled"]


def test_a_full_disk_is_said_and_costs_nothing_that_is_stored(server):
    [fact] = server.add(TEXT)["data"]
    for path, body in (("packs", {"text": "More. " * 99}), ("facts", {"facts": [{"text": "Yet more. " * 99}]})):
        with full_disk(200):
            done = server.ask("POST", f"/v1/{path}", {**body, "namespace": "a"})
        assert (done.status_code, "cannot be used now" in done.json()["error"]["message"]) == (503, True), done.text
    assert [each["id"] for each in server.ask("GET", "/v1/facts").json()["data"]] == [fact["id"]]
    assert server.ask("GET", f"/v1/packs/{fact['handle']}").json()["compiled"]


def test_what_nobody_thought_of_is_no_traceback(server):
    async def broken(scope, receive, send):
        raise KeyError("a secret")

    server.gate.app = broken
    done = server.ask("POST", "/v1/chat/completions", {"messages": []})
    assert (done.status_code, done.json()["error"]["type"], "secret" in done.text) == (500, "server_error", False)


def test_a_salt_of_any_length_counts_nothing(server):
    done, body = server.chat(messages=[], cache_salt="x" * 100_000)
    assert (done.status_code, len(body["cache_salt"])) == (200, 64)


SAID = (
    "",
    "No handle here, k",
    "kp:",
    f"See {HANDLE}.",
    f"{HANDLE} {HANDLE}",
    f"{HANDLE}{HANDLE}",
    f"kp:a/k{HANDLE}",
    f"kp:{HANDLE}-x/{HANDLE[5:]}",
    HANDLE[:-1],
    f"a\\n{HANDLE}\\n",
)


@pytest.mark.parametrize("said", SAID)
def test_no_handle_leaves_whole_or_in_pieces(server, said):
    server.says = said
    asked = {"messages": [{"role": "user", "content": "x"}]}
    whole = server.ask("POST", "/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
    assert whole == strip_handles(said)
    assert not find_handles(whole)
    events = events_of(server.ask("POST", "/v1/chat/completions", {**asked, "stream": True}).content)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in events if each["choices"]) == whole


def test_calls_and_several_choices_are_read_apart():
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    def call(piece, index):
        return {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}

    choices = [
        [{"index": 0, "delta": {"content": HANDLE[:9]}}, {"index": 1, "delta": {"content": "one"}}],
        [{"index": 0, "delta": {"content": HANDLE[9:] + " k"}}, {"index": 1, "delta": call('{"a": "' + HANDLE[:4], 0)}],
        [{"index": 1, "delta": call(HANDLE[4:] + '", "k', 0), "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": "stop"}, {"index": 1, "delta": {}, "finish_reason": "tool_calls"}],
    ]

    async def go():
        answer = Answer(send)
        head = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await answer({"type": "http.response.start", "status": 200, "headers": head})
        for each in choices:
            body = f"data: {json.dumps({'choices': each})}\n\n".encode()
            await answer({"type": "http.response.body", "body": body, "more_body": True})
        await answer({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    asyncio.run(go())
    said = {0: "", 1: "", "call": ""}
    for event in events_of(b"".join(sent)):
        for choice in event["choices"]:
            said[choice["index"]] += choice["delta"].get("content", "")
            for each in choice["delta"].get("tool_calls", ()):
                said["call"] += each["function"]["arguments"]
    assert said == {0: " k", 1: "one", "call": '{"a": "", "k'}


def test_usage_is_split_and_counts_join_those_of_vllm(server):
    [fact] = server.add(TEXT)["data"]
    tokens = server.ask("GET", f"/v1/packs/{fact['handle']}").json()["tokens"]
    asked = {"messages": [{"role": "user", "content": f"{fact['handle']} kp:b/{'a' * 21}"}]}
    split = {"prompt_tokens": 100 - tokens, "pack_tokens": tokens, "unresolved": 1}
    split |= {"reused_tokens": 60, "computed_tokens": 40}
    server.gate.state.__dict__["unresolved"] = "text"
    assert server.ask("POST", "/v1/chat/completions", asked).json()["usage"]["knowledge_packs"] == split
    last = events_of(server.ask("POST", "/v1/chat/completions", {**asked, "stream": True}).content)[-1]
    assert last["usage"]["knowledge_packs"] == split
    server.ask("POST", "/v1/facts/search", {"question": "x"})
    server.ask("POST", "/v1/responses", {})
    assert server.ask("GET", "/metrics", key=None).status_code == 401
    done = server.ask("GET", "/metrics")
    assert int(done.headers["content-length"]) == len(done.content)
    said = dict(line.rsplit(" ", 1) for line in done.text.splitlines() if not line.startswith("#"))
    assert said == {
        "vllm:x": "1",
        "kp_packs_delivered_total": "2",
        "kp_pack_tokens_total": str(2 * tokens),
        "kp_handles_left_total": "2",
        "kp_packs_compiled_total": "1",
        "kp_facts_added_total": "1",
        "kp_fact_searches_total": "1",
        "kp_requests_refused_total": "2",
    }
    assert server.ask("GET", "/metrics", key=None).status_code == 401


def test_an_engine_has_texts_compiled_by_the_server(server, address):
    engine = load_engine(engine=address, api_key=server.keys["a"]).engine
    told = engine.compile(TEXT, "a", provenance={"title": "Bells"})
    assert (told["compiled"], told["provenance"], server.computed) == (True, {"title": "Bells"}, 1)
    pack = PackStore(server.store.path).get(server.store.handle(TEXT, "a"))
    local = server.session.build_pack(TEXT, namespace="a")
    assert pack.kv.equal(local.kv)
    assert engine.compile(TEXT, "a")["handle"] == told["handle"]
    assert server.computed == 1


@pytest.mark.parametrize("source", [SYSTEM_FIRST, TWO_ROLES])
def test_a_message_that_the_template_would_drop_is_in_what_a_client_sends(server, source):
    tokenizer = tiny_engine(template=source).tokenizer
    desk = replace(server.gate.state, identity=served(tiny_engine(template=source)))
    desk.__dict__["tokenizer"] = tokenizer
    server.gate.state = desk
    said = [*({"role": role, "content": f"The {role}."} for role in ("system", "user", "assistant"))]
    said += [{"role": "system", "content": GUARD}, {"role": "user", "content": "And now?"}]
    with listening(server.gate) as url:
        session = load_engine(VLLMEngine(url, api_key=server.keys["a"], tokenizer=tokenizer))
        for ask in (session.generate, lambda messages: session.stream(messages).result()):
            ask(said)
            path, body = server.seen[-1]
            text = tokenizer.decode(body["prompt"])
            assert path == "/v1/completions"
            for part in ("The system.", "The user.", "The assistant.", GUARD, "And now?"):
                assert text.count(part) == 1, text
        assert session.explain(said).rows[-1].stop == len(body["prompt"])


def test_a_decision_needs_the_probabilities_of_all_labels(server, address):
    session = load_engine(engine=address, api_key=server.keys["a"])
    asked = {"bell": Question("Is there a bell?"), "lamp": Question("Is there a lamp?")}
    # This server ignores what it does not know.
    with pytest.raises(UnsupportedRequestError, match="does not offer decisions"):
        session.decide(TEXT, asked)
    _, body = server.seen[-1]
    assert (body["max_tokens"], body["logprobs"], body["temperature"]) == (1, 1, 0)
    inner = server.gate.app

    async def scored(scope, receive, send):
        """Numbers for the first question alone."""
        if scope["path"] != "/v1/completions":
            await inner(scope, receive, send)
            return
        body = json.loads((await receive())["body"])
        value = None if "lamp" in session.tokenizer.decode(body["prompt"]) else -1.5
        top = {f"token_id:{token}": value for token in body["logprob_token_ids"]}
        choice = {"index": 0, "token_ids": [5], "finish_reason": "length", "logprobs": {"top_logprobs": [top]}}
        event = {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": f"data: {json.dumps(event)}\n\n".encode()})

    server.gate.app = scored
    decided = session.decide(TEXT, {"bell": asked["bell"]})
    assert sum(decided.answers["bell"].probabilities.values()) == 1
    assert (decided.usage.computed_tokens, decided.usage.reused_tokens) == (decided.usage.prompt_tokens, 0)
    with pytest.raises(ModelError, match="'lamp' are not finite"):
        session.decide(TEXT, asked)
    tokens = session.tokenizer.encode("A bell.", add_special_tokens=False)
    assert session.log_likelihoods([TEXT, "Who?"], "A bell.") == [-1.5 * len(tokens)] * 2
    with pytest.raises(ModelError, match="not finite"):
        session.log_likelihoods(["A lamp?"], "A bell.")


def test_a_forked_process_asks_a_server_over_connections_of_its_own(server, address):
    clients = []

    async def noted(scope, receive, send):
        clients.append(scope["client"])
        await server.gate(scope, receive, send)

    tokenizer = load_engine(engine=address, api_key=server.keys["a"]).tokenizer
    with listening(noted) as url:
        engine = VLLMEngine(url, api_key=server.keys["a"], tokenizer=tokenizer)
        for text in (TEXT, TEXT * 2):
            engine.compile(text, "a")
        [ours] = set(clients)
        assert in_child(lambda: engine.compile(f"{TEXT} And?", "a"))["compiled"]
        assert clients[-1] != ours
        # The server closes connections that were idle; at that moment none is used again.
        time.sleep(2.1)
        before = set(clients)
        engine.compile(f"{TEXT} Or?", "a")
        assert clients[-1] not in before
