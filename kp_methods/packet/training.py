"""Trains soft tokens around packs by self-distillation (KV Packet, arXiv 2604.13226, section 3).

`Samples` draws questions over documents, each of which is a packet. The teacher is the model with full attention over
the canonical prompt, and the student is the same model over packets, as `PacketComposer` places them. The loss is the
KL divergence between their distributions at the tokens of the answer. The model is frozen; gradients reach only the
soft tokens, through the keys and values of the packets.
"""

from __future__ import annotations

import math
import platform
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kp_core import KVTensors, Session
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.local.engine import LocalEngine
from kp_core.errors import OptionError, ShortTextError, UnsupportedRequestError
from kp_core.packs.envelope import Envelope
from kp_core.packs.view import PackRef
from kp_core.progress import bar_of
from kp_core.prompt.conversation import GAP, Turn
from kp_methods.packet.composer import PacketComposer, read_signed, write_signed

Documents = Sequence[tuple[str, str]]
"""Title (may be empty) and text of each document."""

_QUESTIONS = (
    "What is said about {}?",
    "Tell me about {}.",
    "Answer the question with a few words, using the facts.\nQuestion: Who or what is {}?",
    "Summarise in one sentence what the texts above say about {}.",
    "Repeat what the text about {} says.",
)
_NEXT = "Which sentence follows in the texts above?\n{}"
_SHARE_OF_NEXT, _SHARE_OF_OWN, _SHARE_OF_ALL = 0.3, 0.5, 0.25
_TRIES = 50
_CHECKPOINT = Envelope("knowledge-pack-training", "content", "1", covers_tensors=True)
_AVERAGED = 0.05  # Weight of the current soft tokens in their running average, which is evaluated and saved.
_HELD = 8


