"""LlamaIndex's messages in the core's form."""

import pytest
from llama_index.core.base.llms.types import (
    AudioBlock,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from kp_core.errors import PromptError
from kp_llamaindex import to_messages

CALL = ToolCallBlock(tool_call_id="c1", tool_name="search", tool_kwargs={"q": "x"})


def test_roles_and_tools():
    converted = to_messages(
        [
            ChatMessage("s", role="system"),
            ChatMessage("d", role="developer"),
            ChatMessage("u", additional_kwargs={"name": "Nan"}),
            ChatMessage(role="assistant", blocks=[ThinkingBlock(content="hm"), CALL]),
            ChatMessage("r", role="tool", additional_kwargs={"tool_call_id": "c1"}),
            ChatMessage("f", role="function", additional_kwargs={"name": "old"}),
            ChatMessage("a", role="chatbot"),
            ChatMessage("m", role="model"),
        ]
    )
    function = {"name": "search", "arguments": {"q": "x"}}
    assert converted == [
        {"role": "system", "content": "s"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u", "name": "Nan"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function, "id": "c1"}]},
        # LlamaIndex's agents leave the name out; the call has it.
        {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "search"},
        {"role": "tool", "content": "f", "name": "old"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "m"},
    ]


def test_text_blocks_are_joined_as_llama_index_joins_them():
    cited = CitationBlock(cited_content="four", source="s", title="t", additional_location_info={})
    blocks = [
        TextBlock(text="one"),
        CachePoint(cache_control={"type": "x"}),
        CitableBlock(title="t", source="s", content="two"),
    ]
    message = ChatMessage(blocks=[*blocks, TextBlock(text="three")])
    assert to_messages([message]) == [{"role": "user", "content": "one\ntwo\nthree", "cache_control": True}]
    plain = ChatMessage(blocks=[TextBlock(text="a"), TextBlock(text="b")])
    assert to_messages([plain])[0]["content"] == plain.content
    assert to_messages([ChatMessage(blocks=[cited])])[0]["content"] == "four"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"q": 1}', [{"q": 1}]), ("", [{}]), ('{"q', []), ("[1]", [])],
)
def test_arguments_as_strings(arguments, expected):
    block = ToolCallBlock(tool_name="f", tool_kwargs=arguments)
    [message] = to_messages([ChatMessage(role="assistant", blocks=[block])])
    assert [call["function"]["arguments"] for call in message.get("tool_calls", [])] == expected


@pytest.mark.parametrize(
    "block",
    [
        ImageBlock(url="https://example.com/a.png"),
        AudioBlock(url="https://example.com/a.wav"),
        DocumentBlock(url="https://example.com/a.pdf"),
        ThinkingBlock(content="hm"),
        CALL,
    ],
)
def test_other_content_is_refused_by_name(block):
    with pytest.raises(PromptError, match=f"block of type '{block.block_type}' in a user message"):
        to_messages([ChatMessage(blocks=[block])])


def test_a_string_is_no_message():
    with pytest.raises(PromptError, match="Got a str"):
        to_messages(["hello"])
