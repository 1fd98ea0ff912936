"""Packs in object storage (S3, GCS ...) or in any other place that `fsspec` reaches. See `docs/storage.md`."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any

from kp_core.bundled import cache_directory
from kp_core.errors import MissingDependencyError, PackError
from kp_core.packs.blobs import Blobs, BlobStat, Buffer, FolderBlobs, check_key, is_key

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)")
_CACHE_BYTES = 8 * 2**30
_FRESH_SECONDS = 1.0
_LARGE = 32 * 2**20  # Larger blobs are read in parallel parts.
_DIGEST_BYTES = 16  # Bytes of the digest that ends each local copy.
_TRIES = 5
_BUCKETS = {"s3", "s3a", "gs", "gcs"}
# s3fs makes five more attempts of its own, with backoff, when connections break.
_S3: Mapping[str, Any] = {"config_kwargs": {"retries": {"mode": "standard", "max_attempts": 4}}}
_PACKAGES = {"s3": 'pip install "knowledge-packs[s3]"', "gs": "pip install gcsfs", "gcs": "pip install gcsfs"}
_IN_MEMORY = threading.Lock()
_KEYS = "Check the keys (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile) and their rights: packs have to be "
_KEYS += "listed, read, written and deleted there."
_ADDRESS = "Check the network and the address (AWS_ENDPOINT_URL for servers that are not Amazon's)."


class ObjectBlobs:
    """Blobs as objects under a URL, e.g. `s3://bucket/prefix`, `gs://bucket/prefix` or `memory://name`.

    `options` go to the fsspec file system, which reads the rest from the environment, profiles and fsspec's
    configuration. A local cache of `cache_bytes` (0: none) keeps packs that were read. A change by another process is
    seen within a second. `if_absent` uses a conditional write; if the server has none, we check before we write.

    Raises `PackError` for an invalid URL, `MissingDependencyError` if the package for it is not installed.
    """

    def __init__(self, url: str, *, cache_bytes: int = _CACHE_BYTES, **options: Any) -> None:  # noqa: ANN401
        match = _URL.fullmatch(url.rstrip("/"))
        self.protocol, self._url = (match[1] if match else ""), url.rstrip("/")
        if match is None or not match[2] or self.protocol in {"http", "https", "file", "local"}:
            raise PackError(
                f"Got {url!r} as a place for packs; expected a folder, or a URL such as s3://bucket/prefix."
            )
        self._options = {**(_S3 if self.protocol in {"s3", "s3a"} else {}), **options}
        self._systems = dict[int, Any]()
        self.root = str(self._system._strip_protocol(self._url)).rstrip("/")  # noqa: SLF001 - fsspec's name for it
        self._copies = LocalCopies(self._url, cache_bytes) if cache_bytes and self.is_far else None
        self._stats = dict[str, tuple[float, BlobStat]]()
        # Other storage makes a conditional write atomic itself.
        self._lock: AbstractContextManager[object] = nullcontext() if self.is_far else _IN_MEMORY

    def __str__(self) -> str:
        return self._url

    @property
    def is_far(self) -> bool:
        """As `Blobs.is_far`: only the memory of this process is near."""
        return self.protocol != "memory"

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        """As `Blobs.read`; the local cache serves whole packs, never ranges."""
        if start or stop is not None or not key.endswith(".safetensors"):
            return self._fetch(key, start, stop)
        for _ in range(_TRIES):
            stat = self.stat(key, recent=True)
            if stat is None:
                if self._copies:
                    self._copies.drop(key)
                raise FileNotFoundError(key)
            data: Buffer | None = self._copies.read(key, stat.version) if self._copies else None
            if data is not None:
                return data
            data = self._fetch(key) if stat.size < _LARGE else self._call("cat_file", self._path(key))
            # All parts must be of one version, and a copy must carry its own version.
            if self.stat(key) == stat and len(data) == stat.size:
                if self._copies:
                    self._copies.write(key, stat.version, data)
                return data
        raise OSError(f"{self}/{key} changed, or came in another length, each of the {_TRIES} times that it was read.")

    def write(self, key: str, chunks: Iterable[Buffer], *, if_absent: bool = False) -> bool:
        """As `Blobs.write`; may return `False` although an earlier attempt of this same call wrote the blob."""
        path, data = self._path(key), b"".join(chunks)
        with self._lock:
            if if_absent and self.stat(key) is not None:
                return False
            try:
                self._call("pipe_file", path, data, **({"mode": "create"} if if_absent else {}))
            except FileExistsError:
                return False
            except FileNotFoundError as error:
                raise self._no_bucket() from error
            except OSError as error:
                if not if_absent or _code(error.__cause__) not in {"NotImplemented", "501"}:
                    raise
                self._call("pipe_file", path, data)
            finally:
                self._stats.pop(key, None)
        return True

    def stat(self, key: str, *, recent: bool = False) -> BlobStat | None:
        """As `Blobs.stat`."""
        read_at, stat = self._stats.get(key, (float("-inf"), None))
        if recent and time.monotonic() - read_at < _FRESH_SECONDS:
            return stat
        stat = None
        with suppress(FileNotFoundError, NotADirectoryError):
            info = self._call("info", self._path(key))
            stat = _stat(info) if info["type"] == "file" else None
        self._stats.pop(key, None)
        if stat is not None:
            if len(self._stats) > 1 << 16:
                self._stats.clear()
            self._stats[key] = time.monotonic(), stat
        return stat

    def list(self, prefix: str = "") -> Iterator[tuple[str, BlobStat]]:
        """As `Blobs.list`; also yields names that are not valid keys."""
        if prefix:
            check_key(prefix.rstrip("/"))
        folder = f"{self.root}/{prefix}".rpartition("/")[0]
        options: dict[str, Any] = {}
        if self.protocol in _BUCKETS:
            folder, _, options["prefix"] = f"{self.root}/{prefix}".partition("/")
        try:
            listed = self._call("find", folder, detail=True, **options)
        except FileNotFoundError as error:
            if self.protocol in _BUCKETS:
                raise self._no_bucket() from error
            return
        for name, info in listed.items():
            key = name.removeprefix(f"{self.root}/")
            if key != name and key.startswith(prefix) and info["type"] == "file":
                yield key, _stat(info)

    def drop_gone(self) -> None:
        """Delete the local copies of what other machines have deleted."""
        if self._copies:
            self._copies.keep(lambda: (key for key, _ in self.list()))

    def delete(self, key: str) -> bool:
        """As `Blobs.delete`; if two callers delete a blob at the same time, both may get `True`."""
        if self._copies:
            self._copies.drop(key)
        if self.stat(key) is None:
            return False
        try:
            self._call("rm_file", self._path(key))
        except FileNotFoundError:
            return False
        finally:
            self._stats.pop(key, None)
        return True

    def _fetch(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        try:
            # Without a start, s3fs would first ask for the size.
            data: bytes = self._call("cat_file", self._path(key), start=start, end=stop)
        except FileNotFoundError:
            raise
        except OSError:
            # Servers refuse a range that starts behind the end.
            if (stat := self.stat(key)) is None or start < stat.size:
                raise
            return b""
        return data

    def _no_bucket(self) -> OSError:
        return OSError(f"{self}: there is no bucket {self.root.partition('/')[0]!r}. Create it, or correct the name.")

    def _path(self, key: str) -> str:
        return f"{self.root}/{check_key(key)}"

    @property
    def _system(self) -> Any:  # noqa: ANN401 - fsspec ships no types
        """The fsspec file system of this process: connections and threads do not survive a fork."""
        process = os.getpid()
        if process not in self._systems:
            import fsspec

            try:
                # Cache no listings: other processes write, too.
                system, _ = fsspec.url_to_fs(
                    self._url, skip_instance_cache=True, use_listings_cache=False, **self._options
                )
            except ImportError as error:
                how = _PACKAGES.get(self.protocol, str(error))
                raise MissingDependencyError(f"{self._url} needs a package that is not installed: `{how}`.") from error
            except ValueError as error:
                raise PackError(f"Got {self._url!r} as a place for packs: {error}.") from error
            self._systems[process] = system
        return self._systems[process]

    def _call(self, name: str, path: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call the file system; turn every error into an `OSError` that says what to do."""
        try:
            return getattr(self._system, name)(path, *args, **options)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            code = _code(error.__cause__ or error)
            if code in {"PreconditionFailed", "412", "ConditionalRequestConflict"}:
                raise FileExistsError(path) from error
            denied = isinstance(error, PermissionError) or "credentials" in str(error).lower()
            kind, advice = (PermissionError, _KEYS) if denied else (OSError, _ADDRESS)
            reason = f"{type(error).__name__}: {error}".rstrip(". ")
            raise kind(f"{self._url} cannot be reached, or refuses ({name}): {reason}. {advice}") from (
                error.__cause__ or error
            )


