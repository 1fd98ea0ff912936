"""The embedder of this project as LlamaIndex's embedding."""

import pytest
from llama_index.core import Document, VectorStoreIndex

from kp_core import SentenceTransformerEmbedder
from kp_core.banks.embed import as_embedder
from kp_core.errors import FactError
from kp_llamaindex import KnowledgePackEmbedding
from tests.llamaindex.conftest import LetterEmbedder


@pytest.fixture
def letters():
    return KnowledgePackEmbedding(LetterEmbedder(), embed_batch_size=2)


async def test_vectors_are_those_of_the_embedder(letters):
    texts = ["The mill has four sails.", "The ferry leaves at dawn.", "The light burns blue oil."]
    vectors = LetterEmbedder().embed(texts).tolist()
    assert letters.get_text_embedding_batch(texts) == vectors
    assert await letters.aget_text_embedding_batch(texts) == vectors
    assert letters.get_text_embedding(texts[1]) == vectors[1] == await letters.aget_text_embedding(texts[1])
    assert letters.get_query_embedding(texts[2]) == vectors[2] == await letters.aget_query_embedding(texts[2])
    assert as_embedder(letters).name == "letters" == letters.model_name


def test_an_index_finds_by_it(letters):
    documents = [Document(text="The ferry leaves Veyl at dawn."), Document(text="Quiz: 9 + 9 = 18")]
    index = VectorStoreIndex.from_documents(documents, embed_model=letters)
    [found] = index.as_retriever(similarity_top_k=1).retrieve("When does the ferry leave Veyl?")
    assert found.text == documents[0].text


def test_the_bundled_model_is_the_default_and_comes_back_from_its_description():
    embedding = KnowledgePackEmbedding()
    assert embedding.model_name == SentenceTransformerEmbedder().name
    vector = embedding.get_query_embedding("Who keeps the light?")
    assert len(vector) == 384
    again = KnowledgePackEmbedding.from_dict(embedding.to_dict())
    assert again.get_query_embedding("Who keeps the light?") == vector


def test_another_embedder_must_be_given_again(letters):
    with pytest.raises(FactError, match=r"model_name='letters'\. Give the embedder of that model"):
        KnowledgePackEmbedding.from_dict(letters.to_dict())
    assert KnowledgePackEmbedding.from_dict(letters.to_dict(), embedder=LetterEmbedder()).model_name == "letters"