@dataclass(frozen=True)
class PacketTraining:
    """Settings of the training of soft tokens. Raises `OptionError` for a value out of range."""

    soft: int = 8
    """Tokens of the header, and of the trailer."""
    steps: int = 1000
    batch: int = 2
    """Samples per step."""
    rate: float = 0.05
    """Initial step size of Adam, in standard deviations of the model's embeddings; it falls to 0 as a cosine."""
    documents: tuple[int, int] = (1, 10)
    """Fewest and most documents of a sample."""
    tokens: tuple[int, int] = (128, 1024)
    """Least and greatest length of documents in tokens: shorter ones are left out, longer ones cut."""
    answer: int = 24
    """Most tokens of an answer."""
    every: int = 50
    """Steps between two evaluations on held-out documents."""
    patience: int = 6
    """Evaluations in a row without an improvement that end the training."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("soft", "steps", "batch", "answer", "every", "patience"):
            if getattr(self, name) < 1:
                raise OptionError(f"Got {name}={getattr(self, name)}; expected at least 1.")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise OptionError(f"Got rate={self.rate}; expected a finite number > 0.")
        for name in ("documents", "tokens"):
            low, high = getattr(self, name)
            object.__setattr__(self, name, (low, high))  # A training record has lists.
            if not 1 <= low <= high:
                raise OptionError(f"Got {name}={low}-{high}; expected two numbers from 1 on, the smaller one first.")


@dataclass(frozen=True)
class Sample:
    """One question over documents: in the canonical `prompt`, `packets` begin at position `begin`.

    Each packet has the tokens of a document and of the blanks behind it, and is compiled behind the first `prefix`
    tokens of the prompt. `behind` are the tokens after the last packet. If `answer` is `None`, the teacher writes it.
    """

    prompt: tuple[int, ...]
    prefix: int
    begin: int
    packets: tuple[tuple[int, ...], ...]
    behind: tuple[int, ...]
    answer: tuple[int, ...] | None


class Samples:
    """Draws samples, each determined by its number, from documents; raises `OptionError` for too few of them."""

    def __init__(self, session: Session, texts: Documents, settings: PacketTraining) -> None:
        self._session, self._settings = session, settings
        most, tokens = settings.documents[1], settings.tokens
        self._positions = session.max_positions - settings.answer
        encode, decode = session.tokenizer.encode, session.tokenizer.decode
        documents: list[tuple[str, str]] = []
        for title, text in dict.fromkeys(texts):
            ids = encode(text, add_special_tokens=False)
            if len(ids) >= tokens[0]:
                documents.append((title, text.strip() if len(ids) <= tokens[1] else decode(ids[: tokens[1]]).strip()))
        if len(documents) < 2 * most:
            raise OptionError(
                f"Got {len(documents)} different documents of at least {tokens[0]} tokens (of {len(texts)}); expected "
                f"at least {2 * most}, as a sample has up to {most} and as many are held out. Give more documents, or "
                "lower --documents or --tokens."
            )
        random.Random(settings.seed).shuffle(documents)  # noqa: S311 - not cryptography
        held_count = max(most, min(len(documents) // 10, 200))
        self._pools = {"held": documents[:held_count], "train": documents[held_count:]}
        self._pack = lru_cache(4096)(lambda text: PackRef("", session.build_pack(text, lazy=True)))

    @property
    def held(self) -> Documents:
        """The held-out documents, which no training sample contains."""
        return self._pools["held"]

    def draw(self, kind: str, number: int, count: int | None = None) -> Sample:
        """Draw sample `number` for `"train"`, or of the `"held"` out documents; with `count` documents, if given.

        Raises `OptionError` for too few held-out documents, and if none of 50 attempts fits.
        """
        if count is not None and count > len(self._pools[kind]):
            raise OptionError(f"Got {len(self._pools[kind])} documents that are held out; expected at least {count}.")
        for attempt in range(_TRIES):
            draw = random.Random(f"{self._settings.seed}/{kind}/{number}/{attempt}")  # noqa: S311 - not cryptography
            sample = self._made(draw, self._pools[kind], count)
            if sample is not None:
                return sample
        raise OptionError(
            f"None of {_TRIES} samples fits: the tokenizer merges these documents with what stands around them, or "
            f"they are too long for the {self._session.max_positions} positions of the model."
        )

    def _made(self, draw: random.Random, pool: Documents, count: int | None) -> Sample | None:
        chosen = draw.sample(pool, count or draw.randint(*self._settings.documents))
        question, answer = self._asked(draw, *draw.choice(chosen))
        try:
            packs = [self._pack(f"{title}: {text}" if title else text) for title, text in chosen]
        except ShortTextError:
            return None
        segments = tuple(segment for pack in packs for segment in (pack, GAP))
        prompt = self._session.template.render_turns([Turn("user", (*segments, question))])
        spans, ends = prompt.spans, self._session.template.ends(prompt)
        fits = [span.pack.token_ids == prompt.token_ids[span.start : span.stop] for span in spans]
        if (
            len(spans) < len(chosen)
            or not all(fits)
            or len(prompt) + 2 * self._settings.soft * len(spans) > self._positions
        ):
            return None
        # The first document stands where its pack was compiled. Alone, or in a share of samples, it is a packet too.
        first_packet = 0 if len(spans) == 1 or draw.random() < _SHARE_OF_ALL else 1
        prefix = spans[0].start
        starts = [span.start for span in spans[first_packet:]]
        if list(ends[first_packet:-1]) != starts[1:] or spans[0].pack.prefix != prompt.token_ids[:prefix]:
            return None
        ids = prompt.token_ids
        packets = tuple(ids[start:end] for start, end in zip(starts, ends[first_packet:], strict=True))
        return Sample(ids, prefix, starts[0], packets, ids[ends[-1] :], answer)

    def _asked(self, draw: random.Random, title: str, text: str) -> tuple[str, tuple[int, ...] | None]:
        """A question about a document, and the tokens of its answer; `None` if the teacher is to write it."""
        sentences = re.split(r"(?<=[.!?])\s+", text)
        if len(sentences) > 1 and draw.random() < _SHARE_OF_NEXT:
            at = draw.randrange(len(sentences) - 1)
            question, answer = _NEXT.format(sentences[at]), " ".join(sentences[at + 1 :])
        else:
            question, answer = draw.choice(_QUESTIONS).format(title or " ".join(text.split()[:5])), text
        if draw.random() < _SHARE_OF_OWN:
            return question, None
        ids = self._session.tokenizer.encode(answer, add_special_tokens=False)
        return question, tuple(ids[: self._settings.answer]) or None


Taught: TypeAlias = tuple[Sample, Tensor, KVTensors]
"""A sample with its answer, the teacher's logits for it, `(answer, vocabulary)`, and the KV before the packets."""


