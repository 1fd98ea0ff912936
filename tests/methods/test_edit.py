"""Edits of packs: what they say, what they compute, and that the rest stays as it is, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kp_core import KnowledgePack, PackStore, Session
from kp_core.errors import KnowledgePackError, PackError
from kp_core.packs.pack import Edit, common_length
from kp_methods import edit
from tests.conftest import tiny_engine

TEXT = "The mill of Veyl has four sails. It was built in 1802 by Orla Venn. It grinds barley and rye on Thursdays."
ASKED = "\n\nHow many sails has it?"
AT_HAND: dict[str, Any] = {"squash_above": 9.0}

Counted = Callable[[], int]


@contextmanager
def counting(engine: Session) -> Iterator[Counted]:
    """How many tokens go through the model meanwhile."""
    model: Any = engine.engine.model  # type: ignore[attr-defined]
    count = 0
    plain = {name: getattr(model, name) for name in ("forward", "forward_among")}

    def forward(ids: Any, *rest: Any, **options: Any) -> Any:
        nonlocal count
        count += len(ids)
        return plain["forward"](ids, *rest, **options)

    def forward_among(ids: Any, *rest: Any, **options: Any) -> Any:
        nonlocal count
        count += len(ids)
        return plain["forward_among"](ids, *rest, **options)

    model.forward, model.forward_among = forward, forward_among
    try:
        yield lambda: count
    finally:
        del model.forward, model.forward_among


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest) -> Session:
    return tiny_engine(dtype=getattr(torch, request.param), chunk_tokens=16)


@pytest.fixture
def pack(engine: Session) -> KnowledgePack:
    return engine.build_pack(TEXT, namespace="mill")


def same_answer(engine: Session, pack: KnowledgePack, folder: Path) -> None:
    """From KV, from the forward pass alone, from a pack whose KV was lost, and from plain text: the same bits."""
    logits = [engine.prefill(f"{pack.text}{ASKED}", reuse=False).logits]
    for name, each, reuse in (("kv", pack, True), ("kv", pack, False), ("lazy", pack.without_kv(), True)):
        store = PackStore(folder / name)
        engine.clear_cache()
        logits.append(engine.prefill(f"{store.put(each)}{ASKED}", view=store.view("mill"), reuse=reuse).logits)
    assert all(torch.equal(logits[0], each) for each in logits[1:])


def test_an_erratum_is_all_that_is_computed(engine: Session, pack: KnowledgePack, tmp_path: Path) -> None:
    store = PackStore(tmp_path)
    old = store.put(pack)
    engine.prefill(f"{old}{ASKED}", view=store.view("mill"))
    with counting(engine) as computed:
        made = edit.amend(pack, "four", "six", engine, **AT_HAND)
        assert computed() == len(made.token_ids) - len(pack.token_ids)
    own = len(pack.token_ids)
    assert made.kv is not None
    assert pack.kv is not None
    assert made.kv.slice(0, own).equal(pack.kv)
    assert made.token_ids[:own] == pack.token_ids
    assert made.text.startswith(TEXT + "\n")
    assert made.text.count("has six sails") == made.text.count("\n") == 1
    assert made.errata_start == own
    assert edit.current_text(made) == TEXT.replace("four", "six")
    new = store.put(made)
    assert new != old
    assert store.get(old).text == TEXT
    assert store.get(old).kv.equal(pack.kv)  # type: ignore[union-attr]
    assert store.get(new).history == made.history == (Edit("amend", "four", "six"),)
    usage = engine.prefill(f"{new}{ASKED}", view=store.view("mill")).usage
    assert usage.errata_tokens == len(made.token_ids) - own
    assert usage.approximate_tokens == 0
    assert usage.computed_tokens == usage.prompt_tokens - len(pack.prefix)
    same_answer(engine, made, tmp_path)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_neox", "gemma"])
@pytest.mark.parametrize("place", ["user", "system", "own"])
def test_warm_is_cold_on_other_architectures_and_at_other_places(architecture: str, place: str, tmp_path: Path) -> None:
    engine = tiny_engine(architecture, torch.bfloat16, chunk_tokens=16)
    where: Any = [{"role": "user", "content": "Of mills: {pack}"}] if place == "own" else place
    pack = engine.build_pack(TEXT, namespace="mill", compiled_for=where)
    made = edit.amend(pack, "four", "six", engine, compiled_for=where if place == "own" else None, **AT_HAND)
    assert made.token_ids[: len(pack.token_ids)] == pack.token_ids
    store = PackStore(tmp_path)
    view, asked = store.view("mill"), f"{'Of mills: ' if place == 'own' else ''}{store.put(made)}{ASKED}"
    placement: Any = "system" if place == "system" else "in_place"
    engine.clear_cache()
    warm = engine.prefill(asked, view=view, placement=placement)
    assert warm.usage.reused_tokens >= len(made.token_ids)
    assert torch.equal(warm.logits, engine.prefill(asked, view=view, placement=placement, reuse=False).logits)


def test_what_stands_before_an_erratum_stays_in_memory(tmp_path: Path) -> None:
    engine, store = tiny_engine(chunk_tokens=64), PackStore(tmp_path)
    texts = ["A first pack. " * 12, TEXT + " And so on." * 12]
    first, second = engine.build_packs(texts, namespace="mill", progress=False)
    a, b, view = store.put(first), store.put(second), store.view("mill")
    c = store.put(edit.amend(second, "four", "six", engine, **AT_HAND))
    engine.clear_cache()
    engine.prefill(f"{a}\n{b}{ASKED}", view=view)
    warm = engine.prefill(f"{a}\n{c}{ASKED}", view=view)
    behind = len(warm.prompt) - warm.prompt.spans[-1].stop
    assert warm.usage.computed_tokens == warm.usage.errata_tokens + behind
    plain = f"{first.text}\n{store.get(c).text}{ASKED}"
    assert torch.equal(warm.logits, engine.prefill(plain, reuse=False).logits)


def test_in_a_conversation_the_new_handle_brings_its_erratum_alone(
    engine: Session, pack: KnowledgePack, tmp_path: Path
) -> None:
    store = PackStore(tmp_path)
    made = edit.amend(pack, "four", "six", engine, **AT_HAND)
    again = edit.amend(made, "six", "eight", engine, **AT_HAND)
    old, new, last = map(store.put, (pack, made, again))
    talk = [{"role": "user", "content": f"{old}{ASKED}"}, {"role": "assistant", "content": "Four."}]
    before = engine.prefill(talk, view=store.view("mill")).prompt
    talk.append({"role": "user", "content": f"{new}{ASKED}"})
    found = engine.prefill(talk, view=store.view("mill"))
    kept = before.breaks[-1]
    assert found.prompt.token_ids[:kept] == before.token_ids[:kept]
    assert found.usage.reused_tokens >= kept
    assert found.usage.errata_tokens == len(found.prompt.spans[1])
    assert found.usage.computed_tokens < len(pack.token_ids) + found.usage.errata_tokens
    shown = engine.template.text(found.prompt)
    assert shown.count(TEXT) == 1
    assert f"user\n{made.edits.errata[0]}{ASKED}" in shown
    assert torch.equal(found.logits, engine.prefill(talk, view=store.view("mill"), reuse=False).logits)
    talk += [{"role": "assistant", "content": "Six."}, {"role": "user", "content": f"{last}{ASKED}"}]
    shown = engine.template.text(engine.prefill(talk, view=store.view("mill")).prompt)
    assert shown.count(TEXT) == 1
    assert shown.index(made.edits.errata[0]) < shown.index(again.edits.errata[0])
    # The text of an earlier version is no handle.
    sent = [{"role": "user", "content": f"{TEXT}{ASKED}"}, *talk[1:3]]
    assert engine.template.text(engine.prefill(sent, view=store.view("mill")).prompt).count(TEXT) == 2


def test_what_a_conversation_says_last_of_a_field_is_what_the_last_version_says(
    engine: Session, pack: KnowledgePack, tmp_path: Path
) -> None:
    store = PackStore(tmp_path)
    six = edit.amend(pack, "four", "six", engine, **AT_HAND)
    back = edit.amend(edit.amend(six, "six", "four", engine, **AT_HAND), "1802", "1820", engine, **AT_HAND)
    again = edit.amend(edit.amend(six, "six", "eight", engine, **AT_HAND), "eight", "six", engine, **AT_HAND)

    def last(*packs: KnowledgePack) -> str:
        talk = [{"role": "user", "content": f"{store.put(each)}{ASKED}"} for each in packs]
        shown = engine.template.text(engine.prefill(talk, view=store.view("mill")).prompt)
        return shown.rpartition("user\n")[2].partition(ASKED)[0]

    assert last(pack, six, back) == back.text
    assert last(pack, six, pack) == TEXT
    assert last(pack, six, pack, six) == six.edits.errata[0]
    eight = edit.amend(six, "six", "eight", engine, **AT_HAND)
    assert again.edits.errata == six.edits.errata
    assert last(pack, six, eight, again) == six.edits.errata[0]
    assert last(pack, six, edit.amend(six, "1802", "1820", engine, **AT_HAND)).count("\n") == 0


def test_errata_stand_in_order_and_a_later_one_replaces_that_of_its_field(
    engine: Session, pack: KnowledgePack, tmp_path: Path
) -> None:
    one = edit.amend(pack, "four", "six", engine, **AT_HAND)
    two = edit.amend(one, "1802", "1820", engine, **AT_HAND)
    assert two.kv is not None
    assert one.kv is not None
    assert two.kv.slice(0, len(one.token_ids)).equal(one.kv)
    assert two.edits.starts == (len(pack.token_ids), len(one.token_ids))
    assert two.errata_start == len(pack.token_ids)
    three = edit.amend(two, "six sails", "no sails", engine, **AT_HAND)
    lines = [each.line for each in three.edits.corrections]
    assert three.text == "\n".join((TEXT, *lines))
    assert ["1820" in lines[0], "no sails" in lines[1], "six" in "".join(lines)] == [True, True, False]
    now = TEXT.replace("four", "no").replace("1802", "1820")
    assert edit.current_text(three) == now
    assert [each.old for each in three.history] == ["four", "1802", "six sails"]
    same_answer(engine, three, tmp_path)
    # By what the text itself says, and inside of what an earlier correction said.
    assert edit.current_text(edit.amend(one, "four", "five", engine, **AT_HAND)) == TEXT.replace("four", "five")
    long = edit.amend(pack, "four", "six or seven", engine, **AT_HAND)
    assert edit.current_text(edit.amend(long, "seven", "nine", engine, **AT_HAND)) == TEXT.replace(
        "four", "six or nine"
    )
    wide = edit.amend(two, "six sails. It was built in 1820", "a wheel of 1820", engine, **AT_HAND)
    assert edit.current_text(wide) == TEXT.replace("four sails. It was built in 1802", "a wheel of 1820")
    assert len(wide.edits.corrections) == 1
    back = edit.amend(one, "six", "four", engine, **AT_HAND)
    assert (back.text, back.edits.starts, len(back.history)) == (TEXT, (), 2)
    assert back.errata_start == len(back.token_ids)
    assert back.kv is not None
    assert pack.kv is not None
    assert back.kv.equal(pack.kv)


def test_errata_of_an_earlier_wording_still_count(
    engine: Session, pack: KnowledgePack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as then:
        then.setattr(edit, "_WORDING", 'Correction: wherever the text above says "{old}", read "six". {sentence}')
        written = edit.amend(pack, "four", "six", engine, **AT_HAND)
    line = 'Correction: wherever the text above says "four", read "six". The mill of Veyl has six sails.'
    assert written.text == f"{TEXT}\n{line}"
    store = PackStore(tmp_path)
    old = store.get(store.put(written))
    assert (old.history, old.edits.errata) == ((Edit("amend", "four", "six"),), (line,))
    assert edit.current_text(old) == edit.squash(old, engine).text == TEXT.replace("four", "six")
    more = edit.amend(old, "1802", "1820", engine, **AT_HAND)
    assert more.token_ids[: len(old.token_ids)] == old.token_ids
    assert more.edits.errata[0] == line
    assert edit.current_text(more) == TEXT.replace("four", "six").replace("1802", "1820")
    other = edit.amend(old, "six", "nine", engine, **AT_HAND)
    assert len(other.edits.errata) == 1
    assert edit.current_text(other) == TEXT.replace("four", "nine")
    same_answer(engine, more, tmp_path)


def test_errata_are_squashed_into_the_text(engine: Session, pack: KnowledgePack, tmp_path: Path) -> None:
    made = edit.amend(edit.amend(pack, "four", "six", engine, **AT_HAND), "rye", "oats", engine, **AT_HAND)
    plain = engine.build_pack(edit.current_text(made), namespace="mill")
    for found in (
        edit.squash(made, engine),
        edit.amend(edit.amend(pack, "four", "six", engine), "rye", "oats", engine),
    ):
        assert (found.text, found.token_ids) == (plain.text, plain.token_ids)
        assert (found.edits.starts, found.errata_start) == ((), len(found.token_ids))
        assert found.kv is not None
        assert plain.kv is not None
        assert found.kv.equal(plain.kv)
        assert [each.how for each in found.history if each.how != "squash"] == ["amend", "amend"]
    assert edit.squash(pack, engine) is pack
    # A conversation that holds the first version hears what has changed.
    store = PackStore(tmp_path)
    asked = [{"role": "user", "content": f"{store.put(part)}{ASKED}"} for part in (pack, edit.squash(made, engine))]
    shown = engine.template.text(engine.prefill(asked, view=store.view("mill")).prompt)
    assert "\n".join(made.edits.errata) in shown
    assert plain.text not in shown


def test_a_long_pack_keeps_its_erratum(engine: Session) -> None:
    pack = engine.build_pack(TEXT + " And so on." * 60)
    made = edit.amend(pack, "four", "six", engine)
    assert made.edits.corrections
    assert len(made.token_ids) < 1.2 * len(pack.token_ids)


def test_rebuilding_computes_from_the_first_token_that_differs(engine: Session, pack: KnowledgePack) -> None:
    text = TEXT.replace("barley", "oats")
    engine.prefill("Hello.")
    with counting(engine) as computed:
        made = edit.rebuild(pack, text, engine)
        kept = common_length(pack.token_ids, made.token_ids)
        assert computed() == len(made.token_ids) - kept
    plain = engine.build_pack(text, namespace="mill")
    assert made.kv is not None
    assert plain.kv is not None
    assert made.kv.equal(plain.kv)
    assert (made.token_ids, made.prefix, made.text) == (plain.token_ids, plain.prefix, text)
    assert engine.tokenizer.decode(made.token_ids[:kept]).endswith("It grinds ")
    assert made.history == (Edit("rebuild", "barley", "oats"),)
    amended = edit.amend(pack, "four", "six", engine, **AT_HAND)
    assert edit.rebuild(amended, text, engine).kv.equal(plain.kv)  # type: ignore[union-attr]


def test_overwriting_keeps_what_stands_behind_and_says_so(
    engine: Session, pack: KnowledgePack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = edit.overwrite(pack, "1802", "in the spring of 1820", engine)
    assert "has seen the old value" in caplog.text
    assert made.kv is not None
    assert pack.kv is not None
    plain = engine.build_pack(made.text, namespace="mill")
    assert plain.kv is not None
    assert made.token_ids == plain.token_ids
    head = next(at for at, pair in enumerate(zip(pack.token_ids, made.token_ids, strict=False)) if len(set(pair)) == 2)
    tail = len(" by Orla")
    grown = len(made.token_ids) - len(pack.token_ids)
    assert grown > 0
    assert made.kv.slice(0, head).equal(pack.kv.slice(0, head))
    exact, close = plain.kv.slice(head, head + 3), made.kv.slice(head, head + 3)
    for mine, theirs in zip((*close.keys, *close.values), (*exact.keys, *exact.values), strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.05 if mine.dtype == torch.bfloat16 else 1e-4, rtol=0.02)
    ends = (slice(len(made.token_ids) - tail, None), slice(len(pack.token_ids) - tail, None))
    for mine, old in zip(made.kv.values, pack.kv.values, strict=True):
        assert torch.equal(mine[:, ends[0]], old[:, ends[1]])
    moved: Any = engine.engine.model.rope.move(pack.kv, grown)  # type: ignore[attr-defined]
    for mine, old in zip(made.kv.keys, moved.keys, strict=True):
        assert torch.equal(mine[:, ends[0]], old[:, ends[1]])
    # It is never taken for exact.
    store = PackStore(tmp_path)
    asked = f"{store.put(made)}{ASKED}"
    usage = engine.prefill(asked, view=store.view("mill")).usage
    assert usage.approximate_tokens == len(made.token_ids)
    store.put(plain)
    assert engine.prefill(asked, view=store.view("mill")).usage.approximate_tokens == 0
    other = edit.overwrite(engine.build_pack(made.text.replace("spring", "autumn")), "autumn", "spring", engine)
    assert other.text == made.text
    assert other.fingerprint != made.fingerprint


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("five", "six", "does not say 'five'"),
        ("Four sails", "six", "Nearest to it is"),
        ("It", "She", r"2 times: in .*has four sails\. It was built.* and .*It grinds"),
        ("sail", "wing", "does not say 'sail'"),
        ("four", "", "expected words"),
        ("four", " \n", "expected words"),
        ("", "four", "Got old=''"),
        (None, "six", "Got old=None; expected words"),
        ("four", 5, "Got new=5; expected words"),
        ("four", "four", "expected another text"),
    ],
)
def test_what_cannot_be_found_once_is_refused(pack: KnowledgePack, old: Any, new: Any, said: str) -> None:
    engine = tiny_engine(dtype=pack.kv.dtype, chunk_tokens=16)  # type: ignore[union-attr]
    for change in (edit.amend, edit.overwrite):
        with pytest.raises(PackError, match=r"Got str; expected a pack: `store\.get\(handle\)`"):
            change("kp:veyl/1", "a", "b", engine)  # type: ignore[operator]
    with pytest.raises(PackError, match=r"Got str; expected a pack"):
        edit.rebuild("kp:veyl/1", "b", engine)  # type: ignore[arg-type]
    for how in ("amend", "overwrite", "rebuild"):
        with pytest.raises(PackError, match=said):
            edit.edit(pack, old, new, engine, how=how)  # type: ignore[arg-type]


def test_what_cannot_be_edited_is_refused(engine: Session, pack: KnowledgePack) -> None:
    steered = pack.steer(engine.make_steering([("an 7 er", "er 42")], progress=False))
    foreign = tiny_engine("qwen3").build_pack(TEXT)
    amended = edit.amend(pack, "four", "six", engine, **AT_HAND)
    own = engine.build_pack(TEXT, compiled_for=[{"role": "user", "content": "Of mills: {pack}"}])
    refused: list[tuple[KnowledgePack, str, str]] = [
        (pack.without_kv(), "amend", "is lazy"),
        (steered, "amend", "is steered"),
        (foreign, "amend", "was not made by this model"),
        (amended, "overwrite", "squash"),
        (own, "amend", "compiled for another place"),
        (pack, "mend", "Got how='mend'"),
    ]
    for each, how, said in refused:
        with pytest.raises(KnowledgePackError, match=said):
            edit.edit(each, "1802", "1820", engine, how=how)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[]", "{}", '["",[],"0",[],[],[]]', '["",[],0,[],[9,3],[]]', "[1,[],0,[],[],[]]"])
def test_edits_that_nobody_made_are_refused(pack: KnowledgePack, text: str) -> None:
    with pytest.raises(PackError, match="edits of a pack"):
        KnowledgePack(TEXT, "mill", (), pack.prefix, pack.fingerprint, provenance={"kp:edits": text})
