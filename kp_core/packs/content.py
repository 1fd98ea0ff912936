"""The JSON inside a pack file: strict reading and canonical writing. The format is specified in `docs/format.md`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kp_core.errors import KnowledgePackError, PackCorruptError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack, Prefix

__all__ = ["DTYPES", "PackContent", "from_json", "mapping", "string", "tensor_names", "to_json"]

DTYPES = ("bfloat16", "float16", "float32", "float64")
_FIELDS = {
    *("dtype", "fingerprint", "head", "layers", "namespace", "provenance", "tensors", "text", "token_ids", "tokens"),
}
_LARGEST_INT = 2**53 - 1  # The largest integer that every JSON reader keeps exact.


@dataclass(frozen=True)
class PackContent:
    """A pack without KV, and what its tensors are: dtype name, then shapes `(kv_heads, tokens, head_dim)` and digests.

    Tensors come in file order: `layers.0.key`, `layers.0.value`, `layers.1.key`, …; a lazy pack has none, and no dtype.
    """

    pack: KnowledgePack
    dtype: str | None = None
    shapes: tuple[tuple[int, int, int], ...] = ()
    digests: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The canonical JSON; equal contents give equal strings."""
        pack, names = self.pack, tensor_names(len(self.shapes))
        content = {
            "dtype": self.dtype,
            "fingerprint": pack.fingerprint.to_dict(),
            "head": {"cuts": pack.prefix.cuts, "token_ids": pack.prefix.token_ids},
            "layers": len(names) // 2,
            "namespace": pack.namespace,
            "provenance": dict(pack.provenance),
            "tensors": {
                name: {"digest": digest, "shape": shape}
                for name, digest, shape in zip(names, self.digests, self.shapes, strict=True)
            },
            "text": pack.text,
            "token_ids": pack.token_ids,
            "tokens": len(pack.token_ids),
        }
        return to_json(content, sort_keys=True)

    @classmethod
    def from_json(cls, content: str) -> PackContent:
        """The inverse of `to_json`; raises `PackCorruptError` for anything it would not have written."""
        data = mapping(from_json(content.encode()), "pack")
        _expect_fields(data, _FIELDS, "pack")
        head = mapping(data["head"], "head")
        _expect_fields(head, {"cuts", "token_ids"}, "head")
        provenance = mapping(data["provenance"], "provenance")
        try:
            pack = KnowledgePack(
                text=string(data["text"], "text"),
                namespace=string(data["namespace"], "namespace"),
                token_ids=_integers(data["token_ids"], "token_ids"),
                prefix=Prefix(_integers(head["token_ids"], "head.token_ids"), _integers(head["cuts"], "head.cuts")),
                fingerprint=ModelFingerprint.from_dict(mapping(data["fingerprint"], "fingerprint")),
                provenance={string(name, "provenance"): string(text, name) for name, text in provenance.items()},
            )
        except PackCorruptError:
            raise
        except KnowledgePackError as error:
            raise PackCorruptError(str(error)) from error
        for text in pack.fingerprint.to_dict().values():
            string(text, "fingerprint")
        return cls(pack, *_parse_tensors(data, len(pack.token_ids)))


def tensor_names(count: int) -> list[str]:
    """The names of `count` tensors, in file order."""
    return [f"layers.{index // 2}.{'value' if index % 2 else 'key'}" for index in range(count)]


def _parse_tensors(
    data: Mapping[str, object], tokens: int
) -> tuple[str | None, tuple[tuple[int, int, int], ...], tuple[str, ...]]:
    tensors, dtype = mapping(data["tensors"], "tensors"), data["dtype"]
    if dtype is not None and (not isinstance(dtype, str) or dtype not in DTYPES):
        raise PackCorruptError(f"Got the dtype {dtype!r}; expected null or one of {DTYPES}.")
    names = tensor_names(len(tensors))
    counts = _integers([data["layers"], data["tokens"]], "layers, tokens")
    if (dtype is None) != (not tensors) or counts != (len(tensors) // 2, tokens):
        raise PackCorruptError(
            f"Got {len(tensors)} tensors of dtype {dtype!r} for {counts[0]} layers and {counts[1]} tokens; "
            f"expected a key and a value per layer, and {tokens} tokens."
        )
    if set(tensors) != set(names) or len(names) % 2:
        raise PackCorruptError(f"Got the tensors {sorted(tensors)}; expected a key and a value per layer.")
    entries = [mapping(tensors[name], name) for name in names]
    for entry in entries:
        _expect_fields(entry, {"digest", "shape"}, "tensors")
    shapes = tuple(_shape(entry["shape"], tokens) for entry in entries)
    if any(key[0] != value[0] for key, value in zip(shapes[::2], shapes[1::2], strict=True)):
        raise PackCorruptError("Keys and values of a layer differ in kv_heads.")
    return dtype, shapes, tuple(string(entry["digest"], "digest") for entry in entries)


def _expect_fields(data: Mapping[str, object], names: set[str], what: str) -> None:
    if set(data) != names:
        raise PackCorruptError(f"Got the fields {sorted(data)} under {what!r}; expected {sorted(names)}.")


def _shape(value: object, tokens: int) -> tuple[int, int, int]:
    shape = _integers(value, "shape")
    if len(shape) != 3 or shape[1] != tokens:
        raise PackCorruptError(f"Got the shape {shape}; expected (kv_heads, {tokens}, head_dim).")
    return shape[0], shape[1], shape[2]


def _integers(value: object, name: str) -> tuple[int, ...]:
    # `type(...) is int`, as `isinstance` takes JSON's true for an integer.
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= _LARGEST_INT for item in value):
        raise PackCorruptError(f"Expected a list of integers from 0 to 2**53 - 1 under {name!r}.")
    return tuple(value)


def string(value: object, name: str) -> str:
    """`value`, when it is a string of Unicode characters; `PackCorruptError` otherwise."""
    if not isinstance(value, str):
        raise PackCorruptError(f"Got {type(value).__name__} under {name!r}; expected a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PackCorruptError(f"The string under {name!r} is not Unicode: {error}.") from error
    return value


def mapping(value: object, name: str) -> dict[str, object]:
    """`value`, when it is a JSON object; `PackCorruptError` otherwise."""
    if not isinstance(value, dict):
        raise PackCorruptError(f"Got {type(value).__name__} under {name!r}; expected an object.")
    return value


def to_json(value: Mapping[str, object], *, sort_keys: bool = False) -> str:
    """Compact JSON; raises `TypeError` or `ValueError` for what JSON cannot say."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys, allow_nan=False)


def from_json(data: bytes) -> object:
    """The value that UTF-8 `data` describes; `PackCorruptError` when it is no JSON or repeats a name in an object."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise PackCorruptError(f"Not JSON: {error}.") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise PackCorruptError("A name occurs twice in one JSON object.")
    return found