@torch.no_grad()
def teach(model: CausalModel, sample: Sample, most: int) -> Taught:
    """Run the teacher on `sample` and its answer; without one, on a greedy answer of at most `most` tokens."""
    past, logits = model.forward_embedded(model.embedded(sample.prompt), None, 1)
    before, answer_logits = past.slice(0, sample.begin).clone(), [logits]
    if sample.answer:
        if rest := sample.answer[:-1]:
            answer_logits.append(model.forward_embedded(model.embedded(rest), past, len(rest))[1])
        return sample, torch.cat(answer_logits), before
    generated = [int(logits[-1].argmax())]
    while len(generated) < most and generated[-1] not in model.end_tokens:
        past, logits = model.forward_embedded(model.embedded(generated[-1:]), past, 1)
        answer_logits.append(logits)
        generated.append(int(logits[-1].argmax()))
    return replace(sample, answer=tuple(generated)), torch.cat(answer_logits), before


def divergence(model: CausalModel, taught: Taught, soft: Tensor) -> Tensor:
    """Mean KL per token of the answer, in nats; `soft` is header and trailer, `(2 * soft tokens, hidden)`."""
    _, logits, _ = taught
    expected = logits.float().log_softmax(-1)
    actual = student(model, taught, soft).float().log_softmax(-1)
    return (expected.exp() * (expected - actual)).sum(-1).mean()


def student(model: CausalModel, taught: Taught, soft: Tensor) -> Tensor:
    """The student's logits for the tokens of the answer, `(answer, vocabulary)`."""
    sample, _, before = taught
    answer, prefix = sample.answer or (), sample.prefix
    header, trailer = soft.to(model.network.get_input_embeddings().weight.dtype).tensor_split(2)
    parts, at = [before], sample.begin
    for ids in sample.packets:
        # One at a time: a batch would pad all documents to the longest.
        inputs = torch.cat([header, model.embedded(ids), trailer])
        kv, _ = model.forward_embedded(inputs, before.slice(0, prefix), 0)
        parts.append(model.rope.move(kv.slice(prefix, kv.tokens), at - prefix))
        at += len(inputs)
    tail = model.embedded((*sample.behind, *answer[:-1]))
    return model.forward_embedded(tail, KVTensors.concat(parts), len(answer))[1]


def checkpoint_of(out: Path) -> Path:
    """Path of the checkpoint of a training that writes `out`."""
    return out.with_name(out.name + ".training")


def train_wrapper(  # noqa: PLR0913
    session: Session,
    documents: Documents,
    out: str | Path,
    settings: PacketTraining | None = None,
    *,
    minutes: float | None = None,
    about: str = "",
    progress: bool = True,
) -> PacketComposer:
    """Train soft tokens for the model of `session` on `documents`, and write them to `out`.

    A checkpoint beside `out` is written after each step and deleted at the end; the same call resumes from it. After
    `minutes`, the best soft tokens so far are written and the checkpoint stays. `about` goes to the training record.
    Raises `OptionError` for too few documents, a checkpoint of other
    settings, documents or model, and a full disk; `UnsupportedRequestError` for an engine other than Hugging Face's.
    """
    with _frozen(_model_of(session)):
        return _Training(session, documents, settings or PacketTraining(), Path(out)).run(minutes, about, progress)


