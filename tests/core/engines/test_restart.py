"""An agent whose process ended goes on in another one; run as a module, this file is that agent."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kp_core import PackStore, load_engine

ROOT = Path(__file__).parents[3]
MESSAGES = [
    {"role": "system", "content": "Answer with a few words."},
    {"role": "user", "content": "Which keeper counted most ships?"},
]


def step(*arguments: object) -> dict:
    command = [sys.executable, "-m", "tests.core.engines.test_restart", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=True)  # noqa: S603
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow  # `test_keeping.py` does the same in one process.
def test_an_agent_of_ten_searches_goes_on_in_another_process(thin_or_bundled, tmp_path):
    """It reads all knowledge from the store, computes none of it, and sees what a cold run would compute."""
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps(MESSAGES), encoding="utf-8")
    before = step(thin_or_bundled, tmp_path / "store", messages, "search")
    assert before["pack_tokens"] > 250
    after = step(thin_or_bundled, tmp_path / "store", messages, "go on")
    assert after["reused_tokens"] >= after["pack_tokens"] == before["pack_tokens"]
    assert after["computed_tokens"] <= after["prompt_tokens"]
    assert after["same"]
    again = step(thin_or_bundled, tmp_path / "store", messages, "replay")
    assert len(again["steps"]) == len({logits for _, logits in again["steps"]}) == 10
    assert again["steps"] == before["steps"]


def searched(engine, store, messages: list) -> dict:
    """Ten searches, each of them answered; what the last answer cost, and what each step gave."""
    steps = []
    for at in range(10):
        text = f"Note {at}. Keeper {at * 7} of the light counted {at * 31 + 2} ships in the year {1800 + at}.\n"
        handle = str(store.put(engine.build_pack(text, namespace="notes")))
        function = {"name": "search", "arguments": json.dumps({"query": f"keeper {at}"})}
        calls = [{"id": f"call{at}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call{at}", "content": handle})
        answer = answered(engine, store, messages)
        steps.append(result(engine, store, messages, answer))
        messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": "Go on."})
    return {**answer.usage.to_dict(), "steps": steps}


def replayed(engine, store, messages: list) -> dict:
    """What each step gives when its conversation is sent again."""
    ends = [at + 1 for at, message in enumerate(messages) if message["role"] == "tool"]
    return {"steps": [result(engine, store, messages[:end], answered(engine, store, messages[:end])) for end in ends]}


def answered(engine, store, messages: list):
    return engine.generate(messages, view=store.view("notes"), keep="always", max_tokens=4)


def result(engine, store, messages: list, answer) -> list:
    """The answer and a digest of the logits before it."""
    logits = engine.prefill(messages, view=store.view("notes"), keep="always").logits
    return [answer.text, hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()]


def gone_on(engine, store, messages: list) -> dict:
    """What the next step alone costs, and whether it is that of a cold run."""
    found = engine.prefill(messages, view=store.view("notes"), keep="always")
    oracle = engine.prefill(messages, view=store.view("notes"), reuse=False)
    return {**found.usage.to_dict(), "same": bool((found.logits == oracle.logits).all())}


if __name__ == "__main__":
    model, place, path, mode = sys.argv[1:]
    asked = json.loads(Path(path).read_text(encoding="utf-8"))
    act = {"search": searched, "go on": gone_on, "replay": replayed}[mode]
    cost = act(load_engine(model, dtype="bfloat16", device="cpu"), PackStore(place), asked)
    Path(path).write_text(json.dumps(asked), encoding="utf-8")
    sys.stdout.write(json.dumps(cost) + "\n")
