"""The sweep over alpha: what it measures, what it recommends, and where it warns."""

import json
import math

import pytest

from benchmarks import steering_range
from benchmarks.common import perplexity
from benchmarks.steering_range import Task, calibrate, main, repetition
from kp_core import load_engine
from kp_core.errors import OptionError
from kp_core.steering import SteeringWarning, load_steering, save_steering
from tests.conftest import tiny_engine

PAIRS = [("The formal one.\n", "an 7 er"), ("the other, formal", "er er er 42")]
WORDS = "one two three four five six seven eight nine ten"


def steering_of(engine):
    return engine.make_steering(PAIRS, layers=(0.0, 1.0), progress=False).at_strength(1)


class Spoken:
    """Speaks as told: from |alpha| 3 on it repeats itself, from 2 on it forgets; the effect is alpha."""

    def __init__(self, collapse=3.0, forget=2.0, surprise=math.inf, silence=math.inf):
        self.collapse, self.forget, self.surprise, self.silence, self.asked = collapse, forget, surprise, silence, []

    def generate(self, messages, *, steering, scope, packs, max_tokens):
        alpha = steering[1]
        self.asked.append((messages, alpha, scope, tuple(packs), max_tokens))

        class Said:
            text = "a b c " * 9 if abs(alpha) >= self.collapse else f"{alpha} {WORDS}"

        if abs(alpha) < self.forget:
            Said.text += " Paris"
        if abs(alpha) >= self.silence:
            Said.text = ""
        return Said

    def perplexity(self, _messages, text, *, packs):
        assert packs is not None
        first = (text or "a").split()[0]
        return 1e6 if first != "a" and abs(float(first)) >= self.surprise else 5.0


def effect(text):
    first = (text or "0").split()[0]
    return 9.0 if first == "a" else float(first)


TASKS = ("Who?", Task("Where?", (), "paris"))


def sweep(spoken, tasks=TASKS, **settings):
    settings = {"alphas": (-4, -2, -1, 0.5, 1, 2, 4), "progress": False} | settings
    return calibrate(spoken, steering_of(tiny_engine()), tasks, effect, **settings)


def test_the_coherent_range_ends_where_text_repeats_itself():
    found = sweep(Spoken())
    assert [row.alpha for row in found.rows] == [-4, -2, -1, 0, 0.5, 1, 2, 4]
    assert (found.low, found.high) == (-2, 2)
    assert found.recommended == 2
    assert found.recommended_with_knowledge == 1
    assert [row.coherence for row in found.rows] == [0, 1, 1, 1, 1, 1, 1, 0]
    assert [row.accuracy for row in found.rows] == [0, 0, 1, 1, 1, 1, 0, 0]
    assert [row.strength for row in found.rows] == pytest.approx([4, 2, 1, 0, 0.5, 1, 2, 4])
    assert found.rows[0].effect == 9
    assert found.steering.coherent == (-2, 2)
    assert found.steering.recommended == (2, 1)
    assert found.steering == steering_of(tiny_engine())


def test_surprise_and_silence_end_it_as_well():
    assert sweep(Spoken(surprise=1.0)).high == 0.5
    assert sweep(Spoken(silence=1.0), tasks=["Who?"]).high == 0.5


def test_an_end_of_the_sweep_is_no_cliff():
    found = sweep(Spoken(collapse=99), alphas=[1, 2])
    assert (found.low, found.high) == (0, 2)
    assert found.steering.coherent == (-math.inf, math.inf)


def test_without_questions_that_have_answers_the_default_beside_packs_is_cautious():
    assert sweep(Spoken(), tasks=["Who?"]).recommended_with_knowledge == 0.7
    assert sweep(Spoken(collapse=1.0), tasks=["Who?"]).recommended_with_knowledge == 0.5
    assert sweep(Spoken(), tasks=["Who?"]).rows[0].accuracy is None


def test_every_task_is_asked_as_given():
    spoken = Spoken()
    pack = tiny_engine().build_pack("A fact of it.", compiled_for="system")
    sweep(spoken, tasks=[Task("Who?", [pack])], alphas=[1], scope="pack", max_tokens=7)
    assert spoken.asked == [("Who?", 0.0, "pack", (pack,), 7), ("Who?", 1.0, "pack", (pack,), 7)]


@pytest.mark.parametrize(
    ("tasks", "alphas"), [([], [1]), (["Who?"], []), (["Who?"], [math.nan]), (["Who?"], [math.inf])]
)
def test_a_sweep_of_nothing_is_refused(tasks, alphas):
    with pytest.raises(OptionError, match="expected tasks and finite numbers"):
        sweep(Spoken(), tasks=tasks, alphas=alphas)