@torch.no_grad()
def wrapper_scores(  # noqa: PLR0913
    session: Session,
    wrapper: PacketComposer,
    documents: Documents,
    counts: Sequence[int],
    questions: int,
    *,
    tokens: tuple[int, int] | None = None,
) -> list[dict[str, float]]:
    """Mean KL divergence of `wrapper` from full attention, in nats per token of the answer, for each of `counts`.

    Each row is measured on `questions` samples of `count` documents that were held out. `without_soft_tokens_kl` is the
    divergence of the same packets without soft tokens, `nearer` the number of questions where soft tokens reduce it.
    """
    settings = PacketTraining(**wrapper.training.get("settings", {"soft": len(wrapper.header)}))
    samples = Samples(session, documents, settings if tokens is None else replace(settings, tokens=tokens))
    model = _model_of(session)
    soft = torch.cat([wrapper.header, wrapper.trailer]).to(model.device)
    rows = []
    for count in counts:
        pairs = []
        # These samples were not used to choose the best soft tokens.
        for number in range(_HELD, _HELD + questions):
            taught = teach(model, samples.draw("held", number, count), settings.answer)
            pairs.append([float(divergence(model, taught, embeddings)) for embeddings in (soft, soft[:0])])
        soft_kl, bare_kl = (sum(column) / questions for column in zip(*pairs, strict=True))
        nearer = sum(with_soft < without_soft for with_soft, without_soft in pairs)
        rows.append({"documents": count, "kl": soft_kl, "without_soft_tokens_kl": bare_kl, "nearer": nearer})
    return rows


