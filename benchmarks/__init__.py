"""One module per table of `docs/results.md`, each run as `python -m benchmarks.NAME`."""
