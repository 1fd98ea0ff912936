"""How formal and how short a text is, how documented and how defensive code: deterministic scores for steering.

Formality is the mean of two numbers from 0 to 1: the automated readability index of textstat (a school grade from the
lengths of words and sentences), clipped to 0..20 and divided by 20; and one less ten times the share of informal words
(contractions, first and second person, slang, exclamation marks), at least 0. Brevity is minus the logarithm of the
number of words.

Code is read by `ast`. Documented is the share of its lines that are comments or docstrings; defensive the number of its
guards (`raise`, `assert`, `try`, `isinstance`) per function. Both are 0 of what is no program.
"""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize

import textstat

__all__ = ["INSTRUCTED", "brevity", "defensive", "documented", "formality", "program"]

INSTRUCTED = "Write in a highly formal register, without contractions and without addressing the reader."
"""What the formal preset says in words."""

_INFORMAL = re.compile(
    r"\b(?:\w+'(?:s|re|ve|ll|d|m|t)|i|me|my|you|your|we|us|our|hey|yeah|ok|okay|lol|gonna|wanna|gotta|kinda|stuff|guys|"
    r"cool|awesome|super|dude|yo|thanks|pretty|really|just|so|love)\b|!",
    re.IGNORECASE,
)


def formality(text: str) -> float:
    """Formality from 0 to 1; 0 of a text without words."""
    words = text.split()
    if not words:
        return 0.0
    grade = min(max(textstat.automated_readability_index(text), 0.0), 20.0) / 20
    return (grade + max(0.0, 1 - 10 * len(_INFORMAL.findall(text)) / len(words))) / 2


def brevity(text: str) -> float:
    """Minus the natural logarithm of the number of words."""
    return -math.log(max(len(text.split()), 1))


_FENCED = re.compile(r"```\w*\n(.*?)(?:```|\Z)", re.DOTALL)
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def program(text: str) -> str | None:
    """The Python program in an answer: its first fenced block, or all of it; `None` where no function is defined.

    Lines at the end that do not parse are left out: answers are cut at a number of tokens.
    """
    fenced = _FENCED.search(text)
    lines = (fenced[1] if fenced else text).splitlines()
    while lines:
        found = "\n".join(lines)
        try:
            parsed = ast.parse(found)
        except (SyntaxError, ValueError):
            lines.pop()
            continue
        return found if any(isinstance(node, _FUNCTION) for node in ast.walk(parsed)) else None
    return None


def documented(text: str) -> float:
    """Share of the lines of the program in `text` that are comments or docstrings."""
    code = program(text)
    if code is None:
        return 0.0
    held = {number for number, line in enumerate(code.splitlines(), 1) if line.strip()}
    about = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTION)) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            about |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(about & held) / len(held)


def defensive(text: str) -> float:
    """Guards per function of the program in `text`."""
    code = program(text)
    if code is None:
        return 0.0
    nodes = list(ast.walk(ast.parse(code)))
    guards = sum(isinstance(node, ast.Raise | ast.Assert | ast.Try) or _asks_type(node) for node in nodes)
    return guards / sum(isinstance(node, _FUNCTION) for node in nodes)


def _asks_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
