"""vLLM: a server of ours around it (`kp serve`), and the engine that asks such a server.

`connector` and `blocks` run inside vLLM, the only modules that import it; `middleware` runs before its own endpoints;
`engine` is the client, and needs neither vLLM nor weights. The core finds the client by its name, never by an import.
"""
