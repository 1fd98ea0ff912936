"""What `kp build` compiles, and what it says of that beforehand."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kp_cli.shared import ModelOptions
from kp_core.compiling import MUCH_BYTES, compile_cost, provenance_of
from kp_core.delivery import KV, Delivery, Unit
from kp_core.engines.session import Session
from kp_core.engines.vllm.engine import VLLMEngine
from kp_core.errors import PackError
from kp_core.facts import Fact, FactStore
from kp_core.packs.codec import Compression
from kp_core.packs.fingerprint import NUMERICS
from kp_core.packs.store import PackStore
from kp_core.progress import bar_of

__all__ = ["CompileOptions", "say_plan", "units_of"]

logger = logging.getLogger(__name__)

_BATCH, _AT_ONCE = 64, 8


@dataclass(frozen=True)
class CompileOptions(ModelOptions):
    """Whether packs are compiled now, and which."""

    compile: Annotated[
        bool, typer.Option("--compile", help="Compile packs of all facts now. Without, each is when it is first found.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many packs, tokens, bytes and minutes --compile would take.")
    ] = False
    unit: Annotated[Unit, typer.Option(help="What a pack holds.")] = "fact"
    kv: Annotated[KV, typer.Option(help="Whether --compile stores KV, or text alone.")] = "stored"
    compress: Annotated[
        Compression | None,
        typer.Option(
            help="How KV is stored: none as it is, lossless changes no bit, int8 rounds and needs "
            "`--mismatch accept`. Default: none; a server stores it as its `kp serve --compress` says."
        ),
    ] = None

    def chosen(self, session: Session) -> Compression:
        """How KV is stored from here; raises `BadParameter` for a choice that is the server's."""
        if self.compress is not None and isinstance(session.engine, VLLMEngine):
            raise typer.BadParameter(
                f"Got --compress {self.compress}; how a server stores KV is for `kp serve --compress` to say."
            )
        return self.compress or "none"

    def plan(self, units: Iterable[Fact], store: PackStore | None, session: Session) -> dict[str, Any]:
        """What compiling the units takes that have no pack yet."""
        compress = self.chosen(session)
        texts, stored, allowed = [], 0, set(NUMERICS if compress == "int8" else ())
        for unit in units:
            pack = store and store.peek(store.handle(unit.text, unit.namespace))
            differs = pack.fingerprint.diff(session.fingerprint).keys() if pack else set()
            if pack and differs <= allowed and (pack.stored_bytes or self.kv == "lazy"):
                stored += 1
            else:
                texts.append(unit.text)
        cost = compile_cost(texts, session, lazy=self.kv == "lazy", compress=compress)
        about: dict[str, Any] = {"packs": cost.packs, "tokens": cost.tokens, "stored": stored, "compress": compress}
        if (
            isinstance(session.engine, VLLMEngine) and self.kv == "stored"
        ):  # Which bytes and time it takes, it alone knows.
            return about | {"server": session.engine.base_url}
        return about | {"bytes": cost.nbytes, "minutes": cost.seconds / 60}

    def run(self, facts: FactStore, store: PackStore, session: Session, *, as_json: bool) -> dict[str, Any]:
        """Say what it takes, and compile; an interrupted run goes on where it stopped."""
        server = session.engine
        delivery = Delivery(facts, session, store, unit=self.unit, kv=self.kv, compress=self.chosen(session))
        units = delivery.all_units()
        plan = self.plan(units, store, session)
        say_plan(plan, err=as_json)
        with bar_of("Compiling", len(units), "pack") as bar:
            for at in range(0, len(units), _BATCH):
                part = units[at : at + _BATCH]
                handles = delivery.compile(part, progress=False)
                if isinstance(server, VLLMEngine) and self.kv == "stored":
                    made = [unit for unit, handle in zip(part, handles, strict=True) if handle]
                    _by_server(server, made, self.unit, progress=bar.update)
                    bar.update(len(part) - len(made))
                else:
                    bar.update(len(part))
        return plan


def _by_server(engine: VLLMEngine, units: Iterable[Fact], unit: Unit, *, progress: Callable[[int], object]) -> None:
    """Have a server compile texts, some at a time, as it batches them; it answers at once for what it has.

    What it refuses is left out, with a warning. Raises `ModelError` when the server is away or refuses the key.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting = {
            pool.submit(engine.compile, each.text, each.namespace, "user", provenance_of(each, unit)): each
            for each in units
        }
        try:
            for done in as_completed(waiting):
                try:
                    done.result()
                except PackError as error:
                    logger.warning("Fact %s is not compiled: %s", waiting[done].id, error)
                progress(1)
        finally:
            for each in waiting:
                each.cancel()


def units_of(facts: Iterable[Fact], unit: Unit, bank_size: int) -> list[Fact]:
    """The units that facts will make, about: which banks there will be, nobody knows before they are made."""
    groups = defaultdict[object, list[str]](list)
    for number, (space, text) in enumerate(sources := {(fact.namespace, fact.text): fact.source for fact in facts}):
        key = {"fact": number, "bank": number // bank_size, "document": sources[space, text] or number}[unit]
        groups[space, key].append(text)
    return [Fact("\n".join(texts), namespace=key[0]) for key, texts in groups.items()]  # type: ignore[index]


def say_plan(plan: Mapping[str, Any], *, err: bool = False) -> None:
    """Print a plan in one line, and a warning when it fills the disk."""
    if "server" in plan:
        typer.echo(
            f"To compile by {plan['server']}: {plan['packs']:,} packs of {plan['tokens']:,} tokens; known to be "
            f"compiled already: {plan['stored']:,}.",
            err=err,
        )
        return
    size, compress = plan["bytes"], plan["compress"]
    stored = "" if compress == "none" else f" ({compress})"
    typer.echo(
        f"To compile: {plan['packs']:,} packs of {plan['tokens']:,} tokens, {size / 1e6:,.1f} MB on disk{stored}, "
        f"about {plan['minutes']:.1f} minutes; compiled already: {plan['stored']:,}.",
        err=err,
    )
    if size > MUCH_BYTES:
        typer.echo(f"That is {size / 1e9:.1f} GB; `--kv lazy` keeps text alone, and computes KV on use.", err=True)
