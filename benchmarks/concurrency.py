"""Several users at once on one engine: tokens a second, waits, gaps and memory, beside the same one by one.

Each user asks one question behind `--tokens` tokens of knowledge. `sharing`: `pack` is one pack for all, `packs` a pack
each, `text` no pack and a text each. For each number of users the same requests are answered twice in turn, together
and `one by one`, after the prefix tree was emptied and the knowledge prefilled once (not for `text`, which nobody sent
before). Answers have `--answer` tokens at most.

- tok_s: tokens of all answers over the seconds from the first request to the last token.
- ttft: seconds from a request to its first token, at the median and the 99th percentile.
- itl_p99: 99th percentile of the seconds between two pieces of one answer.
- vllm_tok_s: tok_s of vLLM for the same token ids, knowledge in its prefix cache, where `make setup-vllm` was done.
- peak_bytes: the most memory the process ever had (Linux, macOS), which never falls from row to row.
- long: with `--long N`, the gaps between tokens of the running answers while a text of N tokens is prefilled.
  `chunk_s` is what one of its chunks takes in the mean, `last_chunk_s` its last tokens, as many as a chunk has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.composition import passages
from kp_core import PackStore, Session

__all__ = ["main", "run"]

_UNIT = 1 if sys.platform == "darwin" else 1024
_ASKED = "Tell a long story about what you read."
_VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"


_PASS_TOKENS = 1024
"""Of one forward pass, by default."""


def listen(engine: Session, asked: str, tokens: int, **options: Any) -> tuple[int, list[float]]:  # noqa: ANN401
    """The tokens of an answer, and when it was asked for and each piece of it came."""
    heard = [time.perf_counter()]
    stream = engine.stream(asked, max_tokens=tokens, **options)
    heard += [time.perf_counter() for _ in stream.deltas()]
    return stream.result().usage.completion_tokens, heard


def measure(engine: Session, requests: Sequence[str], at_once: int, tokens: int, **options: Any) -> dict[str, float]:  # noqa: ANN401
    """Figures of these requests, `at_once` of them at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda asked: listen(engine, asked, tokens, **options), requests))
    heard = [times for _, times in answers]
    seconds = max(times[-1] for times in heard) - min(times[0] for times in heard)
    first = [times[1] - times[0] for times in heard]
    return {
        "tok_s": sum(count for count, _ in answers) / seconds,
        "ttft_p50": statistics.median(first),
        "ttft_p99": float(np.percentile(first, 99)),
        "itl_p99": gap(heard),
    }


def gap(heard: Sequence[Sequence[float]]) -> float:
    """99th percentile of the seconds between two pieces of one answer."""
    gaps = [later - earlier for times in heard for earlier, later in itertools.pairwise(times[1:])]
    return float(np.percentile(gaps, 99)) if gaps else 0.0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    engine = common.load_engine(arguments)
    texts = itertools.cycle(str(passage.text) for passage in common.read_passages(arguments.data))
    rows: list[dict[str, Any]] = []
    prompts: list[dict[str, Any]] = []
    with common.scratch(engine) as folder:
        store = PackStore(folder)
        view = store.view("default")
        for size in arguments.tokens:
            found = passages(engine, texts, size, max(arguments.users))
            handles = [str(store.put(pack)) for pack in engine.build_packs(found, progress=False)]
            ways = {"pack": handles[:1] * len(handles), "packs": handles, "text": found}
            for sharing, users in ((way, count) for way in arguments.sharing for count in arguments.users):
                requests = [f"{each}\n\n{_ASKED} ({number})" for number, each in enumerate(ways[sharing][:users])]
                for at_once in (users, 1):
                    warm = _reset(engine, requests if sharing != "text" else (), view=view)
                    figures = measure(engine, requests, at_once, arguments.answer, view=view)
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
                    row = {"users": users, "tokens": size, "sharing": sharing, "at_once": at_once}
                    rows.append(row | figures | {"peak_bytes": peak})
                    ids = [list(engine.prefill(asked, view=view).prompt.token_ids) for asked in requests]
                    prompts.append({"prompts": ids, "warm": warm, "at_once": at_once})
        told: dict[str, Any] = {"rows": rows}
        if arguments.long:
            told["long"] = _beside_a_long_prompt(engine, texts, arguments)
        engine.clear_cache()
        for row, rate in zip(rows, _vllm(prompts, arguments, Path(folder)), strict=True):
            row["vllm_tok_s"] = rate
    return told


