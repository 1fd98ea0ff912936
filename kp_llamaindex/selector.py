"""`KnowledgePackSelector`: which of several query engines, retrievers or tools a question is for, without decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import ToolMetadata

from kp_core import Question, strip_handles
from kp_core.errors import OptionError
from kp_core.session.deciding import Rotations
from kp_llamaindex.llm import KnowledgePackLLM

_ASK = "{}\n\nAsk a question about this."
_IS = "Can this help to answer the question above?\n\n{}"


class KnowledgePackSelector(BaseSelector):
    """Selects by what `llm` says of the choices, without decoding, for routers.

    A single selection is the choice behind which `llm` would ask this question most likely, by Bayes' rule: small
    models that cannot choose from a list can do this, and the order of the choices does not matter. With `multi`, each
    choice is a question of its own (`kp_core.Session.decide`, with its `rotations`), and all that are at least as
    likely as `threshold` are selected, or else the likeliest, the best first; take a model that judges well. A reason
    tells the probability.
    """

    def __init__(
        self, llm: KnowledgePackLLM, *, multi: bool = False, threshold: float = 0.5, rotations: Rotations = "all"
    ) -> None:
        self.llm, self.multi, self.threshold, self.rotations = llm, multi, threshold, rotations

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        """There are none."""

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        if not choices:
            raise OptionError("Got no choices; expected at least one.")
        engine, options = self.llm._engine(), self.llm._asked({})  # noqa: SLF001 - ours
        texts = [": ".join(filter(None, (choice.name, choice.description))) for choice in choices]
        if self.multi:
            questions = {at: Question(_IS.format(text)) for at, text in enumerate(texts)}
            decided = engine.decide(query.query_str, questions, rotations=self.rotations, **options)
            shares = [answer.probabilities["yes"] for answer in decided.answers.values()]
        else:
            nats = engine.log_likelihoods(map(_ASK.format, texts), strip_handles(query.query_str), **options)
            shares = torch.tensor(nats, dtype=torch.float64).softmax(0).tolist()
        return self._selected(shares)

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return await asyncio.to_thread(self._select, choices, query)

    def _selected(self, shares: Sequence[float]) -> SelectorResult:
        best, *others = sorted(range(len(shares)), key=shares.__getitem__, reverse=True)
        chosen = [best, *(at for at in others if self.multi and shares[at] >= self.threshold)]
        return SelectorResult(
            selections=[SingleSelection(index=at, reason=f"probability {shares[at]:.3f}") for at in chosen]
        )
