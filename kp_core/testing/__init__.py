"""For tests: tiny models of the supported architectures."""

from kp_core.testing.models import ARCHITECTURES, CHATML, tiny_model, tiny_tokenizer

__all__ = ["ARCHITECTURES", "CHATML", "tiny_model", "tiny_tokenizer"]
