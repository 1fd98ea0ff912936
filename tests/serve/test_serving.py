"""What stands around vLLM and needs none of it: rights, keys, packs found by token ids, and what is let through."""

import asyncio
import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import torch

from kp_core import KnowledgePack, KVTensors, PackStore, Prefix, load_engine
from kp_core.errors import ModelError, OptionError, PackCorruptError, PackError
from kp_core.packs.handle import Handle
from kp_core.plan.request import Request
from kp_serve.engine import VLLMEngine
from kp_serve.middleware import PackMiddleware, until_end
from kp_serve.rights import Rights, salt_of
from kp_serve.state import ServerState
from kp_serve.stored import StoredKV
from kp_serve.wire import KEYS_VARIABLE, Access, HTTPError, access_of, read_keys, send_json
from tests.conftest import tiny_engine

KEY = bytes(range(32))
LAYERS = 2  # Of tiny models.
TEXT = "The harbour bell of Vint is rung by Oda Wick at noon, and nobody knows for whom it is rung any more."


def test_rights_count_only_as_they_were_signed_and_for_their_salt():
    rights = Rights(("a", "b"), "salt", save=True)
    signed = rights.sign(KEY)
    found = Rights.read(signed, "salt", KEY)
    assert (found.namespaces, found.save) == (("a", "b"), True)
    assert Rights.read(signed, "other", KEY) is None
    assert Rights.read(signed, None, KEY) is None
    assert Rights.read(signed, "salt", KEY[::-1]) is None
    assert Rights.read(Rights(("a",), "salt", expires=time.time() - 1).sign(KEY), "salt", KEY) is None
    text, mac = signed["kp"].split(".")
    for wrong in (
        {},
        None,
        {"kp": 3},
        {"kp": ""},
        {"kp": text},
        {"kp": f"{text}."},
        {"kp": f"{text[:-4]}.{mac}"},
        {"kp": "ü.ü"},
    ):
        assert Rights.read(wrong, "salt", KEY) is None


def test_a_salt_is_that_of_the_namespaces_and_one_that_vllm_takes():
    assert salt_of(["b", "a"], KEY) == salt_of(["a", "b", "a"], KEY)
    assert len({salt_of(names, key) for names in (["a"], ["b"], ["a", "b"], ["ab"]) for key in (KEY, KEY[::-1])}) == 8
    assert salt_of(["a"], KEY).isalnum()
    assert len(salt_of(["a"], KEY)) <= 128


def test_keys_are_those_of_the_environment(monkeypatch):
    first, second = "1" * 32, "2" * 32
    rights = {first: {"namespaces": ["a"]}, second: {"namespaces": ["b", "c"], "write": True}}
    monkeypatch.setenv(KEYS_VARIABLE, json.dumps(rights))
    keys = read_keys()
    assert access_of(keys, first) == Access(("a",))
    assert access_of(keys, second) == Access(("b", "c"), write=True)
    assert access_of(keys, None) is access_of(keys, "") is access_of(keys, first + "x") is None
    monkeypatch.delenv(KEYS_VARIABLE)
    assert read_keys() == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[]", "holds no keys"),
        ("keys.json", "holds no keys"),
        ('{"KEY": ["a"]}', "must be a mapping"),
        ('{"KEY": {"namespaces": "handbook"}}', "expected lists of namespaces"),
        ('{"KEY": {"namespaces": ["a"], "write": "false"}}', "true or false"),
        ('{"KEY": {"namespaces": ["A"]}}', "expected 1 to 64 characters"),
        ('{"KEY": {"namespaces": ["a"], "trusted_roles": ["boss"]}}', "trusted roles"),
        ('{"KEY": {"spaces": ["a"]}}', "spaces"),
        ('{"": {"namespaces": ["a"]}}', "fewer than 20 characters"),
    ],
)
def test_keys_of_another_form_are_refused_and_not_said(monkeypatch, given, said):
    monkeypatch.setenv(KEYS_VARIABLE, given.replace("KEY", "5" * 32))
    with pytest.raises(ModelError, match=said) as caught:
        read_keys()
    assert "5" * 32 not in str(caught.value)


