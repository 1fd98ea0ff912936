"""Packs that a real server moves to where they stand, beside the engine here, which moves them likewise."""

import pytest

from kp_core.errors import ModelError, UnsupportedRequestError
from kp_methods import PacketComposer
from tests.kits import NaiveComposer


@pytest.mark.parametrize("part", [slice(4), pytest.param(slice(4, 6), marks=pytest.mark.nightly)], ids=["few", "rest"])
def test_spliced_answers_are_those_of_the_local_engine(both, questions, part):
    """Several packs, in one message and in a conversation, the first of which stands where it was compiled."""
    different, moved = [], 0
    for number, (question, text) in enumerate(questions[part]):
        lines = [f"Heard at the {place}. {line}" for place, line in zip("abcdef", text.splitlines(), strict=False)]
        content = "\n".join(f"{{{at}}}" for at in range(len(lines))) + f"\n{question}"
        if number % 2:
            content = [
                {"role": "user", "content": "Here is what I know.\n{0}"},
                {"role": "assistant", "content": "I shall remember it."},
                {"role": "user", "content": content.removeprefix("{0}\n")},
            ]
        there, here = both.ask(content, lines, composer="splice", max_tokens=12)
        assert there.prompt.token_ids == here.prompt.token_ids
        assert there.usage.approximate_tokens == here.usage.approximate_tokens > 0
        assert there.usage.computed_tokens <= len(there.prompt)
        if there.text != here.text:
            different.append((question, there.text, here.text))
        if number < 2:
            # What was moved is found by nobody who did not ask for it, and again by who does.
            plain, expected = both.ask(content, lines, max_tokens=12)
            moved += here.text != expected.text
            assert plain.text == expected.text
            again = both.ask(content, lines, composer="splice", max_tokens=12)[0]
            assert again.text == there.text
            behind = len(there.prompt) - there.prompt.spans[-1].stop
            assert again.usage.computed_tokens <= behind
    assert not different
    assert moved  # The test can fail.


def test_what_a_server_cannot_move_is_refused(both, questions):
    lines = questions[12][1].splitlines()
    content = "\n".join(f"{{{at}}}" for at in range(len(lines)))
    with pytest.raises(UnsupportedRequestError, match="composer='naive"):
        both.ask(content, lines, composer=NaiveComposer(), max_tokens=2)
    with pytest.raises(ModelError, match="--packets"):
        both.ask(content, lines, composer=PacketComposer.load(), max_tokens=2)
    ids = list(range(40))
    for said, status in (
        ({"moved": []}, 400),
        ({"moved": [[5, 5, "kp:own/x"]]}, 400),
        ({"moved": [[5, 50, "kp:own/x"]]}, 400),
        ({"moved": [[9, 12, "kp:own/x"], [11, 14, "kp:own/x"]]}, 400),
        ({"moved": "x"}, 400),
        ({"moved": [[5, 9, f"kp:own/{'a' * 21}"]]}, 404),
        ({"moved": [[5, 9, f"kp:plain/{'a' * 21}"]]}, 404),
    ):
        got, body = both.server.ask("/v1/completions", {"prompt": ids, "max_tokens": 1, "kp": said})
        assert got == status, body
    packs = both.server.compile("The toll of Ebb bridge is three coins on market days, and none at all at night. " * 2)
    body = {"prompt": ids, "max_tokens": 1, "kp": {"moved": [[5, 9, packs["handle"]]]}}
    assert both.server.ask("/v1/completions", body)[0] == 409
    assert both.server.ask("/v1/completions", body, "plain")[0] == 404
