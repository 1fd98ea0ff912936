"""What the pages need beyond Markdown: files of the repository's root as pages, and links to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_ROOT_PAGES = {"SECURITY.md": "security.md"}
_LINK = re.compile(r"\[([^\[\]]*)\]\((\.\./)?([\w./-]+)((?:#[\w-]+)?)\)")
_FIGURE = re.compile(r"!\[([^\]]*)\]\(figures/([\w-]+)\.svg\)")


def on_config(config: Any) -> None:  # noqa: ANN401 - of MkDocs
    """Show what stands in `docs` and in no menu: behind all others, so that no page is lost."""
    named = set(re.findall(r"'([\w/.-]+\.md)'", str(config.nav))) | {"index.md"}
    docs = Path(config.docs_dir)
    found = sorted(each.relative_to(docs).as_posix() for each in docs.rglob("*.md"))
    others = [name for name in [*found, *_roots().values()] if name not in named]
    config.nav = [*config.nav, {"More": others}] if others else config.nav


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401
    """Add the pages of the root."""
    for name, page in _roots().items():
        files.append(File.generated(config, page, content=(_ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:  # noqa: ANN401
    """Have links lead to pages; of a file that is none, the path is said.

    A figure that was drawn for dark pages too is shown as the page is.
    """

    def drawn(figure: re.Match[str]) -> str:
        said, name = figure.groups()
        if not (_ROOT / "docs" / "figures" / f"{name}-dark.svg").is_file():
            return figure[0]
        return f"![{said}](figures/{name}.svg#only-light)![{said}](figures/{name}-dark.svg#only-dark)"

    markdown = _FIGURE.sub(drawn, markdown)
    from_root = page.file.src_uri in _roots().values()

    def led(link: re.Match[str]) -> str:
        said, up, path, anchor = link.groups()
        if not up and not from_root:
            return link[0]
        if path in _roots():
            return f"[{said}]({_roots()[path]}{anchor})"
        if from_root and path.startswith("docs/"):
            return f"[{said}]({path.removeprefix('docs/')}{anchor})"
        return f"{said} (`{path}`)"

    return _LINK.sub(led, markdown)


def _roots() -> dict[str, str]:
    return {name: page for name, page in _ROOT_PAGES.items() if (_ROOT / name).is_file()}
