"""Is the answer from several packs the answer from their text, in every order? HotpotQA questions, greedy answers.

Each gold fact of a question is a pack of its own, stored in a `PackStore`. Its handles stand in the user message in
the order of the facts (`given`), and shuffled (`shuffled`). Each is answered four ways:

- text: in the order in which it was sent, on this engine with nothing cached (`reuse=False`).
- cold: the engine's cache cleared, packs from the store.
- warm: the cache cleared, the same packs asked something else, then this.
- hf: the same token ids through plain `model.generate`, default attention, a model loaded apart from the engine.

Counted are outputs that differ from text's, token by token, first logits that have other bits, cold or warm, and the
tokens up to the end of the last pack that were computed again though the combination was seen.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import track

from benchmarks import common
from benchmarks.equivalence import question_text
from kp_core import Generation, PackStore, PackView, Session

__all__ = ["ORDERS", "main", "run"]

ORDERS = ("given", "shuffled")
_COUNTS = ("cold", "warm", "hf", "logits", "again")


@dataclass(frozen=True)
class _Desk:
    """Who answers, from which packs, with how many tokens at most."""

    engine: Session
    twin: common.Twin
    view: PackView
    tokens: int

    def compare(self, handles: Sequence[str], ask: str) -> dict[str, int]:
        """What one prompt adds to each of `_COUNTS`."""
        options: dict[str, Any] = {"view": self.view, "keep": "never", "max_tokens": self.tokens}
        said, counts = "\n\n".join((*handles, ask)), dict.fromkeys(_COUNTS, 0)
        text: Generation | None = None
        for state in ("cold", "warm"):
            self.engine.clear_cache()
            if state == "warm":
                self.engine.generate("\n\n".join((*handles, "Why?")), **options | {"max_tokens": 1})
            found = self.engine.generate(said, **options)
            if text is None or text.prompt.token_ids != found.prompt.token_ids:  # Warm is mostly sent as cold.
                text = self.engine.generate("\n\n".join((*found.packs, ask)), reuse=False, **options)
            if text.prompt.token_ids != found.prompt.token_ids or text.usage.reused_tokens:
                raise RuntimeError(f"{ask}: expected the same prompt computed from its start, got {text.usage}.")
            counts[state] += found.token_ids != text.token_ids
            counts["logits"] += not common.same_bits(found.logits, text.logits)
        behind = len(found.prompt) - max(span.stop for span in found.prompt.spans)
        counts["again"] += max(0, found.usage.computed_tokens - behind)
        plain = self.twin.generate([found.prompt.token_ids], self.tokens)[0]
        counts["hf"] += self.twin.without_end(found.token_ids) != plain
        return counts


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    examples = common.read_examples(arguments.data, arguments.limit)
    engine = common.load_engine(arguments)
    twin = common.Twin(arguments, engine.tokenizer)
    rows = {order: dict.fromkeys(_COUNTS, 0) for order in ORDERS}
    chance = random.Random(0)  # noqa: S311
    with common.scratch(engine) as folder:
        store = PackStore(folder)
        desk = _Desk(engine, twin, store.view("default"), arguments.tokens)
        for example in track(examples, "Text, packs and plain Hugging Face"):
            packs = engine.build_packs([str(each) for each in example.paragraphs], progress=False)
            handles = [str(store.put(pack)) for pack in packs]
            for order, row in rows.items():
                placed = chance.sample(handles, len(handles)) if order == "shuffled" else handles
                counts = desk.compare(placed, question_text(example.question))
                for name, count in counts.items():
                    row[name] += count
    return {"n": len(examples), "dtype": arguments.dtype, "rows": rows}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="most tokens of an answer; default: 24")
    figures = run(arguments := parser.parse_args(argv))
    common.show_table(
        f"Several packs: {figures['n']} questions, {figures['dtype']}",
        ("order", "cold ≠ text", "warm ≠ text", "warm ≠ hf", "other first logits", "computed again"),
        [(order, *row.values()) for order, row in figures["rows"].items()],
    )
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
