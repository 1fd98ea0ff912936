"""Engines run models. Each implementation has its own module, which is imported on first use."""
