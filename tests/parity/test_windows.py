"""Models with windows: answers decoded together are those of one by one, and windows are no longer than they are."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kp_core import PackStore
from kp_core.engines.hf import attention
from kp_core.engines.local.buffer import TILE, KVBuffer
from tests.parity.families import WINDOW, config_of
from tests.parity.test_models import ask, family_of, letters

KINDS = ("gemma3_text", "mistral", "llama4_text", "gpt_oss")


def behind(model, prefix, own, run):
    """A buffer that begins with the run `prefix`, as a request that found it in the tree has it."""
    buffer = KVBuffer(model.shape, 512)
    for part in (prefix, own):
        model.forward(part, buffer, logits=0)
    buffer.runs = [(run, 0, len(prefix))]
    return buffer


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_each_is_alone(kind):
    """Within the window, as they cross it, and behind it; three share more than a window, in layers that see it all."""
    model, draw = family_of(kind).engine.engine.model, random.Random(0)
    assert "batch" not in model.lacks
    book = [draw.randrange(256) for _ in range(3 * WINDOW)]
    starts = [(book, 3, 7), (book, 90, 7), (book[:20], 2, 8), (book[: WINDOW - 5], 1, 9), (book, 17, 7)]
    starts = [(prefix, [draw.randrange(256) for _ in range(own)], run) for prefix, own, run in starts]
    together, alone = ([behind(model, *each) for each in starts] for _ in range(2))
    step_rows = model.rows(together)
    for step in range(70):  # More than a tail has room for at first.
        tokens = [draw.randrange(256) for _ in starts]
        found = step_rows(tokens)
        expected = [model.forward([token], buffer) for token, buffer in zip(tokens, alone, strict=True)]
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4, msg=f"step {step}")


@pytest.mark.parametrize("kind", KINDS)
def test_questions_of_any_length_are_what_each_is_alone(kind):
    """Within the window, as they cross it, a token behind it, and far behind it."""
    model, draw = family_of(kind).engine.engine.model, random.Random(1)
    starts = [[draw.randrange(256) for _ in range(size)] for size in (1, WINDOW - 5, WINDOW, 3 * WINDOW)]
    together, alone = ([behind(model, each, each[:1], 7) for each in starts] for _ in range(2))
    for counts in [(1, 5, 2, 9), (WINDOW, 1, 1, 2 * WINDOW), (3, 8, WINDOW + 1, 1)]:
        asked = [[draw.randrange(256) for _ in range(count)] for count in counts]
        found = model.ragged(together, asked)
        expected = [model.forward(ids, buffer) for ids, buffer in zip(asked, alone, strict=True)]
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4, msg=f"{counts}")


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_come_together_are_those_of_one_by_one(kind, tmp_path, monkeypatch):
    engine = family_of(kind).engine
    engine.clear_cache()
    store = PackStore(tmp_path)
    handles = [store.put(engine.build_pack(letters(size, size) + ".\n")) for size in (WINDOW // 2, 3 * WINDOW)]
    asked = [ask(f"{handles[at % 2]}\n{letters(9 * at)}?") for at in range(6)]

    def answer(messages):
        return engine.generate(messages, view=store.view("default"), max_tokens=40).token_ids

    one_by_one = [answer(messages) for messages in asked]
    engine.clear_cache()
    passes, scheduler = [], engine.engine.scheduler
    logits = scheduler._logits
    monkeypatch.setattr(scheduler, "_logits", lambda batch: passes.append(len(batch)) or logits(batch))
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(answer, asked)) == one_by_one
    assert max(passes) > 1


def test_caps_are_left_to_the_model_and_decoded_one_by_one():
    model = family_of("gemma2").engine.engine.model
    assert not model.attends
    assert "batch" in model.lacks
    assert "its attention is its own" in model.lacks["bitwise"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_leaves_windows_as_they_were(kind):
    model, config = family_of(kind).engine.engine.model, config_of(kind)
    assert "batch" not in model.lacks
    assert model.config._attn_implementation == attention.NAME
    assert set(model.kind.windows) - {0} == {WINDOW}
    for name in ("sliding_window", "attention_chunk_size"):
        assert getattr(model.config, name, None) == getattr(config, name, None)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "llama4_text", "gpt_oss", "llama"])
@pytest.mark.parametrize("size", [TILE - 3, TILE, 2 * TILE + 90])
def test_tiled_attention_is_attention(kind, size):
    """Windows, chunks and sinks over several tiles, as the library computes them; and in passes cut anywhere."""
    model, tiled = family_of(kind).model, family_of(kind).engine.engine.model
    assert tiled.attends
    ids = torch.randint(256, (1, size), generator=torch.Generator().manual_seed(size))
    with torch.inference_mode():
        expected = model(ids).logits[0]
    buffer, found = KVBuffer(tiled.shape, size), []
    for start, stop in itertools.pairwise((0, size // 3, size // 3 + 1, size - 5, size)):
        found.append(tiled.forward(ids[0, start:stop].tolist(), buffer, stop - start))
    torch.testing.assert_close(torch.cat(found), expected, rtol=2e-3, atol=2e-3)