def _reset(engine: Session, requests: Sequence[str], **options: Any) -> list[list[int]]:  # noqa: ANN401
    """Forget all, and prefill the knowledge of these requests; the token ids of what was prefilled."""
    engine.clear_cache()
    engine.prefill("Hello.")
    texts = dict.fromkeys(asked.rpartition("\n\n")[0] for asked in requests)
    return [list(engine.prefill(f"{text}\n\nWhy?", **options).prompt.token_ids) for text in texts]


def _vllm(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace, folder: Path) -> Sequence[float | None]:
    """Tokens a second of vLLM for each row, which does not run beside ours; nothing where it is not installed."""
    if not _VLLM.exists():
        return [None] * len(rows)
    asked = {"model": common.model_path(arguments), "dtype": arguments.dtype, "tokens": arguments.answer, "rows": rows}
    (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    worker = Path(__file__).parent / "vllm_worker.py"
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [str(_VLLM), str(worker), str(folder / "asked.json"), str(folder / "rates.json")]
    subprocess.run(command, check=True, env=os.environ | settings)  # noqa: S603 - our own
    rates: list[float] = json.loads((folder / "rates.json").read_text(encoding="utf-8"))
    return rates


def _beside_a_long_prompt(engine: Session, texts: Iterator[str], arguments: argparse.Namespace) -> dict[str, float]:
    """Gaps in four running answers while a long prompt is prefilled, and how long a chunk of it takes, and its last."""
    [long] = passages(engine, texts, arguments.long, 1)
    chunk_tokens = _PASS_TOKENS
    start = engine.tokenizer.decode(engine.tokenizer.encode(long)[:-chunk_tokens]) or "Hello."
    seconds = []
    for text in (long, start):
        engine.clear_cache()
        began = time.perf_counter()
        engine.prefill(text)
        seconds.append(time.perf_counter() - began)
    chunk = seconds[0] / max(1, arguments.long / chunk_tokens)
    last = seconds[0] - seconds[1]
    engine.clear_cache()
    going, heard = threading.Barrier(5), list[list[float]]()

    def answer(number: int) -> None:
        going.wait()
        heard.append(listen(engine, f"Hello {number}. {_ASKED}", arguments.answer)[1])

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(answer, number) for number in range(4)]
        going.wait()
        time.sleep(0.3)
        engine.prefill(long)
        for job in jobs:
            job.result()
    return {"tokens": arguments.long, "itl_p99": gap(heard), "chunk_s": chunk, "last_chunk_s": last}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show and write."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[64, 512, 1800, 4096], metavar="N", help="of knowledge"
    )
    parser.add_argument("--sharing", nargs="+", default=["pack", "packs", "text"], choices=["pack", "packs", "text"])
    parser.add_argument("--answer", type=int, default=32, metavar="N", help="most tokens of an answer")
    parser.add_argument("--long", type=int, default=4000, metavar="N", help="tokens of a text prefilled beside answers")
    arguments = parser.parse_args(argv)
    found = run(arguments)
    columns = ("users", "tokens", "sharing", "at_once", "tok_s", "vllm_tok_s", "ttft_p50", "ttft_p99", "itl_p99")
    columns += ("peak_bytes",)
    notes = [f"Beside a prefill: {found['long']}"] if "long" in found else []
    common.show_table("Users at once", columns, [[row[name] for name in columns] for row in found["rows"]], notes)
    common.write_json(arguments.json, found)


if __name__ == "__main__":
    main()
