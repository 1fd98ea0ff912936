"""What `ChatKnowledgePacks` adds to the engine."""

import asyncio
import json
import subprocess
import sys
import threading

import pytest
from langchain_core import exceptions
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage, trim_messages
from pydantic import ValidationError

import kp_core
from kp_core import PackStore
from kp_core.engines import shared
from kp_core.engines.hf import loading
from kp_core.errors import (
    ContextOverflowError,
    GenerationTimeoutError,
    OptionError,
    PromptError,
)
from kp_langchain import ChatKnowledgePacks, to_messages
from tests.conftest import tiny_engine, until
from tests.core.prompt.families import FAMILIES
from tests.kits import tiny_model

CHAT = [SystemMessage("Be brief."), HumanMessage("Name a colour.")]


@pytest.fixture
def tiny():
    return ChatKnowledgePacks(engine=tiny_engine(), max_tokens=8)


def test_metadata_counts_what_was_read(tiny):
    answer = tiny.invoke(CHAT)
    kp = answer.response_metadata["kp"]
    prompt = tiny.engine.template.render(to_messages(CHAT))
    assert answer.usage_metadata["input_tokens"] == kp["prompt_tokens"] == len(prompt)
    assert answer.usage_metadata["output_tokens"] == kp["completion_tokens"]
    assert answer.usage_metadata["total_tokens"] == len(prompt) + kp["completion_tokens"]
    assert answer.response_metadata["finish_reason"] in {"stop", "length"}
    again = tiny.invoke(CHAT)
    assert 0 < again.usage_metadata["input_token_details"]["cache_read"] <= len(prompt)
    assert answer.response_metadata["model_provider"] == tiny._get_ls_params()["ls_provider"]


def test_metadata_names_the_packs_that_were_read_in_answers_and_streams(tiny, tmp_path):
    store = PackStore(tmp_path)
    handles = [str(store.put(tiny.engine.build_pack(text))) for text in ("The mill has sails.", "The ferry is late.")]
    model = ChatKnowledgePacks(engine=tiny.engine, store=store, namespaces="default", max_tokens=2)
    asked = f"{handles[1]}\n\n{handles[0]}\n\nWhat is late?"
    *_, last = model.stream(asked)
    assert model.invoke(asked).response_metadata["kp"]["packs"] == handles[::-1]
    assert last.response_metadata["kp"]["packs"] == handles[::-1]
    assert sum(model.stream(asked), AIMessageChunk("")).response_metadata["kp"]["packs"] == handles[::-1]
    assert model.invoke("What is late?").response_metadata["kp"]["packs"] == []


def test_log_probabilities_have_the_form_of_openai(tiny):
    answer = tiny.invoke(CHAT, top_logprobs=2)
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == answer.usage_metadata["output_tokens"]
    assert all(set(token) == {"token", "bytes", "logprob", "top_logprobs"} for token in content)
    assert [token["top_logprobs"][0]["bytes"] for token in content] == [token["bytes"] for token in content]
    assert json.loads(json.dumps(content)) == content
    by_field = ChatKnowledgePacks(engine=tiny.engine, max_tokens=8, logprobs=True)
    assert [token["top_logprobs"] for token in by_field.invoke(CHAT).response_metadata["logprobs"]["content"]] == [
        [] for _ in content
    ]
    assert "logprobs" not in tiny.invoke(CHAT).response_metadata


async def test_chunks_carry_log_probabilities_and_join_to_those_of_the_answer(tiny):
    content = tiny.invoke(CHAT, top_logprobs=2).response_metadata["logprobs"]["content"]
    chunks = list(tiny._stream(CHAT, top_logprobs=2))
    infos = [chunk.generation_info["logprobs"] for chunk in chunks if "logprobs" in (chunk.generation_info or {})]
    assert len(infos) > 1
    assert [token for info in infos for token in info["content"]] == content
    whole = None
    for chunk in tiny.stream(CHAT, top_logprobs=2):
        whole = chunk if whole is None else whole + chunk
    assert whole.response_metadata["logprobs"]["content"] == content
    answer = await tiny.ainvoke(CHAT, top_logprobs=2)
    assert answer.response_metadata["logprobs"]["content"] == content


def test_counting_tokens_needs_no_other_tokenizer(tiny):
    assert tiny.get_token_ids("Héron") == tiny.engine.tokenizer.encode("Héron", add_special_tokens=False)
    assert tiny.get_num_tokens_from_messages(CHAT) == tiny.invoke(CHAT).usage_metadata["input_tokens"]
    tools = [{"name": "f", "description": "A tool."}]
    counted = tiny.get_num_tokens_from_messages(CHAT, tools=tools)
    assert counted == tiny.bind_tools(tools).invoke(CHAT).usage_metadata["input_tokens"]