class LocalCopies:
    """A local cache of object storage at `place`, in one folder for all processes and storages of this user.

    Every copy ends with its digest, so damage on the local disk is never taken for damage in the storage. fsspec's
    `filecache` has no byte budget, raises when a disk refuses, and does not check its copies: with it, 12 damaged
    copies made the store take all 12 entries for damaged.
    """

    def __init__(self, place: str, max_bytes: int) -> None:
        self._blobs, self._place, self.max_bytes = FolderBlobs(cache_directory() / "objects"), place, max_bytes

    def read(self, key: str, version: str) -> memoryview | None:
        """Return the copy of this version, in memory that the caller owns; `None` if there is no intact copy."""
        name = self._name(key, version)
        with suppress(OSError):
            data = self._blobs.read(name)
            content = data[:-_DIGEST_BYTES]
            if _digest(content) == bytes(data[-_DIGEST_BYTES:]):
                os.utime(self._blobs.path / name)
                return content
            self._blobs.delete(name)
        return None

    def write(self, key: str, version: str, data: Buffer) -> None:
        """Store a copy in place of older versions, and delete other copies until all fit."""
        if len(data) + _DIGEST_BYTES > self.max_bytes:
            return
        with suppress(OSError):
            self.drop(key)
            self._blobs.write(self._name(key, version), [data, _digest(data)])
            copies = filter(lambda copy: is_key(copy[0]), self._blobs.list())
            oldest_first = sorted(copies, key=lambda copy: copy[1].modified)
            excess = sum(stat.size for _, stat in oldest_first) - self.max_bytes
            for name, stat in oldest_first:
                if excess <= 0:
                    break
                self._blobs.delete(name)
                excess -= stat.size

    def drop(self, key: str) -> None:
        """Delete all copies of a blob."""
        with suppress(OSError):
            for name, _ in list(self._blobs.list(self._name(key))):
                self._blobs.delete(name)

    def keep(self, keys: Callable[[], Iterable[str]]) -> None:
        """Delete all copies of this place but those of `keys`, which are asked for if there are copies."""
        with suppress(OSError):
            if copies := list(self._blobs.list(self._name())):
                names = set(map(self._name, keys()))
                for name in (name for name, _ in copies if name.rpartition(".")[0] not in names):
                    self._blobs.delete(name)

    def _name(self, *parts: str) -> str:
        """The name of the copies of this place, of a key, or of one version of it."""
        return ".".join(blake2b(part.encode(), digest_size=16).hexdigest() for part in (self._place, *parts))


