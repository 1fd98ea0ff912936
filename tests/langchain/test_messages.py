"""From LangChain's messages and prompts to the core's."""

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

from kp_core.errors import PromptError
from kp_langchain import pack_place, to_messages
from tests.conftest import tiny_engine


def test_every_role():
    call = {"name": "search", "args": {"q": "x"}, "id": "c1"}
    converted = to_messages(
        [
            SystemMessage("s"),
            HumanMessage("h", name="Nan"),
            AIMessage("", tool_calls=[call]),
            ToolMessage("r", tool_call_id="c1", name="search"),
            AIMessageChunk("a"),
            FunctionMessage("f", name="old"),
            ChatMessage("d", role="developer"),
        ]
    )
    function = {"name": "search", "arguments": {"q": "x"}}
    assert converted == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "h", "name": "Nan"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function, "id": "c1"}]},
        {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "search"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "f", "name": "old"},
        {"role": "system", "content": "d"},
    ]


def test_text_blocks_and_what_assistants_add_to_them():
    blocks = [{"type": "reasoning", "reasoning": "hm"}, "one ", {"type": "text", "text": "two"}]
    blocks.append({"type": "tool_call", "name": "f", "args": {}, "id": "1"})
    [message] = to_messages([AIMessage(blocks)])
    assert message == {"role": "assistant", "content": "one two"}
    [message] = to_messages([HumanMessage([{**blocks[2], "cache_control": {"type": "ephemeral"}}])])
    assert message == {"role": "user", "content": "two", "cache_control": True}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "url": "https://example.com/a.png"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "audio", "base64": "AA==", "mime_type": "audio/wav"},
        {"type": "text"},
        {"type": "tool_call", "name": "f", "args": {}, "id": "1"},
    ],
)
def test_other_content_is_refused_by_name(block):
    with pytest.raises(PromptError, match=block["type"]):
        to_messages([HumanMessage([block])])


def test_a_message_that_is_no_turn():
    with pytest.raises(PromptError, match="RemoveMessage"):
        to_messages([RemoveMessage(id="1")])


def test_pack_place_is_where_the_first_document_will_stand():
    prompt = ChatPromptTemplate(
        [
            ("system", "You are {name}."),
            MessagesPlaceholder("examples", optional=True),
            ("human", "Facts:\n{context}\n\nQuestion: {question}"),
        ]
    ).partial(name="Nan")
    place = pack_place(prompt)
    assert place == [
        {"role": "system", "content": "You are Nan."},
        {"role": "user", "content": "Facts:\n{pack}\n\nQuestion: ?"},
    ]
    engine, fact = tiny_engine(), "The mill has four sails."
    pack = engine.build_pack(fact, compiled_for=place, lazy=True)
    ids = engine.template.render(
        to_messages(prompt.format_messages(context=fact, question="How many sails?"))
    ).token_ids
    assert ids[: len(pack.prefix) + len(pack.token_ids)] == pack.prefix + pack.token_ids


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([("human", "{question} {context}")], "'question' stands before 'context'"),
        ([("system", "{language}"), ("human", "{context}")], "'language' stands before"),
        ([MessagesPlaceholder("history"), ("human", "{context}")], "'history' stands before"),
        ([("human", "{question}")], "Got the variable 'context'"),
        ([MessagesPlaceholder("context"), ("human", "{x}")], "Got the variable 'context'; .* are: x"),
    ],
)
def test_a_place_that_moves_is_refused(messages, complaint):
    with pytest.raises(PromptError, match=complaint):
        pack_place(ChatPromptTemplate(messages))


def test_variables_and_placeholders_behind_the_documents_do_not_matter():
    prompt = ChatPromptTemplate([("system", "{context}"), MessagesPlaceholder("history"), ("human", "{context}{x}")])
    assert [message["content"] for message in pack_place(prompt)] == ["{pack}", "?", "??"]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "reasoning", "summary": []}, {"type": "web_search_call", "id": "1"}, {"type": "text", "text": "yes"}],
        [{"type": "redacted_thinking", "data": "x"}, {"type": "output_text", "text": "yes"}],
        [{"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}, {"type": "text", "text": "yes"}],
        [{"type": "executable_code", "executable_code": "1"}, {"type": "code_execution_result"}, "yes"],
        [{"type": "non_standard", "value": {"type": "mcp_call", "id": "1"}}, {"type": "text", "text": "yes"}],
        [{"type": "refusal", "refusal": "yes"}],
    ],
    ids=str,
)
def test_answers_of_other_models_go_on_with_ours(content):
    message = AIMessage(content)
    standard = AIMessage(content_blocks=message.content_blocks)
    for answer in (message, standard) if content[0]["type"] != "refusal" else (message,):
        assert to_messages([answer]) == [{"role": "assistant", "content": "yes"}]
