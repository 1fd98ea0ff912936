"""deepagents: its files in a `KnowledgePackStore`, long ones read as handles, and its agents bounded with packs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from deepagents import HarnessProfile, register_harness_profile
from deepagents.backends import StoreBackend
from deepagents.backends.protocol import FileData, ReadResult

from kp_core.errors import OptionError
from kp_langchain.messages import PROVIDER
from kp_langchain.middleware import KnowledgePackMiddleware
from kp_langchain.store import KnowledgePackStore

_FIELD = "pack"
_PER_TOKEN = 16  # Characters, at most, of a text that is worth counting in tokens.


class PackBackend(StoreBackend):
    """deepagents' `StoreBackend` over a `KnowledgePackStore` that was made with `fields=["pack"]`.

    A text file of at least `shortest` characters that is read whole comes as the handle of its pack, which the model
    reads as the text; the line above it says one line. Parts of files, short files, binary ones, and those with more
    than half of the tokens that the model reads come as from a `StoreBackend`.

    Raises `OptionError` for another store, or one with other fields.
    """

    def __init__(
        self, store: KnowledgePackStore, *, namespace: Callable[[Any], tuple[str, ...]], shortest: int = 1000
    ) -> None:
        if not isinstance(store, KnowledgePackStore) or store.fields != [_FIELD]:
            raise OptionError(f"Got {store!r}; expected `KnowledgePackStore(..., fields=[{_FIELD!r}])`.")
        super().__init__(store=store, namespace=namespace)
        self._items, self._shortest = store, shortest

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """As `StoreBackend.read`, with a handle for a long file."""
        return self._shown(file_path, super().read(file_path, offset, limit))

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """As `read`."""
        result = await super().aread(file_path, offset, limit)
        return await asyncio.to_thread(self._shown, file_path, result)

    def _shown(self, file_path: str, result: ReadResult) -> ReadResult:
        data, is_whole = result.file_data, result.start_line == 1 and result.end_line == result.total_lines
        if data is None or not is_whole or len(data["content"]) < self._shortest:
            return result
        item: Any = self._items.get(self._get_namespace(), file_path)
        if item is None or item.handle is None or item.value.get(_FIELD) != data["content"].removesuffix("\n"):
            return result
        return ReadResult(file_data={**data, "content": item.handle})

    def _convert_file_data_to_store_value(self, file_data: FileData) -> dict[str, Any]:
        value, engine = super()._convert_file_data_to_store_value(file_data), self._items.engine
        # deepagents shows a file without its last newline.
        text, most = file_data["content"].removesuffix("\n"), engine.max_positions // 2
        is_text = file_data["encoding"] == "utf-8" and len(text) <= most * _PER_TOKEN
        fits = is_text and len(engine.tokenizer.encode(text, add_special_tokens=False)) <= most
        return {**value, _FIELD: text if fits else f"A file of {len(text)} characters."}


def register() -> None:
    """Register the profile of our models: `KnowledgePackMiddleware` bounds the prompt in place of a summariser.

    deepagents calls it (entry point `deepagents.harness_profiles`). A `KnowledgePackMiddleware` that is given to
    `create_deep_agent` takes the place of the profile's.
    """
    profile = HarnessProfile(
        excluded_middleware=frozenset({"SummarizationMiddleware"}),
        extra_middleware=lambda: [KnowledgePackMiddleware()],
    )
    register_harness_profile(PROVIDER, profile)
