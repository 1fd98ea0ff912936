"""Making a steering from contrastive pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from tqdm.auto import tqdm

from kp_core.engines.local.fill import Prefiller
from kp_core.errors import SteeringError
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.prompt.prompt import Prompt, common_length
from kp_core.prompt.template import ChatTemplate
from kp_core.steering import LayerRange, Method, Pair, Side, Steering, resolve_layers

__all__ = ["Contrast"]

_ADVICE = "expected pairs of (positive, negative), each a text or a list of messages."


class _Means(NamedTuple):
    """Means of one side over the positions read: keys and values per layer, and the norms of value vectors."""

    keys: list[Tensor]
    values: list[Tensor]
    norms: list[float]


class Contrast:
    """Reads pairs of conversations and keeps what their KV have apart."""

    def __init__(self, prefiller: Prefiller, template: ChatTemplate, fingerprint: ModelFingerprint) -> None:
        self._prefiller, self._template, self._fingerprint = prefiller, template, fingerprint

    def make(  # noqa: PLR0913 - as the engine's method
        self,
        pairs: Sequence[Pair],
        *,
        method: Method = "mean",
        layers: LayerRange | None = None,
        c_v: float = 1.0,
        c_k: float | None = None,
        progress: bool = True,
    ) -> Steering:
        """The steering towards the positive sides of `pairs` and away from the negative ones.

        `"mean"` (arXiv 2604.03270, section 2.6): the mean over pairs of the mean over positions of V(positive) minus
        that of V(negative). Positions count from the first message that differs; a text is one user message.
        `"last_token"` (arXiv 2507.08799): the mean over pairs of the difference of K and of V at the last token but one
        of the prompt, its generation prompt included, which is the last token in the cache when the model is about to
        answer; times `c_k` (default 1) and `c_v`. Keys are taken as cached, rotated for where they stood.

        `layers` is by default the middle third. Raises `SteeringError` for pairs that are empty, one-sided or alike
        once rendered, for layers the model lacks, for a method that does not exist, and for `c_k` with `"mean"`.
        """
        if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not pairs:
            raise SteeringError(f"Got {pairs!r} for pairs; {_ADVICE}")
        if method not in ("mean", "last_token"):
            raise SteeringError(f"Got the method {method!r}; expected 'mean' or 'last_token'.")
        if method == "mean" and c_k is not None:
            raise SteeringError(
                "Got c_k with method='mean'. RoPE rotates each cached key by its position, so a mean over positions "
                "mixes rotations and is no direction. Leave c_k out, or use method='last_token'."
            )
        chosen = resolve_layers(layers, len(self._prefiller.model.shape.layers))
        prompts = [self._prompts(pair, index, method) for index, pair in enumerate(pairs)]
        sums: list[tuple[_Means, _Means]] = [
            self._read_pair(*found, method)
            for found in tqdm(prompts, "Reading pairs", delay=1, unit="pair", disable=not progress)
        ]
        deltas = {
            name: {
                layer: torch.stack([getattr(a, name)[layer] - getattr(b, name)[layer] for a, b in sums]).mean(dim=0)
                for layer in chosen
            }
            for name in ("keys", "values")
        }
        scales = {layer: sum(a.norms[layer] + b.norms[layer] for a, b in sums) / (2 * len(sums)) for layer in chosen}
        made = Steering(
            deltas["values"],
            self._fingerprint,
            method,
            deltas["keys"] if method == "last_token" else {},
            scales,
            provenance={
                "made": f"{method} of {len(pairs)} pairs",
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        )
        return made.scaled(c_v=c_v, c_k=1.0 if c_k is None else c_k)

    def _prompts(self, pair: Pair, index: int, method: Method) -> tuple[Prompt, Prompt]:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise SteeringError(f"Got {pair!r} for pair {index}; {_ADVICE}")
        if not all(isinstance(side, Sequence) for side in pair):
            raise SteeringError(f"Got {pair!r} for pair {index}; {_ADVICE}")
        if any(not side or (isinstance(side, str) and not side.strip()) for side in pair):
            raise SteeringError(f"Pair {index} has an empty side; {_ADVICE}")
        positive, negative = (self._render(side, answering=method == "last_token") for side in pair)
        if positive.token_ids == negative.token_ids:
            raise SteeringError(f"Both sides of pair {index} are the same prompt once rendered; {_ADVICE}")
        return positive, negative

    def _render(self, side: Side, *, answering: bool) -> Prompt:
        return self._template.render(side, add_generation_prompt=answering)

    def _read_pair(self, positive: Prompt, negative: Prompt, method: Method) -> tuple[_Means, _Means]:
        shared = common_length(positive.token_ids, negative.token_ids)
        start = max((at for at in positive.breaks if at <= shared), default=0)
        first, second = (self._read(prompt, start, method) for prompt in (positive, negative))
        return first, second

    def _read(self, prompt: Prompt, start: int, method: Method) -> _Means:
        kv = self._compute(prompt, start)
        if method == "last_token":
            at = max(kv.tokens - 2, 0)
            kv = kv.slice(at, at + 1)
        return _Means(
            [key.double().mean(dim=1).cpu() for key in kv.keys],
            [value.double().mean(dim=1).cpu() for value in kv.values],
            # All heads of one token are one vector.
            [float(value.double().square().sum(dim=(0, 2)).sqrt().mean()) for value in kv.values],
        )

    def _compute(self, prompt: Prompt, start: int) -> KVTensors:
        """KV of the tokens from `start` on; only what stands before them goes through the prefix tree."""
        prefiller, ids = self._prefiller, prompt.token_ids
        breaks = tuple(at for at in prompt.breaks if at < start)
        run = prefiller.start(
            Prompt(ids[:start], breaks=breaks), len(ids), self._fingerprint, deterministic=True, logits=False
        )
        try:
            for at in range(start, len(ids), prefiller.chunk_tokens):
                prefiller.forward(ids[at : at + prefiller.chunk_tokens], run.buffer, logits=False)
            return run.buffer.read(start, len(ids))
        finally:
            prefiller.finish(run)
