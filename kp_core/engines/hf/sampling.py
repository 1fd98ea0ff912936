"""Chooses the next token with the logits processors of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
from kp_core.plan.plan import Sampling

_PART = 16384
"""Logits per call of `max`. torch divides more than twice as many among threads, which answers decoded together
would have to restart for each token."""
_COLDEST = 1e-5  # Below this temperature, scores overflow, and sampling would be greedy anyway.


def sampler_of(
    sampling: Sampling, prompt_ids: Sequence[int], device: torch.device, constraint: Constraint | None = None
) -> Callable[[Tensor, int], int]:
    """A function that chooses the next token as `sampling` says; greedy at temperature 0. Equal seeds choose alike.

    It takes logits, `(vocabulary,)`, and the number of tokens that may still come, this one included. With a
    `constraint`, it chooses among the allowed tokens.
    """
    is_greedy, is_penalised = sampling.temperature < _COLDEST, sampling.repetition_penalty != 1
    processors = LogitsProcessorList()
    if is_penalised:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if not is_greedy:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
        processors += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        processors += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    # The repetition penalty is the only processor that reads earlier tokens.
    ids = torch.tensor([prompt_ids if is_penalised else ()], dtype=torch.long, device=device)
    generator = torch.Generator(device=device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    # On an accelerator, each part would wait for the device.
    is_plain = is_greedy and constraint is None and not processors and device.type == "cpu"

    def choose(logits: Tensor, left: int) -> int:
        nonlocal ids
        if is_plain and (likeliest := _likeliest(logits)) is not None:
            return likeliest
        scores = logits.to(torch.float32)[None]
        if constraint is not None:
            scores = constraint.mask(scores)
        # A repetition penalty near zero makes scores infinite; later steps must not see NaN.
        scores = processors(ids, scores).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        if is_greedy:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(dim=-1), 1, generator=generator))
        if constraint is not None:
            token = constraint.accept(token, left)
        if is_penalised:
            ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
        return token

    return choose


def _likeliest(logits: Tensor) -> int | None:
    """Index of the first largest logit, found in parts, so that torch starts no threads; `None` if one is NaN."""
    parts = [part.max(dim=0) for part in torch.split(logits, _PART)]
    most = [float(value) for value, _ in parts]
    if any(map(math.isnan, most)):
        return None
    best = most.index(max(most))
    return best * _PART + int(parts[best].indices)
