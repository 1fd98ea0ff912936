"""Hugging Face models on this machine; the only place that imports transformers."""

from kp_core.engines.hf.bundled import bundled_model
from kp_core.engines.hf.engine import load_session
from kp_core.renamed import old_names

__all__ = ["bundled_model", "load_session"]

__getattr__ = old_names(__name__, HFEngine=load_session)
