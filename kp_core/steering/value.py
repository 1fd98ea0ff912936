"""A steering as a value with arithmetic, and its file: safetensors, digested, fingerprinted, written atomically."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from numbers import Real
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from kp_core.errors import OptionError, PackCorruptError, PackError
from kp_core.packs.codec import digest
from kp_core.packs.envelope import Envelope
from kp_core.packs.fingerprint import ModelFingerprint, mismatch
from kp_core.prompt.conversation import Message

Method: TypeAlias = Literal["mean", "last_token"]
Side: TypeAlias = str | Sequence[Message]
"""One side of a contrastive pair: a conversation, or the text of one user message."""

Pair: TypeAlias = tuple[Side, Side]
"""The side to steer towards, and the side to steer away from."""

LayerRange: TypeAlias = tuple[float, float] | range | Sequence[int]
"""Layers as fractions of the depth `(1/3, 2/3)`, as a `range`, or as indices `[10, 11, 12]`."""

Scope: TypeAlias = Literal["pack", "system", "prompt", "last_token"]
"""What is steered: the packs; the tokens before the first message that is not a system message; the whole prompt; or
the last prompt token whose KV is cached before the pass that gives the first token of the answer."""

Deltas: TypeAlias = Mapping[int, Tensor]

_WITH_KNOWLEDGE = 0.7  # arXiv 2604.03270, section 4.7.
_STRONG = 0.3
"""Of three words in a row, SmolLM2-135M repeats 7 % under the presets at strength 0.2, 20 % at 0.3, 30 % at 0.35."""


class SteeringWarning(UserWarning):
    """A steering is applied beyond the strength up to which text was measured to stay coherent."""


def check_method(method: str, *, keys: bool) -> None:
    """Raise `OptionError` for an unknown method, and for keys with `"mean"`."""
    if method not in get_args(Method):
        raise OptionError(f"Got the method {method!r}; expected 'mean' or 'last_token'.")
    if method == "mean" and keys:
        raise OptionError(
            "Got a coefficient or deltas for keys with method='mean'. RoPE rotates each cached key by its position, so "
            "a mean over positions mixes rotations and is no direction. Leave keys out, or use method='last_token'."
        )


@dataclass(frozen=True, eq=False)
class Steering:
    """Per-layer deltas for a KV cache, made from contrastive pairs. Steerings with the same effect are equal.

    `values` maps layers to float32 tensors `(kv_heads, head_dim)` on the CPU: `V + delta` at every steered position
    (Knowledge Packs, arXiv 2604.03270, section 2.6). `keys` does the same for keys, with `method="last_token"` only (KV
    cache steering, arXiv 2507.08799).

    `scales` maps layers to the mean norm of a cached value vector (all heads of one token) over the pairs; it is the
    unit of `strength`. `coherent` has the least and greatest alpha at which text stayed coherent (infinite if no limit
    was found), `recommended` the alphas that a calibration chose, without and with packs. Multiplication rescales both.

    `a + b`, `a - b`, `-a`, `2 * a`, `a * 2`, `a / 2` are new steerings. Raises `OptionError` for deltas that are not
    finite or have another shape, for none at all, and for a wrong `method`.
    """

    values: Deltas
    fingerprint: ModelFingerprint
    method: Method = "mean"
    keys: Deltas = field(default_factory=dict)
    scales: Mapping[int, float] = field(default_factory=dict)
    coherent: tuple[float, float] | None = None
    recommended: tuple[float, float] | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_method(self.method, keys=bool(self.keys))
        for name in ("values", "keys"):
            object.__setattr__(self, name, MappingProxyType(_checked(name, getattr(self, name))))
        if not self.values and not self.keys:
            raise OptionError("Got a steering without layers; expected a delta for at least one layer.")
        object.__setattr__(self, "scales", MappingProxyType(dict(sorted(self.scales.items()))))
        object.__setattr__(self, "provenance", MappingProxyType(dict(self.provenance)))
        if self.recommended is not None:
            for alpha in self.recommended:
                _finite(alpha, "a recommended alpha")

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with a delta, ascending."""
        return tuple(sorted({*self.values, *self.keys}))

    @cached_property
    def id(self) -> str:
        """Digest of model, method and deltas, without the descriptive fields."""
        state = blake2b(f"{self.fingerprint.id}\0{self.method}".encode(), digest_size=16)
        for name, deltas in (("value", self.values), ("key", self.keys)):
            for layer, delta in deltas.items():
                state.update(f"\0{name}.{layer}.{tuple(delta.shape)}\0".encode())
                state.update(delta.numpy().tobytes())
        return state.hexdigest()

    @cached_property
    def is_zero(self) -> bool:
        """Whether every delta is zero, so that the output equals that without steering, bit for bit."""
        return not any(bool(delta.any()) for delta in (*self.values.values(), *self.keys.values()))

    @property
    def norms(self) -> dict[int, float]:
        """Per layer, the Euclidean norm of the value delta over all heads."""
        return {layer: float(delta.norm()) for layer, delta in self.values.items()}

    @property
    def strength(self) -> float:
        """Mean over layers of the value delta's norm, in units of the cached values' mean norm in that layer.

        Unlike an alpha, a strength has about the same effect in every model. Raises `OptionError` without scales.
        """
        norms, scales = self.norms, self.scales
        if not norms or any(scales.get(layer, 0.0) <= 0 for layer in norms):
            raise OptionError("This steering carries no scale of the cached values; give `alpha` instead.")
        return fmean(norm / scales[layer] for layer, norm in norms.items())

    def default_alpha(self, *, with_knowledge: bool) -> float:
        """The calibrated alpha; otherwise 0.7 with packs (arXiv 2604.03270, section 4.7), else 1."""
        if self.recommended is not None:
            return self.recommended[with_knowledge]
        return _WITH_KNOWLEDGE if with_knowledge else 1.0

    def at_alpha(self, alpha: float | None, *, with_knowledge: bool) -> Steering:
        """This steering times `alpha`; `None` means the default. Raises `OptionError` unless `alpha` is finite."""
        if alpha is None:
            alpha = self.default_alpha(with_knowledge=with_knowledge)
        if isinstance(alpha, bool) or not isinstance(alpha, Real):
            raise OptionError(f"Got alpha={alpha!r}; expected a finite number, or None for the default strength.")
        return self * float(alpha)

    def at_strength(self, strength: float) -> Steering:
        """The same direction with that `strength`; a negative one reverses it.

        Raises `OptionError` if `strength` is not finite, or the steering is zero or has no scales.
        """
        if self.strength == 0:
            raise OptionError("A steering of zero has no direction, so it can have no other strength.")
        return self * (_finite(strength, "strength") / self.strength)

    def scaled(self, *, c_v: float = 1.0, c_k: float = 1.0) -> Steering:
        """Values times `c_v`, keys times `c_k` (arXiv 2507.08799); raises `OptionError` unless both are finite."""
        bounds = chosen = None
        if self.coherent is not None and c_v:
            low, high = sorted(bound / c_v for bound in self.coherent)
            bounds = low, high
        if self.recommended is not None and c_v:
            without_packs, with_packs = self.recommended
            chosen = without_packs / c_v, with_packs / c_v
        return replace(
            self,
            coherent=bounds,
            recommended=chosen,
            values={layer: delta * _finite(c_v, "c_v") for layer, delta in self.values.items()},
            keys={layer: delta * _finite(c_k, "c_k") for layer, delta in self.keys.items()},
        )

    def restrict(self, layers: Iterable[int]) -> Steering:
        """This steering with only the deltas of `layers`; raises `OptionError` if it has none there."""
        layer_set = set(layers)
        return replace(
            self,
            coherent=None,
            recommended=None,
            values={layer: delta for layer, delta in self.values.items() if layer in layer_set},
            keys={layer: delta for layer, delta in self.keys.items() if layer in layer_set},
        )

    def cosine(self, other: Steering) -> float:
        """Cosine of the value deltas over all layers of both; a missing layer counts as zero."""
        own_norm, other_norm = (math.hypot(*steering.norms.values()) for steering in (self, other))
        return (
            sum(_dots(self.values, other.values).values()) / (own_norm * other_norm) if own_norm and other_norm else 0.0
        )

    def layer_cosines(self, other: Steering) -> dict[int, float]:
        """Cosine of the value deltas in each layer that both have."""
        norms, other_norms, dots = self.norms, other.norms, _dots(self.values, other.values)
        return {layer: dot / (norms[layer] * other_norms[layer] or 1.0) for layer, dot in dots.items()}

    def check(self, fingerprint: ModelFingerprint) -> None:
        """Raise `PackError`, naming each differing field, unless this steering was made for that model.

        A vLLM server makes no steerings, so it accepts those of any engine with the same model.
        """
        differences = self.fingerprint.diff(fingerprint)
        differences.pop("passes", None)
        if differences and not (fingerprint.engine == "vllm" and self.fingerprint.same_model(fingerprint)):
            raise mismatch(
                "The steering",
                differences,
                "steering",
                "Make it anew from its pairs, with `engine.make_steering(pairs)` or `kp steer make`"
                + (f", or load the model with dtype {self.fingerprint.dtype}." if "dtype" in differences else "."),
                same_model=self.fingerprint.same_model(fingerprint),
            )

    def warn_beyond_cliff(self) -> None:
        """Issue a `SteeringWarning` if this steering is beyond its coherent range, or strong and never calibrated."""
        if self.coherent is None:
            try:
                strength = self.strength
            except OptionError:  # Nothing says how strong it is.
                return
            if strength > _STRONG:
                warnings.warn(
                    f"A steering of strength {strength:.2f} was not calibrated. Beyond {_STRONG}, a small model begins "
                    f"to repeat itself. Take `steering.at_strength(0.2)`, or {0.2 / strength:.2g} of this alpha.",
                    SteeringWarning,
                    stacklevel=3,
                )
        elif self.coherent[1] < 1:
            high = self.coherent[1]
            times = f"{1 / high:.3g} times" if high > 0 else "far"
            warnings.warn(
                f"A steering is {times} beyond the cliff up to which text was measured to stay coherent; expect it to "
                "fall apart. Lower alpha.",
                SteeringWarning,
                stacklevel=3,
            )

    def __add__(self, other: Steering) -> Steering:
        if not isinstance(other, Steering):
            return NotImplemented
        other.check(self.fingerprint)
        if self.method != other.method:
            raise OptionError(
                f"Got a sum of method {self.method!r} and {other.method!r}; they are applied at different positions. "
                "Apply them one by one, or make both with one method."
            )
        return replace(
            self,
            values=_sum(self.values, other.values),
            keys=_sum(self.keys, other.keys),
            scales={
                layer: fmean(side.scales[layer] for side in (self, other) if layer in side.scales)
                for layer in {*self.scales, *other.scales}
            },
            coherent=None,
            recommended=None,
            provenance=self.provenance if self.provenance == other.provenance else {"made": "a sum of steerings"},
        )

    def __neg__(self) -> Steering:
        return self * -1.0

    def __sub__(self, other: Steering) -> Steering:
        return self + -other if isinstance(other, Steering) else NotImplemented

    def __mul__(self, factor: float) -> Steering:
        if not isinstance(factor, int | float):
            return NotImplemented
        return self.scaled(c_v=_finite(factor, "alpha"), c_k=factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Steering:
        if not isinstance(divisor, int | float):
            return NotImplemented
        return self * (1.0 / divisor if divisor else math.inf)

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Steering) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Steering({self.method}, layers {self.layers[0]}-{self.layers[-1]}, id {self.id})"


