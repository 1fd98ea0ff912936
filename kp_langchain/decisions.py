"""`KnowledgePackDecisions`: LangChain's decision model over packs. It needs langchain-core 1.8."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from langchain_core import __version__
from langchain_core.messages import BaseMessage, is_data_content_block
from langchain_core.runnables import RunnableConfig

from kp_core import Decisions, Question
from kp_core.errors import MissingDependencyError, PromptError
from kp_core.packs.handle import inert
from kp_core.prompt.conversation import GAP, Message, map_strings, texts_of
from kp_core.settings import ModelSettings
from kp_langchain.messages import PROVIDER, overflows, to_messages, usage_metadata

try:
    from langchain_core.decisions import BaseDecisionModel, Choice, ClassifierResponse, Noul, Score
except ImportError as error:
    raise MissingDependencyError(
        f"KnowledgePackDecisions needs langchain-core 1.8 or newer; {__version__} is installed. "
        "`pip install -U langchain-core langchain`."
    ) from error


class KnowledgePackDecisions(ModelSettings, BaseDecisionModel):  # type: ignore[misc]  # see pyproject.toml
    """A decision model whose state may hold handles: `kp_core.Session.decide` behind LangChain's interface.

    Its settings are those of `ChatKnowledgePacks`; `packs` and `system` stand before every state, and `rotations` is
    that of `decide`. A state is text, messages, or JSON, which is written as text with its keys in order. Messages
    inside of JSON bring packs if their roles are trusted, and its other strings if those of users are.

    The confidence of an answer is the probability of its likeliest label. `usage` is the sum over all questions, of
    which `cache_read` was reused. Raises `PromptError` for a `Box` and for media, else as `decide`.
    """

    system: str = ""
    """The system message, in front of that of a state."""
    rotations: int | Literal["all"] = 1

    @property
    def _provider(self) -> str:
        return PROVIDER

    def _traced_config(self, config: RunnableConfig | None) -> RunnableConfig:
        traced: RunnableConfig = super()._traced_config(config)
        traced["metadata"]["ls_model_name"] = self.model_name
        return traced

    def _classify(self, state: Any, questions: Mapping[str, Any]) -> ClassifierResponse:
        asked, options = {key: _question(question) for key, question in questions.items()}, self._asked({})
        with overflows():
            decided = self._engine().decide(self._messages(state), asked, rotations=self.rotations, **options)
        return self._response(questions, decided)

    async def _aclassify(self, state: Any, questions: Mapping[str, Any]) -> ClassifierResponse:
        asked, options = {key: _question(question) for key, question in questions.items()}, self._asked({})
        engine = await asyncio.to_thread(self._engine)
        with overflows():
            decided = await engine.adecide(self._messages(state), asked, rotations=self.rotations, **options)
        return self._response(questions, decided)

    def _messages(self, state: Any) -> Sequence[Message]:
        """The conversation that stands for `state`, behind `system`."""
        listed = [state] if isinstance(state, BaseMessage) else state
        if isinstance(listed, Sequence) and listed and all(isinstance(item, BaseMessage) for item in listed):
            messages = to_messages(listed)
        else:
            messages = [{"role": "user", "content": _text(state, self.trusted_roles)}]
        if self.system and messages[0]["role"] == "system":
            said = [f"{self.system}{GAP}", *texts_of(messages[0])]
            return [{"role": "system", "content": said}, *messages[1:]]
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def _response(self, questions: Mapping[str, Any], decided: Decisions) -> ClassifierResponse:
        answers = dict[str, dict[str, Any]]()
        for key, question in questions.items():
            answer, shares = decided.answers[key], decided.answers[key].probabilities
            if isinstance(question, Noul):
                answers[key] = {"type": "noul", "noul": shares["yes"]}
                continue
            about: dict[str, Any]
            if isinstance(question, Choice):
                about = {"type": "choice", "choice": answer.label, "probabilities": dict(shares)}
            else:
                about = {"type": "score", "score": answer.score, "legend": dict(enumerate(question.criteria))}
                about["probabilities"] = dict(enumerate(shares.values()))
            answers[key] = about | {"confidence": answer.confidence}
        report = {"model": self.model_name, "answers": answers, "usage": usage_metadata(decided.usage)}
        return ClassifierResponse.model_validate(report)


def _question(question: Any) -> Question:
    """A question of LangChain as one of the core. Levels of a score are numbered from 0."""
    if isinstance(question, Noul):
        criteria = question.criteria
        sides = (None, None) if criteria is None else (criteria.true, criteria.false)
        labels = dict(zip(("yes", "no"), map(_text, sides), strict=True))
    elif isinstance(question, Choice):
        labels = {label: _text(description) for label, description in question.criteria.items()}
    elif isinstance(question, Score):
        labels = {str(level): _text(description) for level, description in enumerate(question.criteria)}
    else:
        raise PromptError(
            f"Got the question {question!r}; a text model takes a Noul, a Choice or a Score, e.g. of "
            'langchain_core.decisions Choice(instructions="What is it about?", criteria={"tides": "", "boats": ""}).'
        )
    return Question(_text(question.instructions), labels)


def _text(value: Any, trusted: Sequence[str] = ()) -> str:
    """`value` as text: a string as it is, none as nothing, other JSON written with its keys in order."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(_plain(value, trusted), ensure_ascii=False, sort_keys=True)


def _plain(value: Any, trusted: Sequence[str]) -> Any:
    """JSON with mappings for messages, in which handles resolve only if the role is `trusted`. Raises `PromptError`."""
    if isinstance(value, BaseMessage):
        [message] = to_messages([value])
        return message if message["role"] in trusted else map_strings(message, inert)
    if isinstance(value, Mapping):
        if value.get("type") in ("image_url", "input_audio") or is_data_content_block(dict(value)):
            raise PromptError(f"Got a block of type {value['type']!r} in a state or question; expected text alone.")
        return {str(key): _plain(item, trusted) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item, trusted) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise PromptError(f"Got {type(value).__name__} in a state or question; expected text, messages or JSON.")
