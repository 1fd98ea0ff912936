"""Signed rights of a request to the packs of a server. Parameters that clients write themselves are ignored."""

from __future__ import annotations

import base64
import hmac
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b, sha256
from typing import Any

from kp_core.errors import ModelError
from kp_core.packs.handle import check_namespace
from kp_serve.stored import Part

_PARAMETER = "kp"  # The only name that is read in `kv_transfer_params`.
KEY_VARIABLE = "KP_SERVE_KEY"
"""Environment variable with which `kp serve` passes the server's key, in hexadecimal, to vLLM's processes."""
_LIVES = 3600.0  # Seconds until rights expire: a request may wait in vLLM's queue.


@dataclass(frozen=True)
class Rights:
    """The namespaces whose packs a request may load, and whether (`save`) KV computed for these packs is stored.

    `salt` is the request's `cache_salt`; rights are valid only with this salt. `expires` is in seconds since 1970.

    `tokens` is the digest of the token ids of one prompt. With it, rights are valid only for this prompt, whose KV is
    altered: it begins with the KV of `begins`, and the KV of `keeps` is kept for later requests.
    """

    namespaces: tuple[str, ...]
    salt: str
    save: bool = False
    expires: float = 0.0
    tokens: str = ""
    begins: tuple[Part, ...] = ()
    keeps: Part | None = None

    def sign(self, key: bytes) -> dict[str, str]:
        """The signed rights as `kv_transfer_params` of a request. Without `expires` they last an hour."""
        claims = asdict(self) | {"expires": self.expires or time.time() + _LIVES}
        text = base64.urlsafe_b64encode(json.dumps(claims, sort_keys=True, default=sorted).encode()).decode()
        return {_PARAMETER: f"{text}.{_mac(key, text)}"}

    @classmethod
    def read(cls, parameters: object, salt: str | None, key: bytes) -> Rights | None:
        """The rights in `kv_transfer_params`; `None` unless they were signed for this salt.

        Expired rights give `None`, except rights to altered KV (`begins`). These are returned without namespaces, so
        that their request fails: plain KV must not be computed for it.
        """
        signed = parameters.get(_PARAMETER) if isinstance(parameters, Mapping) else None
        text, _, mac = str(signed).partition(".")
        if not isinstance(signed, str) or not hmac.compare_digest(_mac(key, text).encode(), mac.encode()):
            return None
        claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text))
        if claims["salt"] != salt:
            return None
        is_over, kept = claims["expires"] <= time.time(), claims["keeps"]
        names = () if is_over else tuple(map(check_namespace, claims["namespaces"]))
        claims |= {"begins": tuple(map(Part.of, claims["begins"])), "keeps": kept and Part.of(kept)}
        if is_over and not claims["begins"]:
            return None
        return cls(**claims | {"namespaces": names, "save": claims["save"] and not is_over})


def _mac(key: bytes, text: str) -> str:
    return hmac.new(key, b"kp-rights-v1\0" + text.encode(), sha256).hexdigest()


def salt_of(namespaces: Iterable[str], key: bytes, altered: str = "") -> str:
    """The `cache_salt` of clients that may read exactly these namespaces. They share vLLM's prefix cache; others do
    not.

    It does not depend on packs, so that an agent's next search still finds the prefix of its conversation. Requests
    with `altered` KV share a salt only if they alter the same things in the same places.
    """
    names = "\0".join(sorted(set(namespaces))) + (f"\1{altered}" if altered else "")
    return blake2b(names.encode(), key=key[:64], person=b"kp-salt-v1", digest_size=32).hexdigest()


def server_key() -> bytes:
    """The key of this server. Raises `ModelError` if the environment has none of at least 16 bytes."""
    try:
        key = bytes.fromhex(os.environ.get(KEY_VARIABLE, ""))
    except ValueError:
        key = b""
    if len(key) < 16:
        raise ModelError(
            f"Got no key in the environment variable {KEY_VARIABLE}; expected at least 16 bytes in hexadecimal. "
            "`kp serve` makes one for each start."
        )
    return key
