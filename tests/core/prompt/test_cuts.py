"""Where a prompt with several packs is cut: what it costs beside text, and what the next prompt finds again."""

from hypothesis import given
from hypothesis import strategies as st

from kp_core import KnowledgePack
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import Prefix
from kp_core.packs.view import PackRef
from kp_core.prompt.cuts import cut
from kp_core.prompt.prompt import Prompt, Span

HEAD, GAP, QUESTION = 10, 2, 20


def message(sizes, *, home=True, question=QUESTION, lead=0, batches=None):
    """A prompt of one message: a lead, packs of `sizes` tokens `GAP` apart, a question; the first pack is at home."""
    ids = [1] * (HEAD + lead)
    spans = []
    for number, size in enumerate(sizes):
        ids += [2] * GAP if number else []
        own = tuple(100 + number for _ in range(size))
        cuts = (HEAD, HEAD + lead) if lead else (HEAD,)
        prefix = Prefix(tuple(ids), cuts) if home and not number else Prefix((7,), (1,))
        pack = KnowledgePack(f"pack {number}", "a", own, prefix, ModelFingerprint.unknown())
        memory = {"memory": True, "batch": batches[number]} if batches else {}
        spans.append(Span(len(ids), len(ids) + size, PackRef(f"kp:a/{number}", pack, **memory)))
        ids += own
    return Prompt((*ids, *[3] * question), tuple(spans), (HEAD,))


def computed(prompt, longest=1024, **options):
    """The chunks behind the head that have to be computed: those of no pack that brings its KV."""
    found = cut(prompt, longest, **options)
    own = {(span.start, span.stop) for span in found.own}
    inside = [(a, b) for a, b in found.chunks if a >= HEAD and not any(s <= a and b <= e for s, e in own)]
    return [b - a for a, b in inside]


def cost(chunks, per_pass):
    """Of so many tokens in so many passes, in tokens."""
    return sum(chunks) + per_pass * len(chunks)


def test_short_facts_are_computed_in_one_pass_with_the_question():
    assert computed(message([25, 25, 25])) == [2 * (GAP + 25) + QUESTION]
    assert computed(message([25, 25, 25], home=False)) == [3 * 25 + 2 * GAP + QUESTION]


def test_longer_packs_are_found_again_one_by_one():
    assert computed(message([140, 140])) == [142, QUESTION]
    assert computed(message([140] * 4)) == [426, QUESTION]
    assert computed(message([500] * 4)) == [502, 502, 502, QUESTION]


def test_where_passes_are_joined_each_pack_is_found_again():
    assert computed(message([140] * 4), joins=True) == [142, 142, 142, QUESTION]
    assert computed(message([140] * 4, home=False), joins=True) == [140, 142, 142, 142, QUESTION]
    # Each chunk has attention of its own, so short facts share one.
    facts = message([25] * 7, home=False)
    assert computed(facts, joins=True) == [3 * 25 + 2 * GAP, 3 * (25 + GAP), GAP + 25, QUESTION]


@given(st.lists(st.integers(1, 600), min_size=2, max_size=24), st.integers(0, 5000))
def test_the_longer_the_past_the_longer_the_joined_parts(sizes, lead):
    prompt = message(sizes, home=False, lead=lead)
    cuts = [0, *(stop for _, stop in cut(prompt, 10**6, joins=True).chunks)]
    for span in prompt.spans[1:-1]:
        last = max(at for at in cuts if at < span.stop)
        came = span.stop - last
        assert (span.stop in cuts) == (came >= 64 and came >= (last - 256) / 2)
    # So of a combination that begins like another one, at most a third of what they share is computed again.
    assert all(span.stop - max(at for at in cuts if at <= span.stop) <= max(64, span.stop / 3) for span in prompt.spans)
    assert prompt.spans[-1].stop in cuts


@given(st.lists(st.integers(1, 600), min_size=1, max_size=24), st.integers(0, 400))
def test_the_first_use_costs_no_more_than_text(sizes, question):
    prompt = message(sizes, question=question)
    tokens = len(prompt) - HEAD
    text = [1024] * (tokens // 1024) + ([tokens % 1024] if tokens % 1024 else [])
    # A little of what is computed may go into what the next use finds. What a pass costs depends on the machine.
    for per_pass in (45, 90):
        assert cost(computed(prompt), per_pass) <= 1.03 * cost(text, per_pass) + 3 * GAP
    # An end of a chunk of the longest kind comes wherever it comes.
    assert len(computed(prompt)) <= len(text) + 1 + len(sizes)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(1, 200), st.integers(1, 200), st.booleans())
def test_cuts_do_not_depend_on_the_question(sizes, one, other, joins):
    first, second = (message(sizes, question=question) for question in (one, other))
    stop = first.spans[-1].stop
    one_way, other_way = (cut(each, 1024, joins=joins).chunks for each in (first, second))
    assert [c for c in one_way if c[1] <= stop] == [c for c in other_way if c[1] <= stop]


def test_a_first_pack_that_is_not_at_home_is_cut_off_where_it_is_worth_a_pass():
    assert computed(message([64], home=False, lead=30)) == [30, 64, QUESTION]
    assert computed(message([63], home=False, lead=30)) == [93 + QUESTION]


def test_packs_that_came_one_by_one_are_cut_apart_wherever_the_memory_grows():
    ends = []
    for count in range(1, 6):
        prompt = message([20] * count, batches=range(count))
        ends.append([span.stop for span in prompt.spans])
        stops = {stop for _, stop in cut(prompt, 1024).chunks}
        assert set(ends[-1]) <= stops
    together = message([20] * 4, batches=[0, 0, 1, 1])
    assert computed(together) == [GAP + 20, 2 * (GAP + 20), QUESTION]


def test_a_break_right_behind_a_pack_is_a_cut():
    prompt = message([25, 25])
    stop = prompt.spans[1].stop
    broken = Prompt(prompt.token_ids, prompt.spans, (HEAD, stop))
    assert stop in {stop for _, stop in cut(broken, 1024).chunks}
