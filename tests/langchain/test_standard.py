"""LangChain's own conformance tests."""

import pytest
from langchain_tests.integration_tests import RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever


class TestChatModel(ChatModelUnitTests):
    @property
    def chat_model_class(self):
        return ChatKnowledgePacks

    @property
    def chat_model_params(self):
        return {"model": "some/model"}

    @property
    def has_tool_calling(self):
        return False

    @property
    def has_structured_output(self):
        return False


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
