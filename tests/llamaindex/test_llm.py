"""What `KnowledgePackLLM` adds to the engine."""

import asyncio
import subprocess
import sys
import threading

import pytest
from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.memory import Memory
from pydantic import ValidationError

from kp_core.engines import shared
from kp_core.engines.hf import loading
from kp_core.errors import (
    ContextOverflowError,
    GenerationTimeoutError,
    OptionError,
    PackNotFoundError,
    PromptError,
)
from kp_llamaindex import KnowledgePackLLM, to_messages
from tests.conftest import tiny_engine, until

CHAT = [ChatMessage("Be brief.", role="system"), ChatMessage("Name a colour.")]
FACT = "The mill of Veyl has four sails."


def test_raw_counts_what_was_sent(tiny):
    response = tiny.chat(CHAT)
    usage = response.raw["usage"]
    prompt = tiny.engine.template.render(to_messages(CHAT))
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["total_tokens"] == len(prompt) + usage["completion_tokens"]
    assert response.raw["finish_reason"] in {"stop", "length"}
    assert response.raw["timings"]["ttft_s"] > 0
    assert set(response.raw) == {"usage", "kp", "timings", "finish_reason"}


async def test_log_probabilities(tiny):
    response = tiny.chat(CHAT, top_logprobs=3)
    generation = tiny.engine.generate(to_messages(CHAT), max_tokens=tiny.max_tokens, top_logprobs=3)
    assert len(response.logprobs) == response.raw["kp"]["completion_tokens"]
    for token, named in zip(generation.logprobs, response.logprobs, strict=True):
        assert [(one.token, one.bytes, one.logprob) for one in named] == [
            (one.text, list(one.bytes), one.logprob) for one in token.top
        ]
    *pieces, last = tiny.stream_chat(CHAT, top_logprobs=3)
    assert last.logprobs == response.logprobs
    assert {piece.logprobs for piece in pieces} == {None}
    completion = await tiny.acomplete("Name a colour.", logprobs=True)
    assert [len(named) for named in completion.logprobs] == [1] * completion.raw["kp"]["completion_tokens"]
    assert tiny.chat(CHAT).logprobs is None


def test_usage_counts_what_the_model_reads_and_kp_what_was_sent(store):
    handle = store.put(tiny_engine().build_pack(FACT, lazy=True))
    llm = KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces=["default"], max_tokens=2)
    pack, text = (llm.complete(f"{said}\n\nHow many sails?") for said in (handle, FACT))
    assert pack.text == text.text
    counts = pack.raw["kp"]
    assert counts["pack_tokens"] > 0
    assert (counts["packs"], text.raw["kp"]["packs"]) == ([str(handle)], [])
    assert counts["prompt_tokens"] + counts["pack_tokens"] == text.raw["kp"]["prompt_tokens"]
    read = text.raw["usage"]["prompt_tokens"]
    assert (pack.raw["usage"]["prompt_tokens"], text.raw["usage"]["total_tokens"]) == (read, read + 2)
    assert pack.raw["usage"]["total_tokens"] == read + 2
    cached = pack.raw["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == read - counts["computed_tokens"]
    assert llm.token_ids(f"{handle}!") == llm.token_ids("!")


def test_packs_of_every_call(store):
    handle = store.put(tiny_engine().build_pack(FACT, compiled_for="system", lazy=True))
    llm = KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces="default", max_tokens=2, packs=[handle])
    assert llm.namespaces == ("default",)
    assert llm.complete("Hi").raw["kp"]["pack_tokens"] > 0
    assert llm.complete("Hi", packs=[]).raw["kp"]["pack_tokens"] == 0
    with pytest.raises(PackNotFoundError, match="does not resolve"):
        llm.complete("Hi", packs=["kp:elsewhere/" + "a" * 21])


def test_roles_that_may_bring_packs(store):
    handle = str(store.put(tiny_engine().build_pack(FACT, lazy=True)))

    def delivered(role, **fields):
        llm = KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces=["default"], max_tokens=1, **fields)
        messages = [ChatMessage("?"), ChatMessage(handle, role=role)]
        return llm.chat(messages).raw["kp"]["pack_tokens"]

    assert delivered("user") > 0
    assert delivered("tool") > 0
    assert delivered("assistant") == 0
    assert delivered("user", trusted_roles=["tool"]) == 0
    assert delivered("developer", trusted_roles=["developer"]) > 0
    assert delivered("user", placement="system") > 0


