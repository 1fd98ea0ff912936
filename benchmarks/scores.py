"""How formal and how short a text is: deterministic scores for the benchmarks of steering.

Formality is the mean of two numbers from 0 to 1: the automated readability index of textstat (a school grade from the
lengths of words and sentences), clipped to 0..20 and divided by 20; and one less ten times the share of informal words
(contractions, first and second person, slang, exclamation marks), at least 0. Brevity is minus the logarithm of the
number of words.
"""

from __future__ import annotations

import math
import re

import textstat

__all__ = ["INSTRUCTED", "brevity", "formality"]

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
