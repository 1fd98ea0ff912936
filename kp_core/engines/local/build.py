"""Compiling texts into packs, several at once where that changes no bit."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.fill import Prefiller
from kp_core.engines.request import CompiledFor
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import Prefix
from kp_core.prompt.prompt import Prompt
from kp_core.prompt.template import ChatTemplate

__all__ = ["PackBuilder"]

_BATCH = 8
_WINDOW = 256
"""Texts looked at together: enough to find batches of one length, few enough to hold in memory."""


@dataclass(frozen=True)
class _Job:
    text: str
    token_ids: tuple[int, ...]
    prefix: Prefix

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.prefix), len(self.token_ids)


class PackBuilder:
    """Computes the KV of texts behind the prefix that their place in the template gives them.

    Batches hold texts of one length behind one prefix. How a sum is rounded depends on the shapes of the matrices and
    not on their content, so each shape of batch is first computed both ways and compared bit for bit; only shapes that
    passed are batched from then on.
    """

    def __init__(self, prefiller: Prefiller, template: ChatTemplate, fingerprint: ModelFingerprint) -> None:
        self._prefiller, self._template, self._fingerprint = prefiller, template, fingerprint
        self._exact_shapes: dict[tuple[int, int], bool] = {}

    def jobs(self, texts: Iterable[str], compiled_for: CompiledFor) -> Iterator[_Job]:
        """Texts as they will stand in prompts, tokenised."""
        for text in texts:
            tokenised = self._template.tokenise_pack(text, compiled_for)
            prefix = tokenised.prompt.prefix(tokenised.prompt.spans[0], self._prefiller.chunk_tokens)
            yield _Job(tokenised.text, tokenised.token_ids, prefix)

    def build(self, texts: Iterable[str], compiled_for: CompiledFor) -> Iterator[tuple[_Job, KVTensors]]:
        """Each text with its KV, in order."""
        jobs = self.jobs(texts, compiled_for)
        while window := list(itertools.islice(jobs, _WINDOW)):
            groups: Mapping[tuple[Prefix, int], list[int]] = defaultdict(list)
            for index, job in enumerate(window):
                groups[job.prefix, len(job.token_ids)].append(index)
            batches = [
                indices[at : at + _BATCH] for indices in groups.values() for at in range(0, len(indices), _BATCH)
            ]
            # In order of their first text, so that the first results come soon.
            done: dict[int, KVTensors] = {}
            upcoming = 0
            for batch in sorted(batches, key=min):
                done.update(zip(batch, self._compute([window[index] for index in batch]), strict=True))
                while upcoming in done:
                    yield window[upcoming], done.pop(upcoming)
                    upcoming += 1

    def _compute(self, jobs: list[_Job]) -> list[KVTensors]:
        shape = jobs[0].shape
        if len(jobs) < _BATCH or self._exact_shapes.get(shape) is False:
            return [self._together([job])[0] for job in jobs]
        together = self._together(jobs)
        if shape not in self._exact_shapes:
            alone = [self._together([job])[0] for job in jobs]
            self._exact_shapes[shape] = all(one.equal(other) for one, other in zip(together, alone, strict=True))
            return alone
        return together

    def _together(self, jobs: list[_Job]) -> list[KVTensors]:
        prefix, tokens = jobs[0].prefix, len(jobs[0].token_ids)
        prefiller = self._prefiller
        prompt = Prompt(prefix.token_ids, breaks=prefix.cuts)
        run = prefiller.start(prompt, len(prefix) + tokens, self._fingerprint, deterministic=True, logits=False)
        try:
            if len(jobs) == 1:
                buffer = run.buffer
            else:
                buffer = KVBuffer(prefiller.model.shape, len(prefix) + tokens, len(jobs))
                if len(prefix):
                    buffer.append(run.buffer.read(0, len(prefix)))
            ids = torch.tensor([job.token_ids for job in jobs], device=prefiller.model.device)
            for start in range(0, tokens, prefiller.chunk_tokens):
                prefiller.forward_batch(ids[:, start : start + prefiller.chunk_tokens], buffer)
            return [buffer.read(len(prefix), len(prefix) + tokens, row) for row in range(len(jobs))]
        finally:
            prefiller.finish(run)
