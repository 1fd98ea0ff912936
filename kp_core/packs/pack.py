"""`KnowledgePack`: a text, its tokens, its KV, and the edits that led to it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from kp_core.errors import KnowledgePackError, OptionError, PackCorruptError, PackError
from kp_core.kv import KVTensors
from kp_core.packs.blobs import Buffer
from kp_core.packs.codec import Compression, check_compression
from kp_core.packs.envelope import string, to_json
from kp_core.packs.fingerprint import ModelFingerprint, mismatch
from kp_core.packs.handle import check_namespace

if TYPE_CHECKING:
    from kp_core.steering import Steering

logger = logging.getLogger(__name__)

_EDITS = "kp:edits"  # Key in the provenance of a pack.
_LARGEST_INT = 2**53 - 1  # The largest integer that every JSON reader keeps exact.

Prefix: TypeAlias = tuple[int, ...]
"""The tokens before a pack when its KV was computed; empty at the start of a prompt."""


@dataclass(frozen=True)
class Edit:
    """One edit: `how` it was done ("amend", "overwrite", "rebuild" or "squash"), the old text and the new text."""

    how: str
    old: str
    new: str


@dataclass(frozen=True)
class Correction:
    """Read the characters `start:stop` of the corrected text as `new`; `line` is the erratum that tells the model."""

    start: int
    stop: int
    new: str
    line: str


@dataclass(frozen=True)
class Edits:
    """The edits of one pack, oldest first.

    `corrections` refer to the first `base` characters of the pack's text. Their lines (errata) follow the text, in
    order. `starts` are the tokens of the pack at which errata begin, ascending. `said` are earlier errata that are now
    part of the text. `root` is the digest of the very first text (`root_of`); it is empty if no earlier version counts.
    """

    root: str = ""
    said: tuple[str, ...] = ()
    base: int = 0
    corrections: tuple[Correction, ...] = ()
    starts: tuple[int, ...] = ()
    history: tuple[Edit, ...] = ()

    @cached_property
    def errata(self) -> tuple[str, ...]:
        """All errata since the first text that still apply."""
        return (*self.said, *(correction.line for correction in self.corrections))

    @classmethod
    def of(cls, provenance: Mapping[str, str]) -> Edits:
        """Read the edits from `provenance`; raises `PackError` if `written` did not write them."""
        text = provenance.get(_EDITS)
        if text is None:
            return cls()
        try:
            root, said, base, corrections, starts, history = json.loads(text)
            edits = cls(
                root,
                tuple(said),
                base,
                tuple(Correction(*row) for row in corrections),
                tuple(starts),
                tuple(Edit(*row) for row in history),
            )
            strings = [root, *said, *(part for row in corrections for part in row[2:]), *chain(*history)]
            numbers = [base, *starts, *(part for row in corrections for part in row[:2])]
        except (ValueError, TypeError) as error:
            raise PackError(f"Got {text[:60]!r} as the edits of a pack; expected what an edit wrote.") from error
        wrong = [value for value in strings if not isinstance(value, str)]
        wrong += [value for value in numbers if type(value) is not int or value < 0]
        if wrong or list(starts) != sorted(set(starts)):
            raise PackError(f"Got {wrong or starts} in the edits of a pack; expected strings, and positions in order.")
        return edits

    def written(self, provenance: Mapping[str, str]) -> dict[str, str]:
        """Return `provenance` with these edits added."""
        return {**provenance, _EDITS: json.dumps(astuple(self), ensure_ascii=False, separators=(",", ":"))}


def root_of(text: str) -> str:
    """Return the digest that names a text in the edits of its later versions."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class PackKey:
    """Selects a KV entry of a text: its model, and its prefix unless `None`."""

    model: ModelFingerprint
    prefix: Prefix | None = None

    def fits(self, pack: KnowledgePack) -> bool:
        """Whether `pack` matches this key."""
        return pack.fingerprint == self.model and self.prefix in (None, pack.prefix)