def test_options_of_a_call_override_the_fields(tiny):
    assert tiny.chat(CHAT, max_tokens=2).raw["kp"]["completion_tokens"] <= 2
    sampled = tiny.model_copy(update={"temperature": 1.5, "seed": 1})
    said = sampled.chat(CHAT).message.content
    assert said == sampled.chat(CHAT).message.content
    assert said != sampled.chat(CHAT, seed=2).message.content
    assert sampled.chat(CHAT, temperature=0).message.content == tiny.chat(CHAT).message.content
    for ask in (tiny.chat, tiny.stream_chat):
        with pytest.raises(TypeError, match="no option 'wibble'"):
            ask(CHAT, wibble=1)
    with pytest.raises(TypeError, match="wibble"):
        tiny.complete("Hi", wibble=1)


async def test_unknown_options_in_async_calls(tiny):
    for ask in (tiny.achat, tiny.astream_chat):
        with pytest.raises(TypeError, match="wibble"):
            await ask(CHAT, wibble=1)


def test_stop_strings(tiny):
    text = tiny.complete("Hi").text
    stop = text[1]
    expected = text[: text.index(stop)]
    assert tiny.complete("Hi", stop=[stop]).text == expected
    assert tiny.complete("Hi", stop=stop).text == expected
    fixed = tiny.model_copy(update={"stop": [stop]})
    assert fixed.complete("Hi").text == expected
    assert fixed.complete("Hi", stop=[]).text == text
    assert "".join(part.delta for part in fixed.stream_complete("Hi")) == expected


def test_errors_come_through(tiny):
    with pytest.raises(PromptError, match="image"):
        tiny.chat([ChatMessage(blocks=[ImageBlock(url="https://example.com/a.png")])])
    with pytest.raises(ContextOverflowError):
        tiny.stream_chat(CHAT, max_tokens=10**6)
    with pytest.raises(OptionError, match="top_p"):
        tiny.chat(CHAT, top_p=7)
    with pytest.raises(GenerationTimeoutError):
        tiny.model_copy(update={"timeout": 1e-9}).chat(CHAT)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"namespaces": ["default"]}, "expected both or neither"),
        ({"engine": tiny_engine(), "dtype": "float32"}, "the engine has its own"),
        ({"engine": "given"}, "expected that engine"),
        ({"placement": "above"}, "placement"),
    ],
)
def test_settings_that_contradict_each_other(settings, complaint):
    with pytest.raises(ValidationError, match=complaint):
        KnowledgePackLLM(**settings)


def test_a_store_needs_namespaces_that_are_names(store):
    with pytest.raises(ValidationError, match="expected both or neither"):
        KnowledgePackLLM(store=store)
    with pytest.raises(ValidationError, match=r"Got the namespace '\.\./up'"):
        KnowledgePackLLM(store=store, namespaces=["../up"])


def test_the_context_window_leaves_room_for_packs(tiny, store):
    positions = tiny.engine.max_positions
    assert tiny.metadata.context_window == positions
    kept = KnowledgePackLLM(engine=tiny.engine, store=store, namespaces=["default"])
    assert kept.metadata.context_window == positions - positions // 2
    assert kept.metadata.num_output < kept.metadata.context_window


def test_it_survives_serialisation(store):
    made = KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces=["a"], stop=["x"], trusted_roles=["tool"])
    data = made.to_dict()
    assert data["class_name"] == "KnowledgePackLLM"
    again = KnowledgePackLLM.from_json(made.to_json(), engine=made.engine)
    assert again.to_dict() == data
    assert again.store.path == store.path
    assert again.trusted_roles == ("tool",)
    with pytest.raises(ValidationError, match="expected that engine"):
        KnowledgePackLLM.from_dict(data)
    named = KnowledgePackLLM(model="some/model", dtype="float32")
    assert KnowledgePackLLM.from_json(named.to_json()).to_dict() == named.to_dict()


