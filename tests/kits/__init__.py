"""For tests: tiny models of the supported architectures, and conformance kits for implementations of the seams."""

from tests.kits.engines import check_composer, check_engine
from tests.kits.models import ARCHITECTURES, CHATML, tiny_model, tiny_tokenizer
from tests.kits.naive import NaiveComposer
from tests.kits.stores import HashEmbedder, check_blobs, check_fact_store

__all__ = [
    "ARCHITECTURES",
    "CHATML",
    "HashEmbedder",
    "NaiveComposer",
    "check_blobs",
    "check_composer",
    "check_engine",
    "check_fact_store",
    "tiny_model",
    "tiny_tokenizer",
]
