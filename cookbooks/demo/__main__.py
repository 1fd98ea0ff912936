"""`python -m cookbooks.demo`: questions about an invented world, answered from text and from packs."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from kp_core.errors import KnowledgePackError


def main() -> int:
    """Run the demo; the exit status."""
    options = _options()
    try:
        _run(options)
    except KnowledgePackError as error:
        sys.stderr.write(f"{error}\n")
    except ImportError as error:
        sys.stderr.write(f'The demo needs {error.name}: `pip install "knowledge-packs[all]"`.\n')
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        return 130
    else:
        return 0
    return 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m cookbooks.demo", description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--limit", type=int, default=40, metavar="N", help="how many questions (default: 40)")
    parser.add_argument(
        "--data",
        type=Path,
        default=_default_data(),
        metavar="FILE",
        help="HotpotQA with gold facts, JSON lines (default: $KP_DATA/hotpotqa_gold.jsonl where KP_DATA is set)",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep facts and packs there, and use what is there")
    options = parser.parse_args()
    if options.limit < 1:
        parser.error("--limit has to be at least 1")
    return options


def _default_data() -> Path | None:
    folder = os.environ.get("KP_DATA")
    return Path(folder) / "hotpotqa_gold.jsonl" if folder else None


def _run(options: argparse.Namespace) -> None:
    # Loading them takes seconds, and --help should not.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    import kp_core
    from cookbooks.demo.corpus import load_corpus
    from cookbooks.demo.show import show_example, show_results, show_turns
    from cookbooks.demo.ways import SEARCHES, World, accumulate, ask

    began, console = time.perf_counter(), Console()
    corpus = load_corpus(options.data, options.limit)
    console.print(f"[bold]Knowledge Packs[/bold]: {len(corpus.facts)} facts from {corpus.name}")
    embedder = kp_core.SentenceTransformerEmbedder(kp_core.bundled_embedder())
    engine = kp_core.load_engine(dtype=options.dtype)
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="knowledge-packs-")))
        folder /= "demo" if options.data is None else options.data.stem
        facts = stack.enter_context(kp_core.ChromaFactStore(folder / "facts", embedder))
        world = World(corpus, engine, facts, folder)
        console.print(f"{len(facts.banks())} banks in Chroma; compiling the packs that the questions will find ...")
        packs = world.compile(corpus.questions)
        console.print(f"{packs} packs, {world.store.nbytes / 1e6:.0f} MB.")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        ways = world.ways()
        asked = sum(len(corpus.questions[:: way.every]) for way in ways)
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=asked + 2 * SEARCHES)
            results = []
            for way in ways:
                progress.update(task, description=way.name)
                results.append(ask(world, way, lambda: progress.advance(task)))
            progress.update(task, description="searching again and again")
            turns = accumulate(world, lambda: progress.advance(task))
        show_example(console, world, results[1], results[2])
        show_results(console, corpus, results)
        console.print()
        show_turns(console, turns)
    console.print(f"\n{time.perf_counter() - began:.0f} s in all.")


if __name__ == "__main__":
    sys.exit(main())
