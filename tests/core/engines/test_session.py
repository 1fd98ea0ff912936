"""Sessions on engines of any kind, plans, and background work."""

import atexit
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import kp_core
from kp_core import PackStore, PackView, Session, TokenStream
from kp_core.errors import ModelError, OptionError, UnsupportedRequestError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import PackKey
from kp_core.plan.plan import Sampling
from kp_core.plan.request import OPTIONS
from kp_core.prompt.encoding import PromptEncoder
from kp_core.prompt.template import ChatTemplate
from tests.conftest import tiny_engine, until
from tests.core.prompt.test_template import GUARD, SYSTEM_FIRST, TWO_ROLES
from tests.kits import NaiveComposer, tiny_model, tiny_tokenizer


class Parrot:
    """An engine in one file, which supports nothing beyond plain answers: it says the last message again."""

    def __init__(self):
        self.tokenizer, self.max_positions, self.supports, self.lacks = tiny_tokenizer(), 512, frozenset(), {}
        self.plans = []
        self.identity = replace(ModelFingerprint.unknown(), weights="none")

    def run(self, plan):
        self.plans.append(plan)
        start = plan.prompt.breaks[-1]

        def tokens(stream):
            stream.computed_tokens = len(plan.prompt)
            yield from plan.prompt.token_ids[start : start + plan.token_budget]

        return TokenStream(tokens)

    def kv(self, plans):
        raise AssertionError("not offered, so never asked for")


@pytest.fixture
def parrot():
    return kp_core.load_engine(Parrot())


def test_an_engine_of_seven_members_answers(parrot, tmp_path):
    answer = parrot.generate("Good morning", max_tokens=4)
    assert (answer.text, answer.finish_reason) == ("Good", "length")
    assert "".join(parrot.stream("Good morning", max_tokens=12)) == "Good morning"
    store = PackStore(tmp_path)
    handle = store.put(parrot.build_pack("Two islands.", namespace="isles", lazy=True))
    told = parrot.generate(f"{handle} Which?", view=store.view("isles"), max_tokens=12)
    assert (told.text, told.usage.pack_tokens) == (
        "Two islands.",
        len(parrot.build_pack("Two islands.", lazy=True).token_ids),
    )


def test_a_plan_holds_nothing_of_the_session(parrot, tmp_path):
    parrot.generate("Hi", temperature=0, stop="x", max_tokens=2, cancel=threading.Event(), timeout=60)
    [plan] = parrot.engine.plans
    assert plan.sampling == Sampling(stop="x", max_tokens=2)
    assert type(plan.sampling) is Sampling
    assert not {field.name for field in fields(plan)} & {"limit", "cancel", "request", "view"}


def test_an_engine_that_never_looks_at_the_limit_is_cancelled_after_the_token_in_progress(parrot):
    cancel = threading.Event()
    stream = parrot.stream("Good morning", cancel=cancel, max_tokens=12)
    assert next(stream) == "G"
    cancel.set()
    assert (stream.result().text, stream.result().finish_reason) == ("G", "cancelled")


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda session: session.build_pack("Two islands."), "building packs"),
        (lambda session: session.stream("Hi", tools=[{"name": "tide"}]), "tools and response schemas"),
        (lambda session: session.stream("Hi", response_schema=True), "tools and response schemas"),
        (lambda session: session.stream("Hi", temperature=1.0), "sampled answers"),
        (lambda session: session.prefill("Hi"), "a prefill alone"),
        (lambda session: session.make_steering([("a", "b")]), "making steerings"),
        (lambda session: session.clear_cache(), "clear_cache"),
        (lambda session: session.cached_bytes, "cached_bytes"),
    ],
)
def test_what_an_engine_does_not_support_is_refused_at_the_call(parrot, ask, what):
    with pytest.raises(UnsupportedRequestError, match=rf"Parrot does not offer {what}.*kp_core.load_engine") as caught:
        ask(parrot)
    assert parrot.engine.plans == [], caught


def test_what_is_no_engine_is_refused():
    with pytest.raises(ModelError, match="Got a dict as engine; expected what"):
        kp_core.engines.shared.session_of({})
    with pytest.raises(ModelError, match=r"Got engine='nowhere:make'; expected 'package.module:function'"):
        kp_core.load_engine(engine="nowhere:make")


def test_an_engine_by_its_name():
    session = kp_core.load_engine(None, engine="tests.core.engines.test_session:make_parrot", color="green")
    assert (session.name, session.engine.color) == ("Parrot", "green")


