"""`KnowledgePackMemoryBlock`: flushed turns as packs, at constant prompt cost."""

import asyncio
import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.memory import Memory
from pydantic import ValidationError

from kp_core import Fact, MemoryFactStore, PackStore, find_handles
from kp_core.banks.delivery import Delivery
from kp_core.errors import OptionError, PackNotFoundError, PromptError
from kp_llamaindex import KnowledgePackLLM, KnowledgePackMemoryBlock, to_messages
from kp_llamaindex.memory import _LEFT
from kp_methods import recall
from tests.conftest import tiny_engine
from tests.llamaindex.conftest import LetterEmbedder

ENGINE = tiny_engine("llama")


def turns(number):
    return [ChatMessage(f"Question {number}?"), ChatMessage(f"Answer {number}.", role="assistant")]


@pytest.fixture
def block(store):
    return KnowledgePackMemoryBlock(engine=ENGINE, store=store)


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


def size(text):
    return len(ENGINE.tokenizer.encode(text, add_special_tokens=False))


async def test_the_oldest_packs_leave_in_blocks(block):
    block.memory_tokens, sizes = 4 * size("user: Question 1?\nassistant: Answer 1.\n"), []
    for number in range(1, 12):
        before = block.handles
        await block.aput(turns(number))
        sizes.append(size(block.text()))
        assert sizes[-1] <= block.memory_tokens
        assert [*block.left, *block.handles][-len(before) - 1 : -1] == before
    assert any(later < earlier / 1.5 for earlier, later in itertools.pairwise(sizes))
    assert (await block.aget()).startswith("(Earlier parts of this conversation")
    block.memory_tokens = 3  # Less than one pack.
    await block.aput(turns(12))
    assert block.handles == []
    assert len(block.left) == 12


async def test_a_turn_longer_than_the_window_is_kept_and_leaves(block, store):
    await block.aput(turns(1))
    await block.aput([ChatMessage("boats " * ENGINE.max_positions)])
    await block.aput(turns(2))
    assert block.text() == "user: Question 2?\nassistant: Answer 2.\n"
    assert "boats boats" in store.get(block.left[-1]).text


async def test_what_left_is_found_again(store, monkeypatch):
    monkeypatch.setattr(recall, "_ABOUT", 0)  # This model attends to nothing.
    facts = MemoryFactStore(LetterEmbedder())
    block = KnowledgePackMemoryBlock(engine=ENGINE, store=store, memory="search", facts=facts, memory_tokens=200)
    for number in range(12):
        await block.aput([ChatMessage(f"The {'abcdefghijkl'[number] * 9} has {number} sails.")])
    asked = [ChatMessage("How many sails has the bbbbbbbbb?")]
    found = [str(handle) for *_, handle in find_handles(await block.aget(asked))]
    assert found[: len(block.handles)] == block.handles
    assert 1 <= len(found[len(block.handles) :]) <= 2
    assert set(found[len(block.handles) :]) <= set(block.left)
    assert len(facts) == len(block.left)
    again = KnowledgePackMemoryBlock(**json.loads(block.model_dump_json()), engine=ENGINE, facts=facts)
    assert await again.aget(asked) == await block.aget(asked)
    # Deleted there is deleted here.
    facts.delete([fact.id for fact in facts.facts()])
    facts.add([Fact("Something else.")])
    assert "\n".join(block.handles) == (await block.aget(asked)).partition("\n")[2]


async def test_a_large_pack_that_left_is_found_where_there_is_room(store, monkeypatch):
    monkeypatch.setattr(recall, "_ABOUT", 0)
    facts = MemoryFactStore(LetterEmbedder())
    block = KnowledgePackMemoryBlock(engine=ENGINE, store=store, memory="search", facts=facts)
    for number, letter in enumerate("abc"):
        await block.aput([ChatMessage(f"The {letter * 9} has {number} sails.")])
        block.memory_tokens = 2 * block._size(block.handles[0]) + 4  # A pack is more than a quarter, less than half.
    assert (len(block.left), len(block.handles)) == (2, 1)
    given = await block.aget([ChatMessage("How many sails has the aaaaaaaaa?")])
    [found] = {str(handle) for *_, handle in find_handles(given)} - {*block.handles}
    assert found in block.left


def test_a_block_of_an_earlier_release_says_what_is_gone(store):
    with pytest.raises(OptionError, match="`memory_tokens` bounds the packs"):
        KnowledgePackMemoryBlock(store=store, max_handles=2)


async def test_nothing_to_remember(block):
    await block.aput([ChatMessage("  ")])
    assert block.handles == []
    assert await block.aget() == ""


