"""`python -m tests.llamaindex.suite mymodule:make_llm`: the suite on any LLM; exit status 1 when a check fails."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from tests.llamaindex.suite import CHECKS, Subject, run_suite


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks asked for and print what became of each."""
    parser = argparse.ArgumentParser("python -m tests.llamaindex.suite", description=__doc__)
    parser.add_argument("make", type=resolve_name, help="what builds a fresh LLM, as module:name")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the checks whose names hold this")
    parser.add_argument("--limit", default="max_tokens", metavar="NAME", help="the option that bounds an answer")
    options = parser.parse_args(argv)
    failed = 0
    for check in CHECKS:
        if options.only in check.name:
            [outcome] = run_suite(Subject(options.make, limit=options.limit), [check])
            failed += not outcome.passed
            sys.stdout.write(f"{'passed' if outcome.passed else 'FAILED'} {outcome.name}  {outcome.problem}\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
