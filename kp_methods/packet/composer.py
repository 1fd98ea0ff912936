"""Composes packs between trained soft tokens, the wrapper; each is compiled once and composed without a forward pass.

A wrapper's file is safetensors with digest and fingerprint, written atomically.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from kp_core.errors import OptionError, PackCorruptError, PackError
from kp_core.packs.envelope import Envelope, mapping
from kp_core.packs.fingerprint import NUMERICS, ModelFingerprint, mismatch
from kp_core.plan.composer import Arrangement, Host
from kp_core.prompt.conversation import Turn
from kp_core.prompt.prompt import Prompt, SoftTokens, Span
from kp_methods.calibration import MeasuredComposer

SHIPPED = Path(__file__).parent / "wrappers" / "smollm2-135m-instruct.safetensors"
"""The wrapper of the bundled model; its training record has the command that made it."""

_ENVELOPE = Envelope("knowledge-pack-wrapper", "content", "1", covers_tensors=True)


@dataclass(frozen=True, eq=False)
class PacketComposer(MeasuredComposer):
    """Moves packs together with trained soft tokens around them, a wrapper (KV Packet, arXiv 2604.13226, section 3).

    `header` and `trailer` are input embeddings, `(soft tokens, hidden)`, in float32 on the CPU. They fit the model of
    `fingerprint` with any numerics. `training` records settings, steps and measurements.

    Header, pack and trailer are compiled behind the prefix of the pack, once for each wrapper, and stored. At use they
    are copied and their keys rotated, without a forward pass. Soft tokens take positions of the prompt, and count as
    approximate like their packs. A pack behind the prefix it was compiled for is exact and has no soft tokens.
    Approximate, and best on the kind of text that the wrapper was trained on: measure with `kp calibrate` before
    you use it. Raises `OptionError` for tensors of another shape, and for values that are not finite.
    """

    header: Tensor
    trailer: Tensor
    fingerprint: ModelFingerprint
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "training", MappingProxyType(dict(self.training)))
        for name in ("header", "trailer"):
            object.__setattr__(self, name, getattr(self.soft, name))

    @classmethod
    def load(cls, wrapper: str | Path = SHIPPED) -> PacketComposer:
        """The composer in a file, by default that of the bundled model, with its digest checked; nothing is unpickled.

        `check` tests at use whether it fits a model. Raises `OptionError` for a file that is missing, damaged or of
        another kind.
        """
        content, tensors = read_signed(wrapper, _ENVELOPE)
        try:
            fingerprint = ModelFingerprint.from_dict(mapping(content["fingerprint"], "fingerprint"))
            return cls(tensors["header"], tensors["trailer"], fingerprint, mapping(content["training"], "training"))
        except (PackCorruptError, LookupError) as error:
            raise OptionError(
                f"The file describes no wrapper: {error}. Train it anew, or load another copy."
            ) from error

    def save(self, path: str | Path) -> Path:
        """Write the wrapper to `path` atomically, replacing an existing file; raises `OptionError` if that fails."""
        content = {"fingerprint": self.fingerprint.to_dict(), "training": dict(self.training)}
        return write_signed(path, _ENVELOPE, content, {"header": self.header, "trailer": self.trailer})

    @cached_property
    def soft(self) -> SoftTokens:
        """What is laid around each pack."""
        return SoftTokens(self.header, self.trailer)

    @cached_property
    def id(self) -> str:
        """Digest of the soft tokens and of the model they fit."""
        return blake2b(self.fingerprint.identity.encode() + self.soft.content, digest_size=16).hexdigest()

    @property
    def key(self) -> str:
        """Method and digest of the wrapper."""
        return f"packet:{self.id}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PacketComposer) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def check(self, fingerprint: ModelFingerprint) -> None:
        """Raise `PackError`, naming each differing field, unless it was trained for that model."""
        differences = self.fingerprint.diff(fingerprint)
        identity = {name: difference for name, difference in differences.items() if name not in NUMERICS}
        if identity:
            advice = "Train one with `kp packet train`, or use another composer."
            raise mismatch(f"The wrapper {self.id[:8]}", identity, "wrapper", advice)

    def arrange(self, turns: Sequence[Turn], host: Host) -> Arrangement:
        """See `Composer.arrange`; raises as `check`."""
        self.check(host.model)
        return super().arrange(turns, host)

    def layout(self, prompt: Prompt, moved: Sequence[Span], host: Host) -> tuple[Prompt, Sequence[Span]]:
        """`prompt` with all `moved` packs between soft tokens; later tokens stand at higher positions.

        Blanks behind a pack become part of it, so that no tokens between packs must be computed.
        """
        if not moved:
            return prompt, ()
        ends = zip(prompt.spans, host.template.ends(prompt), strict=True)
        wrapped = {span.start: (end, self._wrapped(prompt, span, end)) for span, end in ends if span in moved}

        def place(at: int) -> int:
            """Where the token at `at` stands behind the soft tokens before it."""
            return at + sum(len(self.header) + len(self.trailer) for end, _ in wrapped.values() if end <= at)

        ids: list[int] = []
        copied = 0
        for start, (end, span) in wrapped.items():
            ids += (*prompt.token_ids[copied:start], *span.pack.token_ids)
            copied = end
        spans = list[Span]()
        # A message may begin at the start of a pack, never inside it.
        inside = {at for start, (end, _) in wrapped.items() for at in range(start + 1, end)}
        for span in prompt.spans:
            end, laid = wrapped.get(span.start, (span.stop, span))
            spans.append(replace(laid, start=place(span.start), stop=place(end)))
        texts = [
            replace(span, start=place(span.start), stop=place(span.stop))
            for span in prompt.as_text
            if span.start not in inside
        ]
        laid_out = replace(
            prompt,
            token_ids=(*ids, *prompt.token_ids[copied:]),
            spans=tuple(spans),
            breaks=tuple(place(at) for at in prompt.breaks if at not in inside),
            as_text=tuple(texts),
        )
        return laid_out, [span for span in spans if span.soft]

    def _wrapped(self, prompt: Prompt, span: Span, end: int) -> Span:
        """`span` up to `end` between soft tokens, with its start as in `prompt`; its pack has no KV."""
        pack = replace(span.pack, token_ids=self.soft.around(prompt.token_ids[span.start : end]), kv=None)
        return replace(span, reference=replace(span.reference, pack=pack), soft=self.soft)


def write_signed(
    path: str | Path, envelope: Envelope, content: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """`envelope.save`; raises `OptionError` if writing fails, and then leaves an existing file unchanged."""
    try:
        return envelope.save(path, content, tensors)
    except OSError as error:
        raise OptionError(
            f"{Path(path).absolute()} could not be written ({error.strerror or error}); what was there before is "
            "untouched. Make room, or name another place."
        ) from error


def read_signed(path: str | Path, envelope: Envelope) -> tuple[Any, dict[str, Tensor]]:
    """Read a file of `write_signed`; raises `OptionError` for anything else."""
    try:
        return envelope.load(path)
    except FileNotFoundError as error:
        raise OptionError(f"There is no {path}. `kp packet train` makes one.") from error
    except (PackError, ValueError, TypeError, AttributeError) as error:
        raise OptionError(f"{path} cannot be used: {error} Train it anew, or load another copy.") from error
