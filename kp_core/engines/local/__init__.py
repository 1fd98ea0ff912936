"""The engine for one machine. It needs torch, and no particular library to run the model."""
