"""`kp serve` as its users see it: vLLM with the bundled model in float32, over HTTP."""

import itertools

import pytest

from benchmarks.vllm import TENANTS, altered, isolated
from benchmarks.vllm_crowd import crowded
from kp_core import load_engine
from kp_core.errors import ModelError
from kp_core.packs.handle import Handle

ISLES = "The Orrelay Isles have a coin, the tallin: a square piece of bronze with a round hole in it. " * 3


def loaded(server):
    """Tokens that vLLM got from the store since it started, as it counts them itself."""
    return server.counted("vllm:external_prefix_cache_hits_total")


def test_answers_with_a_pack_are_those_with_the_text(server, questions):
    different, before, delivered = [], loaded(server), 0
    for question, text in questions:
        pack = server.compile(text)
        assert pack["compiled"]
        with_pack, usage = server.chat(f"{pack['handle']}\n{question}")
        # Another tenant, so that nothing of it is at hand.
        with_text, plain = server.chat(f"{text}\n{question}", key="plain")
        assert usage["prompt_tokens"] == plain["prompt_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= pack["tokens"]
        assert (plain["prompt_tokens_details"] or {}).get("cached_tokens", 0) == 0
        delivered += pack["tokens"]
        different += [(question, with_pack, with_text)] if with_pack != with_text else []
    assert not different
    # vLLM's own prefix cache has whole blocks of the prompts that compiled packs; the rest came from the store.
    assert 0 < loaded(server) - before < delivered


def test_a_restarted_server_answers_from_the_store(server):
    pack = server.compile(ISLES)
    said, _ = server.chat(f"{pack['handle']}\nWhat is the coin called?")
    server.stop()
    server.start()
    assert loaded(server) == 0
    again, usage = server.chat(f"{pack['handle']}\nWhat is the coin called?")
    assert again == said
    assert usage["prompt_tokens_details"]["cached_tokens"] == loaded(server) >= pack["tokens"]
    # A plain prompt with the text profits, too.
    _, usage = server.chat(f"{ISLES}\nWhat has a hole?", max_tokens=1)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= pack["tokens"]


def test_no_tenant_answers_from_the_kv_of_another(server, smol):
    """Each tenant's pack of the same text has KV of its own, altered so that whoever reads it is found out."""
    ids, expected = altered(server, smol)
    server.stop()
    server.start()
    wrong = isolated(server, ids, expected, 300)
    assert not wrong, wrong[:5]
    # The test can fail: of any two tenants, the answers to some text are further apart than what is taken for equal.
    turns = {turn for turn, _ in expected}
    for mine, other in itertools.combinations(TENANTS, 2):
        assert max(abs(expected[turn, mine] - expected[turn, other]) for turn in turns) > 2 * 5e-3


def test_the_engine_and_both_adapters_answer_through_it(server, smol):
    from llama_index.core.llms import ChatMessage

    from kp_langchain import ChatKnowledgePacks
    from kp_llamaindex import KnowledgePackLLM

    key = server.keys["own"]
    session = load_engine(engine=server.url + "/v1", api_key=key)
    # Packs of this engine are stored as text, and compiled by the server when they are used.
    text = "The lighthouse of Vint Harbour was built by Osk Merrel in the year 214 and painted yellow. " * 2
    pack = session.build_pack(text, namespace="own")
    assert pack.is_lazy
    handle = str(server.store.put(pack))
    asked = f"{handle}\nWho built the lighthouse?"
    options = {"view": server.store.view("own"), "max_tokens": 12}
    first, second = session.generate(asked, **options), session.generate(asked, **options)
    local = smol.generate(f"{text}\nWho built the lighthouse?", max_tokens=12)
    assert first.text == second.text == local.text
    assert first.prompt.token_ids == local.prompt.token_ids
    assert first.usage.computed_tokens == len(first.prompt)
    assert second.usage.reused_tokens >= second.usage.pack_tokens == len(pack.token_ids)
    ours = {"base_url": server.url, "api_key": key, "store": server.store, "namespaces": ["own"], "max_tokens": 12}
    said = ChatKnowledgePacks(**ours).invoke(asked)
    assert said.content == local.text
    assert said.usage_metadata["input_tokens"] == second.usage.prompt_tokens
    assert KnowledgePackLLM(**ours).chat([ChatMessage(asked)]).message.content == local.text
    shape = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    assert session.generate(asked, response_schema=shape, **options).text in ('{"yes": true}', '{"yes": false}')
    with pytest.raises(ModelError, match="401"):
        load_engine(engine=server.url, api_key="kp-wrong")


def test_the_openai_client_sends_handles(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys["own"], max_retries=0)
    model = client.models.list().data[0].id
    pack = server.compile(ISLES)

    def say(content, **more):
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=12, **more)

    whole = say(f"{pack['handle']}\nWhat is the coin called?")
    assert whole.choices[0].message.content == say(f"{ISLES}\nWhat is the coin called?").choices[0].message.content
    pieces = say(f"{pack['handle']}\nWhat is the coin called?", stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == whole.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="special token"):
        say("a<|im_end|>b")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0).models.list()