@dataclass(frozen=True, eq=False)
class KnowledgePack:
    """A text, its tokens and, unless the pack is lazy, the KV that a model computed for them behind a prefix.

    `token_ids` holds the tokens that stay the same whatever follows the text in a prompt, so the last characters of
    `text` may have none. A pack for the system message includes the tokens of its line end, which is not in `text`.
    `kv` has one entry per token of `token_ids`. Packs are immutable: every operation returns a new one.

    Raises `PackError` if `kv` and `token_ids` disagree or the provenance holds invalid edits, `PromptError` for an
    invalid `namespace`.
    """

    text: str
    namespace: str
    token_ids: tuple[int, ...]
    prefix: Prefix
    fingerprint: ModelFingerprint
    kv: KVTensors | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Where the pack comes from (`title`, `source`) and what computed it (`device`, `torch`), as readable strings."""
    stored_bytes: int = field(default=0, compare=False)
    """Bytes of KV that the store holds but has not loaded."""
    steering: Steering | None = None
    """What the engine adds to the pack's values wherever it places them (see `steer`); `kv` is always the plain KV."""

    compression: Compression = "none"
    """How the KV is stored; see `compressed`."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        object.__setattr__(self, "provenance", MappingProxyType(dict(self.provenance)))
        if self.kv is not None and self.kv.tokens != len(self.token_ids):
            raise PackError(
                f"Got KV of {self.kv.tokens} tokens for a pack of {len(self.token_ids)}; expected one entry per token."
            )
        self.edits  # noqa: B018 - refused here, and not when it is first used

    @cached_property
    def edits(self) -> Edits:
        """The edits of the pack, read from its provenance."""
        return Edits.of(self.provenance)

    @property
    def history(self) -> tuple[Edit, ...]:
        """All edits that led to this pack, oldest first."""
        return self.edits.history

    @property
    def errata_start(self) -> int:
        """Index of the first token of an erratum, or the number of tokens if there is none."""
        return min((at for at in self.edits.starts if at > 0), default=len(self.token_ids))

    @property
    def is_lazy(self) -> bool:
        """Whether the pack has no KV yet; its first use computes it."""
        return self.kv is None

    @property
    def nbytes(self) -> int:
        """Bytes of the KV; 0 for a lazy pack."""
        return 0 if self.kv is None else self.kv.nbytes

    @property
    def key(self) -> PackKey:
        """The model and prefix that this entry was computed for."""
        return PackKey(self.fingerprint, self.prefix)

    def without_kv(self) -> KnowledgePack:
        """Return the pack as a lazy pack."""
        return replace(self, kv=None)

    def compressed(self, compression: Compression) -> KnowledgePack:
        """Return the pack with its KV stored in fewer bytes; a lazy pack has nothing to compress.

        `"lossless"` changes no bit (0.7 of the bytes in bfloat16). Raises `PackError` for other names.
        """
        check_compression(compression)
        return replace(self, compression=compression)

    def steer(self, steering: Steering, alpha: float | None = None) -> KnowledgePack:
        """Return the pack with steering applied: values `V + alpha * delta` (arXiv 2604.03270, section 2.6).

        The default `alpha` is the strength beside knowledge: the calibrated value of the steering, else 0.7. Steering
        adds to earlier steering; a sum of zero gives the plain pack. A steered pack cannot be stored: store the pack
        and save the steering. Raises `PackError` for a steering of another model, `OptionError` for an
        `alpha` that is not finite.
        """
        if not hasattr(steering, "at_alpha"):
            raise OptionError(
                f"Got a steering of type {type(steering).__name__}; expected a Steering. Make one with "
                "`engine.make_steering(pairs)`."
            )
        scaled = steering.at_alpha(alpha, with_knowledge=True)
        # A pack recovered from text alone has no model yet; the engine checks again.
        if self.fingerprint != ModelFingerprint.unknown():
            scaled.check(self.fingerprint)
        total = scaled if self.steering is None else self.steering + scaled
        return replace(self, steering=None if total.is_zero else total)

    def check(self, fingerprint: ModelFingerprint) -> None:
        """Raise `PackError`, naming each differing field, unless that model made the pack."""
        differences = self.fingerprint.diff(fingerprint)
        if differences:
            same_model = self.fingerprint.same_model(fingerprint)
            raise mismatch(f"The pack {self.text[:40]!r}", differences, same_model=same_model)


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the number of leading tokens that both have in common."""
    for at, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return at
    return min(len(left), len(right))


def encode_text(packs: Sequence[KnowledgePack]) -> bytes:
    """Return the text file of a pack: one line of JSON about it, then the text, byte for byte.

    `packs` are the same text as compiled for each model and prefix; the KV of each is an `Entry`. Equal packs give
    equal bytes. Raises `PackError` for what JSON cannot hold.
    """
    pack = packs[-1]
    compiled = [
        {"fingerprint": each.fingerprint.to_dict(), "prefix": each.prefix, "token_ids": each.token_ids}
        for each in packs
        if each.fingerprint != ModelFingerprint.unknown()
    ]
    try:
        for each in packs:
            check_integers(chain(each.prefix, each.token_ids))
            for value in chain(each.fingerprint.to_dict().values(), *each.provenance.items()):
                string(value, "pack")
        about = {"compiled": compiled, "namespace": pack.namespace, "provenance": dict(pack.provenance)}
        line = to_json(about, sort_keys=True)
        return f"{root_of(line)} {line}\n{pack.text}".encode()
    except (TypeError, ValueError, PackCorruptError) as error:
        raise PackError(
            f"The pack {pack.text[:40]!r} cannot be stored: {error} Expected Unicode text, integer token ids and "
            "provenance of strings."
        ) from error


def decode_text(data: Buffer, namespace: str, is_own: Callable[[str], bool]) -> tuple[KnowledgePack, ...]:
    """Return what `encode_text` was given, or the text alone if what stands before it is damaged.

    `is_own` knows the text; a file of release 0.2 is nothing but that. Raises `PackCorruptError` for another text.
    """
    try:
        whole = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise PackCorruptError(f"It is not Unicode: {error}.") from error
    line, _, text = whole.partition("\n")
    if not is_own(text):
        line, text = "", whole
        if not is_own(text):
            raise PackCorruptError("It holds another text than that of its handle.")
    alone = KnowledgePack(text, namespace, (), (), ModelFingerprint.unknown())
    if not line:
        return (alone,)
    try:
        about = json.loads(line.partition(" ")[2])
        alone = replace(alone, provenance=about["provenance"])
        compiled = (
            replace(
                alone,
                token_ids=tuple(row["token_ids"]),
                prefix=tuple(row["prefix"]),
                fingerprint=ModelFingerprint.from_dict(row["fingerprint"]),
            )
            for row in about["compiled"]
        )
        packs = tuple(compiled) or (alone,)
        if encode_text(packs) != bytes(data):
            raise PackCorruptError("It is not in canonical form.")
    except (KnowledgePackError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        logger.warning("Only the text of the pack %r is intact, and is compiled again: %s", text[:40], error)
        return (replace(alone, provenance={}),)
    return packs


def check_integers(numbers: Iterable[object]) -> None:
    """Raise `PackCorruptError` for a number that JSON readers do not keep exact."""
    for number in numbers:
        # `type(...) is int`, because `isinstance` accepts JSON's true as an integer.
        if type(number) is not int or not 0 <= number <= _LARGEST_INT:
            raise PackCorruptError(f"Got {number!r}; expected an integer from 0 to 2**53 - 1.")
