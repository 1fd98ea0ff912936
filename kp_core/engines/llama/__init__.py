"""The engine for GGUF files: llama.cpp runs the model. The only place for llama-cpp-python."""