def test_packs_count_as_read_and_not_as_sent(chat, retriever):
    [document] = retriever.invoke("flag", k=1)
    [there], text = [HumanMessage(document.page_content)], document.metadata["text"]
    chat.invoke([there])
    answer = chat.invoke([there])
    usage, kp = answer.usage_metadata, answer.response_metadata["kp"]
    assert kp["prompt_tokens"] + kp["pack_tokens"] == usage["input_tokens"] > kp["prompt_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"]["cache_read"] == kp["reused_tokens"] >= kp["pack_tokens"]
    assert usage["input_tokens"] - kp["reused_tokens"] == kp["computed_tokens"]
    assert chat.get_num_tokens_from_messages([there]) == usage["input_tokens"]
    # A part of a conversation that the template refuses is counted as text, packs included.
    parts = [AIMessage("so"), there]
    refusing = kp_core.load_engine(tiny_model("llama"), tokenizer=FAMILIES["mistral"].tokenizer())
    counting = chat.model_copy(update={"engine": refusing})
    assert counting.get_num_tokens_from_messages(parts) >= len(counting.get_token_ids(text))


def test_a_prompt_beyond_the_window_is_also_langchains_error(tiny):
    long = [HumanMessage("word " * tiny.engine.max_positions)]
    for call in (tiny.invoke, lambda messages: list(tiny.stream(messages)), lambda m: asyncio.run(tiny.ainvoke(m))):
        with pytest.raises(exceptions.ContextOverflowError) as raised:
            call(long)
        assert isinstance(raised.value, ContextOverflowError)
        assert raised.value.prompt_tokens > raised.value.limit == tiny.engine.max_positions

    async def pieces():
        return [piece async for piece in tiny.astream(long)]

    with pytest.raises(exceptions.ContextOverflowError):
        asyncio.run(pieces())


def test_the_window_is_known_before_the_model_is_loaded(thin_model, thin, tmp_path):
    before = dict(shared._sessions)
    assert ChatKnowledgePacks(model=str(thin_model)).profile["max_input_tokens"] == thin.max_positions
    assert "max_input_tokens" not in ChatKnowledgePacks(base_url="http://127.0.0.1:9").profile
    unknown = ChatKnowledgePacks(model=str(tmp_path / "none")).profile
    assert unknown["tool_calling"]
    assert "max_input_tokens" not in unknown
    assert shared._sessions == before


def test_options_of_a_call_override_the_fields(tiny):
    assert tiny.invoke(CHAT, max_tokens=2).usage_metadata["output_tokens"] <= 2
    sampled = tiny.model_copy(update={"temperature": 1.5, "seed": 1})
    assert sampled.invoke(CHAT).text == sampled.invoke(CHAT).text
    assert sampled.invoke(CHAT, seed=2).text != sampled.invoke(CHAT).text
    assert sampled.invoke(CHAT, temperature=0).text == tiny.invoke(CHAT).text
    with pytest.raises(TypeError, match="no option 'wibble'"):
        tiny.invoke(CHAT, wibble=1)


def test_stop_strings(tiny):
    text = tiny.invoke(CHAT).text
    assert len(text) > 1
    stop = text[-1]
    expected = text[: text.index(stop)]
    assert tiny.invoke(CHAT, stop=[stop]).text == expected
    fixed = ChatKnowledgePacks(engine=tiny.engine, max_tokens=8, stop=[stop])
    assert fixed.invoke(CHAT).text == expected
    assert fixed.invoke(CHAT, stop=[]).text == text
    assert "".join(chunk.text for chunk in fixed.stream(CHAT)) == expected


def test_errors_come_through(tiny):
    with pytest.raises(PromptError, match="image_url"):
        tiny.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}])])
    with pytest.raises(ContextOverflowError):
        tiny.invoke(CHAT, max_tokens=10**6)
    with pytest.raises(OptionError, match="top_p"):
        tiny.invoke(CHAT, top_p=7)
    with pytest.raises(PromptError, match="expected one of: auto, none, any, f"):
        tiny.bind_tools([{"name": "f", "description": "A tool."}], tool_choice="g")
    with pytest.raises(GenerationTimeoutError):
        tiny.invoke(CHAT, timeout=1e-9)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"namespaces": ["default"]}, "expected both or neither"),
        ({"engine": tiny_engine(), "dtype": "float32"}, "the engine has its own"),
        ({"placement": "above"}, "placement"),
    ],
)
def test_settings_that_contradict_each_other(settings, complaint):
    with pytest.raises(ValidationError, match=complaint):
        ChatKnowledgePacks(**settings)