@pytest.fixture
def echo(monkeypatch):
    """A package of somebody else, as it lies among those installed."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "strangers")


@pytest.mark.usefixtures("echo")
def test_an_engine_of_another_package_is_found_by_its_name(tmp_path):
    session = kp_core.load_engine(engine="echo", tokenizer=tiny_tokenizer())
    assert (session.name, session.generate("Good morning", max_tokens=5).text) == ("Echo", "user")
    with pytest.raises(OptionError, match=r"no option 'tokeniser'. Did you mean 'tokenizer'"):
        kp_core.load_engine(engine="echo", tokeniser=None)
    (tmp_path / "model").touch()
    assert kp_core.load_engine(str(tmp_path / "model"), tokenizer=tiny_tokenizer()).name == "Echo"
    with pytest.raises(ModelError, match="Could not load"):
        kp_core.load_engine(str(tmp_path / "model"), engine="hf", tokenizer=tiny_tokenizer())


def test_an_engine_that_is_not_installed_is_refused_with_those_that_are():
    with pytest.raises(ModelError, match=r"Got engine='echo'; .* installed engine: hf.* install it again"):
        kp_core.load_engine(engine="echo")


def make_parrot(model, color):
    made = Parrot()
    made.color = color
    return made


@pytest.mark.parametrize("name", OPTIONS)
def test_a_misspelt_option_is_refused_with_the_near_miss(parrot, name):
    wrong = name[:-1] + name[-1] * 2
    with pytest.raises(OptionError, match=f"no option '{wrong}'. Did you mean '{name}'") as caught:
        parrot.stream("Hi", **{wrong: None})
    assert isinstance(caught.value, TypeError)


def test_one_request_is_planned_once(monkeypatch, tmp_path):
    from kp_core.plan import planner

    engine, store = tiny_engine(), PackStore(tmp_path)
    engine.clear_cache()
    handles = [store.put(engine.build_pack(f"Island {n} is green.", namespace="isles")) for n in range(10)]
    question = "\n".join(map(str, handles)) + "\n\nWhich?"
    calls = []

    def counted(name):
        original = getattr(planner, name)

        def count(*arguments, **options):
            calls.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(planner, name, count)

    counted("plan_regions")
    for _ in ("cold", "warm"):
        calls.clear()
        engine.generate(question, view=store.view("isles"), max_tokens=2)
        assert calls == ["plan_regions"]


def _count(monkeypatch, counts, kind, name):
    original = getattr(kind, name)

    def counted(*arguments, **options):
        counts[(name, arguments[1]) if name == "peek" else name] += 1
        return original(*arguments, **options)

    monkeypatch.setattr(kind, name, counted)


def test_a_request_is_rendered_and_tokenised_once_and_a_handle_is_resolved_once(monkeypatch, tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    handles = [store.put(engine.build_pack(f"Island {n} is green.", namespace="isles")) for n in range(2)]
    question, counts = f"{handles[0]}\n{handles[1]}\n\nWhich?", Counter()
    engine.generate(question, view=store.view("isles"), max_tokens=2)  # Keeps the prefixes of packs.
    for kind, name in ((ChatTemplate, "_prompt"), (PromptEncoder, "encode"), (PackView, "peek")):
        _count(monkeypatch, counts, kind, name)
    engine.generate(question, view=store.view("isles"), max_tokens=2, composer="splice")
    assert counts == {"_prompt": 1, "encode": 1, ("peek", handles[0]): 1, ("peek", handles[1]): 1}
    counts.clear()
    # A pack behind another one may have an entry for this place, which only the rendered prompt names.
    engine.generate(question, view=store.view("isles"), max_tokens=2)
    assert counts == {"_prompt": 1, "encode": 1, ("peek", handles[0]): 1, ("peek", handles[1]): 2}


def test_a_plan_tells_where_kv_comes_from_before_anything_is_computed(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    engine.clear_cache()
    handles = [store.put(engine.build_pack(text, namespace="isles")) for text in ("Green it is.", "Blue it is.")]
    engine.clear_cache()
    lazy = store.put(engine.build_pack("Red it is.", namespace="isles", lazy=True))
    question, view = f"{handles[0]}\n\n{handles[1]}\n\nWhich?", store.view("isles")
    told = engine.explain(question, view=view)
    assert engine.cached_bytes == 0, "nothing was computed"
    assert [(row.source, "Green" in row.what) for row in told.rows[:2]] == [("computed", False), ("pack", True)]
    found = engine.generate(question, view=view, max_tokens=1)
    assert told.counts["computed"] == found.usage.computed_tokens
    assert sum(told.counts.values()) == len(found.prompt)
    again = engine.explain(question, view=view)
    assert dict(again.counts) == {"tree": len(found.prompt)}
    assert "pack" not in engine.explain(f"{lazy}\n\nWhich?", view=view).counts, "a lazy pack is computed"
    shown = str(told)
    assert str(handles[1]) in shown
    assert shown.splitlines()[0].split() == ["tokens", "from", "to", "source", "what"]
    assert told.to_dict()["regions"][1]["tokens"] == told.rows[1].tokens


def test_a_prefill_alone_is_held_to_no_grammar():
    engine = tiny_engine()
    schema = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
    warmed = engine.prefill("When?", response_schema=schema)
    assert warmed.prompt.token_ids == engine.generate("When?", response_schema=schema, max_tokens=40).prompt.token_ids


def test_composed_regions_are_named_in_the_plan(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    handles = [store.put(engine.build_pack(text, namespace="isles")) for text in ("Green it is.", "Blue it is.")]
    question = f"{handles[0]}\n\n{handles[1]}\n\nWhich?"
    engine.clear_cache()
    told = engine.explain(question, view=store.view("isles"), composer=NaiveComposer())
    [row] = [row for row in told.rows if row.source == "composed"]
    assert row.method == "naive"
    assert "naive" in str(told)


def test_background_work_waits_for_requests():
    session = Session(Parrot())
    steps, release, stepped = [], threading.Event(), threading.Event()

    def job():
        for number in range(3):
            steps.append(number)
            stepped.set()
            release.wait(10)
            release.clear()
            yield

    stream = session.stream("Good morning", max_tokens=8)
    next(stream)
    done = session.when_idle(job)
    assert not stepped.wait(0.2), "a request is being answered"
    stream.result()
    for _ in range(3):
        assert stepped.wait(10)
        stepped.clear()
        release.set()
    done.result(10)
    assert steps == [0, 1, 2]
    session.close()


def test_background_work_is_bounded_ends_with_the_session_and_reports_errors():
    session = Session(Parrot())
    assert session.when_idle(lambda: None).result(10) is None
    with pytest.raises(ZeroDivisionError):
        session.when_idle(lambda: 1 // 0).result(10)
    started, release = threading.Event(), threading.Event()

    def blocking():
        started.set()
        release.wait(10)

    first = session.when_idle(blocking)
    assert started.wait(10)
    waiting = [session.when_idle(lambda: None) for _ in range(64)]
    with pytest.raises(ModelError, match="64 jobs wait already"):
        session.when_idle(lambda: None)
    closing = threading.Thread(target=session.close)
    closing.start()
    release.set()
    closing.join(10)
    first.result(10)
    assert all(job.cancelled() or job.done() for job in waiting)
    assert any(job.cancelled() for job in waiting)
    with pytest.raises(ModelError, match="it was closed"):
        session.when_idle(lambda: None)


def test_background_work_that_the_end_of_python_stops_is_no_warning(caplog):
    session = Session(Parrot())

    def job():
        raise RuntimeError(said)

    for said, warned in (("cannot schedule new futures after interpreter shutdown", False), ("Ouch", True)):
        with pytest.raises(RuntimeError, match=said):
            session.when_idle(job).result()
        assert ("Background work failed" in caplog.text) is warned
    session.close()


def test_background_threads_share_one_exit_handler():
    session = Session(Parrot())
    before = atexit._ncallbacks()
    for _ in range(20):
        session.when_idle(lambda: None).result(10)
        until(lambda: session._idle._thread is None)
    assert atexit._ncallbacks() <= before + 1
    session.close()


def test_work_that_was_cut_short_is_not_called_done():
    session = Session(Parrot())
    started, release = threading.Event(), threading.Event()

    def endless():
        while True:
            started.set()
            release.wait(10)
            yield

    cut = session.when_idle(endless)
    assert started.wait(10)
    closing = threading.Thread(target=session.close)
    closing.start()
    release.set()
    closing.join(10)
    with pytest.raises(ModelError, match="closed before this background work was done"):
        cut.result(10)


def test_kv_of_other_numerics_is_never_used(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    made = engine.build_pack("The harbour of Veyl had seven boats, two of them red.", namespace="isles")
    handle = store.put(replace(made, fingerprint=replace(made.fingerprint, engine="local/eager")))
    question, view = f"{handle}\n\nHow many?", store.view("isles")
    with pytest.raises(kp_core.errors.PackError, match="engine"):
        engine.generate(question, view=view)
    with pytest.raises(kp_core.errors.OptionError, match=r"It is gone in 0\.3; 'rebuild' computes"):
        engine.generate(question, view=view, mismatch="accept")
    exact = engine.prefill(question, view=view, mismatch="rebuild")
    assert exact.usage.approximate_tokens == 0
    assert torch.equal(exact.logits, engine.prefill(question, view=view, mismatch="rebuild", reuse=False).logits)


def test_a_pack_of_another_kind_of_processor_is_computed_anew_and_stored_beside_it(tmp_path, caplog):
    # An engine of its own: no other test's work waits in its background.
    engine = kp_core.load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(merges=7), cache_bytes=50_000_000)
    store = PackStore(tmp_path)
    made = engine.build_pack("The harbour of Veyl had seven boats, two of them red.", namespace="isles")
    theirs = replace(made, fingerprint=replace(made.fingerprint, passes="tiles of 256, torch 2.13.0, another"))
    handle = store.put(theirs)
    question, view = f"{handle}\n\nHow many?", store.view("isles")
    engine.clear_cache()
    found = engine.prefill(question, view=view)
    assert "another release or kind of processor" in caplog.text
    assert torch.equal(found.logits, engine.prefill(f"{made.text}\n\nHow many?", reuse=False).logits)
    engine.when_idle(lambda: iter(())).result(30)
    for pack in (theirs, made):
        assert store.get(handle, pack.key).kv.equal(pack.kv)
        assert store.peek(handle, PackKey(pack.fingerprint)).fingerprint == pack.fingerprint
    caplog.clear()
    engine.clear_cache()
    assert engine.prefill(question, view=view).usage.reused_tokens >= len(made.token_ids)
    assert "computed anew" not in caplog.text


_ABANDONED = """
import sys
from kp_core import load_engine
from tests.kits import tiny_model, tiny_tokenizer
stream = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer()).stream("Hello?", max_tokens=50)
def kept():
    yield from stream
