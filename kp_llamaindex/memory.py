"""`KnowledgePackMemoryBlock`: old turns of a conversation as packs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.bridge.pydantic import Field, field_serializer, model_validator
from llama_index.core.memory import BaseMemoryBlock
from llama_index.core.memory.memory import DEFAULT_MEMORY_BLOCKS_TEMPLATE

from kp_core import FactStore, Handle, Message, PackView, find_handles, strip_handles
from kp_core.errors import PackNotFoundError, ShortTextError
from kp_core.packs.view import PackRef, Packs
from kp_core.plan.request import refuse_unknown
from kp_core.prompt.conversation import SLOT
from kp_core.settings import EngineSettings
from kp_llamaindex.messages import MEMORY, to_messages
from kp_methods.recall import recalled, remember

_LEFT = "(Earlier parts of this conversation have left it. What was found earlier can be searched again.)"
_AGAIN = "(As found above.)\n"
_WRITING = threading.Lock()  # Of all blocks: event loops do not share asyncio's, and no copy of a block holds one.
_MOST_TOKENS = 512  # Of an answer without `max_tokens`, as in a request.


class KnowledgePackMemoryBlock(EngineSettings, BaseMemoryBlock[str]):
    """Turns that a `Memory` flushes become packs in `store`. Their handles come back in the system message.

    The packs have at most `memory_tokens` tokens, or this share of what an answer leaves of the window; beyond, the
    oldest leave the prompt in one block, down to half, so that the rest stays cached, and a line says so. With
    `memory="search"`, packs that have left become facts in `facts`, and the one or two that the model attends to for
    the newest message of the user come back; with `insert_method="user"` of `Memory` they stand beside it. The LLM
    must resolve handles of `namespace`, and of what its tools find, in the same store. Unless it was given another
    `keep`, it keeps the KV that it computes behind them (`"always"`).

    `model_dump` returns the state of a block: handles, the store's path and the settings. To go on after a restart:
    `KnowledgePackMemoryBlock(**data, engine=engine, facts=facts)`.

    Each flushed message is a line `role: text`. A handle in a message of `trusted_roles`, such as a search result,
    stays the handle of its pack, once: nothing is copied, and what is deleted is not remembered. Elsewhere it is plain
    text. Trust no roles here that the LLM does not trust.

    Engine or model are given as to `KnowledgePackLLM`. With `lazy`, KV is computed when a pack is first read.
    """

    name: str = Field(default="earlier_conversation", description="The tag that stands around the memory.")
    description: str | None = Field(default="What was said earlier.")
    store: Packs = Field(description="A `PackStore`, or its path; or another store of packs.")
    namespace: str = "default"
    handles: list[str] = Field(default_factory=list, description="Handles of the packs, oldest first.")
    left: list[str] = Field(default_factory=list, description="Handles of the packs that have left the prompt.")
    memory_tokens: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] | None = 0.5
    memory: Literal["search"] | None = None
    facts: FactStore | None = Field(default=None, exclude=True, repr=False)
    lazy: bool = False

    def __init__(self, **fields: Any) -> None:
        # Here and not in a validator, because Pydantic would wrap the error.
        refuse_unknown(fields, (*type(self).model_fields, "model_name"), type(self).__name__)
        super().__init__(**fields)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._view()  # It raises for an invalid namespace.
        for handle in (*self.handles, *self.left):
            Handle.parse(handle)
        if (self.memory is None) != (self.facts is None):
            raise ValueError(f"Got memory={self.memory!r} and facts={self.facts!r}; expected both or neither.")
        return self

    @field_serializer("store")
    def _describe_store(self, store: Packs) -> str:
        return str(store.blobs or store)

    def text(self) -> str:
        """The text of all packs of `namespace`, a line for each deleted one, and the handles of others.

        Raises `PackNotFoundError` if the store lost one of `namespace`.
        """
        text, view = "", self.store.view(self.namespace)
        for name in self.handles:
            parts = view.split(name, "system")
            if parts == (name,) and Handle.parse(name).namespace == self.namespace:
                raise PackNotFoundError(f"{self.store!r} has no pack {name}, which this memory holds.")
            said = "".join(part.text if isinstance(part, PackRef) else part for part in parts)
            text += said if said.endswith("\n") else f"{said}\n"
        return text

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        lines = [_LEFT, *self.handles] if self.left else self.handles
        asked = [text for each in messages or () if each.role == "user" and (text := strip_handles(each.content or ""))]
        if self.facts is not None and self.left and asked and asked[-1].strip():
            left = [*map(Handle.parse, self.left)]
            session, most = self._engine(), self._most()
            room = max(most // 4, most - sum(map(self._size, self.handles)))
            found = await asyncio.to_thread(recalled, asked[-1], left, self.facts, session, self._view(), room=room)
            lines = [*lines, *(pack.handle for pack in found)]
        return "\n".join(lines)

    async def _aput(self, messages: list[ChatMessage]) -> None:
        await asyncio.to_thread(self._remember, messages)

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """Return `content` unchanged: truncating handles would save nothing."""
        return content

    def _remember(self, messages: list[ChatMessage]) -> None:
        with _WRITING:
            self._added(messages)

    def _added(self, messages: list[ChatMessage]) -> None:
        handles, text = list[str](), ""
        for part in (part for message in messages for part in self._parts(message)):
            if isinstance(part, Handle) and str(part) not in (*self.handles, *handles):
                handles += [*self._packed(text), str(part)]
                text = ""
            else:
                text += _AGAIN if isinstance(part, Handle) else part
        handles += self._packed(text)
        if not handles:
            return
        handles, left = [*self.handles, *handles], list[str]()
        sizes, most = list(map(self._size, handles)), self._most()
        if sum(sizes) > most:
            while handles and sum(sizes) > (most if len(sizes) == 1 else most // 2):
                left.append(handles.pop(0))
                del sizes[0]
        if self.facts is not None:
            own = [handle for handle in map(Handle.parse, left) if handle.namespace == self.namespace]
            said = [pack.text for pack in map(self.store.peek, own) if pack and MEMORY in pack.provenance]
            remember(said, self.facts, self._engine(), self.store, self.namespace)
        self.handles, self.left = handles, [*self.left, *left]

    def _packed(self, text: str) -> list[str]:
        """The handle of a pack of `text`, if it says anything."""
        if not text.strip():
            return []
        self.store.handle(text, self.namespace)  # It raises for text that is not Unicode.
        # A turn longer than the window is kept as text alone, and leaves at once.
        is_long = len(self._engine().tokenizer.encode(text, add_special_tokens=False)) > self._most()
        settings: dict[str, Any] = {"namespace": self.namespace, "lazy": self.lazy or is_long}
        settings["provenance"] = {MEMORY: self.name}
        with suppress(ShortTextError):  # No token of it is its own: a full stop behind a result.
            return [str(self.store.put(self._engine().build_pack(text, compiled_for=self._place(), **settings)))]
        return []

    def _most(self) -> int:
        """The tokens that packs in the prompt may have."""
        window = self._engine().max_positions
        if isinstance(most := self.memory_tokens, float):
            return int(most * (window - min(_MOST_TOKENS, window // 2)))
        return window if most is None else most

    def _size(self, handle: str) -> int:
        pack = self.store.peek(Handle.parse(handle))
        return 0 if pack is None else len(self._engine().tokenizer.encode(pack.text, add_special_tokens=False))

    def _parts(self, message: ChatMessage) -> Iterator[str | Handle]:
        """The lines of a message, and between them the packs that it brings."""
        [turn] = to_messages([message])
        role, said, end, line = turn["role"], turn["content"], 0, f"{turn['role']}: "
        for start, stop, handle in find_handles(said) if role in self.trusted_roles else ():
            if self.store.peek(handle) is not None or self.store.buried(handle):
                yield f"{line}{said[end:start]}".strip() + "\n"
                yield handle
                end, line = stop, ""
        if text := said[end:].strip():
            yield f"{line}{text}\n"
        for call in (call["function"] for call in turn.get("tool_calls", ())):
            yield f"{role} called {call['name']} with {json.dumps(call['arguments'])}\n"

    def _place(self) -> list[Message]:
        """The place where LlamaIndex's memory puts the first handle."""
        content = [(self.name, [TextBlock(text=SLOT)])]
        [memory] = DEFAULT_MEMORY_BLOCKS_TEMPLATE.format_messages(memory_blocks=content)
        return [*to_messages([ChatMessage(memory.content, role="system")]), {"role": "user", "content": "?"}]

    def _view(self) -> PackView:
        return self.store.view(self.namespace, trusted_roles=self.trusted_roles)
