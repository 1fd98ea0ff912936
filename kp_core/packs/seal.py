"""MACs of stored entries: a server recognises the entries it wrote among those that others wrote into its store."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from kp_core.packs.envelope import to_json
from kp_core.packs.file import PackFile, encode_pack
from kp_core.packs.pack import KnowledgePack

__all__ = ["Seal"]

_NAME = "kp:mac"  # Key in the provenance of an entry.


@dataclass(frozen=True)
class Seal:
    """HMAC-SHA-256 over everything in an entry: model, text, tokens, prefix, and the digest of each tensor.

    The digests in a file reveal damage, but anyone who can write to the store can recompute them. The MAC needs the
    key.
    """

    key: bytes

    def sealed(self, pack: KnowledgePack) -> KnowledgePack:
        """Return `pack` with the MAC in its provenance."""
        digests = encode_pack(replace(pack, compression="none")).digests
        return replace(pack, provenance={**pack.provenance, _NAME: self._mac(pack, digests)})

    def holds(self, file: PackFile) -> bool:
        """Whether the file has a valid MAC over the digests in its header; reading checks tensors against digests."""
        mac = self._mac(file.pack, file.digests)
        return hmac.compare_digest(mac.encode(), file.pack.provenance.get(_NAME, "").encode())

    def _mac(self, pack: KnowledgePack, digests: Sequence[str]) -> str:
        sealed = {
            "digests": list(digests),
            "fingerprint": pack.fingerprint.to_dict(),
            "namespace": pack.namespace,
            "prefix": pack.prefix.token_ids,
            "provenance": {name: value for name, value in pack.provenance.items() if name != _NAME},
            "text": pack.text,
            "token_ids": pack.token_ids,
        }
        return hmac.new(self.key, b"kp-entry-v1\0" + to_json(sealed, sort_keys=True).encode(), sha256).hexdigest()