def test_a_store_needs_namespaces_that_are_names(store):
    with pytest.raises(ValidationError, match="expected both or neither"):
        ChatKnowledgePacks(store=store)
    with pytest.raises(ValidationError, match=r"Got the namespace '\.\./up'"):
        ChatKnowledgePacks(store=store, namespaces=["../up"])


def test_leaving_a_stream_early_stops_the_engine(thin):
    chat = ChatKnowledgePacks(engine=thin, max_tokens=4000)
    stream = chat.stream("Tell a very long story about the sea.")
    next(stream)
    stream.close()
    assert chat.invoke("Hi", max_tokens=1).usage_metadata["output_tokens"] == 1


async def test_cancelling_stops_the_engine(thin):
    chat = ChatKnowledgePacks(engine=thin, max_tokens=4000)
    busy = threading.active_count()

    async def read():
        async for _ in chat.astream("Tell a very long story about the sea."):
            started.set()

    for ask in (read, lambda: chat.ainvoke("Tell a very long story about a mountain.")):
        started = asyncio.Event()
        thin.clear_cache()
        task = asyncio.ensure_future(ask())
        if ask is read:
            await started.wait()
        else:
            await asyncio.to_thread(until, lambda: thin.cached_bytes)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    answer = await asyncio.wait_for(chat.ainvoke("Hi", max_tokens=1), 60)
    assert answer.usage_metadata["output_tokens"] == 1
    assert threading.active_count() <= busy + 8


async def test_breaking_out_of_an_async_stream(tiny):
    async for _ in tiny.astream(CHAT):
        break
    assert (await tiny.ainvoke(CHAT)).text == tiny.invoke(CHAT).text


def test_tokens_reach_callbacks(tiny):
    from langchain_core.callbacks import BaseCallbackHandler

    class Listener(BaseCallbackHandler):
        said = ""

        def on_llm_new_token(self, token, **_):
            self.said += token

    listener = Listener()
    text = "".join(chunk.text for chunk in tiny.stream(CHAT, config={"callbacks": [listener]}))
    assert listener.said == text


