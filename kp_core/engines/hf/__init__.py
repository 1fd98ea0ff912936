"""Hugging Face models on this machine; the only place that imports transformers."""

from kp_core.engines.hf.bundled import bundled_model
from kp_core.engines.hf.engine import load_session

__all__ = ["bundled_model", "load_session"]