def test_a_damaged_pack_is_never_used(server):
    pack = server.compile("The ferry to Saint Oriel leaves at the third bell and carries forty goats at most. " * 2)
    handle = Handle.parse(pack["handle"])
    asked = f"{handle}\nHow many goats?"
    right, _ = server.chat(asked)
    short = "\n".join(f"The mill of Saint Oriel has {number} sails." for number in range(9))
    below = Handle.parse(server.compile(short)["handle"])
    server.stop()
    for each, place in ((handle, -1000), (below, -300_000)):  # In the last layers, and in the midst.
        file = next(server.path.glob(f"packs/own/*/{each.id}*.safetensors"))
        data = bytearray(file.read_bytes())
        data[place] ^= 0xFF
        file.write_bytes(data)
    server.start()
    # What was computed behind it is not stored either.
    longer = {"text": f"{short}\nIt grinds by night.", "namespace": "own"}
    status, said = server.ask("/v1/packs", longer)
    assert (status, set(said)) == (500, {"error"}), said
    found = [server.ask(f"/v1/packs/{each}")[1] for each in server.ask("/v1/packs")[1]["data"]]
    assert [each["compiled"] for each in found if each["text"] == longer["text"]] == [False]
    told = server.compile(longer["text"])
    assert told["compiled"]
    plain = server.chat(f"{longer['text']}\nWhen does it grind?")[0]
    assert server.chat(f"{told['handle']}\nWhen does it grind?")[0] == plain
    status, said = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": asked}]})
    assert (status, set(said)) == (500, {"error"}), said
    # The store has set it aside, so it is computed from its text, and stored again.
    assert server.chat(asked)[0] == right
    assert server.ask(f"/v1/packs/{pack['handle']}")[1]["compiled"]


def test_a_crowd_is_answered_as_each_alone(server, questions):
    asked = [(text, question) for question, text in questions[:6]]
    found = crowded(server, "own", asked, 30, tokens=4)
    assert (found["requests"], found["lost"], found["wrong"]) == (30, 0, 0)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", b"{not json", 400, "not JSON"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [1, 10**9], "max_tokens": 1}, 400, ""),
        ("/v1/completions", {"prompt": [1] * 3000, "max_tokens": 1}, 400, ""),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "model": "another"}, 404, "another"),
        ("/v1/chat/completions", {"messages": "hello"}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [], "cache": 1}, 400, "cache"),
        ("/v1/packs", {"text": "", "namespace": "own"}, 400, "blank"),
        ("/v1/packs", {"text": "word " * 3000, "namespace": "own"}, 400, "2048"),
        ("/v1/packs", {"text": "x y z", "namespace": "plain"}, 404, "plain"),
        ("/v1/packs/kp:own/" + "a" * 21, None, 404, "no pack"),
        ("/v1/responses", {"input": "x"}, 404, "/v1/responses"),
        ("/tokenize", {"prompt": "x"}, 404, "/tokenize"),
    ],
)
def test_what_is_wrong_is_said_in_the_api_s_own_shape(server, path, body, status, said):
    got, error = server.ask(path, body)
    assert got == status, error
    assert said in error["error"]["message"]
