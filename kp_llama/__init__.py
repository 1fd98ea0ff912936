"""The engine for GGUF files: runs models in llama.cpp, through llama-cpp-python."""
