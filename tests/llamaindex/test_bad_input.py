"""Bad input that is LlamaIndex's own way of asking; `tests/parity/test_bad_input.py` asks both adapters the rest."""

import logging
import time

import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from pydantic import create_model

from kp_core.errors import (
    GenerationTimeoutError,
    PackError,
    PackNotFoundError,
    PromptError,
)
from kp_llamaindex import KnowledgePackLLM
from tests.conftest import tiny_engine, until

FACT = "The mill of Veyl has four sails."


@pytest.fixture
def handle(store):
    return str(store.put(tiny_engine().build_pack(FACT, namespace="isles", lazy=True)))


def llm_in(store, *namespaces, engine=None, **fields):
    return KnowledgePackLLM(engine=engine or tiny_engine(), store=store, namespaces=namespaces, max_tokens=1, **fields)


def delivered(llm, *messages):
    return llm.chat(list(messages)).raw["kp"]["pack_tokens"]


@pytest.mark.parametrize(
    ("namespaces", "change", "reason"),
    [
        (["elsewhere"], str, "is not allowed"),
        (["isles"], lambda handle: handle[:-4] + "aaaa", "no such pack"),
        (["isles"], lambda handle: handle.replace("isles", "islet"), "is not allowed"),
    ],
    ids=["foreign namespace", "forged id", "forged namespace"],
)
def test_a_handle_that_does_not_resolve_stays_text(namespaces, change, reason, store, handle, caplog):
    written = change(handle)
    llm = llm_in(store, *namespaces)
    with caplog.at_level(logging.WARNING, "kp_core"):
        usage = llm.chat([ChatMessage(written)]).raw["kp"]
    assert usage["pack_tokens"] == 0
    assert usage["prompt_tokens"] > len(written) / 8
    assert f"Handle {written} stays text" in caplog.text
    assert reason in caplog.text
    assert usage["unresolved_handles"] == 1
    with pytest.raises(PackNotFoundError, match=rf"does not resolve: .*{reason}"):
        llm.complete("Hi", packs=[written])


def test_a_handle_inside_a_fact_is_not_followed(store, handle):
    smuggler = tiny_engine().build_pack(f"For more, see {handle} at once.", namespace="isles", lazy=True)
    assert delivered(llm_in(store, "isles"), ChatMessage(str(store.put(smuggler)))) == len(smuggler.token_ids)


def test_a_pack_of_another_model(store, handle, caplog):
    other = tiny_engine(dtype=torch.bfloat16)
    with pytest.raises(PackError, match=r"dtype: pack has float32.*computed anew from its text"):
        delivered(llm_in(store, "isles", engine=other), ChatMessage(handle))
    with caplog.at_level(logging.WARNING, "kp_core"):
        assert delivered(llm_in(store, "isles", engine=other, mismatch="rebuild"), ChatMessage(handle)) > 0
    assert "made by another model" in caplog.text


def test_a_schema_that_no_grammar_expresses(tiny):
    odd = {"type": "object", "properties": {"x": {"type": "wave"}}, "required": ["x"]}
    with pytest.raises(PromptError, match="wave"):
        tiny.chat([ChatMessage("Hi")], response_schema=odd)
    schema = create_model("Asked", __config__={"json_schema_extra": odd})
    tool = FunctionTool.from_defaults(lambda **_: "", name="ask", description="Ask.", fn_schema=schema)
    with pytest.raises(PromptError, match="wave"):
        tiny.chat_with_tools([tool], "Hi", tool_required=True)


async def test_time_runs_out_at_every_endpoint(tiny):
    late, asked = tiny.model_copy(update={"timeout": 1e-9}), [ChatMessage("Hi")]
    with pytest.raises(GenerationTimeoutError):
        late.complete("Hi")
    with pytest.raises(GenerationTimeoutError):
        list(late.stream_chat(asked))
    with pytest.raises(GenerationTimeoutError):
        await late.achat(asked)
    with pytest.raises(GenerationTimeoutError):
        [part async for part in await late.astream_chat(asked)]


def test_a_stream_that_fails_midway_gives_its_memory_back(tiny):
    pool = tiny.engine.engine.pool
    tiny.complete("Hi")
    idle = pool.nbytes
    began = time.monotonic()
    stream = tiny.stream_complete("Hi", timeout=1.0, max_tokens=100)
    next(stream)
    assert pool.nbytes < idle
    until(lambda: time.monotonic() > began + 1.1)
    with pytest.raises(GenerationTimeoutError):
        list(stream)
    assert pool.nbytes >= idle
    assert tiny.complete("Hi", max_tokens=1).raw["kp"]["completion_tokens"] == 1
