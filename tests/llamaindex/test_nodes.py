"""`PackNode`: a handle to the model, text to everyone else."""

import copy
import logging
import pickle

import pytest
from llama_index.core.base.llms.types import TextBlock
from llama_index.core.schema import MetadataMode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

from kp_core import Fact
from kp_llamaindex import NumberSources, PackNode
from kp_llamaindex.retriever import to_node

HANDLE = "kp:default/" + "a" * 21


@pytest.fixture
def plain():
    return TextNode(
        id_="n1",
        text="The mill has four sails.",
        metadata={"title": "Mill", "page": 7},
        excluded_llm_metadata_keys=["page"],
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id="d1")},
    )


@pytest.fixture
def packed(plain):
    return PackNode.from_node(plain, HANDLE)


def test_only_the_model_sees_the_handle(plain, packed):
    assert packed.get_content(MetadataMode.LLM) == HANDLE
    assert packed.get_content_blocks(MetadataMode.LLM) == [TextBlock(text=HANDLE)]
    for mode in (MetadataMode.NONE, MetadataMode.EMBED, MetadataMode.ALL):
        assert packed.get_content(mode) == plain.get_content(mode)
        assert packed.get_content_blocks(mode) == plain.get_content_blocks(mode)
    assert packed.llm_text() == plain.get_content(MetadataMode.LLM) == "title: Mill\n\nThe mill has four sails."
    assert NodeWithScore(node=packed).text == packed.get_text() == plain.text
    assert (packed.class_name(), packed.node_id, packed.ref_doc_id) == ("TextNode", "n1", "d1")


def rewrite_text(node):
    node.text = "The mill has [REDACTED] sails."


def rewrite_by_method(node):
    node.set_content("Nothing.")


def rewrite_metadata(node):
    node.metadata["title"] = "Windmill"


@pytest.mark.parametrize("rewrite", [rewrite_text, rewrite_by_method, rewrite_metadata])
def test_a_rewritten_node_goes_as_text_with_one_warning(rewrite, packed, caplog):
    rewrite(packed)
    assert not packed.is_intact
    with caplog.at_level(logging.WARNING, "kp_llamaindex"):
        assert packed.get_content(MetadataMode.LLM) == packed.llm_text()
        packed.get_content(MetadataMode.LLM)
    assert caplog.text.count("Node n1 was rewritten since its pack was made; it goes as text.") == 1


def test_metadata_that_the_model_does_not_see_may_change(packed):
    packed.metadata["page"] = 8
    assert packed.get_content(MetadataMode.LLM) == HANDLE


@pytest.mark.parametrize(
    "carry",
    [
        lambda node: PackNode.from_dict(node.to_dict()),
        lambda node: PackNode.from_json(node.to_json()),
        lambda node: PackNode.model_validate(node.model_dump()),
        lambda node: pickle.loads(pickle.dumps(node)),  # noqa: S301 - our own bytes
        lambda node: node.model_copy(),
        lambda node: node.model_copy(deep=True),
        copy.deepcopy,
    ],
)
def test_it_survives(carry, packed):
    again = carry(packed)
    assert again == packed
    assert again.get_content(MetadataMode.LLM) == HANDLE
    again.text = "Other."
    assert again.get_content(MetadataMode.LLM) != HANDLE
    assert packed.is_intact


def test_read_as_a_text_node_it_is_text(packed, plain):
    again = TextNode.from_dict(packed.to_dict())
    assert again.get_content(MetadataMode.LLM) == plain.get_content(MetadataMode.LLM)


def test_numbered_sources(packed, plain):
    found = NumberSources().postprocess_nodes(
        [NodeWithScore(node=packed, score=0.5), NodeWithScore(node=plain, score=0.4)], query_str="?"
    )
    assert [node.get_content(MetadataMode.LLM) for node in found] == [
        f"Source 1:\n{HANDLE}",
        "Source 2:\ntitle: Mill\n\nThe mill has four sails.",
    ]
    assert [node.get_content() for node in found] == [plain.text] * 2
    assert [node.score for node in found] == [0.5, 0.4]
    assert not packed.label


def test_nodes_of_facts():
    node = to_node(Fact("The mill has four sails.", title="Mill", metadata={"page": 0}, id="f1"), HANDLE)
    assert (node.node_id, node.text, node.metadata) == (
        "f1",
        "The mill has four sails.",
        {"title": "Mill", "page": 0},
    )
    assert node.llm_text() == node.text
    assert node.get_content(MetadataMode.LLM) == HANDLE
