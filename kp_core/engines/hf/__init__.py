"""Hugging Face models on this machine; the only place that imports transformers."""

from kp_core.engines.hf.loading import bundled_model, load_session

__all__ = ["bundled_model", "load_session"]
