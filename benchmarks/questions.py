"""Questions over several documents of about one size, for comparing composers: invented worlds and public texts.

Each set is an endless or finite stream of questions, drawn from a seed. One of the documents (or two, of *hops* and
*hotpot*) holds what is asked for; the others are of the same kind. Documents are brought to the asked size with
sentences that answer nothing, before and behind.

- needle: a code among codes that differ in the name of their harbour alone.
- world: one attribute of one town, of an invented country.
- single: a year, made from a passage of Wikipedia by its wording; other passages stand beside it.
- hops: two facts of an invented world: where a person lives, and an attribute of that town.
- hotpot: HotpotQA, two paragraphs; and where these are used up, *hops*.
- a file of one's own (`of_file`): a JSON object a line with `question`, `answer` and `passages`.

Run as a program, it writes questions to such a file, as `kp calibrate` takes them; `kind` is the set.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as counted
from itertools import islice, product
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks import common

__all__ = ["SETS", "Question", "main", "of_file", "questions"]

SETS = ("needle", "world", "single", "hops", "hotpot")


@dataclass(frozen=True)
class Question:
    """What is asked over `documents`, and the right answer."""

    asked: str
    answer: str
    documents: tuple[str, ...]


_FIRST = ("Av", "Bri", "Cor", "Dac", "Elu", "Fen", "Gor", "Har", "Isk", "Jor", "Kes", "Lun", "Mav", "Nol", "Orr", "Pel")
_LAST = ("bury", "dale", "den", "fell", "gate", "holm", "lock", "mere", "moor", "ness", "ridge", "stead", "ton", "wick")
_GIVEN = ("Ansel", "Berta", "Cyril", "Dora", "Edgar", "Flora", "Gilda", "Hugo", "Irma", "Jonas", "Kitty", "Lambert")
_FAMILY = ("Ashcombe", "Birdsong", "Crake", "Dunmore", "Eastlake", "Farrow", "Godwin", "Hurst", "Ivory", "Kestrel")
_ATTRIBUTES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("The river of {town} is the {value}.", "What is the river of {town}?",
     ("Averle", "Tamsin", "Ouse", "Wend", "Lark")),
    ("The flag of {town} is {value}.", "What colour is the flag of {town}?", ("green", "violet", "orange", "grey")),
    ("The people of {town} are known for their {value}.", "What are the people of {town} known for?",
     ("cheese", "bells", "pottery", "lace", "honey", "clocks", "songs")),
    ("The market of {town} is held on {value}.", "On which day is the market of {town} held?",
     ("Monday", "Tuesday", "Thursday", "Friday", "Saturday")),
    ("The mayor of {town} is {value}.", "Who is the mayor of {town}?",
     tuple(f"{given} {family}" for given, family in zip(_GIVEN, (*_FAMILY, "Crake", "Hurst"), strict=True))),
)  # fmt: skip
_FILLERS = (
    "Visitors of {town} mostly come in summer, when the road over the hills is dry.",
    "The houses of {town} are built of pale stone, and most of them have a small garden.",
    "A narrow lane leads from the church of {town} down to the water.",
    "In winter the wind blows from the north, and people stay indoors.",
    "Children walk to school along the wall, past the old well and the bakery.",
    "Much has been written about {town}, and little of it is read today.",
    "The inn of {town} has four rooms and a view of the fields.",
    "On clear evenings one can see the lights of the villages on the other side of the valley.",
)
_BORN = re.compile(r"^([A-Z][^(,.]{3,40}) \(\s*(?:born )?\D{0,12}\d{0,2}\D{0,12}?((?:1[5-9]|20)\d\d)\b")
_FILM = re.compile(r"^([A-Z][^(,.]{2,50}?) is an? ((?:19|20)\d\d) ")

_Draw = Callable[[random.Random, int], Question]
"""A question over so many documents that are not yet of the asked size."""


def questions(
    kind: str, packs: int, tokens: int, encode: Callable[[str], Sequence[int]], seed: int = 0
) -> Iterator[Question]:
    """The questions of a set, over `packs` documents of about `tokens` tokens each, shuffled.

    Raises `ValueError` for an unknown set.
    """
    draw = random.Random(f"{kind} {packs} {tokens} {seed}")  # noqa: S311 - no secret
    if made := {"needle": _needle, "world": _world, "hops": _two_hops}.get(kind):
        found: Iterator[Question] = (made(draw, packs) for _ in counted())
    elif kind == "single":
        found = _single(draw, packs, lambda text: _shortened(text, tokens, encode))
    elif kind == "hotpot":
        found = _hotpot(draw, packs)
    else:
        raise ValueError(f"Got the set {kind!r}; expected one of {', '.join(SETS)}.")
    for question in found:
        sized = [_sized(text, tokens, draw, encode) for text in question.documents]
        yield Question(question.asked, question.answer, tuple(draw.sample(sized, len(sized))))


def of_file(path: Path) -> Iterator[Question]:
    """The questions of a JSON-lines file with `question`, `answer` and `passages`.

    Raises `ValueError` that names the line for anything else.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                asked, answer, passages = row["question"], row["answer"], row["passages"]
                is_right = all(isinstance(each, str) and each.strip() for each in (asked, answer, *passages))
            except (ValueError, TypeError, KeyError):
                is_right = False
            if not is_right or not passages or isinstance(passages, str):
                raise ValueError(
                    f"{path}, line {number}: got {line.strip()[:60]!r}; expected an object with the strings "
                    "'question' and 'answer' and the list of strings 'passages'."
                )
            yield Question(asked, answer, tuple(passages))


