"""Texts of packs in messages are recognised, and a recognised span changes nothing but where KV may come from."""

import gc
import multiprocessing
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kp_core import ChatTemplate, KnowledgePack, ModelFingerprint, Packs, PackStore, PackView, Prefix
from kp_core.errors import PackError
from kp_core.packs.handle import find_handles, mint
from kp_core.packs.recognise import Recogniser
from kp_core.packs.view import PackRef
from tests.core.prompt.test_template import TEMPLATES
from tests.kits import tiny_tokenizer

SECRET = b"secret of a test"
LIGHT = "Orla Venn keeps the light of the outer skerry, and has done so for thirty-one years without a night off."
OIL = "The lamp burns blue oil, which the ferry brings on the first Monday of every month, weather permitting it."
OPENING = LIGHT[:80]


def handle(text, namespace="a"):
    return mint(SECRET, namespace, text)


class Shelf(Packs):
    """Packs in memory, which tell their texts; counts how often they were asked to."""

    changes = 0

    def __init__(self, *texts, namespace="a"):
        self.packs, self.told = {}, []
        for text in texts:
            self.put(text, namespace)

    def put(self, text, namespace="a"):
        found = handle(text, namespace)
        self.packs[found] = KnowledgePack(text, namespace, (), Prefix(), ModelFingerprint.unknown())
        self.changes += 1
        return found

    def remove(self, removed):
        del self.packs[removed]
        self.changes += 1

    def peek(self, found, key=None):
        return self.packs.get(found)

    get = peek

    def texts(self, namespaces, known):
        new = [(found, pack.text) for found, pack in self.packs.items() if found.namespace in namespaces]
        new = [pair for pair in new if pair[0] not in known]
        self.told.append(len(new))
        yield from new

    def view(self, *namespaces, **options):
        return PackView(self, namespaces or ("a",), **options)


def shown(segments):
    return [("recognised" if part.recognised else "handle") if isinstance(part, PackRef) else part for part in segments]


def spelt(segments):
    return "".join(part.text if isinstance(part, PackRef) else part for part in segments)


def oracle(pairs, text, min_chars, namespaces):
    """Every position, every text."""
    found, at = [], 0
    while at < len(text):
        inside = at and (text[at - 1].isalnum() or text[at - 1] == "_") and (text[at].isalnum() or text[at] == "_")
        fits = [
            (-len(known.strip()), name)
            for name, known in pairs
            if name.namespace in namespaces and len(known.strip()) >= min_chars and text.startswith(known.strip(), at)
        ]
        if fits and not inside and not text[at].isspace():
            length, name = min(fits)
            found.append((at, at - length, name))
            at -= length
        else:
            at += 1
    return found


TEXTS = st.text("ab. ", min_size=1, max_size=12)


@given(st.lists(st.tuples(TEXTS, st.sampled_from("xyz")), max_size=12), st.text("ab. ", max_size=60), st.integers(1, 3))
def test_finds_what_trying_every_text_everywhere_finds(packs, text, min_chars):
    pairs = [(handle(known, namespace), known) for known, namespace in packs]
    recogniser = Recogniser(min_chars)
    for pair in pairs:
        recogniser.add(*pair)
    for namespaces in ("xyz", "x", "yz", ""):
        assert recogniser.find(text, namespaces) == oracle(pairs, text, min_chars, namespaces)
    assert recogniser.find(text) == oracle(pairs, text, min_chars, "xyz")
    kept = pairs[::2]
    for name, _ in pairs:
        if name not in dict(kept):
            recogniser.discard(name)
    assert recogniser.find(text) == oracle(kept, text, min_chars, "xyz")
    assert set(recogniser._texts) == set(dict(kept))


@pytest.mark.timeout(100)
@pytest.mark.parametrize("ends", ["X", "!"])
def test_texts_that_share_all_but_their_ends_take_no_quadratic_time(ends):
    text = "ab " * 1_000_000
    recogniser = Recogniser()
    for length in (*range(90, 9_000, 3), *range(3_000_000 - 90, 3_000_000 - 30, 3)):
        known = text[:length] + ends
        recogniser.add(handle(known), known)
    recogniser.add(handle(LIGHT), LIGHT)
    assert recogniser.find(text) == []
    # What stands before such a text is found.
    assert recogniser.find(f"{LIGHT}\n{text}") == [(0, len(LIGHT), handle(LIGHT))]


def test_texts_that_share_a_beginning_are_told_apart():
    known = [f"{OPENING} It is page {number} of the book." for number in range(3_000)]
    recogniser = Recogniser()
    for text in (*known, OPENING):
        recogniser.add(handle(text), text)
    text = "\n".join((known[7], f"{OPENING} It is page -1 of the book.", known[2_999] + "s"))
    found = [text[start:stop] for start, stop, _ in recogniser.find(text)]
    assert found == [known[7], OPENING, known[2_999]]


