"""LangChain's own conformance tests, on the real bundled model."""

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from kp_core import bundled_model
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever


class TestChatModelUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self):
        return ChatKnowledgePacks

    @property
    def chat_model_params(self):
        return {"model": "some/model"}

    @property
    def has_tool_choice(self):
        return True

    @property
    def supports_json_mode(self):
        return True


class TestChatModel(ChatModelIntegrationTests):
    """Everything a text model can be asked; images, audio and files are what is left out."""

    @property
    def chat_model_class(self):
        return ChatKnowledgePacks

    @property
    def chat_model_params(self):
        # Float32 answers alike on every machine; short answers keep the suite short.
        return {"dtype": "float32", "max_tokens": 64, "temperature": 0}

    @property
    def has_tool_choice(self):
        return True

    @property
    def supports_json_mode(self):
        return True

    @property
    def returns_usage_metadata(self):
        return True

    @property
    def supports_model_override(self):
        return True

    @property
    def model_override_value(self):
        return str(bundled_model())

    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    @pytest.mark.xfail(reason="135M parameters do not decide to call: 'The weather in San Francisco, CA, is a ...'")
    def test_agent_loop(self, model):
        super().test_agent_loop(model)


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _parts(self, isles):
        self.parts = {"bank": isles.bank, "store": isles.store, "namespace": isles.namespace}

    @property
    def retriever_constructor(self):
        return KnowledgePackRetriever

    @property
    def retriever_constructor_params(self):
        return self.parts

    @property
    def retriever_query_example(self):
        return "What bird is on the flag?"
