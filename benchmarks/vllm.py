"""Agents on `kp serve`: what packs bring beside vLLM's own prefix cache, when facts change and when servers restart.

Run it with an environment that has vLLM (`make setup-vllm`). `--agents` agents ask `--requests` questions in all, each
about one of `--documents` documents, whose first line changes three times on the way. Each way has a namespace of its
own, so it shares no KV with another:

- packs: the document as it is now is a pack, compiled by the server at its first use.
- errata: the first edition is a pack, and what has changed stands behind it, as text.
- text: the document as it is now, as text: vLLM and its prefix cache alone.

States: `cold`, nothing was sent before; `warm`, the same requests again; `restart`, the same after the server was
stopped and started. `hit_share` is the share of prompt tokens that was not computed, `ttft` the seconds to the first
token, `tok_s` tokens of all answers over the seconds of all requests.

- `--after-restart N`: N packs of 1,800 tokens, each asked once after a restart, beside their text cold and warm;
  stored as `--compress` says.
- `--spliced N`: N questions over ten packs of 200 tokens that are moved, the first time and after a restart, beside
  their text cold and warm.
- `--questions N`: answers with a pack from the store against the server's own with the text, cold and warm; questions
  of HotpotQA.
- `--steered N`: steered answers against those of the engine in this process; use --dtype float32.
- `--crowded N`: N requests of 50 clients at once, beside the same ones alone.
- `--isolated N`: N requests of one token over 8 tenants, who own the same texts with KV of their own; float32.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from benchmarks import common
from benchmarks.vllm_crowd import crowded
from benchmarks.vllm_desk import ASKED, Desk, passages, restarted
from benchmarks.vllm_questions import compared
from benchmarks.vllm_restart import after_restart, spliced
from benchmarks.vllmserver import KpServer
from kp_core import Handle, KnowledgePack, KVTensors, Packs, Session
from kp_core.packs.pack import PackKey
from kp_core.packs.view import PackView
from kp_core.steering import preset

__all__ = ["TENANTS", "WAYS", "agents", "altered", "isolated", "main", "parser", "run"]

WAYS = ("packs", "errata", "text")
_EDITIONS = 4
_JOINED = 4
TENANTS = tuple(f"tenant-{number}" for number in range(8))
_OPTIONS = ("--max-model-len", "4096", "--max-num-batched-tokens", "2048", "--max-num-seqs", "32")


def requests(desk: Desk, way: str, bodies: Sequence[str], arguments: argparse.Namespace) -> list[list[str]]:
    """What each agent asks, in order."""
    steps = -(-arguments.requests // arguments.agents)
    asked: list[list[str]] = []
    for agent in range(arguments.agents):
        body, mine = bodies[agent % len(bodies)], []
        for step in range(steps):
            lines = [f"Edition {number + 1}, read by {'ABCD'[number]}. Wick." for number in range(_EDITIONS)]
            edition = step * _EDITIONS // steps
            now = f"{lines[edition]}\n{body}"
            known = now if way == "text" else desk.handle(now if way == "packs" else f"{lines[0]}\n{body}")
            if way == "errata" and edition:
                known += f"\nCorrection: the first line reads {lines[edition]!r}."
            mine.append(f"{known}\n\n{ASKED} (Agent {agent}, question {step}.)")
        asked.append(mine)
    return asked


def measure(desk: Desk, way: str, state: str, asked: Sequence[Sequence[str]], tokens: int) -> dict[str, Any]:
    """One row: each agent asks one question after the other, all agents at once."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(asked)) as pool:
        said = [each for mine in pool.map(lambda own: [desk.ask(one, tokens) for one in own], asked) for each in mine]
    seconds = time.perf_counter() - began
    first = [each.usage.ttft_s for each in said]
    computed, sent = sum(each.usage.computed_tokens for each in said), sum(len(each.prompt) for each in said)
    return {
        "way": way,
        "state": state,
        "users": len(asked),
        "hit_share": 1 - computed / sent,
        "ttft_p50": median(first),
        "ttft_p90": float(np.percentile(first, 90)),
        "tok_s": sum(each.usage.completion_tokens for each in said) / seconds,
    }


