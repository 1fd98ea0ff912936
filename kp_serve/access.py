"""API keys of a server, from its environment, and what each key may do."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from kp_core.errors import ModelError
from kp_core.packs.handle import check_namespace
from kp_core.packs.view import TRUSTED_ROLES

KEYS_VARIABLE = "KP_API_KEYS"
"""Environment variable with the keys: JSON, a map from each key to the fields of its `Access`."""
_MIN_CHARS = 20


@dataclass(frozen=True)
class Access:
    """Rights of a key: namespaces it may read, roles whose messages may hold handles, and whether it may `write` packs.

    Raises `ModelError` for an unknown role or a value of another type.
    """

    namespaces: tuple[str, ...]
    trusted_roles: tuple[str, ...] = tuple(sorted(TRUSTED_ROLES))
    write: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.namespaces, str) or isinstance(self.trusted_roles, str) or not isinstance(self.write, bool):
            raise ModelError(f"Got {self}; expected lists of namespaces and of trusted roles, and true or false.")
        object.__setattr__(self, "namespaces", tuple(map(check_namespace, self.namespaces)))
        object.__setattr__(self, "trusted_roles", tuple(self.trusted_roles))
        if unknown := set(self.trusted_roles) - TRUSTED_ROLES:
            raise ModelError(f"Got the trusted roles {sorted(unknown)}; expected some of {sorted(TRUSTED_ROLES)}.")


def read_keys() -> dict[str, Access]:
    """The keys in `KEYS_VARIABLE`; none without it. Raises `ModelError` if it has another form, or for a short key."""
    try:
        fields_of = json.loads(os.environ.get(KEYS_VARIABLE) or "{}")
        keys = {str(key): Access(**fields) for key, fields in fields_of.items()}
    except (ModelError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{KEYS_VARIABLE} holds no keys ({error}). Expected JSON, such as "
            '{"KEY": {"namespaces": ["NAME"], "write": true}}.'
        ) from error
    if any(len(key) < _MIN_CHARS for key in keys):
        raise ModelError(
            f"{KEYS_VARIABLE} has a key of fewer than {_MIN_CHARS} characters. `openssl rand -hex 32` makes one."
        )
    return keys


def access_of(keys: Mapping[str, Access] | Access, key: str | None) -> Access | None:
    """The rights of `key` among those of `read_keys`, or those of everybody; `None` for an unknown key."""
    if isinstance(keys, Access):
        return keys
    given = (key or "").encode()
    # Compare with all keys, so that the duration does not reveal which one matched.
    matches = [access for known, access in keys.items() if hmac.compare_digest(known.encode(), given)]
    return matches[0] if matches else None
