"""Files as a machine finds them that has not read them yet."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["drop_from_page_cache"]


def drop_from_page_cache(folder: Path) -> None:
    """Drop the system's copies of the pack files in `folder`, where the system lets us."""
    if hasattr(os, "posix_fadvise"):
        for path in folder.rglob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
