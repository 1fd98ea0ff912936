"""The conformance suite, on ours and on an LLM that does little."""

import re

import pytest
from llama_index.core.llms import MockLLM

from kp_llamaindex import KnowledgePackLLM
from tests.conftest import bundled_dtypes, tiny_engine
from tests.kits import CHATML
from tests.llamaindex.suite import CHECKS, Subject, run_suite
from tests.llamaindex.suite.__main__ import main


def subject(engine, max_tokens=96):
    def make():
        return KnowledgePackLLM(engine=engine, max_tokens=max_tokens)

    return Subject(make, revive=lambda data: KnowledgePackLLM.from_dict(data, engine=engine))


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_ours(check):
    # A call takes room, letter by letter, and what is interrupted takes time.
    is_long = any(word in check.name for word in ("tool", "call", "structured", "loop", "cancelled", "early"))
    await check(subject(tiny_engine("qwen3"), 96 if is_long else 32))


def of_one_way(check):
    """Of a check of each way to ask, that of agents with every change, the others nightly; `test_ours` takes all."""
    agents = re.sub("^a?(stream_)?(chat|complete)", "astream_chat", check.name)
    is_nightly = check.name != agents in {each.name for each in CHECKS}
    return pytest.param(check, id=check.name, marks=pytest.mark.nightly if is_nightly else ())


@pytest.mark.slow
@pytest.mark.parametrize("smol_of", bundled_dtypes(pytest.mark.nightly), indirect=True)
@pytest.mark.parametrize("check", map(of_one_way, CHECKS))
async def test_the_bundled_model(check, smol_of):
    await check(subject(smol_of, max_tokens=40))


async def test_a_template_with_a_system_message_of_its_own():
    default = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Tiny.<|im_end|>\n{% endif %}"
    [check] = [check for check in CHECKS if check.name == "chat reads whole conversations"]
    await check(subject(tiny_engine("qwen3", template=default + CHATML)))


@pytest.mark.parametrize(("only", "status", "said"), [("chat answers", 0, "passed"), ("chat counts", 1, "FAILED")])
def test_the_suite_runs_from_the_command_line(capsys, only, status, said):
    assert main(["llama_index.core.llms:MockLLM", "--only", only]) == status
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(said) for line in lines)


def test_names_are_unique():
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_the_suite_can_fail():
    outcomes = run_suite(Subject(lambda: MockLLM(max_tokens=8)), CHECKS)
    failed = {outcome.name for outcome in outcomes if not outcome.passed}
    passed = {outcome.name for outcome in outcomes if outcome.passed}
    for endpoint in ("chat", "acomplete", "stream_chat", "astream_complete"):
        assert f"{endpoint} counts tokens" in failed
        assert f"{endpoint} takes options of the call" in failed
    assert {"achat leaves the loop free", "chat_with_tools calls a tool when one is required"} <= failed
    assert {"chat answers", "stream_complete answers", "predict fills templates"} <= passed
    assert all(outcome.problem for outcome in outcomes if not outcome.passed)