@pytest.mark.parametrize("before", ["", "Context:", "<doc>", '"', "- ", "\n\n", "(see "])
def test_a_text_is_found_behind_anything_but_a_word(before):
    view = Shelf(LIGHT).view()
    assert shown(view.split(f"{before}{LIGHT}\nWho?", "user")) == [*filter(None, [before]), "recognised", "\nWho?"]
    assert shown(view.split(f"x{LIGHT}", "user")) == [f"x{LIGHT}"]


def test_only_trusted_roles_and_readable_namespaces_are_recognised():
    shelf = Shelf(LIGHT)
    shelf.put(OIL, "b")
    text = f"{LIGHT}\n\n{OIL}"
    assert shown(shelf.view().split(text, "user")) == ["recognised", f"\n\n{OIL}"]
    assert shown(shelf.view("b").split(text, "tool")) == [f"{LIGHT}\n\n", "recognised"]
    assert shown(shelf.view("a", "b").split(text, "system")) == ["recognised", "\n\n", "recognised"]
    for view, role in (
        (shelf.view("a", "b"), "assistant"),
        (shelf.view("a", trusted_roles={"tool"}), "user"),
        (shelf.view("a", "b", recognise=False), "user"),
        (shelf.view("c"), "user"),
    ):
        assert shown(view.split(text, role)) == [text]


def test_the_same_text_of_two_namespaces_is_the_readable_one():
    shelf = Shelf(LIGHT)
    shelf.put(LIGHT, "b")
    for namespace in "ab":
        [reference] = shelf.view(namespace).split(LIGHT, "user")
        assert reference.handle == str(handle(LIGHT, namespace))


def test_short_texts_are_not_recognised():
    shelf = Shelf(LIGHT[:63], OIL[:64])
    assert shown(shelf.view().split(f"{LIGHT[:63]} {OIL[:64]}", "user")) == [f"{LIGHT[:63]} ", "recognised"]


def test_a_recognised_text_is_as_the_message_has_it():
    """Packs may be stored with blanks around their text, as those for the system message once were."""
    shelf = Shelf(f" {LIGHT}\n")
    for text in (LIGHT, f" {LIGHT}\n\n", f"{LIGHT}  Who?"):
        segments = shelf.view().split(text, "user")
        assert spelt(segments) == text
        assert "recognised" in shown(segments)


def test_handles_inside_recognised_texts_are_inert():
    shelf = Shelf(LIGHT)
    inside = shelf.put(OIL)
    for fact in (f"{inside} {LIGHT} See {inside} too.", f"{LIGHT} See {inside}"):
        shelf.put(fact)
        segments = shelf.view().split(f"{fact}\n{inside}", "user")
        assert shown(segments) == ["recognised", "\n", "handle"]
        assert find_handles(segments[0].text)
        # Where nothing is recognised, handles are followed as ever.
        assert shown(shelf.view(recognise=False).split(fact, "user")).count("handle") == len(find_handles(fact))


def test_what_cannot_be_used_is_text():
    class Strict(Shelf):
        def peek(self, found, key=None):
            if found == handle(OIL):
                raise PackError("The pack was not made by this model")
            return super().peek(found)

    shelf = Strict(LIGHT, OIL)
    assert shown(shelf.view().split(f"{OIL}\n{LIGHT}", "user")) == [f"{OIL}\n", "recognised"]
    # A pack that is gone, and one that holds another text than it told.
    shelf.remove(handle(LIGHT))
    assert shown(shelf.view().split(LIGHT, "user")) == [LIGHT]
    shelf.put(LIGHT)
    assert shown(shelf.view().split(LIGHT, "user")) == ["recognised"]
    shelf.packs[handle(LIGHT)] = replace(shelf.packs[handle(LIGHT)], text=OIL)
    assert shown(shelf.view().split(LIGHT, "user")) == [LIGHT]


def test_a_source_that_tells_no_texts_recognises_nothing():
    class Bare(Packs):
        peek = get = Shelf(LIGHT).peek

    view = PackView(Bare(), ["a"])
    assert shown(view.split(f"{LIGHT} {handle(LIGHT)}", "user")) == [f"{LIGHT} ", "handle"]


def test_texts_are_read_once_and_when_something_changed():
    shelf = Shelf(LIGHT)
    assert shown(shelf.view().split("Who keeps it?", "user")) == ["Who keeps it?"]
    assert shelf.told == []
    for _ in range(3):
        shelf.view().split(LIGHT, "user")
    assert shelf.told == [1]
    shelf.put(OIL)
    assert shown(shelf.view().split(OIL, "user")) == ["recognised"]
    shelf.put("short", "b")
    shelf.view("b").split(LIGHT, "user")
    shelf.view("a").split(LIGHT, "user")
    assert shelf.told == [1, 1, 1, 0]  # Of each namespace when it is read, and nothing twice.
    index = weakref.ref(shelf.recogniser)
    del shelf
    gc.collect()
    assert index() is None


