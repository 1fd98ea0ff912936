"""Gone: the package reads no files; the command line does."""

raise ImportError("kp_core.facts.sources is gone in 0.3; import `read_facts` and `read_rows` from kp_cli.sources.")
