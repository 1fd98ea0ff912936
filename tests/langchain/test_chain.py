"""The chain a user writes: retriever, prompt, model. Packs answer as text does."""

import asyncio

import pytest
from langchain_core.messages import AIMessageChunk

from kp_core import find_handles
from tests.langchain.conftest import PROMPT, QUESTIONS, answers_of, chain_of


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.bundled
def test_packs_answer_as_text_does(question, retriever, text_retriever, chat, chat_engine):
    chat_engine.clear_cache()
    by_pack = chain_of(retriever, chat).invoke(question)
    chat_engine.clear_cache()
    by_text = chain_of(text_retriever, chat).invoke(question)
    assert by_pack.text == by_text.text != ""
    pack, text = by_pack.response_metadata["kp"], by_text.response_metadata["kp"]
    assert pack["prompt_tokens"] + pack["pack_tokens"] == text["prompt_tokens"]
    assert by_pack.usage_metadata["input_tokens"] == by_text.usage_metadata["input_tokens"]


def test_the_first_document_comes_from_the_store_exactly(retriever, chat, chat_engine, store):
    first = retriever.invoke(QUESTIONS[0], k=1)
    chat_engine.clear_cache()
    usage = chain_of(retriever.model_copy(update={"k": 1}), chat).invoke(QUESTIONS[0]).response_metadata["kp"]
    pack = store.get(find_handles(first[0].page_content)[0][2])
    assert usage["pack_tokens"] == len(pack.token_ids)
    # Words that were met twice may be stored by now, too.
    assert usage["reused_tokens"] >= usage["pack_tokens"]
    assert usage["computed_tokens"] <= usage["prompt_tokens"]


def test_asked_again_knowledge_is_not_computed_again(retriever, chat, chat_engine):
    chain = chain_of(retriever, chat)
    chat_engine.clear_cache()
    chain.invoke(QUESTIONS[0])
    usage = chain.invoke(QUESTIONS[0]).response_metadata["kp"]
    assert usage["reused_tokens"] >= usage["pack_tokens"]


def test_documents_hold_handles_and_keep_text_in_metadata(retriever, text_retriever):
    documents = retriever.invoke(QUESTIONS[0])
    assert all(find_handles(document.page_content) for document in documents)
    texts = [document.page_content for document in text_retriever.invoke(QUESTIONS[0])]
    assert [document.metadata["text"] for document in documents] == texts


@pytest.mark.bundled
def test_stream_equals_invoke(retriever, chat):
    chain = chain_of(retriever, chat)
    whole = chain.invoke(QUESTIONS[1])
    chunks = list(chain.stream(QUESTIONS[1]))
    assert len(chunks) > 2
    total = sum(chunks[1:], chunks[0])
    assert isinstance(total, AIMessageChunk)
    assert total.text == whole.text
    assert total.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert total.chunk_position == "last"


def test_batch_equals_one_by_one(retriever, chat):
    chain = answers_of(retriever, chat)
    one_by_one = [chain.invoke(question) for question in QUESTIONS]
    assert chain.batch(QUESTIONS * 2) == one_by_one * 2


async def test_async_equals_sync_and_leaves_the_loop_free(retriever, chat):
    chain = answers_of(retriever, chat)
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    answer = await chain.ainvoke(QUESTIONS[2])
    during_invoke = ticks
    pieces = [piece async for piece in chain.astream(QUESTIONS[2])]
    ticking.cancel()
    assert during_invoke > 2
    assert ticks > during_invoke
    assert "".join(pieces) == answer == chain.invoke(QUESTIONS[2])


def test_memory_in_the_system_message_keeps_the_prompt_short(retriever, chat):
    chat = chat.model_copy(update={"placement": "system"})
    chain = PROMPT | chat
    sent = []
    for k in (1, 2):
        handles = [document.page_content for document in retriever.invoke(QUESTIONS[0], k=k)]
        answer = chain.invoke({"context": "See memory.", "question": QUESTIONS[0]}, packs=handles)
        sent.append(answer.response_metadata["kp"]["prompt_tokens"])
    assert sent[0] == sent[1]