def served(session):
    return replace(session.fingerprint, engine="vllm")


def packed(session, text, namespace="a"):
    """A pack of this model, and all KV up to its end."""
    pack = session.build_pack(text, namespace=namespace)
    head = next(session.engine.kv([session._planner.plan_kv(Prefix(), pack.prefix)]))
    return pack, KVTensors.concat([head, pack.kv])


def read(stored, parts, start=0, stop=None, names=("a",)):
    """The KV of consecutive parts from a token on."""
    readers = stored.open(parts, names, start, parts[-1].stop if stop is None else stop, LAYERS)
    layers = [[reader(layer) for reader in readers] for layer in range(LAYERS)]
    return KVTensors(*(tuple(torch.cat([part[half] for part in each], 1) for each in layers) for half in (0, 1)))


def test_the_longest_pack_that_a_prompt_begins_with_is_found_by_ids(tmp_path):
    session, store = tiny_engine(), PackStore(tmp_path)
    short, long = (session.build_pack(text, namespace="a") for text in (TEXT[:40], TEXT))
    other = session.build_pack(TEXT, namespace="b")
    stored = StoredKV(store, served(session))
    ids = long.prefix + long.token_ids + (1, 2)
    assert not list(stored.find(ids, ["a", "b"]))
    for pack in (short, long, other):
        store.put(pack)
    found = list(stored.find(ids, ["a"]))
    # For each pack an entry of this server, and that of the engine which compiled it.
    assert [parts[-1].entry.owners for parts in found[::2]] == [
        {str(store.handle(each, "a"))} for each in (TEXT, TEXT[:40])
    ]
    assert [parts[-1].entry.model.engine for parts in found] == ["vllm", "local"] * 2
    assert [parts[-1].entry.namespaces for parts in stored.find(ids, ["a", "b"])] == [{"a"}] * 2 + [{"b"}] * 2 + [
        {"a"}
    ] * 2
    ends = [len(ids) - 2, len(ids) - 2 - len(long.token_ids) + len(short.token_ids)]
    assert ends == [parts[-1].stop for parts in found[::2]]
    assert not list(stored.find(ids, ["c"]))
    assert not list(stored.find((9, *ids[1:]), ["a"]))
    assert not list(stored.find(ids[: len(long.prefix)], ["a"]))
    store.remove(store.handle(TEXT, "a"))
    assert len(list(stored.find(ids, ["a"]))) == 2


def test_packs_of_another_model_or_dtype_are_not_read(tmp_path):
    session, store = tiny_engine(), PackStore(tmp_path)
    pack = session.build_pack(TEXT, namespace="a")
    ids = pack.prefix + pack.token_ids
    for wrong in (
        tiny_engine("qwen3").build_pack(TEXT, namespace="a"),
        tiny_engine(dtype=torch.bfloat16).build_pack(TEXT, namespace="a"),
    ):
        store.put(wrong)
        assert not list(StoredKV(store, served(session)).find(ids, ["a"]))
    store.put(pack)
    _, run = StoredKV(store, served(session)).find(ids, ["a"])
    with pytest.raises(PackError, match=rf"{LAYERS} layers; this model has {LAYERS + 1}"):
        StoredKV(store, served(session)).open(run, ["a"], run[-1].start, run[-1].stop, LAYERS + 1)


@pytest.mark.parametrize("compress", ["lossless", "none"])
def test_what_a_server_computed_is_read_back_bit_for_bit(tmp_path, compress):
    session, store = tiny_engine(), PackStore(tmp_path)
    pack, whole = packed(session, TEXT)
    stored = StoredKV(store, served(session), compress)
    handle = store.put(pack.without_kv())
    run = next(stored.find(pack.prefix + pack.token_ids, ["a"]))
    assert not stored.has(run, ["a"], run[-1].stop)
    stored.write(run, whole)
    # Another replica, on the same store.
    stored = StoredKV(PackStore(tmp_path), served(session))
    run = next(each for each in stored.find(pack.prefix + pack.token_ids, ["a"]) if stored.has(each, ["a"]))
    own, end = run[-1], run[-1].stop
    assert own.entry.owners == {str(handle)}
    assert store.head(own.entry).compression == compress
    for start in (0, 1, own.start - 1, own.start, own.start + 3):
        assert read(stored, run, start).equal(whole.slice(start, end))
        for stop in {max(start + 1, own.start - 1), own.start + 4, end}:
            assert read(stored, run, start, stop).equal(whole.slice(start, stop))
    with pytest.raises(PackError, match="expected"):
        stored.write(run, whole.slice(0, 5))
    store.forget("a")
    assert not stored.has(run, ["a"], own.start - 1)
    assert stored.has(run, ["a"], own.start)
    with pytest.raises(PackError, match="is not stored"):
        read(stored, run)
    assert read(stored, run, own.start).equal(pack.kv)


