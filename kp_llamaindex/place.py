"""Where nodes stand in a prompt: what packs are compiled for."""

from __future__ import annotations

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate

from kp_core import Message
from kp_core.errors import PromptError
from kp_llamaindex.messages import to_messages

__all__ = ["pack_place"]

_SLOT = "{pack}"


def pack_place(template: BasePromptTemplate, llm: LLM | None = None, variable: str = "context_str") -> list[Message]:
    """Where the first node will stand in a prompt of `template`, as messages for `compiled_for`.

    A pack compiled for this place is used straight from the store when its node is the first one. `llm` selects among
    the variants of a template and brings its system prompt. Raises `PromptError` when another variable stands before
    `variable`, as what precedes the nodes then changes from call to call, or when `variable` is not in the template.
    """
    names = [name for name in template.template_vars if name != variable]
    marks = {name: f"\0{number}\0" for number, name in enumerate(names)}
    messages = template.format_messages(llm=llm, **{variable: _SLOT}, **marks)
    if llm is not None and llm.system_prompt:
        messages = [ChatMessage(role="system", content=llm.system_prompt), *messages]
    made = to_messages(messages)
    before = ""
    for message in made:
        before += message["content"].partition(_SLOT)[0]
        if _SLOT in message["content"]:
            break
    else:
        raise PromptError(f"Got the variable {variable!r}; the variables of the prompt are: {', '.join(names)}.")
    moving = next((name for name, mark in marks.items() if mark in before), None)
    if moving is not None:
        raise PromptError(
            f"{moving!r} stands before {variable!r} in the prompt, so what precedes the nodes changes from call to "
            f"call, and no KV computed beforehand can be exact there. Put {variable!r} first."
        )
    for message in made:
        for mark in marks.values():
            message["content"] = message["content"].replace(mark, "?")
    return list(made)