sys.modules["kept"] = held = kept()
next(held)
"""


@pytest.mark.slow
def test_a_process_may_end_while_a_stream_is_open():
    done = subprocess.run([sys.executable, "-c", _ABANDONED], capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.returncode, done.stderr) == (0, "")


_ANSWERING = """
import threading, time
from kp_core import load_engine
from tests.kits import tiny_model, tiny_tokenizer
engine, text = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer()), "A long text. " * 150
def answer():
    while True:
        engine.generate(text, max_tokens=20, reuse=False)
for _ in range(2):
    threading.Thread(target=answer, daemon=True).start()
time.sleep(1)
"""


@pytest.mark.slow
def test_a_process_may_end_while_other_threads_answer():
    """As a server does. A thread that comes back from torch then would abort it."""
    done = subprocess.run([sys.executable, "-c", _ANSWERING], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr


def test_time_before_a_stream_is_read_is_not_of_the_model():
    engine, text = tiny_engine(), "A long text. " * 30
    engine.clear_cache()
    stream = engine.stream(text, max_tokens=2)
    time.sleep(0.5)
    usage = stream.result().usage
    assert usage.computed_tokens > 256
    assert 0 < usage.ttft_s < 0.5


@pytest.mark.parametrize("placement", ["in_place", "system"])
@pytest.mark.parametrize("source", [SYSTEM_FIRST, TWO_ROLES])
def test_a_message_that_the_template_would_drop_is_answered_from(source, placement, tmp_path):
    """However it is asked: a guard's system message behind the first one, and a pack in it."""
    engine, store = tiny_engine(template=source), PackStore(tmp_path)
    guard = f"{GUARD} {store.put(engine.build_pack('The Grebe is closed.'))}"
    said = [
        *({"role": role, "content": f"The {role}."} for role in ("system", "user", "assistant")),
        {"role": "system", "content": guard},
        {"role": "user", "content": "And now?"},
    ]
    options = {"view": store.view("default"), "placement": placement, "max_tokens": 2}
    stream = engine.stream(said, **options)
    list(stream)
    prompt = stream.result().prompt
    text = engine.tokenizer.decode(prompt.token_ids)
    for part in ("The system.", "The user.", "The assistant.", GUARD, "The Grebe is closed.", "And now?"):
        assert text.count(part) == 1, text
    assert engine.generate(said, **options).prompt.token_ids == prompt.token_ids
    assert engine.prefill(said, **options).prompt.token_ids == prompt.token_ids
    assert dict(engine.generate_many({1: said}, **options))[1].prompt.token_ids == prompt.token_ids
    engine.clear_cache()
    told = engine.explain(said, **options)
    assert told.rows[-1].stop == len(prompt)
    assert sum(told.counts.values()) == len(prompt)