def test_a_layer_that_is_damaged_is_not_given_and_its_entry_is_deleted(tmp_path, caplog):
    session, store = tiny_engine(), PackStore(tmp_path)
    pack, whole = packed(session, TEXT)
    store.put(pack)
    stored = StoredKV(store, served(session))
    _, run = stored.find(pack.prefix + pack.token_ids, ["a"])
    file = tmp_path / run[-1].entry.key
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    start, stop = run[-1].start, run[-1].stop
    [reader] = stored.open(run, ["a"], start, stop, LAYERS)
    key, value = reader(0)
    assert torch.equal(key, whole.keys[0][:, start:stop])
    assert torch.equal(value, whole.values[0][:, start:stop])
    assert stored.has(run, ["a"], start)
    with pytest.raises(PackCorruptError, match="digest"):
        reader(LAYERS - 1)
    assert "is damaged, deleted, and computed again from its text" in caplog.text
    assert not stored.has(run, ["a"], start)
    assert not file.exists()


class Gate:
    """The middleware before an application that says what it was asked."""

    def __init__(self, tmp_path, session, access):
        self.store, self.seen = PackStore(tmp_path / "packs"), []

        async def inner(scope, receive, send):
            message = await receive() if scope["method"] == "POST" else {}
            self.seen.append((scope["path"], json.loads(message.get("body") or b"null")))
            await send_json(send, 200, {"ok": True})

        self.gate = PackMiddleware.__new__(PackMiddleware)
        self.gate.app = inner
        self.gate.state = ServerState(self.store, "", served(session), access, KEY)
        self.gate.state.__dict__["tokenizer"] = session.tokenizer

    def ask(self, method, path, body=None, headers=None):
        async def go():
            transport = httpx.ASGITransport(self.gate)
            async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers) as client:
                return await client.request(method, path, json=body)

        return asyncio.run(go())

    def chat(self, **body):
        done = self.ask("POST", "/v1/chat/completions", body)
        return done, self.seen[-1][1] if done.status_code == 200 else done.json()["error"]["message"]


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path, tiny_engine(), Access(("a",), ("user", "system")))


def put(gate, text=TEXT, namespace="a"):
    return str(gate.store.put(tiny_engine().build_pack(text, namespace=namespace, lazy=True)))


def test_a_balancer_is_told_what_was_answered_from(gate):
    first, second, other = put(gate), put(gate, TEXT * 2), put(gate, namespace="b")

    def hot():
        return gate.ask("GET", "/v1/packs?hot=1").json()["data"]

    assert hot() == []
    gate.gate.state.__dict__["unresolved"] = "text"
    gate.chat(messages=[{"role": "user", "content": f"{first} {other}"}])
    assert hot() == [first]
    for named in (second, other, "nothing", "kp:a/" + "a" * 21):
        gate.ask("POST", "/v1/completions", {"prompt": [1, 2, 3]}, {"kp-pack": named})
    assert hot() == [second, first]
    gate.chat(messages=[{"role": "user", "content": first}])
    assert hot() == [first, second]
    gate.store.remove(Handle.parse(first))
    assert hot() == [second]
    assert gate.ask("GET", "/v1/packs?hot=1&namespace=b").json()["data"] == []


