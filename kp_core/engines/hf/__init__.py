"""Hugging Face models on this machine; the only place that imports transformers."""
