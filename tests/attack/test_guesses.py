"""What a pack says cannot be guessed by what the engine says it reuses (`classes.isolation` tries more of it)."""

import pytest

from kp_core import PackStore
from kp_methods.edit import amend
from tests.conftest import tiny_engine

KEEPER = "The keeper counts the ships at dawn, writes them down and hangs a lantern over the quay."
MILL = "Four sails has the mill, and from dawn on it grinds barley and rye for bakers of the isle."
SECOND = "Another pack, which stands behind the first one wherever anybody asks about both of them."


def reused(ask, text, guesses, folder, view=None):
    """How many tokens of each of `guesses` are reused behind what `ask` does with a pack of `text`."""
    engine, store = tiny_engine(), PackStore(folder)
    engine.clear_cache()
    ask(engine, store, text)
    engine.when_idle(lambda: None).result(60)
    view = view and store.view(view)
    return [engine.prefill(guess, view=view, keep="never").usage.reused_tokens for guess in guesses]


def in_place(engine, store, text):
    handle = store.put(engine.build_pack(text, namespace="geo"))
    engine.generate(f"{handle}\n\nWho?", view=store.view("geo"), max_tokens=3)


def edited(engine, store, text):
    handle = store.put(amend(engine.build_pack(text, namespace="geo"), "dawn", "noon", engine))
    engine.generate(f"{handle}\n\nWho?", view=store.view("geo"), max_tokens=3)


def behind(text):
    """A place in a message of one's own, behind this text."""
    return [{"role": "user", "content": f"{text}\n\n{{pack}}"}]


def built(engine, store, text):
    """What a pack is compiled behind is no secret of the pack's, but of its namespace."""
    store.put(engine.build_pack(SECOND, namespace="geo", compiled_for=behind(text)))


def rebuilt(engine, store, text):
    pack = engine.build_pack(SECOND, namespace="geo", compiled_for=behind(text))
    engine.clear_cache()
    store.put(amend(pack, "first", "third", engine, compiled_for=behind(text)))


@pytest.mark.parametrize("ask", [in_place, edited, built, rebuilt], ids=lambda ask: ask.__name__)
@pytest.mark.parametrize(
    ("namespace", "step"),
    [("hr", 3), *(pytest.param(each, 1, marks=pytest.mark.slow) for each in (None, "hr"))],
)
def test_a_guess_token_by_token_is_told_nothing(ask, namespace, step, tmp_path):
    guesses = [f"{KEEPER[:length]}?" for length in range(1, len(KEEPER) + 1, step)]
    right = reused(ask, KEEPER, guesses, tmp_path / "right", namespace)
    assert right == reused(ask, MILL, guesses, tmp_path / "wrong", namespace)
    # Who may read the pack reuses a token more of each guess, but where that has changed the last one.
    own = reused(ask, KEEPER, guesses, tmp_path / "own", "geo")
    assert all(mine >= theirs for mine, theirs in zip(own, right, strict=True))
    assert sum(own) > sum(right) + 20 / step