AskedSteering: TypeAlias = Steering | tuple[Steering, float | None]
"""A steering, or a steering with an alpha; `None` means the default (`Steering.default_alpha`)."""


def resolve_layers(layers: LayerRange | None, count: int) -> tuple[int, ...]:
    """Indices of `layers` in a model of `count` layers: by default the middle third (arXiv 2604.03270, section 4.5).

    Raises `OptionError` for layers that the model does not have.
    """
    advice = f"expected two fractions like (1/3, 2/3), or indices from 0 to {count - 1} like range(10, 20)."
    if not isinstance(layers, Sequence | None):
        raise OptionError(f"Got the layers {layers!r}; {advice}")
    chosen: Sequence[float] = (1 / 3, 2 / 3) if layers is None else tuple(layers)
    if len(chosen) == 2 and any(isinstance(bound, float) for bound in chosen):
        start, stop = chosen
        if not 0 <= start < stop <= 1:
            raise OptionError(f"Got the layers {layers!r}; {advice}")
        first = min(round(start * count), count - 1)
        return tuple(range(first, max(round(stop * count), first + 1)))
    indices = {index for index in chosen if type(index) is int and 0 <= index < count}
    if not chosen or len(indices) != len(chosen):
        raise OptionError(f"Got the layers {layers!r} of a model of {count} layers; {advice}")
    return tuple(sorted(indices))