def test_weights_are_loaded_once_per_process_and_only_when_needed(monkeypatch, tmp_path):
    loaded = []
    monkeypatch.setattr(shared, "_sessions", {})
    engine = tiny_engine()
    monkeypatch.setattr(loading, "load_session", lambda model, **_: loaded.append(model) or engine)
    models = [ChatKnowledgePacks(model=str(tmp_path), max_tokens=1) for _ in range(4)]
    assert not loaded
    threads = [threading.Thread(target=model.invoke, args=(CHAT,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [str(tmp_path)]
    ChatKnowledgePacks(model=str(tmp_path), dtype="float32", max_tokens=1).invoke(CHAT)
    assert loaded == [str(tmp_path)] * 2


def test_names():
    chat = ChatKnowledgePacks(model_name="some/model", stop_sequences=["x"])
    assert (chat.model, chat.model_name, chat.stop) == ("some/model", "some/model", ["x"])
    assert chat._get_ls_params()["ls_stop"] == ["x"]
    assert ChatKnowledgePacks().model_name == "SmolLM2-135M-Instruct"
    # An engine made of a model object calls it what its configuration does.
    assert ChatKnowledgePacks(engine=tiny_engine()).model_name == "llama"


def test_fields_can_be_configured_per_call(tiny):
    from langchain_core.runnables import ConfigurableField

    model = tiny.configurable_fields(max_tokens=ConfigurableField(id="length"))
    counted = [model.invoke(CHAT, {"configurable": {"length": length}}).usage_metadata for length in (1, 3)]
    assert [usage["output_tokens"] for usage in counted] == [1, 3]


def test_conversations_with_tool_messages_render(tiny):
    call = {"name": "search", "args": {"q": "x"}, "id": "call00001"}
    asked = [HumanMessage("?"), AIMessage("", tool_calls=[call])]
    from langchain_core.messages import ToolMessage

    answer = tiny.invoke([*asked, ToolMessage("found", tool_call_id="call00001", name="search")])
    assert answer.usage_metadata["input_tokens"] > 0


@pytest.mark.slow
def test_the_adapter_imports_alone():
    code = (
        "import sys, kp_langchain\n"
        "heavy = {'llama_index', 'transformers', 'chromadb', 'sentence_transformers', 'kp_llamaindex'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - our own code
    assert run.stdout.strip() == "[]"


def test_public_names():
    import kp_langchain

    assert sorted(kp_langchain.__all__) == kp_langchain.__all__
    assert all(hasattr(kp_langchain, name) for name in kp_langchain.__all__)


@pytest.mark.parametrize("family", ["gemma", "mistral", "magistral"])
def test_messages_that_a_template_refuses_are_counted_as_text(family):
    engine = kp_core.load_engine(tiny_model("llama"), tokenizer=FAMILIES[family].tokenizer())
    chat = ChatKnowledgePacks(engine=engine)
    said = [HumanMessage("one two"), AIMessage("three four"), HumanMessage("five six"), AIMessage("seven eight")]
    for start in range(4):
        for stop in range(start + 1, 5):
            assert chat.get_num_tokens_from_messages(said[start:stop]) > 0
    kept = trim_messages(said, max_tokens=60, token_counter=chat, strategy="last")
    assert kept == said[-len(kept) :]


LOOK = {"name": "look", "args": {"what": "rain", "n": 2}, "id": "call00001"}
TALK = [
    SystemMessage("Be brief, and never name a price."),
    HumanMessage("one two"),
    AIMessage("three four"),
    HumanMessage("look it up"),
    AIMessage("", tool_calls=[LOOK]),
    ToolMessage("it rains in Veyl", tool_call_id="call00001", name="look"),
    AIMessage("It rains."),
    SystemMessage("Be kind."),
    HumanMessage("five six"),
    AIMessage("seven eight"),
    HumanMessage([{"type": "text", "text": "nine ten"}]),
]
TRIMS = [
    {"strategy": "last"},
    {"strategy": "last", "include_system": True},
    {"strategy": "last", "start_on": "human", "include_system": True},
    {"strategy": "last", "start_on": ("human", "tool"), "end_on": ("human", "tool")},
    {"strategy": "last", "allow_partial": True, "text_splitter": str.split},
    {"strategy": "first"},
    {"strategy": "first", "end_on": ("human", "tool")},
    {"strategy": "first", "allow_partial": True},
]


@pytest.mark.parametrize("family", ["gemma", "mistral", "magistral", "llama3", "gpt_oss"])
def test_what_is_trimmed_fits_whatever_a_template_refuses(family):
    tokenizer = FAMILIES[family].tokenizer()
    chat = ChatKnowledgePacks(engine=kp_core.load_engine(tiny_model("llama"), tokenizer=tokenizer))
    whole = chat.get_num_tokens_from_messages(TALK)
    # A part of a result alone is text for Harmony.
    for settings in TRIMS if family != "gpt_oss" else [each for each in TRIMS if "allow_partial" not in each]:
        for room in (1, whole // 2, 2 * whole // 3, whole - 1, whole):
            kept = trim_messages(TALK, max_tokens=room, token_counter=chat, **settings)
            assert chat.get_num_tokens_from_messages(kept) <= room or kept == TALK[:1], (settings, room)
            assert len(kept) < len(TALK) or room == whole or "allow_partial" in settings
            wanted = TALK[-len(kept) :] if settings["strategy"] == "last" else TALK[: len(kept)]
            same = [one == other for one, other in zip(kept, wanted, strict=False)]
            assert same.count(False) <= (settings.keys() & {"allow_partial", "include_system", "end_on"} != set())


@pytest.mark.parametrize("strategy", ["last", "first"])
def test_handles_in_trimmed_conversations_of_strict_templates_count_as_their_packs(strategy, tmp_path):
    model, tokenizer = tiny_model("llama"), FAMILIES["gemma"].tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    engine = kp_core.load_engine(model, tokenizer=tokenizer)
    store, text = kp_core.PackStore(tmp_path), "The gate is green. " * 20
    handle = str(store.put(engine.build_pack(text)))
    chat = ChatKnowledgePacks(engine=engine, store=store, namespaces=["default"])
    said = [HumanMessage(f"{handle}{handle} Who?"), AIMessage("Orla."), HumanMessage("And then?"), AIMessage("No.")]
    read = 2 * len(chat.get_token_ids(text))
    for part in (said[:1], said[1::-1], [*said[1:], said[0]], [said[1], *said[1::-1]]):  # Refused: an answer is first.
        assert read < chat.get_num_tokens_from_messages(part) < read + 200
    assert trim_messages(said, max_tokens=read + 200, token_counter=chat, strategy=strategy) == said
    assert len(trim_messages(said, max_tokens=read, token_counter=chat, strategy=strategy)) < len(said)
