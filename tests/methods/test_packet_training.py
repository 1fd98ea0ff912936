"""Training soft tokens: on tiny models, against the engine that uses them, interrupted and gone on with."""

import json
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
import torch

from kp_core import PackStore
from kp_core.errors import OptionError, UnsupportedRequestError
from kp_core.packs import blobs
from kp_methods import PacketComposer
from kp_methods.packet.training import (
    PacketTraining,
    Samples,
    checkpoint_of,
    divergence,
    student,
    teach,
    train_wrapper,
)
from tests.conftest import tiny_engine
from tests.matrix import architectures

COLOURS = ("green", "blue", "red", "grey", "white", "black", "brown", "pink")
DOCUMENTS = [
    (f"Isle {number}", f"The isle of {name * 2} is {name}. It has {number + 2} hills. Nobody lives there.")
    for number, name in enumerate(COLOURS)
]
SETTINGS = PacketTraining(soft=2, steps=6, batch=1, documents=(1, 3), tokens=(8, 64), answer=6, every=2)


def train(out, settings=SETTINGS, documents=DOCUMENTS, engine=None, **options):
    return train_wrapper(engine or tiny_engine(), documents, out, settings, progress=False, **options)


@architectures
def test_the_student_says_what_the_engine_says_over_packets(architecture, tmp_path):
    engine = tiny_engine(architecture)
    samples, model = Samples(engine, DOCUMENTS, SETTINGS), engine.engine.model
    soft = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    composer, store = PacketComposer(soft[:2], soft[2:], engine.fingerprint), PackStore(tmp_path)
    compared = 0
    for number in range(8):
        sample = samples.draw("train", number)
        taught = teach(model, sample, 6)
        if sample.begin == sample.prefix:
            continue  # The engine takes the first pack as it is.
        text = engine.tokenizer.decode(sample.prompt).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        *packs, asked = text.split("\n\n")
        handles = [str(store.put(engine.build_pack(pack))) for pack in packs]
        options = {"view": store.view("default")}
        exact = engine.prefill("\n\n".join((*handles, asked)), **options)
        assert exact.prompt.token_ids == sample.prompt
        assert torch.allclose(exact.logits, taught[1][0], atol=1e-4)
        found = engine.prefill("\n\n".join((*handles, asked)), **options, composer=composer)
        with torch.no_grad():
            logits = student(model, taught, soft)
        assert logits.shape == taught[1].shape
        assert torch.allclose(found.logits, logits[0], atol=1e-4)
        assert not torch.allclose(found.logits, exact.logits, atol=1e-4)
        compared += 1
    assert compared >= 2


def test_gradients_reach_the_soft_tokens_alone():
    engine = tiny_engine()
    samples, model = Samples(engine, DOCUMENTS, SETTINGS), engine.engine.model
    taught = teach(model, samples.draw("train", 1), 6)
    soft = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).double().float().requires_grad_()
    divergence(model, taught, soft).backward()
    step, found = 1e-2, soft.grad
    with torch.no_grad():
        for row, column in ((0, 0), (1, 7), (3, 31)):
            apart = torch.zeros_like(soft)
            apart[row, column] = step
            up, down = (float(divergence(model, taught, soft + sign * apart)) for sign in (1, -1))
            assert float(found[row, column]) == pytest.approx((up - down) / (2 * step), rel=0.1, abs=1e-5)


@pytest.mark.slow
def test_training_gets_better(tmp_path):
    out = tmp_path / "new" / "isles.wrapper"
    engine = tiny_engine()
    weights = list(engine.engine.model.network.parameters())
    before = [weight.requires_grad for weight in weights]
    made = train(
        out, replace(SETTINGS, steps=60, every=10, rate=1.0, batch=2), engine=engine, about="kp packet train isles"
    )
    assert PacketComposer.load(out) == made
    assert made.header.shape == made.trailer.shape == (2, 64)
    assert [weight.requires_grad for weight in weights] == before
    record = made.training
    assert record["about"] == "kp packet train isles"
    # A random model looks at nothing in particular, so that soft tokens cannot be better than none here.
    assert record["best"]["held_kl"] < record["looks"][0][1] / 2
    assert record["settings"]["steps"] == 60
    assert not checkpoint_of(out).exists()
    engine.generate("The engine was not changed?", max_tokens=1)


def test_an_interrupted_training_ends_with_the_same_bits(tmp_path, monkeypatch):
    whole = train(tmp_path / "whole")
    out, file = tmp_path / "parts", checkpoint_of(tmp_path / "parts")
    steps = []

    def interrupted(self, *arguments):
        if len(steps) == 3:
            raise KeyboardInterrupt
        steps.append(1)
        return step(self, *arguments)

    from kp_methods.packet.training import _Training

    step = _Training._step
    monkeypatch.setattr(_Training, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(out)
    assert not out.exists()
    monkeypatch.undo()
    with pytest.raises(OptionError, match=r"another training: it differs in rate \(then 0.05, now 0.1\)"):
        train(out, replace(SETTINGS, rate=0.1))
    with pytest.raises(OptionError, match="differs in documents"):
        train(out, documents=DOCUMENTS[1:])
    assert file.exists()
    parts = train(out)
    assert parts == whole
    assert parts.training["looks"] == whole.training["looks"]
    assert not file.exists()
    assert train(tmp_path / "other", replace(SETTINGS, seed=1)) != whole


def test_time_that_is_up_leaves_the_best_so_far_and_a_checkpoint(tmp_path):
    out = tmp_path / "isles"
    first = train(out, minutes=0)
    assert first.training["steps"] == 1
    assert checkpoint_of(out).exists()
    assert train(out) == train(tmp_path / "whole")


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    out, file = tmp_path / "isles", checkpoint_of(tmp_path / "isles")
    train(out, minutes=0)
    before, stage = file.read_bytes(), blobs._stage

    @contextmanager
    def full(folder, chunks):
        with stage(folder, [b"half"]):
            raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(blobs, "_stage", full)
    with pytest.raises(OptionError, match=r"could not be written \(No space left on device"):
        train(out)
    assert file.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["isles", "isles.training"]
    monkeypatch.undo()
    file.write_bytes(before[:-1])
    with pytest.raises(OptionError, match=r"isles.training cannot be used"):
        train(out)


@pytest.mark.parametrize(
    ("documents", "settings", "message"),
    [
        (DOCUMENTS[:1], SETTINGS, "Got 1 different documents .* expected at least 6"),
        (DOCUMENTS[:1] * 20, SETTINGS, "Got 1 different documents"),
        ([("", "Short.")] * 4, SETTINGS, "Got 0 different documents of at least 8 tokens"),
        (DOCUMENTS, replace(SETTINGS, tokens=(500, 600)), "Got 0 different documents of at least 500 tokens"),
    ],
)
def test_too_few_documents_are_refused(documents, settings, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        train(tmp_path / "out", settings, documents)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [{"soft": 0}, {"rate": float("nan")}, {"documents": (4, 2)}, {"tokens": (0, 2)}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(OptionError, match=f"Got {next(iter(wrong))}="):
        PacketTraining(**wrong)
    assert PacketTraining(**json.loads(json.dumps(asdict(SETTINGS)))) == SETTINGS


def test_other_engines_do_not_train(tmp_path):
    from kp_core import Session
    from tests.core.engines.test_session import Parrot

    with pytest.raises(UnsupportedRequestError, match="does not train soft tokens"):
        train_wrapper(Session(Parrot()), DOCUMENTS, tmp_path / "out", SETTINGS)
