"""The conformance suites of both adapters, on the engine over llama.cpp."""

import pytest

pytest.importorskip("langchain_tests")
pytest.importorskip("llama_index.core")

from kp_llamaindex import KnowledgePackLLM
from tests.langchain.test_standard import TextModel
from tests.llama.conftest import load
from tests.llamaindex.suite import CHECKS, Subject

_LOADED = []


def shared():
    if not _LOADED:
        _LOADED.append(load())
    return _LOADED[0]


class TestLangChain(TextModel):
    @property
    def chat_model_params(self):
        return {"engine": shared(), "max_tokens": 64, "temperature": 0}


# These compare an answer beside others with one alone, which llama.cpp rounds in another way.
AT_ONCE = ("runs several times at once", "can be cancelled")


@pytest.mark.parametrize("check", [check for check in CHECKS if not str(check).endswith(AT_ONCE)], ids=str)
async def test_llama_index(check):
    def make():
        return KnowledgePackLLM(engine=shared(), max_tokens=40)

    await check(Subject(make, revive=lambda data: KnowledgePackLLM.from_dict(data, engine=shared())))
