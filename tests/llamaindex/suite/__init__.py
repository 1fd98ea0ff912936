"""A conformance suite for LlamaIndex LLMs: what agents, query engines and tracing rely on, checked on any `LLM`.

    import pytest
    from tests.llamaindex.suite import CHECKS, Subject

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    async def test_conformance(check):
        await check(Subject(lambda: MyLLM(max_tokens=32, temperature=0)))

or, without pytest, `run_suite(Subject(...), CHECKS)`, or `python -m tests.llamaindex.suite mymodule:make_llm` from the
root of this repository. The LLM should be deterministic and configured for short answers.
"""

from __future__ import annotations

from tests.llamaindex.suite.checks import CHECKS
from tests.llamaindex.suite.suite import Check, NonconformityError, Outcome, Subject, run_suite

__all__ = ["CHECKS", "Check", "NonconformityError", "Outcome", "Subject", "run_suite"]