async def test_search_results_are_remembered_as_their_packs_and_forgotten_with_them(block, store):
    """Whatever namespace they have; the model reads those that it may."""
    facts = ["The mill has four sails.", "The ferry leaves at dawn."]
    mill, ferry = (store.put(ENGINE.build_pack(fact, namespace="isles", lazy=True)) for fact in facts)
    call = ToolCallBlock(tool_call_id="1", tool_name="search", tool_kwargs={"q": "mill"})
    await block.aput(
        [
            ChatMessage(role="assistant", blocks=[call]),
            ChatMessage(f"{mill}\n\nand {ferry}.", role="tool", additional_kwargs={"tool_call_id": "1"}),
            ChatMessage(f"It says {mill}.", role="assistant"),
        ]
    )
    called, said = 'assistant called search with {"q": "mill"}\ntool:\n', f"assistant: It says {mill}.\n"
    assert block.text() == f"{called}{mill}\nand\n{ferry}\n.\n{said}", "what the block may not read stays a handle"
    mine = block.model_copy(update={"namespace": "isles", "handles": [str(mill), str(ferry)]})
    assert mine.text() == "".join(f"{fact}\n" for fact in facts)
    assert [handle for *_, handle in find_handles(await block.aget())][1:4:2] == [mill, ferry]
    memory = Memory.from_defaults(token_limit=300, memory_blocks=[block], tokenizer_fn=str.split)
    memory.put(ChatMessage("What did it say?"))
    read = {}
    for spaces in (["default"], ["default", "isles"]):
        llm = KnowledgePackLLM(engine=ENGINE, store=store, namespaces=spaces, max_tokens=1)
        read[len(spaces)] = llm.chat(memory.get()).raw["kp"]["packs"]
    assert set(read[2]) - set(read[1]) == {str(mill), str(ferry)}
    Delivery(None, ENGINE, store, namespace="isles").forget(mill)
    assert mine.text() == f"This passage was deleted.\n{facts[1]}\n"
    assert llm.chat(memory.get()).raw["kp"]["packs"] == [handle for handle in read[2] if handle != str(mill)]
    assert not [path for path in store.path.rglob("*") if path.is_file() and b"four sails" in path.read_bytes()]


async def test_a_result_that_comes_again_stands_once(block, store):
    mill = store.put(ENGINE.build_pack("The mill has four sails.", namespace="isles", lazy=True))
    for _ in range(3):
        await block.aput([ChatMessage(str(mill), role="tool", additional_kwargs={"tool_call_id": "1"})])
    assert block.handles.count(str(mill)) == 1
    assert block.text() == f"tool:\n{mill}\n" + "tool:\n(As found above.)\n" * 2


async def test_what_a_user_said_is_deleted_in_one_call(store):
    block = KnowledgePackMemoryBlock(engine=ENGINE, store=store, namespace="ada")
    other = KnowledgePackMemoryBlock(engine=ENGINE, store=store, namespace="bert")
    for each in (block, other):
        await each.aput([ChatMessage(f"My name is {each.namespace}, my number 73910.")])
        await each.aput(turns(1))
    kept = other.text()
    store.forget("ada", packs=True)
    files = [path.read_bytes() for path in store.path.rglob("*") if path.is_file()]
    assert ([b"name is ada" in data for data in files].count(True), list(store.handles("ada"))) == (0, [])
    assert block.text() == 2 * "This passage was deleted.\n"
    assert other.text() == kept
    assert any(b"73910" in data for data in files)


async def test_only_what_was_said_becomes_a_fact(store):
    facts = MemoryFactStore(LetterEmbedder())
    block = KnowledgePackMemoryBlock(engine=ENGINE, store=store, memory="search", facts=facts, memory_tokens=1)
    handle = store.put(ENGINE.build_pack("The mill has four sails.", lazy=True))
    await block.aput([ChatMessage(f"{handle}", role="tool", additional_kwargs={"tool_call_id": "1"})])
    assert [fact.text for fact in facts.facts()] == ["tool:\n"]
    assert str(handle) in block.left


async def test_the_memory_of_another_namespace_is_not_copied_into_this_one(store):
    theirs = KnowledgePackMemoryBlock(engine=ENGINE, store=store, namespace="theirs")
    await theirs.aput([ChatMessage("My password is plumbago.")])
    facts = MemoryFactStore(LetterEmbedder())
    block = KnowledgePackMemoryBlock(engine=ENGINE, store=store, memory="search", facts=facts, memory_tokens=1)
    await block.aput([ChatMessage(f"Read this: {theirs.handles[0]}")])
    assert not [fact for fact in facts.facts() if "plumbago" in fact.text]
    assert "plumbago" not in block.text() + await block.aget([ChatMessage("What is the password?")])


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


BAD = [{"handles": ["x"]}, {"namespace": "../up"}, {"memory_tokens": 0}, {"memory_tokens": 1.5}, {"memory": "search"}]


@pytest.mark.parametrize("settings", BAD)
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


@pytest.mark.slow
def test_a_long_conversation_has_a_short_prompt(block, store):
    block.memory_tokens = 300
    usages = conversation(store, block, 40)
    sent = [usage["prompt_tokens"] for usage in usages]
    assert max(sent[20:]) <= max(sent[:20]) + size(_LEFT)
    assert 0 < max(usage["pack_tokens"] for usage in usages) <= 300
    assert block.left


def test_turns_of_several_event_loops_are_all_kept(block):
    """As of a server whose threads run a loop each."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: asyncio.run(block.aput(turns(number))), range(8)))
    assert sorted(block.text().splitlines()) == sorted(
        f"{turn.role.value}: {turn.content}" for number in range(8) for turn in turns(number)
    )


async def test_what_is_not_unicode_is_an_error_of_ours(block):
    with pytest.raises(PromptError, match="not Unicode"):
        await block.aput([ChatMessage("a\ud800b")])


def test_the_first_pack_comes_straight_from_the_store(block, store):
    memory = Memory.from_defaults(token_limit=300, memory_blocks=[block], tokenizer_fn=str.split)
    memory.put(ChatMessage("Hello?"))
    block._remember([ChatMessage("The mill has four sails.")])
    messages = to_messages(memory.get())
    ENGINE.clear_cache()
    usage = ENGINE.generate(messages, view=store.view("default"), max_tokens=1).usage
    assert usage.pack_tokens == usage.reused_tokens > 0
