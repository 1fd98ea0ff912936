"""The place of nodes in a prompt, for which packs are compiled."""

from __future__ import annotations

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate

from kp_core import Message
from kp_core.prompt.conversation import slotted
from kp_llamaindex.messages import to_messages

__all__ = ["pack_place"]


def pack_place(template: BasePromptTemplate, llm: LLM | None = None, variable: str = "context_str") -> list[Message]:
    """The place of the first node in a prompt of `template`, as messages for `compiled_for`.

    A pack compiled for this place is read straight from the store if its node is the first. `llm` selects among the
    variants of a template and adds its system prompt. Raises `PromptError` if another variable stands before
    `variable`, as the text before the nodes then changes from call to call, or if `variable` is not in the template.
    """
    marks = {name: f"\0{number}\0" for number, name in enumerate(dict.fromkeys((*template.template_vars, variable)))}
    messages = template.format_messages(llm=llm, **marks)
    if llm is not None and llm.system_prompt:
        messages = [ChatMessage(role="system", content=llm.system_prompt), *messages]
    return slotted(to_messages(messages), variable, marks)
