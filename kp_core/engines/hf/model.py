"""Runs a Hugging Face causal language model for the engine: tokens in, KV and logits out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kp_core.engines.hf.attention import attend
from kp_core.engines.hf.kinds import LayersDone, Network, cache_of, placed_cache_of, positions_of, rope_parameters
from kp_core.engines.hf.packed import PackedLinear
from kp_core.engines.hf.replay import Replays
from kp_core.engines.hf.rows import Rows, run_ragged
from kp_core.engines.hf.sampling import sampler_of
from kp_core.engines.local.buffer import TILE, BufferPool, KVBuffer
from kp_core.engines.local.tree import PrefixTree
from kp_core.errors import UnsupportedRequestError
from kp_core.kv import KVTensors
from kp_core.rope import Rope

_APART = 37  # Distance of the two positions at which a key is computed to find its rotation.

LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables of the environment that limit which instruction sets torch and oneDNN compute with."""


class CausalModel(Network):
    """Runs the forward passes of a Hugging Face causal LM over KV buffers.

    It computes as the model was loaded, one answer at a time; `hf.probe.probed` makes it use what works here. Raises
    `ModelError`, with the reason, for architectures that cannot continue from their cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        configs = (self.config, self.text, getattr(self.network, "generation_config", None))
        ends = (getattr(config, "eos_token_id", None) for config in configs)
        self.end_tokens = frozenset(chain.from_iterable([end] if isinstance(end, int) else end or () for end in ends))
        self.max_positions = positions_of(self.text)
        # Some models with different layers count positions from 0 in each pass.
        parameters = inspect.signature(self.network.forward).parameters
        self._takes_positions = self.kind.is_recurrent and "position_ids" in parameters
        self.forks = self.device.type == "cpu" and not self.shape.devices
        self.attends = False
        """Whether its attention is tiled (`hf.attention`)."""
        self.packed: Sequence[PackedLinear] = ()
        """Products with packed weights."""
        self.replays: Replays | None = None
        """Recorded short passes; `None` if each is computed anew."""
        self.engine = "local"
        """Its name in the fingerprint."""
        self.lacks: Mapping[str, str] = self.kind.lacks
        if self.shape.devices:
            self.lacks = {"compose": "its layers are on several devices", **self.lacks}

    def pool(self, tree: PrefixTree, cache_bytes: int) -> BufferPool:
        """See `Model.pool`."""
        return BufferPool(self.shape, tree, cache_bytes)

    @property
    def numerics(self) -> tuple[str, str, str]:
        """`NUMERICS` of the fingerprint: dtype, engine and how passes are computed, as far as the bits depend on it."""
        dtype = str(self.shape.dtype).removeprefix("torch.")
        if "bitwise" in self.lacks:
            return dtype, self.engine, "any"
        version, cpu = torch.__version__.partition("+")[0], torch.cpu
        names = [torch.backends.cpu.get_cpu_capability()]
        if names[0].startswith("AVX512"):  # torch can be told to leave these out, and then names what it has left.
            units = {"bf16": cpu._is_avx512_bf16_supported(), "amx": cpu._is_amx_tile_supported()}  # noqa: SLF001
            names += [name for name, is_supported in units.items() if is_supported]
        # oneDNN does not tell what it was limited to, nor does it follow torch's limit.
        names += [f"{name}={limit.upper()}" for name in LIMITS if (limit := os.environ.get(name))]
        return dtype, self.engine, f"tiles of {TILE}, torch {version}, {' '.join(names)}"

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], buffer: KVBuffer, logits: int = 1) -> Tensor:
        """See `Model.forward`. Without `logits`, skips the head."""
        if logits == 1 and self.replays is not None and (replayed := self.replays.alone(buffer, len(ids))):
            return replayed.step([buffer], [ids])
        return self._run(buffer, len(ids), logits, input_ids=torch.tensor([ids], device=self.device))

    def _run(self, buffer: KVBuffer, tokens: int, logits: int = 0, **inputs: Any) -> Tensor:  # noqa: ANN401 - as transformers
        """The last `logits` of a forward pass over `tokens` tokens behind those in `buffer`, given as `inputs`."""
        start, stop = buffer.length, buffer.length + tokens
        if self._takes_positions:
            inputs["position_ids"] = torch.arange(start, stop, device=self.device)[None]
        inputs[self.takes_cache] = cache_of(buffer, self.kind.windows, in_tiles=self.attends)
        with buffer.passing():
            last_logits = self._logits(logits, **inputs, **self._attention(range(start, stop), buffer))
        buffer.passed(stop)
        return last_logits

    def _logits(self, count: int, **inputs: Any) -> Tensor:  # noqa: ANN401 - as transformers
        """The last `count` logits of a pass, `(count, vocabulary)`. Without any, skips the head."""
        if not count:
            self.network.base_model(use_cache=True, **inputs)
            return torch.empty(0, self.vocabulary)
        logits: Tensor = self.network(use_cache=True, **inputs, **self.keep(count)).logits[0, -count:]
        return logits.clone()

    def _attention(self, positions: Sequence[int], buffer: KVBuffer) -> dict[str, Any]:
        """Arguments of a pass that tell tiled attention how tokens at ascending positions attend over the buffer.

        Empty if the model's own attention is used.
        """
        if not self.attends:
            return {}
        buffer.blank(max(buffer.length, positions[-1] + 1))
        sees = self.sees

        def attend_here(  # noqa: PLR0913 - the inputs of attention
            layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sinks: Tensor | None
        ) -> Tensor:
            return attend(query, key, value, positions, scale, sees[layer], sinks)

        return {"kp_attend": attend_here}

    def rows(self, buffers: Sequence[KVBuffer]) -> Callable[[Sequence[int]], Tensor]:
        """See `Model.rows`."""
        return Rows(self, buffers).step if self.replays is None else self.replays.rows(buffers)

    def ragged(self, buffers: Sequence[KVBuffer], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See `Model.ragged`."""
        return run_ragged(self, buffers, tokens)

    @torch.inference_mode()
    def forward_at(self, ids: Sequence[int], start: int) -> KVTensors:
        """KV of `ids` at the positions from `start` on, with nothing before them.

        Raises `UnsupportedRequestError` if tokens of this model cannot be moved.
        """
        self._refuse_moving()
        buffer = KVBuffer(self.shape, len(ids))
        places = torch.arange(start, start + len(ids), device=self.device)
        self._run(buffer, len(ids), input_ids=torch.tensor([ids], device=self.device), position_ids=places[None])
        return buffer.read(0, len(ids))

    @torch.inference_mode()
    def forward_among(  # noqa: PLR0913
        self,
        ids: Sequence[int],
        buffer: KVBuffer,
        places: Sequence[int],
        *,
        unseen: Sequence[int] = (),
        weights: Callable[[Tensor], None] | None = None,
        layers: int | None = None,
        logits: int = 0,
    ) -> Tensor:
        """See `Model.forward_among`. Without `logits` and `weights`, the pass stops at the keys of the last layer.

        Raises `UnsupportedRequestError` if tokens of this model cannot be moved.
        """
        self._refuse_moving()
        device, dtype, places = self.device, buffer.shape.dtype, list(places)
        stop = max(buffer.length, places[-1] + 1)
        targets, mask, options = torch.tensor(places, device=device), None, dict[str, Any]()
        in_tiles = self.attends and weights is None
        if in_tiles:
            options = self._attention(places, buffer)
        # Tokens behind all others need no mask, which is faster, and more so for longer passes.
        elif weights is not None or places != list(range(buffer.length, stop)):
            key_positions = torch.arange(stop, device=device)
            hidden = torch.tensor(list(unseen), dtype=torch.long, device=device)
            key_positions[hidden] = torch.iinfo(key_positions.dtype).max
            for layer in buffer.layers if unseen else ():  # A weight of zero times NaN would be NaN.
                layer.keys[:, :, hidden] = 0
                layer.values[:, :, hidden] = 0
            mask = torch.zeros(1, 1, len(ids), stop, dtype=dtype, device=device)
            mask.masked_fill_(key_positions[None] > targets[:, None], torch.finfo(dtype).min)
        if weights is not None:
            options = {"kp_weights": weights}
        if layers is None:
            layers = len(buffer.layers) if logits or weights is not None else len(buffer.layers) - 1
        options[self.takes_cache] = placed_cache_of(buffer, targets, stop, layers=layers, in_tiles=in_tiles)
        options |= {"input_ids": torch.tensor([list(ids)], device=device), "position_ids": targets[None]}
        with suppress(LayersDone):
            return self._logits(logits, attention_mask=mask, **options)
        return torch.empty(0, self.vocabulary)

    @torch.inference_mode()
    def forward_soft(self, before: Sequence[int], header: Tensor, ids: Sequence[int], trailer: Tensor) -> KVTensors:
        """See `Model.forward_soft`."""
        self._refuse_moving()
        base = self.network.base_model
        tokens = base.get_input_embeddings()(torch.tensor([*before, *ids], device=base.device))
        header, trailer = (part.to(tokens.device, tokens.dtype) for part in (header, trailer))
        inputs = torch.cat([tokens[: len(before)], header, tokens[len(before) :], trailer])
        buffer = KVBuffer(self.shape, len(inputs))
        self._run(buffer, len(inputs), inputs_embeds=inputs[None])
        return buffer.read(len(before), buffer.length)

    @torch.no_grad()
    def embedded(self, ids: Sequence[int]) -> Tensor:
        """Input embeddings of `ids`, `(tokens, hidden)`."""
        embed = self.network.get_input_embeddings()
        embeddings: Tensor = embed(torch.tensor(ids, dtype=torch.long, device=self.device))
        return embeddings

    def forward_embedded(self, inputs: Tensor, past: KVTensors | None, logits: int) -> tuple[KVTensors, Tensor]:
        """A pass through which gradients flow: the KV of `past` and `inputs`, `(tokens, hidden)`, and the last logits.

        Without `logits`, the number of inputs at which these are wanted, skips the head.
        """
        start = 0 if past is None else past.tokens
        cache = DynamicCache(config=self.config)
        for layer, (key, value) in enumerate(zip(past.keys, past.values, strict=True) if past is not None else ()):
            cache.update(key[None], value[None], layer)
        output = (self.network if logits else self.network.base_model)(
            inputs_embeds=inputs[None],
            position_ids=torch.arange(start, start + len(inputs), device=self.device)[None],
            use_cache=True,
            **{self.takes_cache: cache},
            **(self.keep(logits) if logits else {}),
        )
        layers = cache.layers
        kv = KVTensors(tuple(layer.keys[0] for layer in layers), tuple(layer.values[0] for layer in layers))
        return kv, output.logits[0, -logits:] if logits else inputs.new_empty(0)

    @cached_property
    def rope(self) -> Rope:
        """Moves keys. Verified with single tokens, whose keys at two positions differ by the rotation alone.

        Raises `UnsupportedRequestError` for a model whose tokens cannot be moved: with frequencies that change
        with the length, without RoPE, or with keys whose rotation does not match.
        """
        self._refuse_moving()
        kind = rope_parameters(self.text).get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise UnsupportedRequestError(
                f"The keys of this model cannot be moved: the frequencies of its RoPE ({kind}) change with the length. "
                "Use composer='exact'."
            )
        frequencies = getattr(getattr(self.network.base_model, "rotary_emb", None), "inv_freq", None)
        if frequencies is None:
            raise UnsupportedRequestError("The keys of this model cannot be moved: it has no rotary embedding.")
        ids = torch.randint(self.text.vocab_size, (2,), generator=torch.Generator().manual_seed(0)).tolist()
        near, far = (
            KVTensors.concat(self.forward_at([token], position) for token in ids) for position in (1, 1 + _APART)
        )
        rotated: list[bool] = []
        for interleaved in (False, True):
            rope = Rope(frequencies.detach().float().cpu(), (False,) * near.layers, interleaved)
            rotated = []
            for key, expected in zip(near.keys, far.keys, strict=True):
                turns = _close(rope.turned(key, _APART), expected)
                if not turns and not _close(key, expected):
                    break
                rotated.append(turns)
            if len(rotated) == near.layers and any(rotated):
                return replace(rope, layers=tuple(rotated))
        raise UnsupportedRequestError(
            f"The keys of this model cannot be moved: those of layer {len(rotated)} do not turn as its RoPE ({kind}) "
            "says. Use composer='exact'."
        )

    def _refuse_moving(self) -> None:
        if why := self.lacks.get("compose"):
            raise UnsupportedRequestError(f"Tokens of this model stay where they were computed: {why}.")

    sampler = staticmethod(sampler_of)


def _close(found: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-3 if expected.dtype == torch.float32 else 0.02
    return bool((found.float() - expected.float()).norm() <= tolerance * expected.float().norm())
