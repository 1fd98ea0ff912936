"""What the engine is worth on an accelerator: one command, `python -m benchmarks.gpu`, for a bare machine."""
