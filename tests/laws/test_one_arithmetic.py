"""The KV of a token depends on the tokens before it and the model alone, however its prompt was reached."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kp_core import KVTensors, Packs, PackStore, PackView
from kp_core.engines.local.buffer import TILE, KVBuffer
from kp_core.plan.request import Request
from tests.conftest import tiny_engine
from tests.matrix import models

WORDS = (
    "The keeper of the 7 lamps counts an ether; a man, then another, é, 中文 42.\n\nVeyl (the oldest) has 3 ferries. "
)
SIZES = (1, 9, 40, TILE // 2 - 30, TILE - 40, TILE + 10)
MOST = 1700

quick = settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
thorough = settings(quick, max_examples=30)


@dataclass(frozen=True)
class Talk:
    """Turns of a user, each a list of `(text, how)`, `how` a pack comes or blank; and the answers between them."""

    turns: tuple[tuple[tuple[str, str], ...], ...]
    answers: tuple[str | None, ...]
    """`None` for what the model itself says."""


@dataclass(frozen=True)
class Way:
    """How a prompt is reached."""

    pass_tokens: int
    source: str
    earlier: tuple[tuple[int, int, str, int], ...]
    """Prompts before it: how many of its turns, of how many characters, what then comes, tokens of an answer."""


def text(size, start):
    return (WORDS * 9)[start : start + size]


texts = st.builds(text, st.sampled_from(SIZES), st.integers(0, len(WORDS)))
# A pack that was compiled for where it stands, for the start of a message, without KV, or sent as text.
packs = st.tuples(texts.filter(lambda it: len(it.strip()) > 8), st.sampled_from(("home", "user", "lazy", "text")))
pieces = st.one_of(packs, texts.map(lambda it: (it, "")))
talks = st.lists(st.lists(pieces, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).flatmap(
    lambda turns: st.builds(
        Talk,
        st.just(tuple(turns)),
        st.tuples(*[st.sampled_from([None, "An er.", WORDS]) for _ in turns[1:]]),
    )
)
talks = talks.filter(lambda talk: sum(len(piece) + 60 for turn in talk.turns for piece, _ in turn) < MOST)
ways = st.builds(
    Way,
    st.sampled_from((5, 16, 100, TILE - 1, TILE + 1, 4096)),
    st.sampled_from(("memory", "store", "read anew", "kept")),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 700), texts, st.sampled_from((0, 1, 6))), max_size=3).map(
        tuple
    ),
)


# Behind packs that cross the first edge of a tile and the second, decoded tokens and a third turn.
LONG = Talk(
    (((text(200, 5), "home"), (text(9, 3), ""), (text(150, 40), "home")), ((text(180, 60), "user"),), (("Who?", ""),)),
    (None, "An er."),
)
ALONG = (
    Way(100, "read anew", ((1, 240, " Or?", 6), (2, 90, "", 1))),
    Way(TILE + 1, "memory", ((1, 300, "", 6),)),
    Way(16, "kept", ()),
)


class Memory(Packs):
    """Packs that lie in no store."""

    def __init__(self, store):
        handles = list(store.handles("law"))
        self._packs = {str(each): [store.get(each, entry.key) for entry in store.entries(each)] for each in handles}

    def get(self, handle, key=None):
        found = self._packs[str(handle)]
        return next((pack for pack in found if key is None or key.fits(pack)), found[0])

    peek = get


def engine_of(architecture, dtype):
    engine = tiny_engine(architecture, dtype)
    if "bitwise" not in engine.engine.supports:
        pytest.skip(f"not bitwise: {engine.engine.lacks['bitwise']}")
    engine.clear_cache()
    return engine


def in_one_pass(engine, ids):
    """The oracle: KV of all tokens, and the logits behind each, of a single forward pass of the model."""
    model = engine.engine.model
    buffer = KVBuffer(model.shape, len(ids))
    with torch.inference_mode():
        logits = model.forward(ids, buffer, len(ids))
    return buffer.read(0, len(ids)), logits


def reached(engine, messages, **options):
    """The prompt, its KV and the logits behind it, as a request has them."""
    plan = engine._plan(messages, Request.of(options))
    run = engine.engine.prefill(plan, len(plan.prompt))
    try:
        return plan.prompt, run.buffer.read(0, len(plan.prompt)), run.logits
    finally:
        run.close()


def in_tree(engine, ids, view):
    """The KV of the longest beginning of `ids` that is in memory for whom may read all packs."""
    path = engine.engine.tree.match(tuple(ids), owners=view.namespaces, logits=False)
    path.release()
    return KVTensors.concat([kv for _, kv in path.held])


def compiled(engine, store, talk):
    """The messages of a talk, with the handles of its packs, which are put into `store`, and as plain text."""
    sent, plain = [], []
    for turn, answer in zip(talk.turns, (*talk.answers, ""), strict=True):
        handles = told = ""
        for piece, how in turn:
            if how in ("home", "user", "lazy"):
                place = [*plain, {"role": "user", "content": f"{told}{{pack}}"}] if how == "home" else "user"
                pack = engine.build_pack(piece, namespace="law", compiled_for=place)
                handles += f"{store.put(pack.without_kv() if how == 'lazy' else pack)}\n"
            else:
                handles += f"{piece}\n"
            told += f"{piece}\n"
        said = engine.generate([*plain, user(told)], max_tokens=9, reuse=False).text if answer is None else answer
        sent += [user(handles), {"role": "assistant", "content": said or "No."}]
        plain += [user(told), {"role": "assistant", "content": said or "No."}]
    return sent[:-1], plain[:-1]


def user(content):
    return {"role": "user", "content": content}


def view_of(way, folder):
    store = PackStore(folder)
    return PackView(Memory(store), ("law",)) if way.source == "memory" else store.view("law")


def check(engine, talk, way, folder):
    """Reach the prompt of a talk in a way, and compare all there is of it with one pass over its plain text."""
    store = PackStore(folder)
    engine.engine.scheduler.pass_tokens = 4096
    sent, plain = compiled(engine, store, talk)
    ids = engine.prefill(plain, reuse=False).prompt.token_ids
    assert talk is not LONG or len(ids) > 2 * TILE
    engine.engine.scheduler.pass_tokens = max(way.pass_tokens, len(ids) // 60)
    view, keep = view_of(way, folder), "always" if way.source == "kept" else "never"
    if way.source == "kept":
        engine.clear_cache()
        engine.generate(sent, view=view, max_tokens=1, keep=keep)
        engine.when_idle(lambda: None).result(60)
    engine.clear_cache()
    for turns, cut, tail, tokens in way.earlier:
        *before, last = plain[: 2 * min(turns, len(talk.turns)) - 1]
        asked = [*sent[: len(before)], user(last["content"][:cut] + tail)]
        engine.generate(asked, view=view, keep=keep, max_tokens=tokens) if tokens else engine.prefill(asked, view=view)
    prompt, kv, logits = reached(engine, sent, view=view, keep=keep)
    assert prompt.token_ids == ids
    answer = engine.generate(sent, view=view, keep=keep, max_tokens=7)
    whole, every = in_one_pass(engine, (*ids, *answer.token_ids))
    expected = whole.slice(0, len(ids)), every[len(ids) - 1]
    assert kv.equal(expected[0])
    assert torch.equal(logits, expected[1])
    # So are the tokens that were decoded, and what is left of all for the next prompt.
    assert torch.equal(answer.logits, expected[1])
    assert answer.token_ids == tuple(every[len(ids) - 1 : -1].argmax(-1).tolist())
    known = in_tree(engine, (*ids, *answer.token_ids), view)
    assert known.tokens >= len(ids) + len(answer.token_ids) - 1
    assert known.equal(whole.slice(0, known.tokens))
    # The plain text by itself, from a tree that may not give it the packs, and from none.
    for reuse in (True, False):
        _, kv, logits = reached(engine, plain, reuse=reuse)
        assert kv.equal(expected[0])
        assert torch.equal(logits, expected[1])


@models
@pytest.mark.parametrize("way", ALONG, ids=lambda way: way.source)
def test_a_long_prompt_has_the_same_bits_however_it_was_reached(architecture, dtype, way, tmp_path):
    check(engine_of(architecture, dtype), LONG, way, tmp_path)


@models
@quick
@given(talk=talks, way=ways)
def test_a_prompt_has_the_same_bits_however_it_was_reached(architecture, dtype, talk, way, tmp_path):
    check(engine_of(architecture, dtype), talk, way, tmp_path / uuid.uuid4().hex)


@pytest.mark.slow
@models
@thorough
@given(talk=talks, way=ways)
def test_many_prompts_have_the_same_bits_however_they_were_reached(architecture, dtype, talk, way, tmp_path):
    check(engine_of(architecture, dtype), talk, way, tmp_path / uuid.uuid4().hex)


@models
@settings(quick, max_examples=1)
@given(talk=talks, tails=st.lists(texts, min_size=8, max_size=8), pass_tokens=st.sampled_from((16, 100, 4096)))
def test_eight_at_once_have_the_bits_of_each_alone(architecture, dtype, talk, tails, pass_tokens, tmp_path):
    engine, store = engine_of(architecture, dtype), PackStore(tmp_path / uuid.uuid4().hex)
    sent, _ = compiled(engine, store, talk)
    view = store.view("law")
    engine.clear_cache()
    engine.engine.scheduler.pass_tokens = pass_tokens
    asked = [[*sent[:-1], user(f"{sent[-1]['content']}{tail}")] for tail in tails]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: engine.generate(each, view=view, max_tokens=6), asked))
    for answer in answers:
        ids = (*answer.prompt.token_ids, *answer.token_ids)
        whole, every = in_one_pass(engine, ids)
        at = len(answer.prompt)
        assert torch.equal(answer.logits, every[at - 1])
        assert answer.token_ids == tuple(every[at - 1 : -1].argmax(-1).tolist())
        known = in_tree(engine, ids, view)
        assert known.tokens >= len(ids) - 1
        assert known.equal(whole.slice(0, known.tokens))
