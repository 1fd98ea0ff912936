"""Options, messages, schemas and arguments of every wrong type, size and depth: an answer that keeps to them, or an error of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import jsonschema

from benchmarks.grammar import random_schema, validate
from kp_core import Fact, Handle, MemoryFactStore, PackStore
from kp_core.plan.request import OPTIONS
from tests.attack.harness import Case, WrongError, refused
from tests.attack.mutate import number, text, value, warped
from tests.conftest import tiny_engine
from tests.core.banks.test_facts import facts_of
from tests.kits import HashEmbedder

SHORT = 38

_ROOM = 60
_NAMES = [*OPTIONS]
_PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.7, 1), "top_p": (0.5, 1), "top_k": (0, 3), "seed": (0, 2**64 - 1), "stop": (["e"], [""], "e", ["\n", "x" * 999]),
    "placement": ("system", "in_place"), "composer": ("splice", "naive", "select:packs=1", "select:packs=x", "packet"),
    "tool_choice": ("any", "none", "find"), "tools": ([{"name": "find", "parameters": {}}], [{"name": ""}], [{}]), "max_tokens": (0, 1, 2),
    "keep": ("never", "always"), "keep_in": ("geo", "../x"), "timeout": (5, 0), "packs": (["kp:geo/" + "a" * 21], [""]), "thinking": (True,),
    "response_schema": (True, {}, {"type": "object"}), "scope": ("pack",), "mismatch": ("rebuild",),
}  # fmt: skip
_AROUND = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Facts: {pack}"}]
_SCHEMA_VALUES = (
    "string",
    "object",
    "array",
    [],
    {},
    10000,
    -1,
    0,
    ["a"],
    {"$ref": "#"},
    {"$ref": "#/$defs/a"},
    "^(a+)+$",
    "(",
    True,
    "date",
)


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    engine, store, facts = tiny_engine(), PackStore(folder / "packs"), MemoryFactStore(HashEmbedder())
    facts.add(facts_of(9))

    def options(draw: Random) -> None:
        given = {
            name: draw.choice((*_PLAUSIBLE.get(name, ()), value(draw)))
            for name in draw.sample(_NAMES, draw.choice((1, 1, 2, 3)))
        }
        given = {"max_tokens": 2, "timeout": 30, **given}
        if not isinstance(given["max_tokens"], int) or given["max_tokens"] > 300:
            given["response_schema"] = None  # A long answer is no finding.
        with refused():
            answer = engine.generate("Hi", **given)
            wanted = given["max_tokens"]
            if isinstance(wanted, int) and answer.usage.completion_tokens > max(wanted, 0):
                raise WrongError(f"{answer.usage.completion_tokens} tokens for {given!r}")

    def schemas(draw: Random) -> None:
        schema: Any = random_schema(draw)
        if draw.random() < 0.5:
            schema = warped(draw, schema, _SCHEMA_VALUES)
        forced = draw.random() < 0.4
        tool = {"name": "record", "description": "Records.", "parameters": schema}
        given = {"tools": [tool], "tool_choice": "any"} if forced else {"response_schema": schema}
        with refused():
            answer = engine.generate("Example.", max_tokens=_ROOM, **given)
            if schema is None and not forced:
                return
            try:
                found = dict(answer.tool_calls[0].arguments) if forced else json.loads(answer.text)
            except (ValueError, LookupError) as error:
                raise WrongError(f"{answer.text!r} of {schema!r} does not parse") from error
            _validate(found, {} if schema is True else schema)

    def messages(draw: Random) -> None:
        plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        given = value(draw) if draw.random() < 0.3 else warped(draw, plain)
        with refused():
            engine.generate(given, max_tokens=1)

    calls: tuple[Callable[[Random], object], ...] = (
        lambda draw: engine.build_pack(text(draw), namespace=draw.choice(("a", text(draw)))),
        lambda draw: engine.build_pack("A text.", compiled_for=draw.choice((text(draw), warped(draw, _AROUND)))),
        lambda draw: engine.build_pack("A text.", provenance={text(draw): draw.choice((text(draw), value(draw)))}),
        lambda draw: engine.build_pack("A text.", compress=text(draw)),
        lambda draw: engine.make_steering([(text(draw), text(draw)) for _ in range(draw.randrange(3))]),
        lambda draw: facts.search(text(draw), number(draw), probes=draw.choice((None, number(draw)))),
        lambda draw: facts.search("fact", where=value(draw), namespace=draw.choice((None, text(draw)))),
        lambda draw: facts.add([Fact(f"a {text(draw)}")], ttl=number(draw)),
        lambda draw: facts.delete([text(draw)], namespace=text(draw)),
        lambda draw: facts.get(text(draw)),
        lambda draw: facts.bank_facts(text(draw)),
        lambda draw: facts.search(text(draw), 1, probes=1, namespace=text(draw)),
        lambda draw: PackStore(folder / "other", max_bytes=number(draw), keep_seconds=number(draw)),
        lambda draw: store.view(text(draw), trusted_roles=[text(draw)]),
        lambda draw: list(store.handles(text(draw))),
        lambda draw: store.forget(text(draw)),
        lambda draw: Handle(text(draw), text(draw)),
        lambda draw: MemoryFactStore(HashEmbedder(), bank_size=number(draw)).add(facts_of(3)),
    )

    def arguments(draw: Random) -> None:
        with refused():
            draw.choice(calls)(draw)

    def case(draw: Random) -> None:
        draw.choice((options, options, schemas, messages, arguments))(draw)

    yield case


def _validate(found: Any, schema: Any) -> None:
    try:
        validate(found, schema)
    except jsonschema.ValidationError as error:
        raise WrongError(f"{found!r} does not fit {schema!r}: {error.message}") from error
    except Exception:  # noqa: BLE001 - it may fail in any way on what is no schema
        return
