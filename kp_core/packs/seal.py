"""MACs of stored entries: what a server wrote under its key is told from what others wrote into its store."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from kp_core.packs.codec import digest, in_threads
from kp_core.packs.envelope import to_json
from kp_core.packs.pack import KnowledgePack

__all__ = ["Seal"]

_NAME = "kp:mac"  # In the provenance of an entry.


@dataclass(frozen=True)
class Seal:
    """HMAC-SHA-256 over all that makes an entry: model, text, tokens, prefix, and the digest of each tensor.

    Digests of a file tell damage; whoever may write to a store can make them anew, and not this.
    """

    key: bytes

    def sealed(self, pack: KnowledgePack) -> KnowledgePack:
        """`pack` with the MAC in its provenance."""
        return replace(pack, provenance={**pack.provenance, _NAME: self._mac(pack, _digests(pack))})

    def holds(self, pack: KnowledgePack, digests: Sequence[str] | None = None) -> bool:
        """Whether the MAC is there and right; `digests` are those of the tensors, by default taken of the pack's KV."""
        made = self._mac(pack, _digests(pack) if digests is None else digests)
        return hmac.compare_digest(made.encode(), pack.provenance.get(_NAME, "").encode())

    def _mac(self, pack: KnowledgePack, digests: Sequence[str]) -> str:
        about = {
            "digests": list(digests),
            "fingerprint": pack.fingerprint.to_dict(),
            "namespace": pack.namespace,
            "prefix": pack.prefix.token_ids,
            "provenance": {name: said for name, said in pack.provenance.items() if name != _NAME},
            "text": pack.text,
            "token_ids": pack.token_ids,
        }
        return hmac.new(self.key, b"kp-entry-v1\0" + to_json(about, sort_keys=True).encode(), sha256).hexdigest()


def _digests(pack: KnowledgePack) -> list[str]:
    """Of each tensor, in the order of the file."""
    if pack.kv is None:
        return []
    pairs = zip(pack.kv.keys, pack.kv.values, strict=True)
    tensors = [*(half for pair in pairs for half in pair), *pack.kv.states]
    return in_threads(digest, [tensor.detach().cpu().contiguous() for tensor in tensors], pack.kv.nbytes)