def test_texts_are_listed_for_the_namespaces_of_the_view_alone():
    asked = []

    class Listed(Shelf):
        def texts(self, namespaces, known):
            asked.append((sorted(namespaces), sorted(known)))
            return super().texts(namespaces, known)

    shelf = Listed(LIGHT)
    shelf.put(OIL, "b")
    for _ in range(2):
        shelf.view("a").split(LIGHT, "user")
    shelf.view("b").split(LIGHT, "user")
    assert asked == [(["a"], []), (["b"], [])]
    shelf.put(f"{LIGHT} {OIL}", "b")
    assert shown(shelf.view("a").split(LIGHT, "user")) == ["recognised"]
    assert asked[2:] == [(["a"], [handle(LIGHT)])]


def test_nobody_waits_for_the_texts_of_namespaces_that_others_read():
    reads, go_on = threading.Event(), threading.Event()

    class Slow(Shelf):
        def texts(self, namespaces, known):
            if "a" in namespaces:
                reads.set()
                assert go_on.wait(60)
            return super().texts(namespaces, known)

    shelf = Slow(LIGHT)
    shelf.put(OIL, "b")
    with ThreadPoolExecutor(3) as pool:
        try:
            slow = [pool.submit(shelf.view("a").split, LIGHT, "user") for _ in range(2)]
            assert reads.wait(60)
            assert shown(pool.submit(shelf.view("b").split, OIL, "user").result(20)) == ["recognised"]
            assert not any(future.done() for future in slow)
        finally:
            go_on.set()
        assert [shown(future.result(60)) for future in slow] == [["recognised"], ["recognised"]]
    assert shelf.told == [1, 1]  # The second reader of `a` waited for the first.


def test_what_another_process_puts_and_removes_is_seen(tmp_path):
    store = PackStore(tmp_path)

    def pack(text):
        return KnowledgePack(text, "a", (), Prefix(), ModelFingerprint.unknown())

    def seen(*texts):
        return [shown(store.view("a").split(text, "user")) == ["recognised"] for text in texts]

    def in_another_process(work):
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(60)
        assert process.exitcode == 0

    light = store.put(pack(LIGHT))
    assert seen(LIGHT, OIL) == [True, False]
    for _ in range(2):
        in_another_process(lambda: PackStore(tmp_path).put(pack(OIL)))
        assert seen(LIGHT, OIL) == [True, True]
        in_another_process(lambda: PackStore(tmp_path).remove(store.handle(OIL, "a")))
        assert seen(LIGHT, OIL) == [True, False]
    in_another_process(lambda: PackStore(tmp_path).remove(light))
    assert seen(LIGHT, OIL) == [False, False]
    in_another_process(lambda: PackStore(tmp_path).put(pack(LIGHT)))
    assert seen(LIGHT, OIL) == [True, False]


@pytest.mark.parametrize("placement", ["in_place", "system"])
@pytest.mark.parametrize("merges", [0, 7])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_recognised_spans_are_annotations(kind, merges, placement):
    made = ChatTemplate(tiny_tokenizer(TEMPLATES[kind], merges))
    shelf = Shelf(LIGHT, f"{OIL}\n")
    brought = shelf.put("The ferry leaves at nine.")
    numbers = count(1)

    def search(result):
        number = f"call0000{next(numbers)}"
        call = {"id": number, "function": {"name": "search", "arguments": {"q": LIGHT}}}
        return [
            {"role": "assistant", "content": LIGHT, "tool_calls": [call]},
            {"role": "tool", "content": result, "name": "search", "tool_call_id": number},
        ]

    messages = [
        {"role": "system", "content": f"{LIGHT}\nBe brief."},
        {"role": "user", "content": f"{OIL}\n\n{LIGHT} Who? {brought}"},
        *search(OIL),
        *search(str(brought)),
        {"role": "assistant", "content": "Orla."},
        {"role": "user", "content": f"And: {LIGHT}"},
    ]
    prompt = made.render(messages, view=shelf.view(), placement=placement)
    plain = made.render(messages, view=shelf.view(recognise=False), placement=placement)
    recognised = [span for span in prompt.spans if span.recognised]
    assert [span.handle for span in recognised] == [
        str(handle(text)) for text in (LIGHT, f"{OIL}\n", LIGHT, f"{OIL}\n", LIGHT)
    ]
    assert prompt.rendered == plain.rendered
    assert replace(prompt, spans=tuple(span for span in prompt.spans if not span.recognised)) == plain
    for _, as_text in made.verify(prompt):
        assert len(as_text) <= 2
