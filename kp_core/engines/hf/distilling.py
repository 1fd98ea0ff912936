"""Teacher and student on one model, for soft tokens around packs (KV Packet, arXiv 2604.13226, section 3).

The teacher is the model with full attention over a canonical prompt. The student is the same model over packets, as
`PacketComposer` places them. The activations of one sample fit in memory for documents of the intended length, so there
is no gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kp_core.engines.hf.model import CausalModel
from kp_core.engines.hf.samples import Sample
from kp_core.kv import KVTensors

__all__ = ["Distilling", "Taught"]


@dataclass(frozen=True)
class Taught:
    """A sample with its answer, the teacher's logits for it, `(answer, vocabulary)`, and the KV before the packets."""

    sample: Sample
    answer: tuple[int, ...]
    logits: Tensor
    before: KVTensors


class Distilling:
    """Teacher and student on one model."""

    def __init__(self, model: CausalModel) -> None:
        self._model, self._rope, self.device = model.network, model.rope, model.device
        self._embeddings = self._model.get_input_embeddings()
        self._ends = model.end_tokens
        self._keeps_logits = model.keeps_logits
        self.spread = float(self._embeddings.weight.detach().float().std())
        """Standard deviation of the model's input embeddings."""

    @torch.no_grad()
    def embed(self, ids: Sequence[int]) -> Tensor:
        """Input embeddings, `(tokens, hidden)`."""
        embeddings: Tensor = self._embeddings(torch.tensor(ids, dtype=torch.long, device=self.device))
        return embeddings

    @torch.no_grad()
    def teach(self, sample: Sample, most: int) -> Taught:
        """Run the teacher on `sample` and its answer; without one, on a greedy answer of at most `most` tokens."""
        past, logits = self._run(self.embed(sample.prompt), None, 1)
        before, answer_logits = past.slice(0, sample.begin).clone(), [logits]
        if sample.answer is not None:
            answer = sample.answer
            if answer[1:]:
                answer_logits.append(self._run(self.embed(answer[:-1]), past, len(answer) - 1)[1])
            return Taught(sample, answer, torch.cat(answer_logits), before)
        generated = [int(logits[-1].argmax())]
        while len(generated) < most and generated[-1] not in self._ends:
            past, logits = self._run(self.embed(generated[-1:]), past, 1)
            answer_logits.append(logits)
            generated.append(int(logits[-1].argmax()))
        return Taught(sample, tuple(generated), torch.cat(answer_logits), before)

    def divergence(self, taught: Taught, soft: Tensor) -> Tensor:
        """Mean KL per token of the answer, in nats; `soft` is header and trailer, `(2 * soft tokens, hidden)`."""
        expected = taught.logits.float().log_softmax(-1)
        actual = self.student(taught, soft).float().log_softmax(-1)
        return (expected.exp() * (expected - actual)).sum(-1).mean()

    def student(self, taught: Taught, soft: Tensor) -> Tensor:
        """The student's logits for the tokens of the answer, `(answer, vocabulary)`."""
        sample, prefix = taught.sample, taught.sample.prefix
        weight = self._embeddings.weight
        header, trailer = soft.to(weight.dtype).tensor_split(2)
        parts, at = [taught.before], sample.begin
        for ids in sample.packets:
            # One at a time: a batch would pad all documents to the longest.
            inputs = torch.cat([header, self.embed(ids), trailer])
            kv, _ = self._run(inputs, taught.before.slice(0, prefix), 0)
            parts.append(self._rope.move(kv.slice(prefix, kv.tokens), at - prefix))
            at += len(inputs)
        tail = self.embed((*sample.behind, *taught.answer[:-1]))
        return self._run(tail, KVTensors.concat(parts), len(taught.answer))[1]

    def _run(self, inputs: Tensor, past: KVTensors | None, keep: int) -> tuple[KVTensors, Tensor]:
        """KV of `past` and `inputs`, `(tokens, hidden)`, and the logits at the last `keep` inputs."""
        count, new = 0 if past is None else past.tokens, len(inputs)
        cache = DynamicCache(config=self._model.config)
        for layer, (key, value) in enumerate(zip(past.keys, past.values, strict=True) if past is not None else ()):
            cache.update(key[None], value[None], layer)
        mask = None
        if count and new > 1:
            least = torch.finfo(inputs.dtype).min
            mask = torch.full((new, count + new), least, dtype=inputs.dtype, device=self.device).triu(count + 1)
            mask = mask[None, None]
        arguments: dict[str, Any] = {
            "inputs_embeds": inputs[None],
            "attention_mask": mask,
            "position_ids": torch.arange(count, count + new, device=self.device)[None],
            "past_key_values": cache,
            "use_cache": True,
        }
        logits = inputs.new_empty(0)
        if keep:
            arguments |= {"logits_to_keep": keep} if self._keeps_logits else {}
            logits = self._model(**arguments).logits[0, -keep:]
        else:
            self._model.base_model(**arguments)
        layers = cache.layers
        return KVTensors(tuple(kv.keys[0] for kv in layers), tuple(kv.values[0] for kv in layers)), logits
