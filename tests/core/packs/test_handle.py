import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kp_core import Handle, find_handles, strip_handles
from kp_core.errors import PromptError
from kp_core.packs.handle import handles_like, inert, mint
from kp_core.session.reading import VisibleText
from tests.core.prompt.test_template import FOREIGN, HANDLE, OTHER, Packs

SECRET = bytes(range(32))
namespaces = st.from_regex(r"[a-z0-9_-]{1,63}", fullmatch=True)


@given(namespaces, st.text())
def test_a_handle_is_stable_and_found_again(namespace, text):
    handle = mint(SECRET, namespace, text)
    assert handle == mint(SECRET, namespace, text) == Handle.parse(str(handle)) == Handle.parse(handle)
    assert find_handles(f"See {handle}.") == [(4, 4 + len(str(handle)), handle)]
    assert strip_handles(f"See {handle}.") == "See ."


@given(namespaces, st.text(), st.text())
def test_other_texts_namespaces_and_secrets_have_other_handles(namespace, text, other):
    handle = mint(SECRET, namespace, text)
    assert (mint(SECRET, namespace, other) == handle) == (text == other)
    assert mint(bytes(32), namespace, text) != handle
    assert mint(SECRET, namespace + "0", text).id != handle.id


@pytest.mark.parametrize(
    "text", ["", "kp:a", "kp:A/" + "a" * 21, "kp:a/" + "a" * 20, "kp:../" + "a" * 21, "kp:a/" + "1" * 21]
)
def test_what_is_no_handle_is_refused(text):
    assert find_handles(text) == []
    with pytest.raises(PromptError, match="expected a handle"):
        Handle.parse(text)


@pytest.mark.parametrize("text", ["xkp:a/" + "a" * 21, "kp:a/" + "a" * 22, "kp:a/" + "a" * 21 + "Z"])
def test_parts_of_longer_words_are_no_handles(text):
    assert find_handles(text) == []


def test_handles_are_found_in_json_and_in_written_out_lists():
    handles = [str(mint(SECRET, "a", text)) for text in "xyz"]
    for written in (json.dumps("\n".join(handles)), repr(["\t".join(handles)]), json.dumps(handles)):
        assert [str(handle) for _, _, handle in find_handles(written)] == handles
        assert "kp:" not in strip_handles(written)


@pytest.mark.parametrize("name", ["", "A", "a/b", "a.b", "..", "a" * 65, "ä", "a\n"])
def test_bad_namespaces_are_refused(name):
    with pytest.raises(PromptError, match="namespace"):
        Handle(name, "a" * 21)


NESTED = ["kp:a-{0}/{1}", "kp:{0}/{1}", "kp:a-{0}-b/{1}", "kp:{0}-/{1}", "kp:a/{0}-{1}", "kp:a-kp:b-{0}-/{1}/{1}"]


@pytest.mark.parametrize("form", NESTED)
def test_what_is_left_of_a_handle_around_a_handle_is_none(form):
    nested = form.format(f"kp:isles/{'b' * 21}", "a" * 21)
    for text in (nested, nested.replace("a-", "a-" + f"kp:x/{'c' * 21}" + "-")):
        assert find_handles(strip_handles(text)) == []
        assert find_handles(inert(text)) == []
        # Nor when it is said piece by piece.
        said = VisibleText()
        pieces = "".join(map(said.push, text)) + said.flush()
        assert find_handles(pieces) == []


@pytest.mark.parametrize("form", ["{0}{1}", "{0}{1}{2}", "({0}{1})", "{0}{1}, {2}", '"\\n{0}{1}"', "{2} {0}{1}\n"])
def test_handles_may_stand_right_behind_each_other(form):
    handles = [str(mint(SECRET, namespace, "x")) for namespace in ("a", "kp", "a-b_c")]
    text = form.format(*handles)
    expected = [handle for _, handle in sorted((text.index(h), h) for h in handles if h in text)]
    assert [str(handle) for _, _, handle in find_handles(text)] == handles_like(text) == expected
    assert not find_handles(strip_handles(text))
    assert not find_handles(inert(text))
    assert len(find_handles(handles[0] + handles[1] + "x")) == 1
    for whole in (text, f"{text}x", f"x/{'b' * 21}{text}", f"world{text}"):
        for size in range(1, len(whole) + 1):
            said = VisibleText()
            pieces = (whole[at : at + size] for at in range(0, len(whole), size))
            assert "".join(map(said.push, pieces)) + said.flush() == strip_handles(whole)


