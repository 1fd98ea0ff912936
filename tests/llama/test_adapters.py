"""The conformance suites of both adapters, on the engine over llama.cpp."""

import numpy as np
import pytest

pytest.importorskip("langchain_tests")
pytest.importorskip("llama_index.core")

from kp_llamaindex import KnowledgePackLLM
from tests.langchain.test_standard import TextModel
from tests.llama.conftest import load
from tests.llamaindex.suite import CHECKS, Subject

_LOADED = []
NEAR = 0.5
"""How far below the largest logit one may be that rounding could make the largest. Batches change logits by 0.2."""


def shared():
    if not _LOADED:
        _LOADED.append(load())
    return _LOADED[0]


def could_say(question, said):
    """Whether `said` answers `question` but for rounding: alone, each of its tokens is nearly the likeliest."""
    session = shared()
    context, prompt = session.engine.model.context, session.prefill(question).prompt.token_ids

    def read():
        ids, sequence = [], context.free_ids[-1]
        [logits] = context.decode([(sequence, 0, prompt)])
        try:
            while session.tokenizer.decode(ids) != said:
                likely = [token for token in np.argsort(-logits)[:50] if logits[token] >= logits.max() - NEAR]
                fits = [int(token) for token in likely if said.startswith(session.tokenizer.decode([*ids, token]))]
                if not fits:
                    return False
                [logits] = context.decode([(sequence, len(prompt) + len(ids), fits[:1])])
                ids += fits[:1]
        finally:
            context.remove(sequence)
        return True

    return context.call(read)


class TestLangChain(TextModel):
    @property
    def chat_model_params(self):
        return {"engine": shared(), "max_tokens": 64, "temperature": 0}


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_llama_index(check):
    def make():
        return KnowledgePackLLM(engine=shared(), max_tokens=64)

    def revive(data):
        return KnowledgePackLLM.from_dict(data, engine=shared())

    await check(Subject(make, revive=revive, could_say=could_say))


def test_an_answer_to_another_question_is_no_matter_of_rounding():
    questions = ["Name three colours. (1)", "Name three colours. (2)", "How many legs has a spider?"]
    answers = [shared().generate(question, max_tokens=40).text for question in questions]
    for question in questions:
        assert [could_say(question, answer) for answer in answers] == [question == other for other in questions]
