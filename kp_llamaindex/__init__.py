"""The LlamaIndex adapter; nothing is in it yet."""

__all__: list[str] = []
