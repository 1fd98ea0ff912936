"""`kp packet`: soft tokens around packs, trained for a model and measured."""

from __future__ import annotations

import math
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kp_core.cli.places import ReadOptions, is_collection
from kp_core.cli.shared import JsonFlag, ModelOptions, console, print_json, spread
from kp_core.compose import Composer, PacketComposer
from kp_core.compose.wrapper import SHIPPED, load_wrapper
from kp_core.engines.comparing import compare_composers
from kp_core.errors import WrapperError
from kp_core.facts.sources import read_facts
from kp_core.packs.store import PackStore

__all__ = ["packet"]

packet = typer.Typer(
    name="packet",
    no_args_is_help=True,
    help="Soft tokens around packs (KV Packet), so that documents compose without computing: train and measure them.",
)

_Documents = Annotated[
    str, typer.Argument(metavar="DOCUMENTS", help="A collection, or a file or folder as for `kp build`.")
]
_QUESTION = "What is said about {}?"


@packet.command()
@spread
def train(  # noqa: PLR0913 - one parameter per setting
    place: _Documents,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The wrapper to write.")],
    *,
    soft: Annotated[int, typer.Option(help="Soft tokens before each pack, and behind.")] = 8,
    steps: Annotated[int, typer.Option(help="Most steps.")] = 1000,
    batch: Annotated[int, typer.Option(help="Samples of one step.")] = 2,
    rate: Annotated[float, typer.Option(help="Step size, in units of the spread of the model's embeddings.")] = 0.05,
    documents: Annotated[str, typer.Option(metavar="FROM-TO", help="Documents of one sample.")] = "1-10",
    tokens: Annotated[
        str, typer.Option(metavar="FROM-TO", help="Their length: shorter ones are left out, longer ones cut.")
    ] = "128-1024",
    every: Annotated[int, typer.Option(help="Steps between two looks at held-out documents.")] = 50,
    seed: Annotated[int, typer.Option(help="Equal seeds draw equal samples.")] = 0,
    minutes: Annotated[float | None, typer.Option(help="Stop then, with the best so far. Default: no limit.")] = None,
    read: ReadOptions,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Train a wrapper on documents; the same command goes on where it was interrupted.

    It ends after --steps, when held-out documents show no progress any more, or after --minutes.
    """
    from kp_core.engines.hf.samples import PacketTraining
    from kp_core.engines.hf.training import checkpoint_of, train_wrapper

    settings = PacketTraining(
        *(soft, steps, batch, rate, _range("--documents", documents), _range("--tokens", tokens)),
        every=every,
        seed=seed,
    )
    about = shlex.join(["kp", *(part for part in sys.argv[1:] if part != "--json")])
    made = train_wrapper(
        *(model.load(), _read(place, read), out, settings), minutes=minutes, about=about, progress=not as_json
    )
    found = {"file": str(out), "id": made.id, "bytes": out.stat().st_size, **made.training}
    if as_json:
        print_json(found)
        return
    best, bare = found["best"], found["without_soft_tokens_kl"]
    more = f" {checkpoint_of(out)} stays: the same command goes on." if checkpoint_of(out).exists() else ""
    console().print(
        f"{out}: {found['steps']} steps in {found['minutes']} minutes. On held-out documents the answers are "
        f"{best['held_kl']:.4f} nats from full attention (best at step {best['step']}); without soft tokens "
        f"{bare:.4f}.{more}",
        soft_wrap=True,
    )


@packet.command("eval")
@spread
def evaluate(  # noqa: PLR0913 - one parameter per option
    place: _Documents,
    *,
    wrapper: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: that of the bundled model.")] = None,
    documents: Annotated[list[int] | None, typer.Option(min=2, help="How many; may be repeated. [5, 10]")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Questions for each number of documents.")] = 10,
    against: Annotated[list[str] | None, typer.Option(metavar="COMPOSER", help="[splice, blend]")] = None,
    read: ReadOptions,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Measure a wrapper against exact composition, on documents that it was not trained on.

    Of the documents that it was trained on, those that were held out are taken. `kl` is the divergence of the first
    token, `nll` what the exact answer becomes less likely, in nats a token, `agreement` how much of it comes unchanged.
    """
    trained = load_wrapper(wrapper or SHIPPED)
    session = model.load()
    trained.check(session.fingerprint)
    counts = documents or [5, 10]
    texts = _unseen(session, trained.training, _read(place, read))
    if len(texts) < max(counts):
        raise WrapperError(
            f"Got {len(texts)} documents that the wrapper was not trained on; expected at least {max(counts)}."
        )
    composers: list[Composer | str] = [*(against or ["splice", "blend"]), PacketComposer(trained)]
    rows: list[dict[str, Any]] = []
    draw = random.Random(0)  # noqa: S311 - not cryptography
    with tempfile.TemporaryDirectory() as folder:
        store = PackStore(folder)
        for count in counts:
            found: dict[str, list[tuple[float, float, float]]] = {}
            for _ in range(limit):
                chosen = draw.sample(texts, count)
                title, text = draw.choice(chosen)
                built = session.build_packs([f"{a}: {b}" if a else b for a, b in chosen], progress=False)
                asked = _QUESTION.format(title or " ".join(text.split()[:5]))
                prompt = "\n\n".join((*(str(store.put(pack)) for pack in built), asked))
                options: dict[str, Any] = {"view": store.view("default")}
                answer = session.generate(prompt, max_tokens=24, **options).text
                exact = math.log(session.perplexity(prompt, answer, **options))
                for row in compare_composers(session, prompt, composers, **options):
                    name = row.composer.split(":")[0] if row.composer.startswith("packet") else row.composer
                    used = next(each for each in composers if getattr(each, "key", each) == row.composer)
                    likely = math.log(session.perplexity(prompt, answer, composer=used, **options))
                    found.setdefault(name, []).append((row.kl, likely - exact, row.agreement))
            for name, scores in found.items():
                kl, nll, agreement = (sum(column) / limit for column in zip(*scores, strict=True))
                rows.append({"documents": count, "composer": name, "kl": kl, "nll": nll, "agreement": agreement})
    if as_json:
        print_json({"wrapper": trained.id, "questions": limit, "rows": rows})
        return
    table = Table("documents", "composer", "kl", "nll", "agreement")
    for each in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in each.values()))
    console().print(table)


def _read(place: str, options: ReadOptions) -> list[tuple[str, str]]:
    """Titles and texts of a collection, or of files."""
    if is_collection(place) or options.collection is not None:
        with options.reading(place) as facts:
            return [(fact.title, fact.text) for fact in facts.facts()]
    return [(fact.title, fact.text) for fact in read_facts([place])]


def _unseen(session: Any, training: Any, documents: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:  # noqa: ANN401
    """The documents that were held out, where it was trained on these; else all."""
    from kp_core.engines.hf.samples import PacketTraining, Samples
    from kp_core.engines.hf.training import digest_of

    if training.get("documents") != digest_of(documents):
        return list(documents)
    return list(Samples(session, documents, PacketTraining.from_dict(training["settings"])).held)


def _range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal()):
        raise typer.BadParameter(f"Got {name} {text}; expected two numbers as in 1-10.")
    return int(low), int(high)
