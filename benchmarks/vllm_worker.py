"""vLLM's side of `benchmarks.concurrency`: tokens a second for the same prompts, in the environment that vLLM has.

It is run by its path with that environment's Python, and imports nothing else of this folder: `vllm_worker.py IN OUT`.
IN has `model`, `dtype`, `tokens` (most of an answer) and `rows` of `prompts` and `warm`, lists of token ids, and
`at_once`; OUT gets a number for each row. vLLM is given token ids, so that it renders and tokenises nothing; what is
`warm` is in its prefix cache. It runs without compiled graphs, as its start then takes seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

# `vllm.py` beside this file is not vLLM.
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]


def measure(asked: dict[str, Any]) -> list[float]:
    """Tokens a second of each row."""
    from vllm import LLM, SamplingParams

    longest = max(len(ids) for row in asked["rows"] for ids in row["prompts"])
    room = -(-(longest + asked["tokens"] + 1) // 256) * 256
    llm = LLM(asked["model"], dtype=asked["dtype"], max_model_len=room, enforce_eager=True, enable_prefix_caching=True)
    answer, nothing = SamplingParams(temperature=0, max_tokens=asked["tokens"]), SamplingParams(max_tokens=1)

    def generate(prompts: list[list[int]], params: SamplingParams) -> int:
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in found)

    rates = []
    for row in asked["rows"]:
        llm.reset_prefix_cache()
        generate([asked["rows"][0]["prompts"][0][:8], *row["warm"]], nothing)
        began, prompts, count = time.perf_counter(), row["prompts"], row["at_once"]
        tokens = sum(generate(prompts[at : at + count], answer) for at in range(0, len(prompts), count))
        rates.append(tokens / (time.perf_counter() - began))
    return rates


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file.
    source, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(measure(json.loads(source.read_text(encoding="utf-8")))), encoding="utf-8")