A, B, LOST = HANDLE, OTHER, "kp:a/" + "c" * 21


@pytest.mark.parametrize(
    ("form", "packs"),
    [
        ("{A}{B}", "AB"),
        ("{A}{A}", "AA"),
        ("{A}{B}{A}{B}", "ABAB"),
        ("{A}{B}\n", "AB"),
        ("See {A}{B}.", "AB"),
        ("\t{A}{B}\r\n{B}", "ABB"),
        ("{A}{LOST}{B}", "AB"),
        ("{A}{FOREIGN}{B}", "AB"),
        ("{LOST}{A}", "A"),
        ("{FOREIGN}{FOREIGN}{A}", "A"),
        ('["{A}{B}"]', "AB"),
        ('{{"found": "\\n{A}{B}"}}', "AB"),
        ("'\\t{A}{B}\\n'", "AB"),
        ("[the gate]({A}{B})", "AB"),
        ("`{A}{B}`", "AB"),
        ("<doc>{A}{B}</doc>", "AB"),
        ("\u7684{A}{B}\u3002", "AB"),
        ("\U0001f600{A}{B}\U0001f600", "AB"),
        ("\u00a0{A}{B}\u200b", "AB"),
        ("a/{A}{B}/a", "AB"),
        ("http://x/?q={A}{B}&k={A}", "ABA"),
        ("{A}{B}kp:", "A"),
        ("{A}{B}kp:a/abc", "A"),
        ("{A}{B}2", "A"),
        ("x{A}{B}", "B"),
        ("{A}-{B}", "AB"),
        ("{A},{B};{A}", "ABA"),
        ("{A}{B}, {A}KP:a/b", "AB"),
    ],
)
def test_handles_behind_each_other_bring_their_packs_in_every_role(form, packs):
    text = form.format(A=A, B=B, LOST=LOST, FOREIGN=FOREIGN)
    for role in ("system", "user", "tool"):
        segments = Packs().view().split(text, role)
        brought = [segment.handle for segment in segments if not isinstance(segment, str)]
        assert brought == [{"A": A, "B": B}[letter] for letter in packs]
        assert "".join(part if isinstance(part, str) else part.handle for part in segments) == text
    assert Packs().view().split(text, "assistant") == (text,)


@pytest.mark.parametrize("stop", [(), ("kp:a",), ("\n",), ("aa",), (".",)])
@pytest.mark.parametrize(
    "form",
    [
        "See {A}{B}.",
        "x{A}{B} and {A}",
        "x{A}k {A}kp:a/",
        "{A}{A}{A}\n",
        '"\\n{A}\\t{B}\\{A}"',
        "kp:a-{A}-b/{B}",
        "_{A}/{A}",
        "kp kp: kp:a kp:a/ {A}{A}a",
        "kp:a:{A}kp:/{B}",
    ],
)
def test_what_is_said_is_the_same_wherever_it_is_cut(form, stop):
    """The oracle finds handles, and a stop string, in the whole text."""
    text = form.format(A=A, B=B)
    ends = [at for at in map(text.find, stop) if at >= 0]
    expected = strip_handles(text[: min(ends)] if ends else text)
    for first in range(len(text) + 1):
        for second in {first, first + 1, (first + len(text)) // 2, len(text)}:
            said, pieces = VisibleText(stop), (text[:first], text[first:second], text[second:])
            assert "".join(said.push(piece) for piece in pieces if not said.stopped) + said.flush() == expected
            assert said.stopped == bool(ends)


def test_nothing_is_held_that_can_become_no_handle():
    said = VisibleText()
    for piece in ("x", A, "-", "y", "kp", ":a", "/b", ". ", "y"):
        assert said.push(piece) == piece
    assert [said.push(piece) for piece in (" ", "k", "p:a", "/b", "!")] == [" ", "", "", "", "kp:a/b!"]
