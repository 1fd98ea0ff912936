"""For tests: tiny models of the supported architectures, and conformance kits for implementations of the seams."""

from kp_core.testing.engines import check_composer, check_engine
from kp_core.testing.models import ARCHITECTURES, CHATML, tiny_model, tiny_tokenizer
from kp_core.testing.stores import HashEmbedder, check_blobs, check_fact_store

__all__ = [
    "ARCHITECTURES",
    "CHATML",
    "HashEmbedder",
    "check_blobs",
    "check_composer",
    "check_engine",
    "check_fact_store",
    "tiny_model",
    "tiny_tokenizer",
]