def test_handles_become_text_for_whom_they_resolve(gate):
    own, other = put(gate), put(gate, namespace="b")
    gate.gate.state.__dict__["unresolved"] = "text"
    messages = [
        {"role": "developer", "content": own},
        {"role": "user", "content": f"{own} {other}"},
        {"role": "user", "content": [{"type": "text", "text": own}]},
        {"role": "tool", "content": own, "tool_call_id": "1"},
    ]
    _, body = gate.chat(messages=messages, model="m")
    assert [each["content"] for each in body["messages"]] == [TEXT, f"{TEXT} {other}", TEXT, own]
    assert body["messages"][3]["tool_call_id"] == "1"
    rights = Rights.read(body["kv_transfer_params"], body["cache_salt"], KEY)
    assert (rights.namespaces, rights.save) == (("a",), False)


@pytest.mark.parametrize("bent", ["unknown", "cut", "upper"])
def test_a_handle_that_brings_nothing_is_refused_and_says_no_more_than_that(gate, bent, caplog):
    own, foreign = put(gate), put(gate, namespace="b")
    bent = {"unknown": f"kp:b/{'a' * 21}", "cut": own[:-1], "upper": own.replace(own[-21:], own[-21:].upper())}[bent]
    said = []
    for name in (foreign, bent):
        done, message = gate.chat(messages=[{"role": "user", "content": f"{own} {name} Who rings it?"}])
        assert (done.status_code, done.json()["error"]["type"]) == (404, "not_found_error")
        assert f"Handle {name} does not resolve" in caplog.text
        said.append(message.replace(name, "X"))
    assert said[0] == said[1]
    assert not gate.seen
    assert gate.gate.state.counts["handles_left"] == 2
    # A role that this key does not trust, and the model itself, may say what they like.
    done, _ = gate.chat(messages=[{"role": role, "content": foreign} for role in ("tool", "assistant")])
    assert done.status_code == 200


def test_handles_inside_packs_are_not_followed(gate):
    own = put(gate)
    _, body = gate.chat(messages=[{"role": "user", "content": put(gate, f"See {own} for more about it.")}])
    assert body["messages"][0]["content"] == f"See {own} for more about it."


def test_a_handle_in_the_prompt_of_a_completion_is_refused(gate):
    handle = put(gate)
    for prompt in (f"{handle} What is it?", ["What?", handle]):
        done = gate.ask("POST", "/v1/completions", {"prompt": prompt})
        assert (done.status_code, handle in done.json()["error"]["message"]) == (400, True)
        assert "Ask /v1/chat/completions" in done.json()["error"]["message"]
    gate.gate.state.__dict__["unresolved"] = "text"
    assert gate.ask("POST", "/v1/completions", {"prompt": handle}).status_code == 200


def test_what_clients_say_of_salts_and_rights_counts_nothing(gate):
    forged = Rights(("b",), "mine", save=True).sign(b"x" * 32)
    _, body = gate.chat(messages=[], cache_salt="mine", kv_transfer_params=forged)
    assert body["cache_salt"] == salt_of(["a"], KEY)
    assert Rights.read(body["kv_transfer_params"], body["cache_salt"], KEY).namespaces == ("a",)


def test_without_reuse_neither_packs_nor_vllms_own_cache_are_read(gate):
    asked = {"prompt": [1, 2, 3], "kp": {"reuse": False}}
    assert [gate.ask("POST", "/v1/completions", asked).status_code for _ in range(2)] == [200, 200]
    first, second = (body for _, body in gate.seen)
    rights = Rights.read(first["kv_transfer_params"], first["cache_salt"], KEY)
    assert (rights.namespaces, rights.save, rights.tokens) == ((), False, "")
    assert len({first["cache_salt"], second["cache_salt"], salt_of(["a"], KEY)}) == 3
    assert "kp" not in first
    assert gate.ask("POST", "/v1/completions", {"prompt": "x", "kp": {"reuse": True}}).status_code == 400


@pytest.mark.parametrize(
    "where",
    [
        {"messages": [{"role": "user", "content": "a<|im_end|>b"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>"}]}
            ]
        },
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "<|im_start|>"}}]}
            ]
        },
        {"messages": [], "tools": [{"function": {"parameters": {"properties": {"<|im_end|>": {}}}}}]},
    ],
)
def test_special_tokens_are_refused_wherever_they_stand(gate, where):
    done, said = gate.chat(**where)
    assert done.status_code == 400
    assert "special token" in said
    assert not gate.seen


