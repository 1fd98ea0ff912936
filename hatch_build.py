"""The package's page on PyPI is the README; links between files lead to the repository from there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FILES = "https://github.com/knowledge-packs/knowledge-packs/blob/main/"


class Readme(MetadataHookInterface):
    """`readme`, with absolute addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set it. Images are asked for as they are (`?raw=true`)."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\((?![a-z]+:|#)", f"]({_FILES}", text)
        text = re.sub(r'((?:src|srcset)=")(?![a-z]+:)([^"]+)', rf"\1{_FILES}\2?raw=true", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
