"""The conformance kit of composers, on toys written against the protocol alone."""

import pytest
import torch

from kp_core import Composer, load_engine
from tests.kits import check_composer, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def engine():
    """An engine that toys may spoil."""
    return load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(merges=7))


class Toy(Composer):
    """Keeps the KV of packs as it is."""

    key = "toy"

    def layout(self, prompt, moved, host):
        return prompt, moved

    def fill(self, region, packs, room, move):
        for span, pack in zip(region.spans, packs, strict=True):
            place = room.slice(span.start - region.start, span.stop - region.start)
            for target, tensor in zip((*place.keys, *place.values), (*pack.kv.keys, *pack.kv.values), strict=True):
                target.copy_(tensor)
        return ()


class Keyless(Toy):
    key = ""


class Elsewhere(Toy):
    def layout(self, prompt, moved, host):
        return prompt, (*moved, prompt.until(3))


class Boasting(Toy):
    exact = True


class Beyond(Toy):
    def fill(self, region, packs, room, move):
        return [len(region)]


class Random(Toy):
    def fill(self, region, packs, room, move):
        super().fill(region, packs, room, move)
        for value in room.values:
            value.add_(torch.rand_like(value))
        return ()


class Grasping(Toy):
    """Changes the KV of its packs."""

    def fill(self, region, packs, room, move):
        with torch.inference_mode():
            packs[0].kv.values[0].mul_(2)
        return super().fill(region, packs, room, move)


class Trampling(Toy):
    """Changes the KV before its region."""

    def fill(self, region, packs, room, move):
        with torch.inference_mode():
            room.values[0].as_strided((region.start,), (1,), 0).mul_(2)
        return super().fill(region, packs, room, move)


def test_a_small_composer_passes(engine):
    check_composer(Toy(), engine)
    check_composer(Toy())


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (object, "A composer is a `Composer`"),
        (Keyless, "`key` is a text that does not change"),
        (Elsewhere, "`layout` returns spans of the prompt"),
        (Boasting, "An `exact` composer gives the logits of a plain prefill"),
        (Beyond, r"`fill` returns tokens of its region. Got: .*'toy' wants the tokens \d+ to \d+"),
        (Random, "Equal regions get equal KV each time"),
        (Grasping, "`fill` leaves the KV of packs as it is"),
        (Trampling, "`fill` leaves KV outside of its region as it is"),
    ],
)
def test_a_broken_rule_is_named(engine, broken, rule):
    engine.clear_cache()
    with pytest.raises(AssertionError, match=rule):
        check_composer(broken(), engine)