def as_steering(steering: AskedSteering | None, *, with_knowledge: bool = False) -> Steering | None:
    """The requested steering times its alpha; `None` if there is none or it is zero.

    An alpha of `None` means the default, without or with packs. Raises `OptionError` for other types.
    """
    if isinstance(steering, tuple):
        if len(steering) != 2 or not isinstance(steering[0], Steering):
            raise OptionError(f"Got the steering {steering!r}; expected a Steering, or (Steering, alpha).")
        steering = steering[0].at_alpha(steering[1], with_knowledge=with_knowledge)
    if steering is not None and not isinstance(steering, Steering):
        raise OptionError(
            f"Got a steering of type {type(steering).__name__}; expected a Steering, or (Steering, alpha). Make one "
            "with `engine.make_steering(preset('formal'))`."
        )
    return None if steering is None or steering.is_zero else steering


@torch.inference_mode()
def _checked(name: str, deltas: Deltas) -> dict[int, Tensor]:
    """The deltas by ascending layer, as private float32 copies to which torch refuses to write."""
    for layer, delta in deltas.items():
        if type(layer) is not int or layer < 0:
            raise OptionError(f"Got the layer {layer!r} under {name!r}; expected an index from 0 on.")
        if delta.ndim != 2:
            raise OptionError(
                f"The delta of layer {layer} under {name!r} has the shape {tuple(delta.shape)}; "
                "expected (kv_heads, head_dim)."
            )
        if not bool(torch.isfinite(delta).all()):
            raise OptionError(f"The delta of layer {layer} under {name!r} is not finite; lower alpha or remake it.")
    # Adding zero turns -0.0 into 0.0, so that equal steerings have equal bytes.
    return {layer: deltas[layer].detach().to("cpu", torch.float32, copy=True) + 0.0 for layer in sorted(deltas)}


