"""For tests: tiny models of the supported architectures, and conformance kits for implementations of the seams."""

from kp_core.testing.engines import check_composer, check_engine
from kp_core.testing.models import ARCHITECTURES, CHATML, tiny_model, tiny_tokenizer

__all__ = ["ARCHITECTURES", "CHATML", "check_composer", "check_engine", "tiny_model", "tiny_tokenizer"]
