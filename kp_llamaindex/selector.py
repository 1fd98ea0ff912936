"""`KnowledgePackSelector`: which of several query engines, retrievers or tools a question is for, without decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import ToolMetadata

from kp_core import Decisions, Question
from kp_core.session.deciding import Rotations
from kp_llamaindex.llm import KnowledgePackLLM

_WHICH = "Which of these is best to answer the question above?"
_IS = "Can this help to answer the question above?\n\n{}"


class KnowledgePackSelector(BaseSelector):
    """Selects by the probabilities that `llm` gives the choices (`kp_core.Session.decide`), for routers.

    A single selection is the likeliest choice. With `multi`, each choice is a question of its own, and all that are at
    least as likely as `threshold` are selected, or else the likeliest, the best first. A reason tells the probability.
    `rotations` are those of `decide`: by default all orders, because models favour the first choice.
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
        decided = self.llm._engine().decide(query.query_str, self._questions(choices), **self._options)  # noqa: SLF001
        return self._selected(decided)

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        engine = await asyncio.to_thread(self.llm._engine)  # noqa: SLF001 - ours
        return self._selected(await engine.adecide(query.query_str, self._questions(choices), **self._options))

    @property
    def _options(self) -> Mapping[str, Any]:
        return {**self.llm._asked({}), "rotations": self.rotations}  # noqa: SLF001 - ours

    def _questions(self, choices: Sequence[ToolMetadata]) -> Mapping[int, Question]:
        texts = [": ".join(filter(None, (choice.name, choice.description))) for choice in choices]
        if self.multi:
            return {at: Question(_IS.format(text)) for at, text in enumerate(texts)}
        return {0: Question(_WHICH, {str(at): text for at, text in enumerate(texts, 1)})}

    def _selected(self, decided: Decisions) -> SelectorResult:
        if self.multi:
            shares = {at: answer.probabilities["yes"] for at, answer in decided.answers.items()}
        else:
            shares = dict(enumerate(decided.answers[0].probabilities.values()))
        best, *others = sorted(shares, key=shares.__getitem__, reverse=True)
        chosen = [best, *(at for at in others if self.multi and shares[at] >= self.threshold)]
        return SelectorResult(
            selections=[SingleSelection(index=at, reason=f"probability {shares[at]:.3f}") for at in chosen]
        )
