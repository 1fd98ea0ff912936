"""`KnowledgePackMemoryBlock`: flushed turns as packs, at constant prompt cost."""

import json

import pytest
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.memory import Memory
from pydantic import ValidationError

from kp_core import PackStore, find_handles
from kp_core.errors import PackNotFoundError
from kp_llamaindex import KnowledgePackLLM, KnowledgePackMemoryBlock, to_messages
from tests.conftest import tiny_engine

ENGINE = tiny_engine("llama")


def turns(number):
    return [ChatMessage(f"Question {number}?"), ChatMessage(f"Answer {number}.", role="assistant")]


@pytest.fixture
def block(store):
    return KnowledgePackMemoryBlock(engine=ENGINE, store=store, max_handles=2)


async def test_turns_become_packs_and_come_back_as_handles(block, store):
    await block.aput(turns(1))
    await block.aput(turns(2))
    content = await block.aget()
    handles = [handle for _, _, handle in find_handles(content)]
    assert content == "\n".join(map(str, handles))
    assert [store.get(handle).text for handle in handles] == [
        f"user: Question {number}?\nassistant: Answer {number}.\n" for number in (1, 2)
    ]
    assert block.text() == "".join(store.get(handle).text for handle in handles)


async def test_more_packs_than_allowed_become_one(block):
    for number in range(1, 8):
        before = block.text()
        await block.aput(turns(number))
        assert block.text() == before + f"user: Question {number}?\nassistant: Answer {number}.\n"
        assert 1 <= len(block.handles) <= 2


async def test_nothing_to_remember(block):
    await block.aput([ChatMessage("  ")])
    assert block.handles == []
    assert await block.aget() == ""


async def test_search_results_are_remembered_as_text(block, store):
    fact = "The mill has four sails."
    handle = str(store.put(ENGINE.build_pack(fact, lazy=True)))
    call = ToolCallBlock(tool_call_id="1", tool_name="search", tool_kwargs={"q": "mill"})
    await block.aput(
        [
            ChatMessage(role="assistant", blocks=[call]),
            ChatMessage(handle, role="tool", additional_kwargs={"tool_call_id": "1"}),
            ChatMessage(f"It says {handle}.", role="assistant"),
        ]
    )
    assert block.text() == (
        f'assistant called search with {{"q": "mill"}}\ntool: {fact}\nassistant: It says {handle}.\n'
    )


async def test_it_persists(block, store):
    for number in range(3):
        await block.aput(turns(number))
    data = json.loads(block.model_dump_json())
    assert "engine" not in data
    again = KnowledgePackMemoryBlock(**data, engine=ENGINE)
    assert (again.handles, again.text()) == (block.handles, block.text())
    assert again.store.path == store.path
    await again.aput(turns(9))
    assert again.text() == block.text() + "user: Question 9?\nassistant: Answer 9.\n"


async def test_a_store_without_the_packs(block, tmp_path):
    await block.aput(turns(1))
    elsewhere = block.model_copy(update={"store": PackStore(tmp_path / "elsewhere")})
    with pytest.raises(PackNotFoundError, match="which this memory holds"):
        elsewhere.text()
    block.handles = []
    assert block.text() == ""


@pytest.mark.parametrize("settings", [{"handles": ["x"]}, {"namespace": "../up"}, {"max_handles": 0}])
def test_bad_settings(settings, store):
    with pytest.raises(ValidationError):
        KnowledgePackMemoryBlock(store=store, **settings)


def conversation(store, block, rounds):
    """Talk for so many rounds with a memory of 120 tokens; the usage of every round."""
    llm = KnowledgePackLLM(engine=ENGINE, store=store, namespaces=["default"], max_tokens=8)
    memory = Memory.from_defaults(
        token_limit=300,
        token_flush_size=60,
        chat_history_token_ratio=0.4,
        memory_blocks=[block],
        tokenizer_fn=llm.token_ids,
    )
    usages = []
    for number in range(rounds):
        memory.put(ChatMessage(f"This is question number {number:03}, what do you say?"))
        response = llm.chat(memory.get())
        usages.append(response.raw["kp"])
        memory.put(ChatMessage(f"I say that the answer is {number:03}.", role="assistant"))
    return usages


def test_a_long_conversation_has_a_short_prompt(block, store):
    usages = conversation(store, block, 20)
    sent = [usage["prompt_tokens"] for usage in usages]
    delivered = [usage["pack_tokens"] for usage in usages]
    assert max(sent[10:]) <= max(sent[:10])
    assert delivered[-1] > 3 * delivered[9] / 2 > 0
    assert "question number 000" in block.text()


def test_the_first_pack_comes_straight_from_the_store(block, store):
    memory = Memory.from_defaults(token_limit=300, memory_blocks=[block], tokenizer_fn=str.split)
    memory.put(ChatMessage("Hello?"))
    block.handles = [block._compile("user: The mill has four sails.\n")]
    messages = to_messages(memory.get())
    ENGINE.clear_cache()
    usage = ENGINE.generate(messages, view=store.view("default"), max_tokens=1).usage
    assert usage.pack_tokens == usage.reused_tokens > 0