def test_a_pack_that_holds_a_special_token_is_refused_too(gate):
    done, said = gate.chat(messages=[{"role": "user", "content": put(gate, TEXT + "<|im_end|>")}])
    assert (done.status_code, "special token" in said) == (400, True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [], "vllm_xargs": {"kv_transfer_params": {}}}, "unknown fields"),
        ({"messages": [], "chat_template": "x"}, "unknown fields"),
        ({"messages": [], "echo": True}, "echo"),
        ({"messages": [], "prompt_logprobs": 0, "prompt_embeds": "x"}, "prompt_embeds"),
        ({"messages": [1]}, "list of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}]}, "text"),
    ],
)
def test_what_is_not_listed_is_refused(gate, body, said):
    done, message = gate.chat(**body)
    assert (done.status_code, said in message) == (400, True)
    assert not gate.seen


@pytest.mark.parametrize(
    ("role", "content", "read"),
    [
        ("assistant", [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Yes."}], "Yes."),
        ("assistant", [{"type": "thinking", "thinking": "Hm."}, "Yes."], "Yes."),
        ("assistant", [{"type": "server_tool_use", "id": "1", "name": "w", "input": {}}, "Yes."], "Yes."),
        ("assistant", [{"type": "output_text", "text": "Yes.", "annotations": []}], "Yes."),
        ("assistant", [{"type": "web_search_call", "id": "1"}, {"type": "output_text", "text": "Yes."}], "Yes."),
        ("assistant", [{"type": "refusal", "refusal": "I may not."}], "I may not."),
        ("assistant", [{"executable_code": {"code": "1"}}, {"text": "Yes."}], "Yes."),
        ("assistant", [{"type": "non_standard", "value": {"type": "text", "text": "Yes."}}], "Yes."),
        ("function", [{"type": "tool_result", "content": "Seen."}], "Seen."),
        ("tool", [{"type": "tool_result", "content": [{"type": "text", "text": "Seen."}]}], "Seen."),
        ("user", [{"type": "input_text", "text": "Ho"}, {"text": " ho"}, "."], "Ho ho."),
        ("user", [{"type": "document", "source": {"type": "text", "data": "Ho."}}], "Ho."),
        ("developer", [{"text": "Be brief."}, {"cachePoint": {"type": "default"}}], "Be brief."),
        ("user", [], ""),
        ("assistant", None, None),
    ],
)
def test_content_of_other_models_is_read_as_the_engine_of_this_machine_reads_it(gate, role, content, read):
    done, body = gate.chat(messages=[{"role": role, "content": content}, {"role": "user", "content": "Go on."}])
    assert done.status_code == 200, body
    assert [message["content"] for message in body["messages"]] == [read, "Go on."]


@pytest.mark.parametrize("part", [{"type": "input_text"}, {"type": "text"}])
def test_a_handle_in_a_part_of_any_name_becomes_text(gate, part):
    _, body = gate.chat(messages=[{"role": "user", "content": ["See ", {**part, "text": put(gate)}]}])
    assert body["messages"][0]["content"] == f"See {TEXT}"


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://x"}}],
        [{"type": "input_audio", "input_audio": {}}, {"type": "text", "text": "What is said?"}],
        [{"type": "tool_result", "content": [{"type": "image", "source": {}}]}],
        [{"type": "file", "text": "a.pdf"}],
        [{"type": "text"}],
        [{}],
        [None],
        [[["a"]]],
        {"type": "text", "text": "a"},
        5,
    ],
)
@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_content_that_is_no_text_is_refused_by_its_kind(gate, role, content):
    done, said = gate.chat(messages=[{"role": role, "content": content}])
    assert (done.status_code, "expected" in said or "text model takes parts" in said) == (400, True), said
    assert not gate.seen


def test_content_that_is_nested_too_deep_is_refused(gate):
    content = "a"
    for _ in range(300):
        content = [{"type": "tool_result", "content": content}]
    done, said = gate.chat(messages=[{"role": "tool", "content": content}])
    assert (done.status_code, "nested" in said) == (400, True)
    assert not gate.seen


