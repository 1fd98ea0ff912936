"""Where nodes stand in a prompt: what packs are compiled for."""

from __future__ import annotations

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate

from kp_core import Message
from kp_core.prompt.conversation import slotted
from kp_llamaindex.messages import to_messages

__all__ = ["pack_place"]


def pack_place(template: BasePromptTemplate, llm: LLM | None = None, variable: str = "context_str") -> list[Message]:
    """Where the first node will stand in a prompt of `template`, as messages for `compiled_for`.

    A pack compiled for this place is used straight from the store when its node is the first one. `llm` selects among
    the variants of a template and brings its system prompt. Raises `PromptError` when another variable stands before
    `variable`, as what precedes the nodes then changes from call to call, or when `variable` is not in the template.
    """
    marks = {name: f"\0{number}\0" for number, name in enumerate(dict.fromkeys((*template.template_vars, variable)))}
    messages = template.format_messages(llm=llm, **marks)
    if llm is not None and llm.system_prompt:
        messages = [ChatMessage(role="system", content=llm.system_prompt), *messages]
    return slotted(to_messages(messages), variable, marks)
