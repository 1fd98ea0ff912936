"""The suite of `tests/llamaindex/suite` on our LLM and on LlamaIndex's own local one, with the same model.

The other is `HuggingFaceLLM` of `llama-index-llms-huggingface`, which is compared with where it is installed (the
dependency group `bench`). It is set up as kindly as its options allow: greedy, the model's chat template for
completions too, its own name for the option that bounds an answer. A check counts as passed or failed; the JSON file
says for each failure what was wrong.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from llama_index.core.llms import LLM
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import common
from kp_llamaindex import KnowledgePackLLM
from tests.llamaindex.suite import CHECKS, Subject, run_suite

__all__ = ["main", "run"]

_ENDPOINTS = ("chat", "complete", "chat_with_tools")


def ours(arguments: argparse.Namespace) -> Subject:
    """`KnowledgePackLLM`."""
    engine = common.load_engine(arguments)
    return Subject(
        lambda: KnowledgePackLLM(engine=engine, max_tokens=arguments.tokens),
        revive=lambda data: KnowledgePackLLM.from_dict(data, engine=engine),
    )


def baseline(arguments: argparse.Namespace) -> Subject:
    """`HuggingFaceLLM`."""
    from llama_index.llms.huggingface import HuggingFaceLLM  # type: ignore[import-not-found]

    path, dtype = common.model_path(arguments), getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False).to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)

    def prompt(text: str) -> str:
        asked = [{"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))

    def make() -> LLM:
        llm: LLM = HuggingFaceLLM(
            model=model,
            tokenizer=tokenizer,
            model_name=path,
            tokenizer_name=path,
            device_map=arguments.device,
            model_kwargs={"dtype": arguments.dtype},
            max_new_tokens=arguments.tokens,
            generate_kwargs={"do_sample": False},
            completion_to_prompt=prompt,
            is_chat_model=True,
        )
        return llm

    return Subject(make, limit="max_new_tokens")


_SUBJECTS: dict[str, Callable[[argparse.Namespace], Subject]] = {"KnowledgePackLLM": ours, "HuggingFaceLLM": baseline}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    checks = [check for check in CHECKS if arguments.only in check.name]
    figures: dict[str, Any] = {"dtype": arguments.dtype, "checks": len(checks), "problems": {}}
    for name in arguments.llm:
        subject = _SUBJECTS[name](arguments)
        outcomes = [run_suite(subject, [check])[0] for check in track(checks, name)]
        figures["problems"][name] = {outcome.name: outcome.problem for outcome in outcomes if not outcome.passed}
    return figures


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    installed = list(_SUBJECTS)
    try:
        version("llama-index-llms-huggingface")
    except PackageNotFoundError:
        installed.remove("HuggingFaceLLM")
    parser = common.argument_parser(__doc__, "")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="most tokens of an answer; default: 40")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the checks whose names hold this")
    parser.add_argument("--llm", nargs="+", choices=_SUBJECTS, default=installed, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    asked: dict[str, list[str]] = defaultdict(list)
    for check in CHECKS:
        if arguments.only in check.name:
            endpoint, _, rest = check.name.partition(" ")
            asked[rest if endpoint.endswith(_ENDPOINTS) else check.name].append(check.name)
    problems = figures["problems"]
    common.show_table(
        f"Conformance, {figures['dtype']}: checks passed",
        ("what", "checks", *problems),
        [
            *(
                (title, len(names), *(sum(name not in failed for name in names) for failed in problems.values()))
                for title, names in asked.items()
            ),
            ("all", figures["checks"], *(figures["checks"] - len(failed) for failed in problems.values())),
        ],
        [f"{llm}: {name}: {problem[:160]}" for llm, failed in problems.items() for name, problem in failed.items()],
    )
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
