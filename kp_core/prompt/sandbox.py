"""Renders chat templates, which are code that comes with a model, in the sandbox of transformers.

The sandbox limits what a template reaches, neither its time nor its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render the template `source` with `variables`.

    Raises the errors of Jinja, among them `SecurityError` for access to what the sandbox forbids.
    """
    return str(_compile_jinja_template(source).render(variables))


@lru_cache
def literals(source: str) -> str:
    """Return all literal text of a template, joined by null characters."""
    tree = _compile_jinja_template(source).environment.parse(source)
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(texts))