def test_tasks_and_scores_that_are_none_are_refused():
    with pytest.raises(OptionError, match=r"expected a list of them: \['Who\?'\]"):
        sweep(Spoken(), tasks="Who?")
    for wrong in (None, math.nan, "much"):
        with pytest.raises(OptionError, match="expected a finite number"):
            calibrate(
                Spoken(), steering_of(tiny_engine()), ["Who?"], lambda _, it=wrong: it, alphas=[1], progress=False
            )


def test_it_runs_on_an_engine_and_the_calibrated_steering_warns_beyond_its_cliff(monkeypatch):
    fallen = sweep(Spoken(collapse=1.0)).steering
    # A model of random numbers repeats itself, or says nothing.
    monkeypatch.setattr(steering_range, "_LEAST_COHERENCE", 0)
    engine = tiny_engine()
    found = calibrate(
        engine,
        steering_of(engine),
        ["Who is the er?"],
        len,
        alphas=[1, 2],
        max_tokens=5,
        progress=False,
    )
    assert [row.alpha for row in found.rows] == [0, 1, 2]
    assert all(row.perplexity > 1 for row in found.rows)
    assert found.to_dict()["rows"][1]["alpha"] == 1
    with pytest.warns(SteeringWarning, match=r"2 times beyond"):
        engine.generate("Who?", steering=fallen, max_tokens=1)


def test_perplexity_is_that_of_the_tokens_one_by_one():
    engine = tiny_engine()
    answer = "the an 42"
    tokens = engine.tokenizer.encode(answer, add_special_tokens=False)
    prompt = engine.template.render("Who?")
    import torch

    from tests.kits import tiny_model

    with torch.inference_mode():
        logits = tiny_model("llama")(torch.tensor([[*prompt.token_ids, *tokens]])).logits[0]
    behind = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    expected = math.exp(-behind[range(len(tokens)), tokens].mean())
    assert perplexity(engine, "Who?", answer) == pytest.approx(expected, rel=1e-3)
    one = perplexity(engine, "Who?", engine.tokenizer.decode(tokens[:1]))
    assert one == pytest.approx(math.exp(-behind[0, tokens[0]]), rel=1e-3)
    assert perplexity(engine, "Who?", "") == 1.0
    two = engine.log_likelihoods(["Where?", "Who?"], answer)
    assert two[1] == pytest.approx(float(behind[range(len(tokens)), tokens].sum()), rel=1e-3)
    assert two[0] != two[1]
    with pytest.raises(OptionError, match="expected a list of them"):
        engine.log_likelihoods("Who?", answer)


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0), ("one two", 0), (WORDS, 0), ("a a a a a", 2 / 3), ("A b c a B c", 0.25), ("a b c " * 9, 0.88)],
)
def test_repetition_is_the_share_of_triples_seen_before(text, share):
    assert repetition(text) == pytest.approx(share)


def test_the_table_has_a_line_per_alpha_and_the_recommendation():
    lines = sweep(Spoken()).table().splitlines()
    assert len(lines) == 10
    assert lines[1].split() == ["-4.00", "4.000", "9.000", "0%", "88%", "5.0", "0%"]
    assert lines[-1] == "Coherent from -2 to 2. Recommended: 2 alone, 1 with knowledge."


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_is_a_picture(tmp_path, suffix):
    path = sweep(Spoken()).plot(tmp_path / f"sweep.{suffix}")
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


@pytest.mark.slow
def test_as_a_program_it_saves_what_it_found(tmp_path, thin_model):
    engine = load_engine(thin_model, dtype="float32")
    pairs = [["I should be obliged for a reply.", "write back ok"], ["It is most regrettable.", "that sucks"]]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    save_steering(engine.make_steering(pairs, progress=False), tmp_path / "formal")
    rows = [{"question": "Who?"}, {"question": "Where is it?", "facts": "It is the er.", "expected": "er"}]
    (tmp_path / "questions.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    told = f"--pairs {tmp_path}/pairs.json --questions {tmp_path}/questions.jsonl --alphas -1 1 --tokens 4"
    told += f" --plot {tmp_path}/sweep.svg --out {tmp_path}/fit --dtype float32 --model {thin_model}"
    found = main([str(tmp_path / "formal"), *told.split()])
    assert [row["alpha"] for row in found["rows"]] == [-1, 0, 1]
    fit = load_steering(tmp_path / "fit")
    assert fit.recommended == (found["recommended"], found["recommended_with_knowledge"])
    assert (tmp_path / "sweep.svg").is_file()
    assert load_steering(tmp_path / "formal").recommended is None


def test_what_left_is_refused_by_name():
    with pytest.raises(ImportError, match=r"`kp_core.steering.calibrate` is gone in 0.3; use `benchmarks"):
        exec("from kp_core.steering import calibrate")  # noqa: S102 - as a user writes it
