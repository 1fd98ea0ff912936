"""The conformance kit of engines, on ours and on toys written against the protocol alone."""

import itertools
from dataclasses import replace

import pytest

from kp_core import TokenStream
from kp_core.packs.fingerprint import ModelFingerprint
from tests.conftest import tiny_engine
from tests.kits import check_engine, tiny_tokenizer
from tests.matrix import architectures


class Toy:
    """A model whose next token depends on all tokens before it."""

    supports, lacks, max_positions = frozenset(), {}, 512

    def __init__(self):
        self.tokenizer, self.identity = tiny_tokenizer(), replace(ModelFingerprint.unknown(), weights="toy")

    def run(self, plan):
        return TokenStream(lambda stream: self.tokens(plan, stream))

    def tokens(self, plan, stream):
        stream.computed_tokens = len(plan.prompt)
        ids = list(plan.prompt.token_ids)
        for _ in range(plan.token_budget):
            ids.append(self.next(ids, plan))
            yield ids[-1]

    def next(self, ids, plan):
        return sum(at * token for at, token in enumerate(ids)) % 256

    def kv(self, plans):
        raise NotImplementedError


class Magic(Toy):
    supports = frozenset({"magic"})


class Contradicting(Toy):
    supports, lacks = frozenset({"kv"}), {"kv": "it is small"}


class Blind(Toy):
    supports = frozenset({"attention"})


class Eager(Toy):
    def run(self, plan):
        stream = super().run(plan)
        stream.computed_tokens = len(plan.prompt)
        return stream


class Endless(Toy):
    def tokens(self, plan, stream):
        yield from super().tokens(replace(plan, token_budget=plan.token_budget + 9), stream)


class Abrupt(Toy):
    def tokens(self, plan, stream):
        yield from itertools.islice(super().tokens(plan, stream), 2)


class Moody(Toy):
    calls = itertools.count()

    def next(self, ids, plan):
        return next(self.calls)


class Overcounting(Toy):
    def tokens(self, plan, stream):
        yield from super().tokens(plan, stream)
        stream.computed_tokens = len(plan.prompt) + 1


class Swayed(Toy):
    """Packs change its answers."""

    def next(self, ids, plan):
        return super().next(ids, plan) // 2 + 128 * bool(plan.prompt.spans)


class Silent(Toy):
    """Gives up without saying so."""

    def tokens(self, plan, stream):
        if not stream.limit.may_end:
            yield from super().tokens(plan, stream)


def test_an_engine_of_seven_members_passes():
    check_engine(Toy())


@architectures
def test_ours_passes(architecture):
    check_engine(tiny_engine(architecture))


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (object, "has all members of `Engine`"),
        (Magic, "only names of `CAPABILITIES`"),
        (Contradicting, "`lacks` gives reasons only for what `supports` does not name"),
        (Blind, "With `attention`, it has the members of `Attends`"),
        (Eager, "`run` computes nothing before the first token is read"),
        (Endless, "An answer has at most `plan.token_budget` tokens"),
        (Abrupt, "An answer shorter than its budget has the finish 'stop'"),
        (Moody, "Equal greedy plans have equal answers"),
        (Overcounting, "`computed_tokens` counts tokens of the prompt"),
        (Swayed, "A pack gives the answer that its text gives"),
        (Silent, "A stream that its limit ends before a token is 'cancelled'"),
    ],
)
def test_a_broken_rule_is_named(broken, rule):
    with pytest.raises(AssertionError, match=rule):
        check_engine(broken())
