"""The server (`kp serve`, around vLLM) and the engine that is its client.

`connector` and `blocks` run inside vLLM and are the only modules that import it. `middleware` runs before vLLM's
endpoints. `engine` is the client; it needs neither vLLM nor weights. The core loads it by name and never imports it.
"""