def is_far(place: str | os.PathLike[str]) -> bool:
    """Whether `place` is a URL of object storage, not a folder."""
    return isinstance(place, str) and _URL.fullmatch(place) is not None and not place.startswith("file://")


def open_blobs(place: str | os.PathLike[str]) -> Blobs:
    """Open a folder (also as `file://` and path) or a URL as blobs."""
    if is_far(place):
        return ObjectBlobs(str(place))
    return FolderBlobs(str(place).removeprefix("file://"))


def _code(error: BaseException | None) -> str:
    return str((getattr(error, "response", None) or {}).get("Error", {}).get("Code", ""))


def _stat(info: Mapping[str, Any]) -> BlobStat:
    """Return the `BlobStat` of a file; each file system names the fields differently."""
    modified = next((info[name] for name in ("LastModified", "mtime", "updated", "created") if info.get(name)), 0.0)
    if isinstance(modified, str):
        modified = datetime.fromisoformat(modified)
    modified = modified.timestamp() if isinstance(modified, datetime) else float(modified)
    token = next((info[name] for name in ("ETag", "etag", "generation", "md5Hash") if info.get(name)), modified)
    # Whole seconds: listings have milliseconds, a query of one object has seconds.
    return BlobStat(int(info["size"]), f"{token}.{info['size']}".replace('"', ""), float(int(modified)))


def _digest(data: Buffer) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