class _Training:
    """One training, with its checkpoint.

    The checkpoint's tensors are `(2 * soft, hidden)` each: the `soft` tokens, their running `average`, the `best`
    average so far, and `mean` and `square`, the moments of Adam. Adam changes its moments and the soft tokens in place.
    """

    def __init__(self, session: Session, documents: Documents, settings: PacketTraining, out: Path) -> None:
        self._session, self._settings, self._out, self._file = session, settings, out, checkpoint_of(out)
        self._samples, self._model = Samples(session, documents, settings), _model_of(session)
        digest = blake2b(repr(list(documents)).encode(), digest_size=16).hexdigest()
        self._made: dict[str, Any] = {
            "settings": asdict(settings),
            "documents": digest,
            "model": session.fingerprint.id,
        }
        self._step_number, self._seconds = 0, 0.0
        self._looks: list[dict[str, float]] = []
        """Evaluations on held-out documents."""
        self._tensors = self._resumed() if self._file.exists() else self._fresh()
        self._soft = self._tensors["soft"].requires_grad_()
        self._adam = torch.optim.Adam([self._soft])
        self._adam.state[self._soft] = {
            "step": torch.tensor(float(self._step_number)),
            "exp_avg": self._tensors["mean"],
            "exp_avg_sq": self._tensors["square"],
        }
        # In standard deviations of the model's input embeddings.
        spread = float(self._model.network.get_input_embeddings().weight.detach().float().std())
        self._rate = settings.rate * spread
        self._held = cache(lambda number: self._teach("held", number))

    def run(self, minutes: float | None, about: str, progress: bool) -> PacketComposer:  # noqa: FBT001
        """Train to the end, or for `minutes`, and write the wrapper."""
        settings, tensors, looks = self._settings, self._tensors, self._looks
        began, before = time.monotonic(), self._seconds
        if not looks:
            bare = self._look(self._soft[:0])
            looks.append({"step": 0, "held_kl": self._look(tensors["average"]), "bare_kl": bare})
        is_over = False
        with bar_of("Training", settings.steps, "step", done=self._step_number, shown=progress) as bar:
            while not is_over and not self._is_done():
                loss = self._step()
                if self._step_number % settings.every == 0 or self._step_number == settings.steps:
                    held_kl = self._look(tensors["average"])
                    if held_kl < self._least["held_kl"]:
                        tensors["best"] = tensors["average"]
                    looks.append({"step": self._step_number, "held_kl": held_kl})
                bar.set_postfix(kl=f"{loss:.3f}", held=f"{looks[-1]['held_kl']:.4f}", refresh=False)
                bar.update()
                spent = time.monotonic() - began
                self._seconds, is_over = before + spent, minutes is not None and spent > 60 * minutes
                content = {"made": self._made, "step": self._step_number, "seconds": self._seconds, "looks": looks}
                write_signed(self._file, _CHECKPOINT, content, tensors)
        record = {
            **self._made,
            "about": about,
            "steps": self._step_number,
            "minutes": round(self._seconds / 60, 1),
            "best": {name: value for name, value in self._least.items() if name in ("step", "held_kl")},
            "without_soft_tokens_kl": looks[0]["bare_kl"],
            "looks": [[look["step"], round(look["held_kl"], 5)] for look in looks],
            "dtype": self._session.fingerprint.dtype,
            "device": f"{self._model.device.type} {platform.machine()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
        }
        header, trailer = tensors["best"].tensor_split(2)
        wrapper = PacketComposer(header, trailer, self._session.fingerprint, record)
        wrapper.save(self._out)
        if self._is_done():
            self._file.unlink(missing_ok=True)
        return wrapper

    def _step(self) -> float:
        settings = self._settings
        cosine = math.cos(math.pi * self._step_number / settings.steps)
        self._adam.param_groups[0]["lr"] = self._rate * (1 + cosine) / 2
        self._adam.zero_grad()
        total = 0.0
        for number in range(self._step_number * settings.batch, (self._step_number + 1) * settings.batch):
            loss = divergence(self._model, self._teach("train", number), self._soft) / settings.batch
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_([self._soft], 1.0)
        self._adam.step()
        self._step_number += 1
        self._tensors["average"] = self._tensors["average"].lerp(self._soft.detach(), _AVERAGED)
        return total

    def _teach(self, kind: str, number: int) -> Taught:
        return teach(self._model, self._samples.draw(kind, number), self._settings.answer)

    @torch.no_grad()
    def _look(self, soft: Tensor) -> float:
        """Mean divergence on held-out documents; an empty `soft` measures packets without soft tokens."""
        return sum(float(divergence(self._model, self._held(number), soft)) for number in range(_HELD)) / _HELD

    @property
    def _least(self) -> dict[str, float]:
        """The evaluation with the least divergence."""
        return min(self._looks, key=lambda look: look["held_kl"])

    def _is_done(self) -> bool:
        since = sum(look["step"] > self._least["step"] for look in self._looks)
        return self._step_number >= self._settings.steps or since >= self._settings.patience

    def _fresh(self) -> dict[str, Tensor]:
        """Initial soft tokens: embeddings of line breaks, the closest to no soft tokens among those tried."""
        blank = self._session.tokenizer.encode("\n", add_special_tokens=False)[:1]
        soft = self._model.embedded(blank * (2 * self._settings.soft)).float()
        copies = {name: soft.clone() for name in ("soft", "average", "best")}
        return copies | {name: torch.zeros_like(soft) for name in ("mean", "square")}

    def _resumed(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint; also goes on from its step. Raises `OptionError` for another training."""
        content, tensors = read_signed(self._file, _CHECKPOINT)
        checkpoint, current = content["made"], self._made
        changed = [name for name in ("documents", "model") if checkpoint[name] != current[name]]
        settings = asdict(PacketTraining(**checkpoint["settings"]))
        for name, value in current["settings"].items():
            if settings[name] != value:
                changed.append(f"{name} (then {settings[name]}, now {value})")
        if changed:
            raise OptionError(
                f"{self._file} is the checkpoint of another training: it differs in {', '.join(changed)}. Go on with "
                "what it was begun with, delete it to begin anew, or name another --out."
            )
        self._step_number, self._seconds, self._looks = content["step"], content["seconds"], content["looks"]
        return {name: tensor.to(self._model.device) for name, tensor in tensors.items()}


def _model_of(session: Session) -> CausalModel:
    model = session.engine.model if isinstance(session.engine, LocalEngine) else None
    if not isinstance(model, CausalModel):
        raise UnsupportedRequestError(
            f"{session.name} does not train soft tokens. `kp_core.load_engine(model)`, which runs the model with "
            "Hugging Face on this machine, does."
        )
    return model


@contextmanager
def _frozen(model: CausalModel) -> Iterator[None]:
    """Disable gradients of the weights during training, and restore them, as the caller may own the model."""
    trainable = [weight for weight in model.network.parameters() if weight.requires_grad]
    for weight in trainable:
        weight.requires_grad_(False)  # noqa: FBT003
    try:
        yield
    finally:
        for weight in trainable:
            weight.requires_grad_()