def _towns(draw: random.Random, count: int) -> list[str]:
    return draw.sample([first + last for first in _FIRST for last in _LAST], count)


def _needle(draw: random.Random, packs: int) -> Question:
    towns = _towns(draw, packs)
    codes = draw.sample(range(1000, 10000), packs)
    texts = tuple(f"The code of the harbour of {town} is {code}." for town, code in zip(towns, codes, strict=True))
    return Question(f"What is the code of the harbour of {towns[0]}?", str(codes[0]), texts)


def _world(draw: random.Random, packs: int) -> Question:
    towns = _towns(draw, packs)
    said, asked, values = draw.choice(_ATTRIBUTES)
    chosen = draw.sample(values, min(len(values), packs))
    answers = [chosen[0], *(draw.choice(chosen[1:] or chosen) for _ in towns[1:])]
    texts = []
    for town, answer in zip(towns, answers, strict=True):
        other, _, other_values = draw.choice([each for each in _ATTRIBUTES if each[0] != said])
        about = [said.format(town=town, value=answer), other.format(town=town, value=draw.choice(other_values))]
        texts.append(" ".join(draw.sample(about, 2)))
    return Question(asked.format(town=towns[0]), answers[0], tuple(texts))


def _single(draw: random.Random, packs: int, shortened: Callable[[str], str]) -> Iterator[Question]:
    passages = common.read_passages(common.data_folder() / "wiki_passages.jsonl")
    draw.shuffle(passages)
    for passage in passages:
        if found := _BORN.match(passage.text):
            asked = f"In what year was {found[1].strip()} born?"
        elif found := _FILM.match(passage.text):
            asked = f"From what year is {found[1].strip()}?"
        else:
            continue
        others = [other for other in draw.sample(passages, packs + 4) if other is not passage][: packs - 1]
        texts = tuple(shortened(str(each)) for each in (passage, *others))
        yield Question(asked, found[2], texts)


def _hotpot(draw: random.Random, packs: int) -> Iterator[Question]:
    examples = common.read_examples(common.data_folder() / "hotpotqa_gold.jsonl")
    paragraphs = [paragraph for example in examples for paragraph in example.paragraphs]
    for example in examples:
        needed = tuple(map(str, example.paragraphs))
        if len(needed) <= packs and common.normalise(example.answer) not in ("yes", "no"):
            others = [str(other) for other in draw.sample(paragraphs, packs + 4) if other not in example.paragraphs]
            yield Question(example.question, example.answer, (*needed, *others[: packs - len(needed)]))
    for _ in counted():
        yield _two_hops(draw, packs)


def _two_hops(draw: random.Random, packs: int) -> Question:
    """Where a person lives, and an attribute of that town, in documents of their own."""
    people = draw.sample([f"{given} {family}" for given in _GIVEN for family in _FAMILY], packs)
    towns = _towns(draw, packs)
    said, asked, values = draw.choice(_ATTRIBUTES[:4])
    answers = draw.sample(values, min(len(values), packs))
    texts = [f"{people[0]} lives in {towns[0]}.", said.format(town=towns[0], value=answers[0])]
    for at in range(1, packs):
        wrong = answers[at % (len(answers) - 1) + 1] if len(answers) > 1 else answers[0]
        texts += [f"{people[at]} lives in {towns[at]}.", said.format(town=towns[at], value=wrong)]
    return Question(asked.format(town=f"the town where {people[0]} lives"), answers[0], tuple(texts[:packs]))


def _shortened(text: str, tokens: int, encode: Callable[[str], Sequence[int]]) -> str:
    """The first sentences of `text` that fit into `tokens` tokens, at least one."""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
    stop = 1
    while stop < len(sentences) and len(encode(" ".join(sentences[: stop + 1]))) <= tokens:
        stop += 1
    return " ".join(sentences[:stop])


def _sized(text: str, tokens: int, draw: random.Random, encode: Callable[[str], Sequence[int]]) -> str:
    """`text` among sentences that answer nothing, of about `tokens` tokens in all; longer texts stay whole.

    Where `text` stands among them is drawn: composers that compute the beginning of each pack shall gain nothing by it.
    """
    town = draw.choice(_FIRST) + draw.choice(_LAST)
    fillers = draw.sample(_FILLERS, len(_FILLERS))
    for at in counted():
        filler = fillers[at % len(fillers)].format(town=town)
        longer = f"{text} {filler}" if draw.random() < 0.5 else f"{filler} {text}"
        if len(encode(longer)) > tokens:
            return text
        text = longer
    raise AssertionError("there is always another sentence")


def main(argv: Sequence[str] | None = None) -> None:
    """Write questions of several sets and sizes to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FILE")
    parser.add_argument("--model", help="Hugging Face id or folder; default: the bundled SmolLM2-135M-Instruct")
    parser.add_argument("--sets", nargs="+", default=("needle", "world", "single", "hops"), choices=SETS)
    parser.add_argument("--packs", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--tokens", type=int, default=130, help="of a pack, about")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="questions of each set and number of packs")
    parser.add_argument("--seed", type=int, default=100)
    arguments = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(common.model_path(arguments))

    def encode(text: str) -> Sequence[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    with arguments.out.open("w", encoding="utf-8") as lines:
        for kind, packs in product(arguments.sets, arguments.packs):
            stream = questions(kind, packs, arguments.tokens, encode, arguments.seed)
            for one in islice(stream, arguments.limit):
                row = {"question": one.asked, "answer": one.answer, "passages": one.documents, "kind": kind}
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
