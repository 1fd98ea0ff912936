"""Composers are measured by right answers, and `composer="auto"` chooses by what was measured."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from kp_core import PackStore
from kp_core.errors import OptionError, PackError
from kp_core.packs.blobs import FolderBlobs
from kp_core.plan.composer import composer_of
from kp_methods import AutoComposer, Calibration, CalibrationQuestion, calibrate_composers
from kp_methods.calibration import CalibrationRow, Calibrations, calibrations_of, contains
from kp_methods.select import Selector
from tests.conftest import tiny_engine
from tests.kits import NaiveComposer

TEXTS = ["The first island is green and flat. " * 5, "The second island is blue. " * 5, "The third one is red. " * 5]
QUESTIONS = [CalibrationQuestion(f"Which island is number {at}?", tuple(TEXTS)) for at in range(20)]
GOOD = CalibrationRow("splice", "", 5, 400, 100, text_right=60, lost=2, won=3, ratio=0.2)


@pytest.fixture
def isles(tmp_path):
    """An engine that has said nothing, a view of its packs, and a question about all of them."""
    engine, store = tiny_engine(chunk_tokens=1024), PackStore(tmp_path)
    engine.clear_cache()
    engine.host.cautioned.clear()
    forget(engine)
    handles = [str(store.put(engine.build_pack(text, namespace="isles"))) for text in TEXTS]
    yield engine, store.view("isles"), "\n\n".join((*handles, "Which?"))
    forget(engine)


def forget(engine):
    """As a new process: what was read of calibrations is read again."""
    engine._last_planner = None


def calibrated(engine, view, *rows):
    calibration = Calibration(engine.fingerprint.identity, rows)
    calibrations_of(engine.host).keep(calibration, view)
    return calibration


class Full(FolderBlobs):
    """A disk that is full, or a folder that is only read."""

    refuses = True

    def write(self, key, *args, **options):
        if self.refuses and key.startswith("composers/"):
            raise OSError(28, "No space left on device")
        return super().write(key, *args, **options)


def test_a_store_that_cannot_be_written_is_refused_before_minutes_are_spent(tmp_path):
    engine, view = tiny_engine(), PackStore(Full(tmp_path)).view("isles")
    with pytest.raises(PackError, match=r"cannot be written .*No space left"):
        calibrate_composers(engine, QUESTIONS, ["splice"], view=view, progress=False)


def test_a_calibration_that_cannot_be_stored_in_the_end_is_used_and_returned(isles, tmp_path, caplog):
    engine, _, _ = isles
    view = PackStore(Full(tmp_path)).view("isles")
    calibration = calibrated(engine, view, GOOD)
    assert calibrations_of(engine.host).of(view) == calibration
    assert "could not be stored" in caplog.text


def test_auto_takes_what_the_calibration_says(isles):
    engine, view, asked = isles
    calibrated(engine, view, GOOD)
    taken = engine.prefill(asked, view=view, composer="auto")
    assert taken.usage.choice == (
        "splice, because it has 102% of the text's right answers (at least 94%; 100 questions over 5 packs) at 0.20 of "
        "its time to first token"
    )
    assert taken.usage.approximate_tokens > 0
    assert "composer: splice, because" in str(engine.explain(asked, view=view, composer="auto"))
    engine.clear_cache()
    named = engine.prefill(asked, view=view, composer="splice")
    assert torch.equal(taken.logits, named.logits)
    assert named.usage.choice == ""


def test_auto_is_exact_where_nothing_says_otherwise(isles):
    engine, view, asked = isles
    oracle = engine.prefill(asked, view=view, reuse=False)

    def taken(*rows, composer="auto", prompt=asked):
        calibrated(engine, view, *rows)
        engine.clear_cache()
        answer = engine.prefill(prompt, view=view, composer=composer)
        in_full = not answer.usage.approximate_tokens and not answer.usage.choice.startswith("select")
        if in_full and prompt == asked:
            assert torch.equal(answer.logits, oracle.logits)
        return answer.usage.choice

    assert "nothing was measured with this model" in engine.prefill(asked, view=view, composer="auto").usage.choice
    for row in (
        replace(GOOD, lost=8),  # Too few right answers.
        replace(GOOD, questions=20, text_right=12, lost=0, won=0),  # Too few questions to be sure.
        replace(GOOD, text_right=0, lost=0, won=0),  # Nothing that could be kept.
        replace(GOOD, ratio=1.1),
    ):
        assert taken(row).startswith("exact, because no other keeps 95%"), row
    for row in (replace(GOOD, packs=2), replace(GOOD, tokens=8)):
        assert taken(row).startswith("exact, because nothing was measured over 3 packs of up to 170 tokens"), row
    assert Calibrations("model", ()).chosen(Calibration("model", (GOOD,)), 3, 40)[0].exact  # It cannot compose.
    assert taken(replace(GOOD, lost=8), composer="auto:kept=0.8,low=0.7").startswith("splice")
    assert taken(GOOD, replace(GOOD, kind="two facts", lost=30)).startswith("exact")  # It must do for every kind.
    assert taken(GOOD, replace(GOOD, kind="two facts")).startswith("splice")
    assert taken(replace(GOOD, packs=9, lost=30), GOOD).startswith("splice")  # The nearest size that covers it counts.
    assert taken(GOOD, replace(GOOD, composer="select:packs=1", ratio=0.1)).startswith("select:packs=1")
    # Of other questions:
    assert taken(GOOD, replace(GOOD, composer="select:packs=1", packs=9, ratio=0.1)).startswith("splice")
    assert taken(GOOD, prompt=asked.split("\n\n")[0]) == "exact, because no packs stand side by side"


def test_a_calibration_is_kept_beside_the_packs(isles, caplog):
    engine, view, asked = isles
    calibration = calibrated(engine, view, GOOD)
    again = Calibrations(engine.fingerprint.identity, engine.engine.supports)
    assert again.of(view) == calibration
    assert Calibrations("another model", ()).of(view) is None
    stored = calibration.to_json()
    assert Calibration.of_json(stored) == calibration
    with_heads = replace(calibration, heads=((2, 1), (0, 3)))
    assert Calibration.of_json(with_heads.to_json()) == with_heads
    blobs, key = view.source.blobs, again._key
    caplog.set_level(logging.WARNING)
    for damaged in (
        "{",
        "[]",
        json.dumps({"model": "m", "rows": [{"composer": "splice"}]}),
        stored.replace('"questions": 100', '"questions": 0'),
        stored.replace('"ratio": 0.2', '"ratio": "fast"'),
        stored.replace("splice", "glue"),
        stored.replace("splice", "packet:wrapper=gone"),
    ):
        blobs.write(key, [damaged.encode()])
        caplog.clear()
        assert Calibrations(engine.fingerprint.identity, ()).of(view) is None
        assert "cannot be read" in caplog.text, damaged
    forget(engine)
    assert engine.prefill(asked, view=view, composer="auto").usage.choice.startswith("exact")


def test_measuring_composers(isles, caplog, monkeypatch):
    engine, view, asked = isles
    # A composer that reads all packs in their order, so that it answers as their text.
    monkeypatch.setattr(Selector, "_looked_up", lambda _, packs, *__: list(range(len(packs))))
    calibration = calibrate_composers(
        engine, QUESTIONS, ["splice", "select:packs=3"], view=view, max_tokens=6, progress=False
    )
    splice, everything = calibration.rows
    assert (splice.composer, everything.composer) == ("splice", "select:packs=3")
    assert {(row.questions, row.text_right, row.packs) for row in calibration.rows} == {(20, 20, 3)}
    assert (everything.lost, everything.kept) == (0, 1.0)
    assert splice.right == 20 - splice.lost
    assert splice.tokens == max(len(engine.build_pack(text).token_ids) for text in TEXTS)
    assert Calibrations(engine.fingerprint.identity, ()).of(view) == calibration
    assert "select:packs=3" in calibration.table()
    caplog.set_level(logging.WARNING)
    engine.host.cautioned.clear()
    engine.prefill(asked, view=view, composer="splice")
    assert ("of 20 questions" in caplog.text) == ("It does worst at" in caplog.text) == (splice.kept < 0.95)
    for _ in range(2):
        engine.prefill(asked, view=view, composer=NaiveComposer())
    assert caplog.text.count("Answers with composer 'naive' are not those of all packs") == 1


def test_too_little_to_measure_by(isles):
    engine, view, _ = isles
    with pytest.raises(OptionError, match="Got 19 questions with at least two passages; expected 20"):
        calibrate_composers(engine, [*QUESTIONS[1:], CalibrationQuestion("Which?", ("One.",))], view=view)
    asked = calibrate_composers(engine, [*QUESTIONS, *QUESTIONS], ["splice"], minutes=0, progress=False)
    assert sum(row.questions for row in asked.rows) == 20
    for composers in ([], ["exact"], ["splice", "auto"], ["glue"]):
        with pytest.raises(OptionError, match="Got"):
            calibrate_composers(engine, QUESTIONS, composers, view=view, progress=False)
    assert calibrations_of(engine.host).of(view) is None
    for wrong in ("auto:kept=-1", "auto:kept=0.5,low=0.9", "auto:kept=nan", "auto:most=1"):
        with pytest.raises(OptionError):
            composer_of(wrong)


def test_where_nothing_chooses_it_composes_exactly():
    auto = composer_of("auto")
    assert auto == AutoComposer(0.95, 0.9)
    assert auto.exact
    assert auto.key == "auto:kept=0.95,low=0.9"


def test_the_interval():
    """By hand: 60 right of 100, two lost and three won, is a difference of 1/102 with an error of 1.96 * 0.024."""
    assert GOOD.right == 61
    assert GOOD.kept == pytest.approx(61 / 60)
    assert GOOD.low == pytest.approx(1 + (1 / 102 - 1.96 * (6 - 1 / 102) ** 0.5 / 102) * 100 / 60)


def test_sizes_that_every_kind_speaks_for():
    rows = (GOOD, replace(GOOD, packs=2), replace(GOOD, kind="two facts", tokens=90), replace(GOOD, kind="two facts"))
    assert Calibration("m", rows).sizes == {2: 400, 5: 400}
    assert Calibration("m", (*rows[:1], replace(GOOD, kind="two facts", tokens=90))).sizes == {5: 90}


def test_words():
    assert contains("It is the Blue house.", "blue house")
    assert not contains("bluehouse", "blue")
