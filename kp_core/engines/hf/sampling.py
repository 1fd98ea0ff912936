"""Chooses the next token with the logits processors of transformers."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kp_core.engines.local.grammar import Constraint
from kp_core.plan import Sampling

__all__ = ["Sampler"]

_PART = 16384
"""Logits per call of `max`. torch divides more than twice as many among threads, which answers decoded together
would have to restart for each token."""
_COLDEST = 1e-5  # Below this temperature, scores overflow, and sampling would be greedy anyway.


class Sampler:
    """Chooses tokens as `Sampling` says; greedy at temperature 0. Equal seeds choose equal tokens.

    With a `constraint`, it chooses among the allowed tokens.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: tuple[int, ...],
        device: torch.device,
        constraint: Constraint | None = None,
    ) -> None:
        self._constraint = constraint
        self._greedy = sampling.temperature < _COLDEST
        processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if not self._greedy:
            processors.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                processors.append(TopPLogitsWarper(sampling.top_p))
        self._processors = processors
        # The repetition penalty is the only processor that reads earlier tokens.
        self._ids = torch.tensor([prompt_ids], device=device) if sampling.repetition_penalty != 1 else None
        self._generator = torch.Generator(device=device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor, left: int) -> int:
        """The next token, from logits of shape `(vocabulary,)`; at most `left` tokens may follow, this one included."""
        # On an accelerator, each part would wait for the device.
        is_plain = self._constraint is None and not self._processors and logits.device.type == "cpu"
        if self._greedy and is_plain:
            likeliest, logit = _likeliest(logits)
            if not math.isnan(logit):
                return likeliest
        scores = logits.to(torch.float32)[None]
        if self._constraint is not None:
            scores = self._constraint.mask(scores)
        ids = self._ids if self._ids is not None else torch.empty(1, 0, dtype=torch.long, device=logits.device)
        # A repetition penalty near zero makes scores infinite; later steps must not see NaN.
        scores = self._processors(ids, scores).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        if self._greedy:
            token = scores.argmax(dim=-1)
        else:
            token = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator)[:, 0]
        if self._constraint is not None:
            token = torch.full_like(token, self._constraint.accept(int(token), left))
        if self._ids is not None:
            self._ids = torch.cat([self._ids, token[:, None]], dim=1)
        return int(token)


def _likeliest(logits: Tensor) -> tuple[int, float]:
    """Index and value of the first largest logit, or NaN as the value; in parts, so that torch starts no threads."""
    token, most, start = 0, -math.inf, 0
    for part in torch.split(logits, _PART):
        value, at = part.max(dim=0)
        largest = float(value)
        if math.isnan(largest):
            return token, largest
        if largest > most:
            token, most = start + int(at), largest
        start += len(part)
    return token, most
