"""`KnowledgePackMemoryBlock`: old turns of a conversation as packs."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer, model_validator
from llama_index.core.memory import BaseMemoryBlock
from llama_index.core.memory.memory import DEFAULT_MEMORY_BLOCKS_TEMPLATE

from kp_core import Handle, Message, PackView
from kp_core.errors import PackNotFoundError
from kp_core.packs.view import PackRef, Packs
from kp_core.plan.request import refuse_unknown
from kp_core.prompt.conversation import SLOT
from kp_core.settings import EngineSettings
from kp_llamaindex.messages import MEMORY, to_messages

__all__ = ["KnowledgePackMemoryBlock"]


class KnowledgePackMemoryBlock(EngineSettings, BaseMemoryBlock[str]):
    """Turns that a `Memory` flushes become packs in `store`. Their handles come back in the system message.

    The prompt grows by at most `max_handles` short lines: if there are more packs, they are compiled into one. The LLM
    must resolve handles of `namespace` in the same store. Unless it was given another `keep`, it keeps the KV that it
    computes behind them (`"always"`).

    `model_dump` returns the state of a block: handles, the store's path and the settings. To go on after a restart:
    `KnowledgePackMemoryBlock(**data, engine=engine)`.

    Each flushed message is a line `role: text`. Handles in messages of `trusted_roles`, such as search results, are
    replaced by their texts, so that they are remembered. A handle anywhere else becomes plain text.

    Engine or model are given as to `KnowledgePackLLM`. With `lazy`, KV is computed when a pack is first read.
    """

    name: str = Field(default="earlier_conversation", description="The tag that stands around the memory.")
    description: str | None = Field(default="What was said earlier.")
    store: Packs = Field(description="A `PackStore`, or its path; or another store of packs.")
    namespace: str = "default"
    handles: list[str] = Field(default_factory=list, description="Handles of the packs, oldest first.")
    max_handles: int = Field(default=4, ge=1)
    lazy: bool = False
    _writing: asyncio.Lock = PrivateAttr(default_factory=asyncio.Lock)

    def __init__(self, **fields: Any) -> None:
        # Here and not in a validator, because Pydantic would wrap the error.
        refuse_unknown(fields, (*type(self).model_fields, "model_name"), type(self).__name__)
        super().__init__(**fields)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._view()  # It raises for an invalid namespace.
        for handle in self.handles:
            Handle.parse(handle)
        return self

    @field_serializer("store")
    def _describe_store(self, store: Packs) -> str:
        return str(store.blobs or store)

    def text(self) -> str:
        """The text of all packs. Raises `PackNotFoundError` if the store lacks one of them."""
        text = ""
        for handle in self.handles:
            if (pack := self.store.peek(Handle.parse(handle))) is None:
                raise PackNotFoundError(f"{self.store!r} has no pack {handle}, which this memory holds.")
            text += pack.text
        return text

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        return "\n".join(self.handles)

    async def _aput(self, messages: list[ChatMessage]) -> None:
        async with self._writing:
            self.handles = await asyncio.to_thread(self._remembering, messages)

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """Return `content` unchanged: truncating handles would save nothing."""
        return content

    def _remembering(self, messages: list[ChatMessage]) -> list[str]:
        """The handles, including those for `messages`."""
        text = "".join(f"{line}\n" for message in messages for line in self._lines(message))
        if not text.strip():
            return self.handles
        if len(self.handles) < self.max_handles:
            return [*self.handles, self._compile(text)]
        return [self._compile(self.text() + text)]

    def _lines(self, message: ChatMessage) -> list[str]:
        [turn] = to_messages([message])
        parts = self._view().split(turn["content"], turn["role"])
        text = "".join(part.text if isinstance(part, PackRef) else part for part in parts).strip()
        lines = [f"{turn['role']}: {text}"] if text else []
        calls = [call["function"] for call in turn.get("tool_calls", ())]
        lines += [f"{turn['role']} called {call['name']} with {json.dumps(call['arguments'])}" for call in calls]
        return lines

    def _compile(self, text: str) -> str:
        settings: dict[str, Any] = {"namespace": self.namespace, "lazy": self.lazy, "provenance": {MEMORY: self.name}}
        return str(self.store.put(self._engine().build_pack(text, compiled_for=self._place(), **settings)))

    def _place(self) -> list[Message]:
        """The place where LlamaIndex's memory puts the first handle."""
        content = [(self.name, [TextBlock(text=SLOT)])]
        [memory] = DEFAULT_MEMORY_BLOCKS_TEMPLATE.format_messages(memory_blocks=content)
        return [*to_messages([ChatMessage(memory.content, role="system")]), {"role": "user", "content": "?"}]

    def _view(self) -> PackView:
        return self.store.view(self.namespace, trusted_roles=self.trusted_roles)
