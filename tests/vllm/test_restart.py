"""A server that was stopped and started again: one restart for all that is asked of one."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from benchmarks.vllm import TENANTS, altered, isolated
from kp_core.errors import ModelError
from kp_core.packs.handle import Handle
from tests.conftest import until
from tests.vllm.conftest import Both
from tests.vllm.test_served import ISLES, loaded

COIN = "What is the coin called?"
GOATS = "The ferry to Saint Oriel leaves at the third bell and carries forty goats at most. " * 2
MILL = "\n".join(f"The mill of Saint Oriel has {number} sails." for number in range(9))


def moved(both, questions):
    """A prompt of several packs, the same on the server and here, with packs moved."""
    question, text = questions[11]
    lines = [f"Sung in the hall. {line}" for line in text.splitlines()]
    content = "\n".join(f"{{{at}}}" for at in range(len(lines))) + f"\n{question}"
    return both.ask(content, lines, composer="splice", max_tokens=12)


@pytest.fixture(scope="module")
def before(server, smol, questions, tmp_path_factory):
    """What was answered and compiled before the restart, some of it damaged since."""
    made = SimpleNamespace(both=Both(server, smol, tmp_path_factory.mktemp("here")))
    made.pack = server.compile(ISLES)
    made.said, _ = server.chat(f"{made.pack['handle']}\n{COIN}")
    made.moved, made.expected = moved(made.both, questions)
    made.tenants = altered(server, smol)
    made.goats = Handle.parse(server.compile(GOATS)["handle"])
    made.right, _ = server.chat(f"{made.goats}\nHow many goats?")
    made.mill = Handle.parse(server.compile(MILL)["handle"])
    with ThreadPoolExecutor(1) as pool:
        endless = {"max_tokens": 1800, "stop": ["never said"]}
        made.ended = pool.submit(made.both.there.generate, "Count up from one, and never stop.", **endless)
        until(lambda: server.counted("vllm:num_requests_running"))
        server.stop()
    made.damaged = [*server.store.verify()]
    for each, place in ((made.goats, -1000), (made.mill, -300_000)):  # In the last layers, and in the midst.
        file = next(server.path.glob(f"packs/own/*/{each.id}*.safetensors"))
        data = bytearray(file.read_bytes())
        data[place] ^= 0xFF
        file.write_bytes(data)
    server.start()
    assert loaded(server) == 0
    return made


def test_an_end_in_the_middle_is_said_and_loses_nothing(before):
    error = before.ended.exception()
    assert isinstance(error, ModelError) or before.ended.result().finish_reason in ("stop", "length")
    assert not before.damaged


def test_it_answers_from_the_store(server, before):
    was = loaded(server)
    again, usage = server.chat(f"{before.pack['handle']}\n{COIN}")
    assert again == before.said
    assert usage["prompt_tokens_details"]["cached_tokens"] == loaded(server) - was >= before.pack["tokens"]
    # A plain prompt with the text profits, too.
    _, usage = server.chat(f"{ISLES}\nWhat has a hole?", max_tokens=1)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= before.pack["tokens"]


def test_no_tenant_answers_from_the_kv_of_another(server, before):
    """Each tenant's pack of the same text has KV of its own, altered so that whoever reads it is found out."""
    ids, expected = before.tenants
    wrong = isolated(server, ids, expected, 120)
    assert not wrong, wrong[:5]
    # The test can fail: of any two tenants, the answers to some text are further apart than what is taken for equal.
    turns = {turn for turn, _ in expected}
    for mine, other in itertools.combinations(TENANTS, 2):
        assert max(abs(expected[turn, mine] - expected[turn, other]) for turn in turns) > 2 * 5e-3


def test_a_damaged_pack_is_never_used(server, before):
    # What was computed behind it is not stored either.
    longer = {"text": f"{MILL}\nIt grinds by night.", "namespace": "own"}
    status, said = server.ask("/v1/packs", longer)
    assert (status, set(said)) == (500, {"error"}), said
    found = [server.ask(f"/v1/packs/{each}")[1] for each in server.ask("/v1/packs")[1]["data"]]
    assert [each["compiled"] for each in found if each["text"] == longer["text"]] == [False]
    told = server.compile(longer["text"])
    assert told["compiled"]
    plain = server.chat(f"{longer['text']}\nWhen does it grind?")[0]
    assert server.chat(f"{told['handle']}\nWhen does it grind?")[0] == plain
    asked = f"{before.goats}\nHow many goats?"
    status, said = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": asked}]})
    assert (status, set(said)) == (500, {"error"}), said
    # Its KV was deleted, so it is computed from its text, and stored again.
    assert server.chat(asked)[0] == before.right
    assert server.ask(f"/v1/packs/{before.goats}")[1]["compiled"]


def test_what_was_moved_is_loaded_and_goes_with_its_packs(server, before, questions):
    again, _ = moved(before.both, questions)
    assert again.text == before.moved.text == before.expected.text
    assert again.usage.computed_tokens <= len(again.prompt) - again.prompt.spans[-1].stop
    # What stood between goes with a pack that is deleted, and is computed anew behind one that is compiled anew.
    lost = again.prompt.spans[1].handle
    assert any(lost in entry.owners for entry, _ in server.store.kept())
    server.store.remove(Handle.parse(lost))
    assert not any(lost in entry.owners for entry, _ in server.store.kept())
    anew, _ = moved(before.both, questions)
    assert anew.text == before.expected.text
    assert anew.usage.computed_tokens > again.usage.computed_tokens
