"""The JSON inside a pack file: strict reading and canonical writing. The format is specified in `docs/format.md`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain

from kp_core.errors import KnowledgePackError, PackCorruptError
from kp_core.packs.codec import COMPRESSIONS
from kp_core.packs.envelope import DTYPES, string, to_json
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack, Prefix

__all__ = ["VERSION", "PackContent", "tensor_names"]

VERSION = "5"
"""Of the format that is written."""

_STATE = "states."
_LARGEST_INT = 2**53 - 1  # The largest integer that every JSON reader keeps exact.


@dataclass(frozen=True)
class PackContent:
    """A pack without KV, and what its tensors are: dtype name, then shapes `(kv_heads, tokens, head_dim)` and digests.

    Tensors come in file order: `layers.0.key`, `layers.0.value`, `layers.1.key`, …; a lazy pack has none, and no dtype.
    Where the pack is compressed, `stored` are the bytes that the file holds of each. The states of recurrent layers
    come last, of any shape; `states` are the names of their dtypes. `cuts` is what files of versions 2 to 4 say of how
    their prefix was computed, which means nothing today.
    """

    pack: KnowledgePack
    dtype: str | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    digests: tuple[str, ...] = ()
    stored: tuple[int, ...] = ()
    states: tuple[str, ...] = ()
    cuts: tuple[int, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in file order."""
        return tensor_names(len(self.shapes), len(self.states))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The names of their dtypes."""
        return (str(self.dtype),) * (len(self.shapes) - len(self.states)) + self.states

    def to_json(self, version: str = VERSION) -> str:
        """The canonical JSON; equal contents give equal strings. Raises `PackCorruptError` for what it cannot hold."""
        self._check()
        pack, prefix = self.pack, self.pack.prefix
        names = self.names
        tensors: dict[str, dict[str, object]] = {
            name: {"digest": digest, "shape": shape}
            for name, digest, shape in zip(names, self.digests, self.shapes, strict=True)
        }
        content = {
            "dtype": self.dtype,
            "fingerprint": pack.fingerprint.to_dict(version),
            "prefix": {"token_ids": prefix.token_ids},
            "layers": (len(self.shapes) - len(self.states)) // 2,
            "namespace": pack.namespace,
            "provenance": dict(pack.provenance),
            "tensors": tensors,
            "text": pack.text,
            "token_ids": pack.token_ids,
            "tokens": len(pack.token_ids),
        }
        if version != VERSION:
            content["prefix"] = {"cuts": self.cuts, "token_ids": prefix.token_ids}
        if version in ("4", VERSION):
            content["states"] = len(self.states)
        if self.states:
            for name, dtype in zip(names[-len(self.states) :], self.states, strict=True):
                tensors[name]["dtype"] = dtype
        if self.stored:
            content["compression"] = pack.compression
            for name, stored in zip(names, self.stored, strict=True):
                tensors[name]["stored"] = stored
        return to_json(content, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, version: str) -> PackContent:
        """The inverse of `to_json`; raises `PackCorruptError` for anything it would not have written."""
        try:
            data = json.loads(text)
            prefix = data["prefix"]
            is_packed = version == "3" or (version in ("4", VERSION) and "compression" in data)
            names = tensor_names(len(data["tensors"]), data["states"] if version in ("4", VERSION) else 0)
            pack = KnowledgePack(
                data["text"],
                data["namespace"],
                tuple(data["token_ids"]),
                Prefix(tuple(prefix["token_ids"])),
                ModelFingerprint.from_dict(data["fingerprint"]),
                provenance=data["provenance"],
                compression=data["compression"] if is_packed else "none",
            )
            tensors = [data["tensors"][name] for name in names]
            shapes = tuple(tuple(tensor["shape"]) for tensor in tensors)
            stored = tuple(tensor["stored"] for tensor in tensors) if is_packed else ()
            states = tuple(data["tensors"][name]["dtype"] for name in names if name.startswith(_STATE))
            digests = tuple(tensor["digest"] for tensor in tensors)
            cuts = () if version == VERSION else tuple(prefix["cuts"])
            content = cls(pack, data["dtype"], shapes, digests, stored, states, cuts)
            if version != VERSION and bool(states) != (version == "4"):
                raise PackCorruptError(f"A file of version {version} has {len(states)} states.")
            # Names too many, repeated or out of order, and counts that disagree, are all seen so.
            if content.to_json(version) != text:
                raise PackCorruptError("It is not in canonical form.")
        except (KnowledgePackError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise PackCorruptError(f"The metadata describe no pack: {error}") from error
        return content

    def _check(self) -> None:
        pack, tokens = self.pack, len(self.pack.token_ids)
        shapes = self.shapes[: len(self.shapes) - len(self.states)]
        about = chain(pack.fingerprint.to_dict().values(), *pack.provenance.items())
        for text in (pack.text, *about, *self.digests):
            string(text, "pack")
        # `type(...) is int`, as `isinstance` takes JSON's true for an integer.
        for number in chain(pack.token_ids, pack.prefix.token_ids, self.cuts, *self.shapes, self.stored):
            if type(number) is not int or not 0 <= number <= _LARGEST_INT:
                raise PackCorruptError(f"Got {number!r}; expected an integer from 0 to 2**53 - 1.")
        if (pack.compression not in COMPRESSIONS) or (bool(self.stored) and pack.compression == "none"):
            raise PackCorruptError(f"Got the compression {pack.compression!r}; expected lossless or int8.")
        if (self.dtype not in DTYPES) if shapes else (self.dtype is not None):
            raise PackCorruptError(f"Got {len(shapes)} tensors of dtype {self.dtype!r}; expected one of {set(DTYPES)}.")
        if self.states and (not shapes or not set(self.states) <= set(DTYPES) or pack.compression == "int8"):
            raise PackCorruptError(
                f"Got {len(self.states)} states of {sorted(set(self.states))} beside {len(shapes)} keys and values, "
                f"compressed {pack.compression!r}; expected some beside keys and values, of {set(DTYPES)}, not int8."
            )
        if any(len(shape) != 3 or shape[1] != tokens for shape in shapes):
            raise PackCorruptError(f"Got the shapes {shapes}; expected (kv_heads, {tokens}, head_dim).")
        if [shape[0] for shape in shapes[::2]] != [shape[0] for shape in shapes[1::2]]:
            raise PackCorruptError("Keys and values of a layer differ in kv_heads, or one of them is missing.")


def tensor_names(count: int, states: int = 0) -> list[str]:
    """The names of `count` tensors, in file order, the last of which are `states`; `ValueError` for more than all."""
    if type(states) is not int or not 0 <= states <= count:
        raise ValueError(f"Got {states!r} states among {count} tensors.")
    kv = [f"layers.{index // 2}.{'value' if index % 2 else 'key'}" for index in range(count - states)]
    return kv + [f"{_STATE}{index}" for index in range(states)]
