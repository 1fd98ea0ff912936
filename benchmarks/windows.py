"""Packs of 1 to 8 windows on a model with sliding windows: what the first token and the next ones take.

Without `--model`, it is one with random weights that is made for this, of a `--family`: 12 layers, of which every
sixth sees all and the others a window of 512 tokens (Gemma 3), behind the tokenizer of the bundled model. Per length,
each repetition asks another question, and measures in turn (medians):

- pack: `generate(max_tokens=1)` with the handle, the pack warm in the prefix tree; template and tokenizer included.
- floor: as in `benchmarks.ttft`: plain transformers with its own attention, one forward pass of the question's tokens
  over a cache that already holds the rest, of which its layers with windows see a window.
- decode: seconds for each token behind the first, of `generate` here.
- hf decode: the same of plain `model.generate` on the same token ids.
- text: everything prefilled by the engine (`reuse=False`), once.

On CPUs, seconds are those of the processor in this process, so that other processes count for little: with one thread
(`OMP_NUM_THREADS=1`) they are what a quiet machine takes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

import kp_core
from benchmarks import common
from benchmarks.floor import Floor
from benchmarks.ttft import knowledge
from kp_core import PackStore, PackView, Session

__all__ = ["made", "main", "run"]

_COLUMNS = ("tokens", "text_s", "pack_s", "floor_s", "decode_s", "hf_decode_s")


def made(folder: Path, family: str, window: int, layers: int, dtype: str) -> str:
    """A model with random weights and windows, saved to `folder` with the tokenizer of the bundled model."""
    tokenizer = AutoTokenizer.from_pretrained(kp_core.bundled_model())
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=128,
        sliding_window=window,
        max_position_embeddings=32_768,
        num_local_experts=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class _Ticks(BaseStreamer):  # type: ignore[misc] # transformers is untyped
    """When each token of `model.generate` came; the prompt comes first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._is_prompt, self.at = clock, True, list[float]()

    def put(self, _: object) -> None:
        """A token, or the prompt."""
        if not self._is_prompt:
            self.at.append(self._clock())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing to do."""

    @property
    def seconds(self) -> float:
        """For each token behind the first."""
        return (self.at[-1] - self.at[0]) / (len(self.at) - 1)


class _Bench:
    """A pack of one length."""

    def __init__(self, answer: int, engine: Session, twin: common.Twin, handle: str, view: PackView) -> None:
        self._answer, self._engine, self._twin, self._handle, self._view = answer, engine, twin, handle, view
        self._clock = time.process_time if twin.model.device.type == "cpu" else time.perf_counter
        prompt = self._ask("Is it so?", 1).prompt
        self.prefix = prompt.token_ids[: prompt.spans[0].stop]
        self._floor = Floor(twin.model, self.prefix, room=64)

    def _ask(self, question: str, tokens: int, **options: Any) -> kp_core.Generation:  # noqa: ANN401
        asked = f"{self._handle}\n\n{question}"
        return self._engine.generate(asked, view=self._view, max_tokens=tokens, **options)

    def _timed(self, *asked: Any, **options: Any) -> tuple[float, kp_core.Generation]:  # noqa: ANN401
        began = self._clock()
        found = self._ask(*asked, **options)
        return self._clock() - began, found

    def text(self) -> float:
        """Seconds with nothing cached."""
        return self._timed("Is it so?", 1, reuse=False)[0]

    def measure(self, question: str) -> dict[str, float]:
        """Seconds of one question; `RuntimeError` when the pack was not reused."""
        first, found = self._timed(question, 1)
        if found.usage.reused_tokens < len(self.prefix):
            raise RuntimeError(f"Got {found.usage}; expected the {len(self.prefix)} tokens before it to be reused.")
        ids = found.prompt.token_ids
        began = self._clock()
        self._floor.first_token(ids[len(self.prefix) :])
        floor = self._clock() - began
        # The prompt is known now, with its logits: what is left is decoding.
        again, long = self._timed(question, self._answer)
        ticks = _Ticks(self._clock)
        self._twin.model.generate(
            input_ids=torch.tensor([ids], device=self._twin.model.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self._twin.model.device),
            max_new_tokens=self._answer,
            do_sample=False,
            streamer=ticks,
        )
        start = min(self._timed(question, 1)[0] for _ in range(2))
        decode = (again - start) / (long.usage.completion_tokens - 1)
        return {"pack_s": first, "floor_s": floor, "decode_s": decode, "hf_decode_s": ticks.seconds}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            shape = arguments.family, arguments.window, arguments.layers, arguments.dtype
            arguments.model = made(Path(folder) / "model", *shape)
        engine = common.load_engine(arguments)
        twin = common.Twin(arguments, engine.tokenizer)
        window = int(twin.model.config.get_text_config().sliding_window)
        passages, store, rows = common.read_passages(arguments.data), PackStore(Path(folder) / "packs"), []
        for times in arguments.times:
            pack = knowledge(engine, passages, times * window)
            bench = _Bench(arguments.answer, engine, twin, str(store.put(pack)), store.view("default"))
            asked = [f"Question {at}: what is said of {passages[at].title}?" for at in range(arguments.repeats + 1)]
            found = [bench.measure(question) for question in asked][1:]
            row = {name: median(each[name] for each in found) for name in found[0]}
            rows.append({"windows": times, "tokens": len(pack.token_ids), "text_s": bench.text(), **row})
    return {"dtype": arguments.dtype, "window": window, "rows": rows}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--times", type=int, nargs="+", default=(1, 2, 4, 8), metavar="N", help="windows in a pack")
    parser.add_argument(
        "--family", default="gemma3_text", metavar="TYPE", help="`model_type` of the model that is made"
    )
    parser.add_argument("--window", type=int, default=512, metavar="N", help="of the model that is made")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="of the model that is made")
    parser.add_argument("--answer", type=int, default=33, metavar="N", help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    rows = []
    for row in figures["rows"]:
        ratios = row["pack_s"] / row["floor_s"], row["decode_s"] / row["hf_decode_s"]
        cells = [f"{row[name]:.4f}" for name in _COLUMNS[1:]]
        rows.append([row["windows"], row["tokens"], *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    columns = ("windows", "tokens", "text", "pack", "floor", "decode", "hf decode", "pack / floor", "decode / hf")
    common.show_table(f"Windows of {figures['window']} tokens, seconds, {figures['dtype']}", columns, rows)
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
