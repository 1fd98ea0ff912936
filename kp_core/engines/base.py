"""The seam to a model: conversations and handles in, answers and counts out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Unpack

from kp_core.engines.request import CompiledFor, Generation, Request
from kp_core.engines.streams import AsyncStream, Stream
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.resolve import Message
from kp_core.prompt.template import ChatTemplate

__all__ = ["Engine"]


class Engine(Protocol):
    """Runs a model: the only seam that touches one."""

    @property
    def name(self) -> str:
        """What people call the model."""

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - whatever the implementation reads text with
        """The model's tokenizer, with Hugging Face's `encode` and `decode`."""

    @property
    def fingerprint(self) -> ModelFingerprint:
        """Identity of the model."""

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template."""

    @property
    def max_positions(self) -> int:
        """Most tokens of prompt and answer together."""

    def build_pack(
        self,
        text: str,
        *,
        namespace: str = "default",
        compiled_for: CompiledFor = "user",
        lazy: bool = False,
        provenance: Mapping[str, str] | None = None,
    ) -> KnowledgePack:
        """`text` compiled for the place that `compiled_for` says (see `ChatTemplate.tokenise_pack`)."""

    def build_packs(  # noqa: PLR0913 - as `build_pack`, for many
        self,
        texts: Sequence[str],
        *,
        namespace: str = "default",
        compiled_for: CompiledFor = "user",
        lazy: bool = False,
        provenance: Sequence[Mapping[str, str]] | None = None,
        progress: bool = True,
    ) -> Iterator[KnowledgePack]:
        """The packs of `texts`, in order, each bit-identical to what `build_pack` gives."""

    def generate(self, messages: Sequence[Message] | str, **request: Unpack[Request]) -> Generation:
        """The answer to a conversation."""

    def stream(self, messages: Sequence[Message] | str, **request: Unpack[Request]) -> Stream:
        """The answer piece by piece."""

    async def agenerate(self, messages: Sequence[Message] | str, **request: Unpack[Request]) -> Generation:
        """As `generate`; cancelling the task stops the generation."""

    def astream(self, messages: Sequence[Message] | str, **request: Unpack[Request]) -> AsyncStream:
        """As `stream`."""