def test_endpoints_that_are_not_listed_are_closed(gate):
    for method, path in [
        ("POST", "/v1/responses"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/docs"),
        ("PUT", "/v1/completions"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/tokenize"),
    ]:
        done = gate.ask(method, path, {})
        assert done.status_code == 404, path
        assert done.json()["error"]["type"] == "not_found_error"
    assert not gate.seen
    assert gate.ask("GET", "/v1/models").status_code == gate.ask("GET", "/health").status_code == 200


def test_packs_of_others_look_like_none_at_all(gate):
    own, other = put(gate), put(gate, namespace="b")
    assert gate.ask("GET", f"/v1/packs/{own}").json()["text"] == TEXT
    assert gate.ask("GET", "/v1/packs").json()["data"] == [own]
    assert gate.ask("GET", "/v1/packs?namespace=b").json()["data"] == []
    answers = [gate.ask(method, f"/v1/packs/{other}") for method in ("GET", "DELETE")]
    unknown = gate.ask("GET", f"/v1/packs/kp:b/{'a' * 21}")
    for answer in answers:
        assert answer.status_code == unknown.status_code == 404
        assert answer.text.replace(other, "X") == unknown.text.replace(f"kp:b/{'a' * 21}", "X")
    assert gate.ask("DELETE", f"/v1/packs/{own}").status_code == 403
    assert gate.ask("POST", "/v1/packs", {"text": "x", "namespace": "a"}).status_code == 403


def test_an_engine_without_a_server_says_what_is_missing(monkeypatch):
    with pytest.raises(ModelError, match="No server of `kp serve` answers"):
        load_engine(engine="http://127.0.0.1:9")
    with pytest.raises(OptionError, match="load_engine has no option 'dtype'"):
        load_engine(engine="http://127.0.0.1:9", dtype="float32")
    monkeypatch.setitem(sys.modules, "kp_serve.engine", None)
    with pytest.raises(ModelError, match=r"Got engine='http'; expected .* an installed engine: hf, http, "):
        load_engine(engine="http://127.0.0.1:9")


def test_packs_for_a_server_are_those_of_the_same_model_whatever_computed_them(tmp_path):
    """The prompt that goes to a server is the canonical one, with packs from any engine of the model."""
    session, store = tiny_engine(), PackStore(tmp_path)
    about = {"model": "tiny", "root": "", "max_positions": session.max_positions, "identity": served(session).to_dict()}
    engine = VLLMEngine("http://127.0.0.1:9", tokenizer=session.tokenizer)
    engine.__dict__["_about"] = about
    remote = load_engine(engine)
    handle = store.put(session.build_pack(TEXT, namespace="a"))
    view = store.view("a")
    plans = [each._plan(f"{handle}\nWho rings it?", Request.of({"view": view})) for each in (session, remote)]
    assert plans[0].prompt.token_ids == plans[1].prompt.token_ids
    assert plans[1].prompt.pack_tokens > 0
    lazy = remote.build_pack(TEXT, namespace="a")
    assert isinstance(lazy, KnowledgePack)
    assert lazy.is_lazy
    assert lazy.fingerprint == remote.fingerprint
    other = VLLMEngine("http://127.0.0.1:9", tokenizer=session.tokenizer)
    other.__dict__["_about"] = {**about, "identity": {**about["identity"], "tokenizer": "another"}}
    with pytest.raises(ModelError, match="tokenizer differ"):
        load_engine(other)


def test_nobody_waits_for_a_server_that_is_ending():
    server = SimpleNamespace(should_exit=False)
    scope = {"app": SimpleNamespace(state=SimpleNamespace(server=server))}

    async def ends():
        ending = asyncio.ensure_future(until_end(scope, asyncio.sleep(3600)))
        await asyncio.sleep(0)
        assert await until_end(scope, asyncio.sleep(0, "said")) == "said"
        server.should_exit = True
        with pytest.raises(HTTPError, match="ending"):
            await ending

    asyncio.run(ends())
