"""The Hugging Face engine; the only place that imports transformers."""

from kp_core.engines.hf.bundled import bundled_model
from kp_core.engines.hf.engine import HFEngine, Prefill

__all__ = ["HFEngine", "Prefill", "bundled_model"]
