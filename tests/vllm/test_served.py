"""`kp serve` as its users see it: vLLM with the bundled model in float32, over HTTP."""

import pytest

from benchmarks.vllm_crowd import crowded
from kp_core import load_engine
from kp_core.errors import ModelError

ISLES = "The Orrelay Isles have a coin, the tallin: a square piece of bronze with a round hole in it. " * 3


def loaded(server):
    """Tokens that vLLM got from the store since it started, as it counts them itself."""
    return server.counted("vllm:external_prefix_cache_hits_total")


@pytest.mark.parametrize(
    "part", [slice(5), pytest.param(slice(5, None), marks=pytest.mark.nightly)], ids=["few", "rest"]
)
def test_answers_with_a_pack_are_those_with_the_text(server, questions, part):
    different, before, delivered = [], loaded(server), 0
    for question, text in questions[part]:
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
    assert said.usage_metadata["input_tokens"] == len(second.prompt)
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
