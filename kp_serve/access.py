"""API keys of a server, hashed in a file, and what each key may do."""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from kp_core.errors import ModelError
from kp_core.packs.handle import check_namespace
from kp_core.packs.view import TRUSTED_ROLES

__all__ = ["Access", "access_of", "add_key", "read_keys"]


@dataclass(frozen=True)
class Access:
    """Rights of a key: namespaces it may read, roles whose messages may hold handles, and whether it may `write` packs.

    Raises `ModelError` for an unknown role.
    """

    namespaces: tuple[str, ...]
    trusted_roles: tuple[str, ...] = tuple(sorted(TRUSTED_ROLES))
    write: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "namespaces", tuple(map(check_namespace, self.namespaces)))
        object.__setattr__(self, "trusted_roles", tuple(self.trusted_roles))
        if unknown := set(self.trusted_roles) - TRUSTED_ROLES:
            raise ModelError(f"Got the trusted roles {sorted(unknown)}; expected some of {sorted(TRUSTED_ROLES)}.")


def read_keys(path: str | os.PathLike[str]) -> dict[str, Access]:
    """The keys in a file: JSON, a map from the SHA-256 of each key (hexadecimal) to the fields of its `Access`.

    A plain hash is safe, as keys are long and random. Raises `ModelError` for a file of another form.
    """
    try:
        return {str(digest): Access(**fields) for digest, fields in json.loads(Path(path).read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} is no file of keys ({error}). Make one with `kp serve --new-key {path} --namespace NAME`."
        ) from error


def access_of(keys: Mapping[str, Access], key: str | None) -> Access | None:
    """The rights of `key` among those of `read_keys`; `None` for an unknown key."""
    digest = _hash(key or "")
    # Compare with all keys, so that the duration does not reveal which one matched.
    matches = [access for stored_digest, access in keys.items() if hmac.compare_digest(stored_digest, digest)]
    return matches[0] if key and matches else None


def add_key(path: str | os.PathLike[str], namespaces: Iterable[str], *, write: bool = False) -> str:
    """Add a new key for these namespaces to a file, and return it. The file stores only its hash."""
    file, key = Path(path), "kp-" + secrets.token_urlsafe(32)
    keys = read_keys(file) if file.exists() else {}
    keys[_hash(key)] = Access(tuple(namespaces), write=write)
    data = json.dumps({digest: asdict(access) for digest, access in keys.items()}, indent=2) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    staged = file.with_name(file.name + ".new")
    with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(data)
    staged.replace(file)
    return key


def _hash(key: str) -> str:
    return sha256(key.encode()).hexdigest()
