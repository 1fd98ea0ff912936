"""Recognition: what it costs to find the texts of packs in a prompt, beside rendering that prompt.

Packs: the passages of `--data`; beyond them, copies, numbered. Prompts: ten of these texts under a question, then
passages of no pack up to `--tokens` tokens. Three stores: the packs as they are; the same behind a beginning that all
of them share, which the prompt repeats; and a hostile one, whose packs and prompt repeat one word and differ in the
last character of the packs alone.

- index: seconds to take in all texts, which happens once per process; what is added later is taken in by itself.
- find: median milliseconds of one search, and its 5th and 95th percentile; render: of the prompt, without recognition.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any

from rich.progress import track
from transformers import AutoTokenizer

from benchmarks import common
from kp_core import ChatTemplate, Handle
from kp_core.packs.handle import mint
from kp_core.packs.recognise import Recogniser

__all__ = ["main", "run"]

_SECRET = b"recognition benchmark"
_SHARED = "From the handbook of the harbour office, edition of this year, for the use of its staff alone.\n"
_QUESTION = "\n\nAnswer from the passages above: which of them names a year?"
_USED = 10


def texts_of(passages: Sequence[str], packs: int) -> list[str]:
    """`packs` texts, the passages first and then numbered copies."""

    def all_of() -> Iterator[str]:
        for number in count():
            yield from (f"{number}. {text}" if number else text for text in passages)

    return list(islice(all_of(), packs))


def handle_of(text: str) -> Handle:
    """The handle of `text`."""
    return mint(_SECRET, "bench", text)


def measure(packs: Sequence[str], prompt: str, template: ChatTemplate, repeats: int) -> dict[str, float]:
    """The figures of one store and one prompt; searching and rendering take turns."""
    pairs = [(handle_of(text), text) for text in packs]
    recogniser = Recogniser()
    began = time.perf_counter()
    for pair in pairs:
        recogniser.add(*pair)
    index = time.perf_counter() - began
    find, render = [], []
    for _ in range(repeats):
        find.append(_seconds(lambda: recogniser.find(prompt)))
        render.append(_seconds(lambda: template.render(prompt)))
    low, *_, high = statistics.quantiles(find, n=20)
    return {
        "packs": len(packs),
        "characters": len(prompt),
        "tokens": len(template.render(prompt)),
        "found": len(recogniser.find(prompt)),
        "index_s": index,
        "find_ms": 1000 * statistics.median(find),
        "find_p5_ms": 1000 * low,
        "find_p95_ms": 1000 * high,
        "render_ms": 1000 * statistics.median(render),
        "find_by_render": statistics.median(find) / statistics.median(render),
    }


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    template = ChatTemplate(AutoTokenizer.from_pretrained(common.model_path(arguments)))
    passages = [str(passage) for passage in common.read_passages(arguments.data, arguments.limit)]
    packs = texts_of(passages[len(passages) // 2 :], arguments.packs)
    shared = [_SHARED + text for text in packs]
    characters = _characters(passages, template, arguments.tokens)

    def prompt_of(known: Sequence[str], between: str) -> str:
        filler = between + f"\n\n{between}".join(passages[: len(passages) // 2])
        return "\n\n".join((*known[:: len(known) // _USED][:_USED], filler))[:characters] + _QUESTION

    word = "word "
    cases = {
        "as they are": (packs, prompt_of(packs, "")),
        "one beginning": (shared, prompt_of(shared, _SHARED)),
        "hostile": ([word * (13 + at % 3000) + f"{at}!" for at in range(arguments.packs)], word * (characters // 5)),
    }
    stores = {
        name: measure(*case, template, arguments.repeats) for name, case in track(list(cases.items()), "Measuring")
    }
    return {"stores": stores}


def _characters(passages: Sequence[str], template: ChatTemplate, tokens: int) -> int:
    """About how many characters make `tokens` tokens."""
    sample = "\n\n".join(passages[:50])
    return round(tokens * len(sample) / len(template.render(sample)))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--packs", type=int, default=20_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4_000, metavar="N", help="of the prompt; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=100, metavar="N", help="timings of each; default: %(default)s")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    common.show_table(
        f"Recognition of {arguments.packs} packs",
        ("packs", "tokens", "found", "index s", "find ms (p5-p95)", "render ms", "find / render"),
        [
            (
                name,
                row["tokens"],
                row["found"],
                f"{row['index_s']:.2f}",
                f"{row['find_ms']:.2f} ({row['find_p5_ms']:.2f}-{row['find_p95_ms']:.2f})",
                f"{row['render_ms']:.2f}",
                f"{row['find_by_render']:.1%}",
            )
            for name, row in figures["stores"].items()
        ],
    )
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