def test_names_need_no_weights():
    llm = KnowledgePackLLM(model="some/model")
    assert llm.to_payload() == {"class_name": "KnowledgePackLLM", "model_name": "some/model"}
    assert KnowledgePackLLM().model_name == "SmolLM2-135M-Instruct"


def test_weights_are_loaded_once_per_process_and_only_when_needed(monkeypatch, tmp_path):
    loaded, engine = [], tiny_engine()
    monkeypatch.setattr(shared, "_sessions", {})
    monkeypatch.setattr(loading, "load_session", lambda model, **_: loaded.append(model) or engine)
    models = [KnowledgePackLLM(model=str(tmp_path), max_tokens=1) for _ in range(4)]
    assert not loaded
    threads = [threading.Thread(target=model.complete, args=("Hi",)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [str(tmp_path)]
    KnowledgePackLLM(model=str(tmp_path), dtype="float32", max_tokens=1).complete("Hi")
    assert loaded == [str(tmp_path)] * 2


def test_token_counting(tiny):
    counter = TokenCountingHandler(tokenizer=tiny.token_ids)
    tiny.callback_manager = CallbackManager([counter])
    asked = [tiny.chat(CHAT).raw, list(tiny.stream_chat(CHAT))[-1].raw, tiny.complete("Hi").raw]
    assert counter.prompt_llm_token_count == sum(raw["usage"]["prompt_tokens"] for raw in asked)
    assert counter.completion_llm_token_count == sum(raw["usage"]["completion_tokens"] for raw in asked)


def test_settings(tiny, clean_settings):
    Settings.llm, Settings.tokenizer = tiny, tiny.token_ids
    assert Settings.tokenizer("Héron") == tiny.engine.tokenizer.encode("Héron", add_special_tokens=False)
    memory = Memory.from_defaults(token_limit=100)
    assert memory.tokenizer_fn("Héron") == tiny.token_ids("Héron")


def test_predict_uses_the_system_prompt(tiny):
    template = PromptTemplate("Name a {thing}.")
    tiny.system_prompt = "Be brief."
    assert tiny.predict(template, thing="colour") == tiny.chat(CHAT).message.content
    assert "".join(tiny.stream(template, thing="colour")) == tiny.chat(CHAT).message.content


@pytest.mark.slow
async def test_async_leaves_the_loop_free(smol):
    llm = KnowledgePackLLM(engine=smol, max_tokens=24)
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    answer = await llm.acomplete("Name three colours.")
    during_complete = ticks
    pieces = [part.delta async for part in await llm.astream_complete("Name three colours.")]
    ticking.cancel()
    # A blocked loop ticks once or not at all, however slow the machine.
    assert during_complete > 3
    assert ticks > during_complete + 3
    assert "".join(pieces) == answer.text == llm.complete("Name three colours.").text


async def test_cancelling_stops_the_engine(thin):
    llm = KnowledgePackLLM(engine=thin, max_tokens=4000)
    started = asyncio.Event()

    async def read():
        async for _ in await llm.astream_complete("Tell a very long story about the sea."):
            started.set()

    task = asyncio.ensure_future(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    thin.clear_cache()
    task = asyncio.ensure_future(llm.acomplete("Tell a very long story about a mountain."))
    await asyncio.to_thread(until, lambda: thin.cached_bytes)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answer = await asyncio.wait_for(llm.acomplete("Hi", max_tokens=1), 60)
    assert answer.raw["kp"]["completion_tokens"] == 1


def test_leaving_a_stream_early_stops_the_engine(tiny):
    stream = tiny.stream_chat(CHAT)
    next(stream)
    stream.close()
    assert tiny.chat(CHAT, max_tokens=1).raw["kp"]["completion_tokens"] == 1


@pytest.mark.slow
def test_the_adapter_imports_alone():
    code = (
        "import sys, kp_llamaindex\n"
        "heavy = {'langchain_core', 'langchain', 'transformers', 'chromadb', 'sentence_transformers', 'kp_langchain'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - our own code
    assert run.stdout.strip() == "[]"


def test_public_names():
    import kp_llamaindex

    assert sorted(kp_llamaindex.__all__) == kp_llamaindex.__all__
    assert all(hasattr(kp_llamaindex, name) for name in kp_llamaindex.__all__)