def _sum(mine: Deltas, theirs: Deltas) -> dict[int, Tensor]:
    for layer in mine.keys() & theirs.keys():
        shapes = tuple(mine[layer].shape), tuple(theirs[layer].shape)
        if shapes[0] != shapes[1]:
            raise OptionError(f"Deltas of layer {layer} have shapes {shapes}; expected steerings of one model.")
    return {**mine, **{layer: mine[layer] + delta if layer in mine else delta for layer, delta in theirs.items()}}


def _finite(factor: float, name: str) -> float:
    if not math.isfinite(factor):
        raise OptionError(f"Got {name}={factor!r}; expected a finite number.")
    return float(factor)


def _dots(mine: Deltas, theirs: Deltas) -> dict[int, float]:
    """The dot product in each common layer."""
    shared = sorted(mine.keys() & theirs.keys())
    return {layer: float((mine[layer].double() * theirs[layer].double()).sum()) for layer in shared}


_ENVELOPE = Envelope("knowledge-pack-steering", "steering", "3")


def save_steering(steering: Steering, path: str | Path) -> Path:
    """Write `steering` to `path` atomically, replacing an existing file. Raises `OptionError` for anything else."""
    if not isinstance(steering, Steering):
        raise OptionError(f"Got {type(steering).__name__}; expected `save_steering(steering, path)`.")
    return _ENVELOPE.save(path, *_content(steering))


def steering_bytes(steering: Steering) -> bytes:
    """The bytes of the file that `save_steering` writes."""
    return _ENVELOPE.write(*_content(steering))


def _content(steering: Steering) -> tuple[dict[str, object], dict[str, Tensor]]:
    tensors = {f"layers.{layer}.value": delta for layer, delta in steering.values.items()}
    tensors |= {f"layers.{layer}.key": delta for layer, delta in steering.keys.items()}
    bounds = steering.coherent
    content: dict[str, object] = {
        # JSON has no infinity.
        "coherent": None if bounds is None else [bound if math.isfinite(bound) else None for bound in bounds],
        "fingerprint": steering.fingerprint.to_dict(),
        "method": steering.method,
        "provenance": dict(steering.provenance),
        "recommended": None if steering.recommended is None else list(steering.recommended),
        "scales": {str(layer): scale for layer, scale in steering.scales.items()},
        "tensors": {name: digest(tensor, is_forgeable=False) for name, tensor in tensors.items()},
    }
    return content, tensors


def load_steering(path: str | Path) -> Steering:
    """Load the steering in `path` and check every digest; nothing is unpickled.

    `Steering.check` tests at use whether it fits a model. Raises `OptionError` for a file that is damaged, of another
    kind or of another version, `FileNotFoundError` if there is none.
    """
    return steering_of(path)


def steering_of(source: bytes | str | Path) -> Steering:
    """The inverse of `steering_bytes`, or the steering in a file; raises as `load_steering`."""
    try:
        content, tensors = _ENVELOPE.read(source) if isinstance(source, bytes) else _ENVELOPE.load(source)
        if {name: digest(tensor, is_forgeable=False) for name, tensor in tensors.items()} != content["tensors"]:
            raise PackCorruptError("The tensors do not match their digests.")
        deltas: dict[str, dict[int, Tensor]] = {"value": {}, "key": {}}
        for name, tensor in tensors.items():
            _, layer, kind = name.split(".")
            deltas[kind][int(layer)] = tensor
        return Steering(
            deltas["value"],
            ModelFingerprint.from_dict(content["fingerprint"]),
            content["method"],
            deltas["key"],
            {int(layer): float(scale) for layer, scale in content["scales"].items()},
            _pair(content["coherent"]),
            _pair(content["recommended"]),
            {name: str(value) for name, value in content["provenance"].items()},
        )
    except (PackError, AttributeError, LookupError, TypeError, ValueError) as error:
        name = "What was sent" if isinstance(source, bytes) else str(source)
        raise OptionError(f"{name} is no intact steering: {error} Make it anew, or load another copy.") from error


def _pair(numbers: list[float | None] | None) -> tuple[float, float] | None:
    if numbers is None:
        return None
    low, high = numbers
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)
