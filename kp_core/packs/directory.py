"""Where the files of a store lie, and how one of them is read, written and set aside; no policy."""

from __future__ import annotations

import io
import itertools
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from kp_core.errors import HandleError, PackCorruptError, PackError
from kp_core.packs.durable import discard_stale, make_dirs, publish, stage, sync_dir
from kp_core.packs.file import EncodedPack, PackHeader, read_header, read_pack
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace, mint
from kp_core.packs.pack import KnowledgePack, Prefix

__all__ = ["PACK", "TEXT", "PackDirectory"]

PACK, TEXT = ".safetensors", ".txt"
_SECRET_BYTES = 32


class PackDirectory:
    """The layout of `docs/format.md`. Methods that change files expect the caller to hold `lock`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packs, self.staging, self.quarantine = (path / name for name in ("packs", "staging", "quarantine"))
        make_dirs(self.packs)
        make_dirs(self.staging)
        discard_stale(self.staging)
        self.lock = FileLock(path / "lock")
        self._secret = self._load_secret()

    def _load_secret(self) -> bytes:
        path = self.path / "secret"
        if not path.exists():
            with self.lock:
                if not path.exists():
                    publish(stage(self.staging, [secrets.token_bytes(_SECRET_BYTES)]), path)
        secret = path.read_bytes()
        if len(secret) != _SECRET_BYTES:
            raise PackError(
                f"{path} has {len(secret)} bytes; expected {_SECRET_BYTES}. Restore it from a backup: "
                "without it the handles of this store mean nothing."
            )
        return secret

    def handle(self, text: str, namespace: str) -> Handle:
        """The handle of `text` under the secret; raises `HandleError` for bad names and non-Unicode text."""
        try:
            return mint(self._secret, namespace, text)
        except UnicodeEncodeError as error:
            raise HandleError(f"Got text that is not Unicode: {error}. Decode it with errors='replace'.") from error

    def file(self, handle: Handle, suffix: str) -> Path:
        """Where the pack (`PACK`) or its text (`TEXT`) lies."""
        return self.packs / handle.namespace / handle.id[:2] / f"{handle.id}{suffix}"

    def files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Every file under `packs/`."""
        for path in self.packs.glob("*/*/*"):
            with suppress(FileNotFoundError):
                yield path, path.stat()

    def handles(self, namespace: str | None) -> Iterator[Handle]:
        """The handles of all packs, or of one namespace, sorted."""
        for name in _listdir(self.packs) if namespace is None else [check_namespace(namespace)]:
            for shard in _listdir(self.packs / name):
                files = [Path(file) for file in _listdir(self.packs / name / shard)]
                for stem in sorted({file.stem for file in files if file.suffix in (PACK, TEXT)}):
                    with suppress(HandleError):  # Files that are not ours.
                        yield Handle(name, stem)

    def header(self, handle: Handle) -> PackHeader:
        """The head of the pack's file; raises `FileNotFoundError`, `PackCorruptError`, `PackVersionError`."""
        with io.FileIO(self.file(handle, PACK)) as file:
            return self._header(handle, file)

    def read(self, handle: Handle) -> KnowledgePack:
        """The pack with its KV, all digests checked; raises as `header`."""
        with io.FileIO(self.file(handle, PACK)) as file:
            return read_pack(file, self._header(handle, file))

    def _header(self, handle: Handle, file: io.FileIO) -> PackHeader:
        header = read_header(file)
        if self.handle(header.pack.text, header.pack.namespace) != handle:
            raise PackCorruptError(f"The file holds another text than that of {handle}, or comes from another store.")
        return header

    def text(self, handle: Handle) -> str:
        """The text beside the pack; raises `FileNotFoundError`, or `PackCorruptError` when it is not that of the id."""
        data = self.file(handle, TEXT).read_bytes()
        with suppress(UnicodeDecodeError):
            text = data.decode()
            if self.handle(text, handle.namespace) == handle:
                return text
        raise PackCorruptError(f"The {len(data)} bytes of text are not those of {handle}.")

    def salvage(self, handle: Handle) -> KnowledgePack | None:
        """What can be trusted of a damaged pack: all but the KV, or the text alone, or nothing (`None`)."""
        with suppress(FileNotFoundError, PackCorruptError):
            return self.header(handle).pack
        with suppress(FileNotFoundError, PackCorruptError):
            text = self.text(handle)
            return KnowledgePack(text, handle.namespace, (), Prefix(), ModelFingerprint.unknown())
        return None

    def write(self, handle: Handle, encoded: EncodedPack, text: str, staged: Path | None = None) -> None:
        """Write a pack, its text first; `staged` is where `encoded` was staged before, if it was."""
        self.write_text(handle, text)
        publish(staged or stage(self.staging, encoded.chunks()), self.file(handle, PACK))

    def write_text(self, handle: Handle, text: str) -> None:
        """Write the text, unless it is there."""
        path, data = self.file(handle, TEXT), text.encode()
        with suppress(FileNotFoundError):
            if path.read_bytes() == data:
                return
        publish(stage(self.staging, [data]), path)

    def touch(self, handle: Handle) -> None:
        """Note that the pack was used, in its access time, which mount options may keep the system from doing."""
        path = self.file(handle, PACK)
        with suppress(OSError):  # A store on a read-only disk has no order of use.
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def set_aside(self, handle: Handle, suffix: str) -> Path | None:
        """Keep a file in quarantine under a new name; returns that, or `None` when there is no such file.

        The file also stays where it is, until something better replaces it, so that no crash loses its handle.
        """
        source = self.file(handle, suffix)
        make_dirs(self.quarantine)
        for number in itertools.count(1):
            target = self.quarantine / f"{handle.namespace}.{handle.id}.{number}{suffix}"
            if target.exists():
                continue
            try:
                os.link(source, target)
            except FileNotFoundError:
                return None
            except FileExistsError:
                continue
            except OSError:  # A file system without hard links.
                source.rename(target)
            sync_dir(self.quarantine)
            return target
        return None

    def remove(self, handle: Handle) -> bool:
        """Remove the pack, its text and its quarantined files; returns whether there was any."""
        # Text first: a text alone would come back as a pack.
        files = [self.file(handle, TEXT), self.file(handle, PACK)]
        files += self.quarantine.glob(f"{handle.namespace}.{handle.id}.*")
        found = [file for file in files if file.exists()]
        for file in found:
            file.unlink()
            sync_dir(file.parent)
        return bool(found)


def _listdir(path: Path) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(path))  # noqa: PTH208 - names alone are needed
    return []
