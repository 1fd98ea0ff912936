"""Trains soft tokens around packs by self-distillation (KV Packet, arXiv 2604.13226, section 3).

The loss is the KL divergence between the teacher's and the student's distributions at the tokens of the answer. The
model is frozen; gradients reach only the soft tokens, through the keys and values of the packets.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kp_core.compose.wrapper import Wrapper, read_signed, save_wrapper, write_signed
from kp_core.engines.hf.distilling import Distilling
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.hf.samples import Documents, PacketTraining, Samples
from kp_core.engines.session import Session
from kp_core.errors import UnsupportedRequestError, WrapperError
from kp_core.packs.envelope import Envelope
from kp_core.progress import bar_of

__all__ = ["checkpoint_of", "train_wrapper", "wrapper_scores"]

_CHECKPOINT = Envelope("knowledge-pack-training", "content", ("1",), covers_tensors=True)
_AVERAGED = 0.05  # Weight of the current soft tokens in their running average, which is evaluated and saved.
_HELD = 8


@dataclass
class _State:
    """Content of a checkpoint: soft tokens, their average and the best average, and the two moments of Adam.

    All five are `(2 * soft, hidden)`.
    """

    soft: Tensor
    average: Tensor
    best: Tensor
    mean: Tensor
    square: Tensor
    step: int = 0
    seconds: float = 0.0
    looks: list[dict[str, float]] = field(default_factory=list)

    @property
    def least(self) -> dict[str, float]:
        """The evaluation with the least divergence."""
        return min(self.looks, key=lambda look: look["held_kl"])


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
) -> Wrapper:
    """Train soft tokens for the model of `session` on `documents`, and write them to `out`.

    A checkpoint beside `out` is written after each step and deleted at the end. The same call resumes from it and gives
    the same bits on the same machine. After `minutes`, the best soft tokens so far are written and the checkpoint
    stays. `about` goes to the training record. Raises `WrapperError` for too few documents, a checkpoint of other
    settings, documents or model, and a full disk; `UnsupportedRequestError` for an engine other than Hugging Face's.
    """
    chosen, target = settings or PacketTraining(), Path(out)
    model = _model_of(session)
    samples = Samples(session, documents, chosen)
    digest = blake2b(repr(list(documents)).encode(), digest_size=16).hexdigest()
    record = {"settings": chosen.to_dict(), "documents": digest, "model": session.fingerprint.id}
    with _frozen(model):
        return _Training(session, Distilling(model), samples, chosen, record, target).run(minutes, about, progress)


@torch.no_grad()
def wrapper_scores(  # noqa: PLR0913
    session: Session,
    wrapper: Wrapper,
    documents: Documents,
    counts: Sequence[int],
    questions: int,
    *,
    tokens: tuple[int, int] | None = None,
) -> list[dict[str, float]]:
    """Mean KL divergence of `wrapper` from full attention, in nats per token of the answer, for each of `counts`.

    Each row is measured on `questions` samples of `count` documents. If the wrapper was trained on these documents with
    the settings of its training record, only held-out documents are used. `without_soft_tokens_kl` is the divergence of
    the same packets without soft tokens. `nearer` is the number of questions for which soft tokens reduce it.
    """
    settings = PacketTraining.from_dict(wrapper.training.get("settings", {"soft": len(wrapper.header)}))
    samples = Samples(session, documents, settings if tokens is None else replace(settings, tokens=tokens))
    distilling = Distilling(_model_of(session))
    soft = torch.cat([wrapper.header, wrapper.trailer]).to(distilling.device)
    rows = []
    for count in counts:
        pairs = []
        # These samples were not used to choose the best soft tokens.
        for number in range(_HELD, _HELD + questions):
            taught = distilling.teach(samples.draw("held", number, count), settings.answer)
            pairs.append([float(distilling.divergence(taught, embeddings)) for embeddings in (soft, soft[:0])])
        soft_kl, bare_kl = (sum(column) / questions for column in zip(*pairs, strict=True))
        nearer = sum(with_soft < without_soft for with_soft, without_soft in pairs)
        rows.append({"documents": count, "kl": soft_kl, "without_soft_tokens_kl": bare_kl, "nearer": nearer})
    return rows


class _Training:
    """One training, with its checkpoint."""

    def __init__(  # noqa: PLR0913
        self,
        session: Session,
        distilling: Distilling,
        samples: Samples,
        settings: PacketTraining,
        made: dict[str, Any],
        out: Path,
    ) -> None:
        self._session, self._distilling, self._samples, self._settings = session, distilling, samples, settings
        self._made, self._out, self._file = made, out, checkpoint_of(out)
        self._state = self._resumed() if self._file.exists() else self._fresh()
        self._held = cache(lambda number: distilling.teach(samples.draw("held", number), settings.answer))

    def run(self, minutes: float | None, about: str, progress: bool) -> Wrapper:  # noqa: FBT001
        """Train to the end, or for `minutes`, and write the wrapper."""
        state, settings = self._state, self._settings
        began, before = time.monotonic(), state.seconds
        soft = state.soft.to(self._distilling.device).requires_grad_()
        adam = torch.optim.Adam([soft])
        if state.step:
            adam.state[soft] = {"step": torch.tensor(float(state.step)), "exp_avg": state.mean}
            adam.state[soft]["exp_avg_sq"] = state.square
        else:
            bare = self._look(soft[:0])
            state.looks.append({"step": 0, "held_kl": self._look(state.average), "bare_kl": bare})
        bar = bar_of("Training", settings.steps, "step", done=state.step, shown=progress)
        is_over = False
        with bar:
            while not is_over and not self._is_done():
                loss = self._step(soft, adam)
                if state.step % settings.every == 0 or state.step == settings.steps:
                    held_kl = self._look(state.average)
                    if held_kl < state.least["held_kl"]:
                        state.best = state.average
                    state.looks.append({"step": state.step, "held_kl": held_kl})
                bar.set_postfix(kl=f"{loss:.3f}", held=f"{state.looks[-1]['held_kl']:.4f}", refresh=False)
                bar.update()
                spent = time.monotonic() - began
                state.seconds, is_over = before + spent, minutes is not None and spent > 60 * minutes
                state.soft, state.mean, state.square = soft, adam.state[soft]["exp_avg"], adam.state[soft]["exp_avg_sq"]
                self._save()
        header, trailer = state.best.tensor_split(2)
        wrapper = Wrapper(header, trailer, self._session.fingerprint, self._record(about))
        save_wrapper(wrapper, self._out)
        if self._is_done():
            self._file.unlink(missing_ok=True)
        return wrapper

    def _step(self, soft: Tensor, adam: torch.optim.Adam) -> float:
        state, settings = self._state, self._settings
        cosine = math.cos(math.pi * state.step / settings.steps)
        adam.param_groups[0]["lr"] = settings.rate * self._distilling.spread * (1 + cosine) / 2
        adam.zero_grad()
        total = 0.0
        for number in range(state.step * settings.batch, (state.step + 1) * settings.batch):
            taught = self._distilling.teach(self._samples.draw("train", number), settings.answer)
            loss = self._distilling.divergence(taught, soft) / settings.batch
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_([soft], 1.0)
        adam.step()
        state.step += 1
        state.average = state.average.lerp(soft.detach(), _AVERAGED)
        return total

    @torch.no_grad()
    def _look(self, soft: Tensor) -> float:
        """Mean divergence on held-out documents; an empty `soft` measures packets without soft tokens."""
        return sum(float(self._distilling.divergence(self._held(number), soft)) for number in range(_HELD)) / _HELD

    def _is_done(self) -> bool:
        state = self._state
        since = sum(look["step"] > state.least["step"] for look in state.looks)
        return state.step >= self._settings.steps or since >= self._settings.patience

    def _fresh(self) -> _State:
        """Initial soft tokens: embeddings of line breaks, the closest to no soft tokens among those tried."""
        blank = self._session.tokenizer.encode("\n", add_special_tokens=False)[:1]
        soft = self._distilling.embed(blank * (2 * self._settings.soft)).float()
        return _State(soft, soft.clone(), soft.clone(), torch.zeros_like(soft), torch.zeros_like(soft))

    def _resumed(self) -> _State:
        content, tensors = read_signed(self._file, _CHECKPOINT)
        checkpoint, current = content["made"], self._made
        changed = [name for name in current if name != "settings" and checkpoint[name] != current[name]]
        for name, value in current["settings"].items():
            if checkpoint["settings"].get(name) != value:
                changed.append(f"{name} (then {checkpoint['settings'].get(name)}, now {value})")
        if changed:
            raise WrapperError(
                f"{self._file} is the checkpoint of another training: it differs in {', '.join(changed)}. Go on with "
                "what it was begun with, delete it to begin anew, or name another --out."
            )
        on_device = {name: tensor.to(self._distilling.device) for name, tensor in tensors.items()}
        return _State(**on_device, step=content["step"], seconds=content["seconds"], looks=content["looks"])

    def _save(self) -> None:
        state = self._state
        content = {"made": self._made, "step": state.step, "seconds": state.seconds, "looks": state.looks}
        names = ("soft", "average", "best", "mean", "square")
        write_signed(self._file, _CHECKPOINT, content, {name: getattr(state, name) for name in names})

    def _record(self, about: str) -> dict[str, Any]:
        state = self._state
        best = {name: value for name, value in state.least.items() if name in ("step", "held_kl")}
        return {
            **self._made,
            "about": about,
            "steps": state.step,
            "minutes": round(state.seconds / 60, 1),
            "best": best,
            "without_soft_tokens_kl": state.looks[0]["bare_kl"],
            "looks": [[look["step"], round(look["held_kl"], 5)] for look in state.looks],
            "dtype": self._session.fingerprint.dtype,
            "device": f"{self._distilling.device.type} {platform.machine()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
        }


def _model_of(session: Session) -> CausalModel:
    model = getattr(session.engine, "model", None)
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