def agents(server: KpServer, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows."""
    desks = {way: Desk(server, way) for way in WAYS}
    bodies = passages(desks["text"], arguments, arguments.tokens, arguments.documents)
    asked = {way: requests(desks[way], way, bodies, arguments) for way in WAYS}
    rows = []
    for state in ("cold", "warm", "restart"):
        if state == "restart":
            restarted(server)
            desks = {way: Desk(server, way) for way in WAYS}
        rows += [measure(desks[way], way, state, asked[way], arguments.answer) for way in WAYS]
    return rows


def _gold(limit: int) -> list[tuple[str, str]]:
    """Texts of HotpotQA, and what is asked about them."""
    examples = common.read_examples(common.data_folder() / "hotpotqa_gold.jsonl", limit)
    texts = ("\n".join(map(str, example.paragraphs)) + "\n" for example in examples)
    return [(text, f"{common.INSTRUCTION}\n{each.question}") for text, each in zip(texts, examples, strict=True)]


def questions(server: KpServer, limit: int) -> dict[str, float]:
    """See `compared`; on questions of HotpotQA."""
    desk = Desk(server, "packs")
    found = _gold(limit + _JOINED - 1)
    # Each text with those of the next questions: vLLM finds whole blocks alone, and short texts have none.
    texts = ["".join(text for text, _ in found[at : at + _JOINED]) for at in range(limit)]
    asked = [f"{desk.handle(text)}\n{question}" for text, (_, question) in zip(texts, found, strict=False)]
    # Compiled and stored, as by a use before.
    prompts = [desk.ask(each, 1).prompt.token_ids for each in asked]
    return compared(server, prompts, partial(restarted, server))


def steered(server: KpServer, limit: int, here: Session) -> dict[str, int]:
    """How many steered answers are those of the engine `here`, and how many differ from the plain ones."""
    formal = here.make_steering(preset("formal"), progress=False)
    desk, equal, moved = Desk(server, "packs"), 0, 0
    examples = _gold(limit)
    for number, (text, question) in enumerate(examples):
        asked = f"\n{question}"
        options: dict[str, Any] = {"steering": (formal, 1.5), "scope": ("system", "prompt")[number % 2]}
        local = here.generate(f"{text}{asked}", max_tokens=24, **options).text
        equal += desk.ask(f"{desk.handle(text)}{asked}", 24, **options).text == local
        moved += here.generate(f"{text}{asked}", max_tokens=24).text != local
    return {"questions": len(examples), "equal": equal, "moved": moved}


def altered(server: KpServer, here: Session) -> tuple[dict[Any, list[int]], dict[Any, float]]:
    """Prompts and right answers by text and tenant, whose packs of one text have KV that tells them apart.

    An answer is the logarithm of the first token's probability, as the engine `here` has it behind that KV. The server
    compiles the packs, and has to be started anew: what it cached then is honest, and would hide what was altered.
    """
    desks = [Desk(server, tenant) for tenant in TENANTS]
    identity = desks[0].session.fingerprint
    said = (("bell", "Oda Wick", "noon"), ("horn", "Pell Saro", "dawn"), ("drum", "Ines Tarn", "dusk"))
    texts = [f"The {name} of Thranmoor is kept by {who} and sounds at {hour} every day." for name, who, hour in said]
    ids, expected = {}, {}
    for turn, text in enumerate(texts):
        pack, asked = here.build_pack(text, namespace="x"), f"{text}\nWho?"
        if pack.kv is None:
            raise AssertionError("a pack that was built has KV")
        for number, tenant in enumerate(TENANTS):
            kv = KVTensors(pack.kv.keys, tuple(value * (1 + number / 4) for value in pack.kv.values))
            desk = desks[number]
            desk.ask(f"{desk.handle(text)}\nWho?", 1)  # Stores what stands before it, too.
            server.store.put(KnowledgePack(text, tenant, pack.token_ids, pack.prefix, identity, kv))
            ids[turn, tenant] = list(here.prefill(asked).prompt.token_ids)
            own = KnowledgePack(text, tenant, pack.token_ids, pack.prefix, pack.fingerprint, kv)
            expected[turn, tenant] = _first(here, own, asked)
    return ids, expected


def isolated(
    server: KpServer, ids: dict[Any, list[int]], expected: dict[Any, float], count: int, seed: int = 7
) -> list[tuple[Any, float, float]]:
    """Ask `count` times for one token, tenants mixed: what was answered from the KV of others, and what was right."""
    jobs = list(itertools.islice(itertools.cycle(sorted(ids)), count))
    random.Random(seed).shuffle(jobs)  # noqa: S311 - no cryptography

    def ask(job: Any) -> tuple[Any, float]:  # noqa: ANN401
        body = {"prompt": ids[job], "max_tokens": 1, "temperature": 0, "logprobs": 1}
        # What clients say of these counts nothing.
        body |= {"cache_salt": "shared", "kv_transfer_params": {"kp": "of my own"}}
        headers = {"authorization": f"Bearer {server.keys[job[1]]}"}
        done = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300)
        done.raise_for_status()
        return job, done.json()["choices"][0]["logprobs"]["token_logprobs"][0]

    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(ask, jobs)
        return [(job, got, expected[job]) for job, got in answers if abs(got - expected[job]) > 5e-3]


def _first(session: Session, pack: KnowledgePack, content: str) -> float:
    """The logarithm of the likeliest first token's probability behind this very pack."""
    handle = f"kp:{pack.namespace}/" + "a" * 21

    class Source(Packs):
        def peek(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack:  # noqa: ARG002
            return pack

        get = peek

    session.clear_cache()
    found = session.prefill(content.replace(pack.text, handle), view=PackView(Source(), [pack.namespace]))
    return float(found.logits.float().log_softmax(-1).max())


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    figures: dict[str, Any] = {"rows": []}
    with tempfile.TemporaryDirectory() as name:
        server = KpServer(
            Path(name),
            common.model_path(arguments),
            [*WAYS, *TENANTS],
            dtype=arguments.dtype,
            options=_OPTIONS,
            ours=("--compress", arguments.compress),
        )
        parts: dict[str, Callable[[], Any]] = {
            "rows": lambda: agents(server, arguments) if arguments.requests else [],
            "after_restart": lambda: after_restart(server, arguments),
            "spliced": lambda: spliced(server, arguments),
            "questions": lambda: questions(server, arguments.questions),
            "steered": lambda: steered(server, arguments.steered, common.load_engine(arguments)),
            "crowded": lambda: crowded(server, WAYS[0], _gold(50), arguments.crowded),
            "isolated": lambda: _isolated(server, arguments),
        }
        restarted(server)
        try:
            for part, measured in parts.items():
                if part == "rows" or getattr(arguments, part):
                    figures[part] = measured()
        finally:
            server.stop()
    return figures


def _isolated(server: KpServer, arguments: argparse.Namespace) -> dict[str, int]:
    made = altered(server, common.load_engine(arguments))
    restarted(server)
    return {"requests": arguments.isolated, "wrong": len(isolated(server, *made, arguments.isolated))}


def parser() -> argparse.ArgumentParser:
    """What it is told."""
    made = common.argument_parser(__doc__, "wiki_passages.jsonl")
    for option, default, about in (
        ("requests", 200, "of all agents; 0 leaves them out"),
        ("agents", 20, "at once"),
        ("documents", 5, "that they read"),
        ("tokens", 600, "of a document"),
        ("answer", 16, "most tokens of an answer"),
        ("after-restart", 0, "packs"),
        ("spliced", 0, "questions"),
        ("questions", 0, "of HotpotQA"),
        ("steered", 0, "of HotpotQA"),
        ("crowded", 0, "requests"),
        ("isolated", 0, "requests"),
    ):
        made.add_argument(f"--{option}", type=int, default=default, metavar="N", help=f"{about}; default: %(default)s")
    made.add_argument("--compress", default="lossless", choices=("lossless", "none"), help="default: %(default)s")
    return made


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the tables, write the JSON file."""
    arguments = parser().parse_args(argv)
    figures = run(arguments)
    columns = ("way", "state", "users", "hit_share", "ttft_p50", "ttft_p90", "tok_s")
    common.show_table("Agents", columns, [[row[each] for each in columns] for row in figures["rows"]])
    for part in figures.keys() - {"rows"}:
        common.show_table(part.replace("_", " "), ("", "figure"), [*figures[part].items()])
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
