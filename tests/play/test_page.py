"""The playground in a real browser: the bundled model, Debian's chromium, and nothing beyond this machine.

With KP_FIGURES=1 the pictures of `docs/cli.md` are made anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image

from tests.conftest import until
from tests.play.conftest import FIGURES

pytestmark = pytest.mark.slow

_WAIT = 90_000  # Milliseconds, for a model on a busy machine.


@pytest.fixture
def visit(site, browser):
    """Opens the page; at the end nothing may have been asked of any other machine, and no script may have failed."""
    asked, failed, contexts = [], [], []

    def opened(width=1280, height=900, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(_WAIT)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(site)
        page.locator("#kp-documents", has_text="Guide to Veyl.md").wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    away = {url for url in asked if urlsplit(url).scheme in ("http", "https", "ws", "wss")}
    assert {urlsplit(url).hostname for url in away} == {"127.0.0.1"}
    assert failed == []


def ask(page, question="Who is the harbour master?"):
    field = page.get_by_label("Question", exact=True)
    # What is there now is not the answer.
    page.evaluate("window.asked = document.querySelector('#kp-verdict p')?.setAttribute('data-old', '')")
    field.fill(question)
    field.press("Enter")
    page.wait_for_selector("#kp-verdict p:not([data-old])")
    return page


def answer(page, way):
    return page.get_by_label(f"Answer from {way}").input_value()


def slide(page, name, value):
    field, sent = (page.get_by_label(f"{part} for {name}") for part in ("number input", "range slider"))

    def moved():
        field.fill(value)
        page.wait_for_timeout(100)  # A control that has just come into view may be given its first value once more.
        return sent.input_value() == value

    until(moved)


def choose(page, name):
    page.get_by_label(name, exact=True).check()
    page.locator("label.selected").get_by_text(name, exact=True).wait_for()


def counts(page, way):
    said = page.locator(f"#kp-cost-{way}").inner_text()
    return {name: int(count.replace(",", "")) for name, count in re.findall(r"([a-z ]+[a-z]) ([\d,]+)(?= ·|$)", said)}


def picture(page, name, target=None):
    if os.environ.get("KP_FIGURES"):
        page.mouse.move(0, 0)
        path = FIGURES / f"play-{name}.png"
        (page.locator(target) if target else page).screenshot(path=path)
        Image.open(path).quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
        assert path.stat().st_size < 150_000


def test_both_answers_their_costs_and_the_plan_by_keyboard_alone(visit, played):
    page = visit()
    page.get_by_label("Question", exact=True).focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#kp-verdict p")
    packs, text = counts(page, "packs"), counts(page, "text")
    guide = played.documents["Guide to Veyl.md"]
    assert packs[" delivered"] == guide.tokens
    assert (text[" delivered"], text[" at hand"]) == (0, 0)
    assert text[" computed"] == packs[" sent"] + guide.tokens
    assert f"{guide.kv_bytes / 1e6:,.1f} MB" in page.locator("#kp-documents").inner_text()
    assert "Both read the same" in page.locator("#kp-verdict").inner_text()
    assert "Fenwick Sloe" in answer(page, "packs")
    plan = page.locator("#kp-plan").inner_text()
    assert "from a pack" in plan
    assert "harbour" in plan
    picture(page, "ask", "body")
    ask(page)
    assert "it was asked before" in page.locator("#kp-verdict").inner_text()


def test_a_narrow_dark_window_needs_no_sideways_scrolling(visit):
    page = ask(visit(400, 860, "dark"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    for name in ("Ask", "Stop"):
        box = page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400
    page.get_by_label("Answer from packs").scroll_into_view_if_needed()


def test_several_packs_that_are_composed_are_coloured_as_what_they_are(visit):
    page = visit()
    page.get_by_role("button", name="How it is sent").click()
    slide(page, "Documents sent", "2")
    choose(page, "select: those that the question is about, exact")
    ask(page, "Who is the miller?")
    assert "1 document was not read" in page.locator("#kp-verdict").inner_text()
    choose(page, "all, splice (approximate)")
    ask(page, "Where is the kelp mill?")
    assert counts(page, "packs")[" approximate"] > 0
    assert "approximate" in page.locator("#kp-plan").inner_text()
    picture(page, "plan", "#kp-plan")
    choose(page, "all, exact")


def test_what_is_no_document_is_said_and_never_run(visit, played, tmp_path):
    page, before = visit(), dict(played.documents)
    page.get_by_role("button", name="Add your own").click()
    uploads = {"empty.txt": "", "tool.exe": "MZ", "huge.txt": "word " * 60_000}
    for name, content in uploads.items():
        (tmp_path / name).write_text(content)
        page.set_input_files("input[type=file][multiple]", tmp_path / name)
        page.locator(".file-preview").get_by_text(name.split(".")[0]).wait_for()
        page.get_by_role("button", name="Compile").click()
        expected = {"empty.txt": "holds no text", "tool.exe": "expected one of", "huge.txt": "takes 200,000 at once"}[
            name
        ]
        page.locator(".toast-body", has_text=expected).wait_for()
        # The field is emptied after the warning: a file that is dropped in between is lost (Gradio's script raises).
        page.locator(".file-preview").wait_for(state="detached")
        assert str(Path(os.environ["GRADIO_TEMP_DIR"])) not in page.locator(".toast-body").last.inner_text()
    assert played.documents == before
    (tmp_path / "larger.txt").write_text("word " * 5_000_000)
    page.set_input_files("input[type=file][multiple]", tmp_path / "larger.txt")
    page.get_by_text("exceed the maximum allowed size").first.wait_for()
    for _ in range(2):
        page.get_by_label("Paste text").fill(
            "<img src=x onerror='window.pwned = 1'> is ${window.pwned = 2} a <b>tag</b>."
        )
        page.get_by_role("button", name="Compile").click()
        page.locator("#kp-documents", has_text="img src").wait_for()
    page.locator(".toast-body", has_text="takes the place of an earlier one").wait_for()
    ask(page, "What is a <img src=x onerror='window.pwned = 3'> tag?")
    assert page.evaluate("window.pwned === undefined")
    assert page.locator("#kp-plan img, #kp-documents img").count() == 0


def test_a_page_that_closes_ends_its_answer(visit, played, monkeypatch):
    watched, stream = [], played.session.stream

    def streamed(messages, **options):
        watched.append((options.get("reuse", True), stream(messages, **options)))
        return watched[-1][1]

    monkeypatch.setattr(played.session, "stream", streamed)
    page = visit()
    page.get_by_label("Question", exact=True).fill("Who is the judge?")
    page.get_by_label("Question", exact=True).press("Enter")
    until(lambda: len(watched) == 2 and answer(page, "text"))
    page.close()
    page = ask(visit(), "Who is the miller?")
    assert [is_packs for is_packs, _ in watched] == [True, False, True, False]
    assert watched[1][1].generation is None  # It was not read to its end.
    assert watched[3][1].generation.text in answer(page, "text")
