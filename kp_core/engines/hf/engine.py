"""The engine for one machine: any Hugging Face causal language model with plain per-token KV."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import torch
import transformers
from torch import Tensor
from tqdm.auto import tqdm

from kp_core.compose import ExactComposer
from kp_core.engines.hf.bundled import bundled_model
from kp_core.engines.hf.loading import load, memory_bytes, name_of, take_fingerprint
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.local.answering import Answerer, usage_of
from kp_core.engines.local.build import PackBuilder
from kp_core.engines.local.contrast import Contrast
from kp_core.engines.local.fill import Prefilled, Prefiller
from kp_core.engines.local.tree import Node
from kp_core.engines.packs import CheckedSource, checked_view, explicit_packs
from kp_core.engines.request import CompiledFor, Generation, Limit, Request, Sampling, sampling_of
from kp_core.engines.streams import AsyncStream, Stream, in_thread
from kp_core.errors import ContextOverflowError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import PackRef, PackSource
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.resolve import Message
from kp_core.prompt.template import ChatTemplate
from kp_core.steering import Block, LayerRange, Method, Pair, Steering, as_steering, plan_blocks
from kp_core.tools import AnswerShape
from kp_core.usage import Usage

__all__ = ["HFEngine", "Prefill"]

_DEFAULT_MAX_TOKENS = 512
_EXACT = ExactComposer()


@dataclass(frozen=True)
class Prefill:
    """What a prefill alone gives: the first logits, of shape `(vocabulary,)`, and what it cost."""

    logits: Tensor
    usage: Usage
    prompt: Prompt


class HFEngine:
    """Runs a Hugging Face causal language model over packs.

    `model` is an id, a folder, or a model object (with `tokenizer`); without it, the bundled SmolLM2-135M-Instruct.
    `device` is by default the best there is (CUDA, MPS, CPU), `dtype` bfloat16 where the machine has it. `cache_bytes`
    is the budget of the prefix tree, by default an eighth of the memory where the cache lives. `chunk_tokens` is the
    longest canonical prefill chunk; it is part of the fingerprint. `template_options` go to the chat template.

    Several threads may call one engine: prompts are prefilled one after the other, answers are decoded in turns.

    Raises `ModelError` when loading fails, `UnsupportedModelError` for architectures whose cache is not plain per-token
    KV, `TemplateError` without a chat template.
    """

    def __init__(  # noqa: PLR0913 - every setting has a default that works
        self,
        model: str | Path | transformers.PreTrainedModel | None = None,
        *,
        tokenizer: Any = None,  # noqa: ANN401
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        chunk_tokens: int = 512,
        cache_bytes: int | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name_of(model)
        loaded, self.tokenizer = load(bundled_model() if model is None else model, tokenizer, device, dtype)
        self._template = ChatTemplate(self.tokenizer, template_options)
        self._model = CausalModel(loaded)
        shape = self._model.shape
        self._prefiller = Prefiller(
            self._model, memory_bytes(shape.device) // 8 if cache_bytes is None else cache_bytes, chunk_tokens
        )
        eos = getattr(self.tokenizer, "eos_token_id", None)
        ends = self._model.end_tokens | ({eos} if isinstance(eos, int) else set())
        self._answerer = Answerer(self._prefiller, self.tokenizer, self._template, ends)
        self._fingerprinting = threading.Lock()

    @cached_property
    def _fingerprint(self) -> ModelFingerprint:
        return take_fingerprint(self._model, self.tokenizer, self._template, self._prefiller.chunk_tokens)

    @cached_property
    def _builder(self) -> PackBuilder:
        # Kept, as it remembers which shapes of batch are exact.
        return PackBuilder(self._prefiller, self._template, self.fingerprint)

    @property
    def fingerprint(self) -> ModelFingerprint:
        """Identity of the model; the weights are digested when it is first asked for."""
        with self._fingerprinting:
            return self._fingerprint

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return self._template

    @property
    def max_positions(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._model.max_positions

    @property
    def cached_bytes(self) -> int:
        """Bytes of KV in the prefix tree, which its budget bounds."""
        return self._prefiller.tree.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token."""
        return self._model.shape.bytes_per_token

    def clear_cache(self) -> None:
        """Drop all KV that is neither pinned nor in use, and the buffers that wait."""
        self._prefiller.tree.clear()
        self._prefiller.pool.clear()

    def build_pack(
        self,
        text: str,
        *,
        namespace: str = "default",
        compiled_for: CompiledFor = "user",
        lazy: bool = False,
        provenance: Mapping[str, str] | None = None,
    ) -> KnowledgePack:
        """`text` compiled for the place that `compiled_for` says (see `ChatTemplate.tokenise_pack`).

        A lazy pack holds text and token ids only; its KV is computed on first use. `provenance` (`title`, `source`,
        ...) travels with the pack.
        """
        return next(
            self.build_packs(
                [text], namespace=namespace, compiled_for=compiled_for, lazy=lazy, provenance=[provenance or {}]
            )
        )

    def build_packs(  # noqa: PLR0913
        self,
        texts: Sequence[str],
        *,
        namespace: str = "default",
        compiled_for: CompiledFor = "user",
        lazy: bool = False,
        provenance: Sequence[Mapping[str, str]] | None = None,
        progress: bool = True,
    ) -> Iterator[KnowledgePack]:
        """The packs of `texts`, in order and one at a time, so that any number fits in memory.

        Each is bit-identical to what `build_pack` gives. A progress bar shows when it takes longer than a second.
        """
        builder = self._builder
        made = {
            "device": f"{self._model.device.type} {platform.machine()}",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        known = [{}] * len(texts) if provenance is None else provenance
        jobs = (
            ((job, None) for job in builder.jobs(texts, compiled_for)) if lazy else builder.build(texts, compiled_for)
        )
        bar = tqdm(jobs, "Building packs", len(texts), delay=1, unit="pack", disable=not progress)
        for (job, kv), about in zip(bar, known, strict=True):
            yield KnowledgePack(
                job.text, namespace, job.token_ids, job.prefix, self.fingerprint, kv, made | dict(about)
            )

    def pin(self, pack: KnowledgePack) -> Node:
        """Keep the KV of `pack`, at the place it was built for, in memory until `unpin` of what is given back."""
        pack.check(self.fingerprint)
        start, ids = len(pack.prefix), pack.prefix.token_ids + pack.token_ids
        prompt = Prompt(ids, (Span(start, len(ids), PackRef("", pack)),), pack.prefix.cuts)
        blocks = self._blocks(prompt, {}, answering=False)
        run = self._prefiller.start(prompt, len(ids), self.fingerprint, deterministic=True, logits=False, blocks=blocks)
        try:
            return run.path.pin()
        finally:
            self._prefiller.finish(run)

    def unpin(self, pinned: Node) -> None:
        """Let the prefix tree evict a pinned pack again."""
        self._prefiller.tree.unpin(pinned)

    def make_steering(  # noqa: PLR0913
        self,
        pairs: Sequence[Pair],
        *,
        method: Method = "mean",
        layers: LayerRange | None = None,
        c_v: float = 1.0,
        c_k: float | None = None,
        progress: bool = True,
    ) -> Steering:
        """A steering from what `pairs` of (positive, negative) have apart; see `Contrast.make`."""
        contrast = Contrast(self._prefiller, self._template, self.fingerprint)
        return contrast.make(pairs, method=method, layers=layers, c_v=c_v, c_k=c_k, progress=progress)

    def perplexity(self, messages: Sequence[Message] | str, answer: str, **request: Unpack[Request]) -> float:
        """Perplexity per token of `answer` to a conversation; 1.0 for an answer without tokens.

        Raises as `generate`.
        """
        tokens = self.tokenizer.encode(answer, add_special_tokens=False)
        if not tokens:
            return 1.0
        limit = Limit.of(request, time.perf_counter())
        prompt, source = self._resolve(messages, request)
        run = self._start(prompt, source, request, self._room(prompt, Sampling(max_tokens=len(tokens))), limit)
        try:
            return self._prefiller.perplexity(run, tokens)
        finally:
            self._prefiller.finish(run)

    def prefill(self, messages: Sequence[Message] | str, **request: Unpack[Request]) -> Prefill:
        """Prefill a conversation without answering it: warms the cache, and gives the first logits."""
        began = time.perf_counter()
        prompt, source = self._resolve(messages, request)
        room = self._room(prompt, Sampling(max_tokens=1))
        run = self._start(prompt, source, request, room, Limit.of(request, began))
        try:
            usage = usage_of(prompt, run, 0, time.perf_counter() - began)
            if run.logits is None:
                raise AssertionError("a prefilled prompt has logits")
            return Prefill(run.logits, usage, prompt)
        finally:
            self._prefiller.finish(run)

    def generate(self, messages: Sequence[Message] | str, **request: Unpack[Request]) -> Generation:
        """The answer to a conversation (a string is one user message).

        Raises `PromptError` for what cannot become a prompt, `ContextOverflowError` before any compute,
        `FingerprintMismatchError` for packs of another model (unless `mismatch="rebuild"`) and, as its kind
        `SteeringMismatchError`, for a steering of one, `SteeringError` for one that the prompt has no place for,
        `SamplingError`.
        """
        return self.stream(messages, **request).result()

    def stream(self, messages: Sequence[Message] | str, **request: Unpack[Request]) -> Stream:
        """The answer piece by piece; raises as `generate`, at the call."""
        began = time.perf_counter()
        sampling, shape = sampling_of(request), AnswerShape.of(request)
        prompt, source = self._resolve(messages, request)
        room = self._room(prompt, sampling)
        sampler, reader = self._answerer.plan(prompt, shape, sampling, room)
        limit = Limit.of(request, began)
        start = partial(self._start, prompt, source, request, room, limit)
        return Stream(self._answerer.answer(start, prompt, sampler, reader, room, limit))

    async def agenerate(self, messages: Sequence[Message] | str, **request: Unpack[Request]) -> Generation:
        """As `generate`, without blocking the event loop; cancelling the task stops the generation."""
        cancel = request.get("cancel") or threading.Event()
        request["cancel"] = cancel
        return await in_thread(lambda: self.generate(messages, **request), cancel)

    def astream(self, messages: Sequence[Message] | str, **request: Unpack[Request]) -> AsyncStream:
        """As `stream`, without blocking the event loop; leaving the loop early stops the generation."""
        cancel = request.get("cancel") or threading.Event()
        request["cancel"] = cancel
        return AsyncStream(lambda: self.stream(messages, **request), cancel)

    def _resolve(self, messages: Sequence[Message] | str, request: Request) -> tuple[Prompt, PackSource]:
        view = request.get("view")
        checked = CheckedSource(view.source if view else None, self.fingerprint, request.get("mismatch", "error"))
        prompt = self._template.render(
            messages,
            view=None if view is None else checked_view(view, checked),
            packs=explicit_packs(request.get("packs", ()), view, checked),
            placement=request.get("placement", "in_place"),
            compact=request.get("compact", False),
            shape=AnswerShape.of(request),
            thinking=request.get("thinking"),
        )
        # Planned here as well, so that a steering that cannot be is refused at the call.
        for block in self._blocks(prompt, request):
            for part in block.parts:
                part.steering.warn_beyond_cliff()
        return prompt, checked

    def _blocks(self, prompt: Prompt, request: Request, *, answering: bool = True) -> tuple[Block, ...]:
        """What is to be steered in `prompt`."""
        steering = as_steering(request.get("steering"), with_knowledge=bool(prompt.spans))
        chunks = prompt.chunks(self._prefiller.chunk_tokens, request.get("composer", _EXACT).wants)
        blocks = plan_blocks(prompt, steering, request.get("scope"), chunks, answering=answering)
        for block in blocks:
            for part in block.parts:
                part.steering.check(self.fingerprint)
        return blocks

    def _room(self, prompt: Prompt, sampling: Sampling) -> int:
        """How many tokens the answer may take."""
        left = self.max_positions - len(prompt)
        wanted = sampling.max_tokens or min(_DEFAULT_MAX_TOKENS, max(left, 1))
        if wanted > left:
            raise ContextOverflowError(len(prompt), wanted, self.max_positions)
        return wanted

    def _start(self, prompt: Prompt, source: PackSource, request: Request, room: int, limit: Limit) -> Prefilled:
        return self._prefiller.start(
            prompt,
            len(prompt) + room,
            self.fingerprint,
            source,
            request.get("composer", _EXACT),
            reuse=request.get("reuse", True),
            deterministic=request.get("deterministic", False),
            cancel=limit,
            blocks=self._blocks(prompt, request),
        )
