"""Synthetic facts that are easy to tell apart, each with a question that one fact answers.

Each is about an institution: its name is one of 900 pairs of words, its town one of 30, its kind one of twelve. Within
a kind, two facts share at most one of the name's first word, its second word and the town.
"""

from __future__ import annotations

import numpy as np

__all__ = ["synthetic"]

_FIRST = (
    "Amber Copper Crimson Emerald Golden Ivory Velvet Frozen Whispering Broken Marble Bearded Wooden Lonely Burning "
    "Hidden Ancient Crystal Iron Paper Salty Winter Midnight Purple Dancing Singing Floating Electric Hungry Holy"
)
_SECOND = (
    "Falcon Otter Lantern Anchor Violin Tulip Walrus Compass Cactus Dragon Pelican Hammer Orchid Badger Mirror "
    "Candle Tiger Acorn Scorpion Trumpet Penguin Ladder Mushroom Dolphin Cobra Feather Teapot Thistle Giraffe "
    "Umbrella"
)
_TOWNS = (
    "Lisbon Oslo Nairobi Kyoto Lima Cairo Dublin Hanoi Quito Prague Havana Tunis Perth Boston Athens Seoul Naples "
    "Bergen Mumbai Geneva Dakar Austin Riga Jakarta Leipzig Toronto Malaga Kabul Denver Odessa"
)
_KINDS = (
    (
        "The {name} observatory in {town} recorded a comet in the year {number}.",
        "In which year did the {name} observatory in {town} record a comet?",
    ),
    (
        "The bakery {name} of {town} sells a rye bread that weighs {number} grams.",
        "How heavy is the rye bread of the bakery {name} in {town}?",
    ),
    (
        "The ferry {name} leaves the harbour of {town} with {number} passengers.",
        "How many passengers leave the harbour of {town} on the ferry {name}?",
    ),
    (
        "The football club {name} of {town} won its cup with {number} goals.",
        "With how many goals did the football club {name} of {town} win its cup?",
    ),
    ("The {name} mine near {town} is {number} metres deep.", "How deep is the {name} mine near {town}?"),
    (
        "The opera {name} had its premiere in {town} before {number} listeners.",
        "Before how many listeners was the premiere of the opera {name} in {town}?",
    ),
    ("The {name} hospital in {town} has {number} beds.", "How many beds has the {name} hospital in {town}?"),
    (
        "The {name} bridge of {town} carries {number} cars a day.",
        "How many cars a day cross the {name} bridge of {town}?",
    ),
    (
        "The brewery {name} in {town} made its first beer with {number} barrels of barley.",
        "How many barrels of barley went into the first beer of the brewery {name} in {town}?",
    ),
    (
        "The {name} lighthouse off {town} flashes every {number} seconds.",
        "How often does the {name} lighthouse off {town} flash?",
    ),
    (
        "The law firm {name} of {town} keeps {number} files in its cellar.",
        "How many files does the law firm {name} of {town} keep in its cellar?",
    ),
    (
        "The {name} school in {town} teaches chess to {number} pupils.",
        "To how many pupils does the {name} school in {town} teach chess?",
    ),
)


def synthetic(count: int) -> tuple[list[str], list[str]]:
    """The first `count` facts of at most 10,800, and a question about each."""
    draw = np.random.default_rng(0)
    first_words, second_words, towns = _FIRST.split(), _SECOND.split(), _TOWNS.split()
    facts, questions = [], []
    for number in draw.permutation(len(_KINDS) * len(first_words) * len(second_words))[:count].tolist():
        pair, kind = divmod(number, len(_KINDS))
        first, second = divmod(pair, len(second_words))
        fact, question = _KINDS[kind]
        about = {
            "name": f"{first_words[first]} {second_words[second]}",
            # A Latin square: first and second word decide the town, and each of them with the town the other.
            "town": towns[(first + second + kind) % len(towns)],
            "number": draw.integers(10, 1000),
        }
        facts.append(fact.format_map(about))
        questions.append(question.format_map(about))
    return facts, questions
