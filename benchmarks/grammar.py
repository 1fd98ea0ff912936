"""Do forced tool calls and structured answers always parse, and what does the grammar cost per token?

Random JSON Schemas (nesting, enums, unions, arrays, optional properties, unicode names, bounds, steps, patterns,
formats, references) are given to the model in turn as the parameters of a forced tool and as the schema of an answer,
with room for few tokens, so that many answers must be brought to an end early. What comes back must validate against
the schema; a schema that is refused must be refused with its place. Overhead: the same answer is decoded once under the
grammar and once without it, as often as `--repeats`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import Any
from urllib.parse import quote

import jsonschema
from rich.progress import track

from benchmarks import common
from kp_core import Session
from kp_core.errors import OptionError, PromptError

__all__ = ["main", "random_schema", "run", "valid_answer", "validate"]

_NAMES = ("city", "größe", "日本", "naïve", "count", "a b", "emoji😀", "kind", "数", "tags", '"quoted"', "back\\slash")
_DEEPEST = 3
_NUMBERS = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
    "number", lambda _, value: isinstance(value, int | float | Decimal) and not isinstance(value, bool)
)
_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=_NUMBERS)
_ESSAY = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "points": {"type": "array", "items": {"type": "string"}, "minItems": 4},
    },
    "required": ["title", "points"],
}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """The schema of a random object."""
    names = rng.sample(_NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _random_value(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if depth == 0:
        _add_references(rng, schema)
    return schema


def _add_references(rng: random.Random, schema: dict[str, Any]) -> None:
    """Add properties that refer to the schema itself, to another property or to definitions in several places."""
    place = next(iter(schema["properties"])).replace("~", "~0").replace("/", "~1")
    definition = _random_value(rng, _DEEPEST)
    kinds: list[tuple[dict[str, Any], bool]] = [
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, True),
        ({"type": "array", "items": {"$ref": "#"}, "maxItems": 2}, True),
        ({"$ref": f"#/properties/{quote(place)}"}, True),
        ({"$ref": "#/$defs/part"}, True),
        ({"$ref": "#/properties/link/$defs/part", "$defs": {"part": definition}}, True),
        ({"$ref": "#"}, False),
    ]
    if rng.random() < 0.5:
        link, may_be_required = rng.choice(kinds)
        schema["$defs"] = {"part": definition}
        schema["properties"]["link"] = link
        if may_be_required and rng.random() < 0.7:
            schema["required"].append("link")


def _random_number(rng: random.Random) -> dict[str, Any]:
    """A number or integer with bounds and a step; now and then nothing satisfies all of them."""
    kind = rng.choice(["number", "integer"])
    low = rng.choice([-90, -1, 0, 1, 3, 150, 10**12] if kind == "integer" else [-90, -1, -0.25, 0, 0.5, 1e-4, 150])
    span = rng.choice([1, 40, 180, 10**6] if kind == "integer" else [0.25, 1, 40, 180])
    step = rng.choice([2, 5, 7, 12, 100, 256, 997, 3600] if kind == "integer" else [0.5, 0.25, 0.1, 0.01, 3])
    schema: dict[str, Any] = {"type": kind}
    if rng.random() < 0.7:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.5:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + span
    if rng.random() < 0.4:
        schema["multipleOf"] = step
    return schema


def _random_value(rng: random.Random, depth: int) -> dict[str, Any]:
    plain: list[dict[str, Any]] = [
        {"type": "string", **rng.choice([{}, {"minLength": 2}, {"maxLength": 5}, {"pattern": "^[a-z]{2,4}$"}])},
        {"type": "string", "format": rng.choice(["date", "uuid", "email", "path", "password", "binary"])},
        _random_number(rng),
        _random_number(rng),
        {"type": rng.choice(["number", "boolean", "null"])},
        {"enum": [*rng.sample(_NAMES, 3), 1]},
        {"const": rng.choice([*_NAMES, 7, None, True])},
    ]
    if depth >= _DEEPEST or rng.random() < 0.5:
        return rng.choice(plain)
    return rng.choice(
        [
            random_schema(rng, depth),
            {"type": "array", "items": _random_value(rng, depth + 1), "minItems": rng.randint(0, 2), "maxItems": 4},
            {"anyOf": [_random_value(rng, depth + 1) for _ in range(rng.randint(2, 3))]},
        ]
    )


def valid_answer(engine: Session, schema: dict[str, Any], *, forced_call: bool, room: int) -> Any:  # noqa: ANN401
    """What the model answers; raises when it does not parse or does not validate."""
    if forced_call:
        tool = {"name": "record", "description": "Records an example.", "parameters": schema}
        answer = engine.generate("Record an example.", tools=[tool], tool_choice="any", max_tokens=room)
        value: Any = dict(answer.tool_calls[0].arguments)
    else:
        value = json.loads(engine.generate("Give an example.", response_schema=schema, max_tokens=room).text)
    validate(value, schema)
    return value


def validate(value: Any, schema: Any) -> None:  # noqa: ANN401 - any JSON
    """Raise `ValidationError` unless `value` fits `schema`. Decimals, as 0.3 is no multiple of 0.1 in binary."""
    exact, exact_schema = (json.loads(json.dumps(each), parse_float=Decimal) for each in (value, schema))
    with localcontext(prec=1000):
        _VALIDATOR(exact_schema).validate(exact)


def overhead(engine: Session, repeats: int) -> tuple[float, float]:
    """Median seconds per token under a grammar, and without one, of answers of one length behind one prompt."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        for constrained in (True, False):
            shape: dict[str, Any] = {"response_schema": _ESSAY} if constrained else {}
            engine.prefill("Write about the sea.", **shape)
            began = time.perf_counter()
            answer = engine.generate("Write about the sea.", max_tokens=128, **shape)
            usage = answer.usage
            if usage.completion_tokens > 1:
                spent = time.perf_counter() - began - usage.ttft_s
                seconds[constrained].append(spent / (usage.completion_tokens - 1))
    return statistics.median(seconds[True]), statistics.median(seconds[False])


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    engine = common.load_engine(arguments)
    rng = random.Random(arguments.seed)  # noqa: S311 - test data is not cryptography
    failures, refused, too_long = [], 0, 0
    for number in track(range(arguments.limit), "Random schemas"):
        schema = random_schema(rng)
        try:
            try:
                valid_answer(engine, schema, forced_call=number % 2 == 0, room=arguments.tokens)
            except OptionError:
                too_long += 1
                valid_answer(engine, schema, forced_call=number % 2 == 0, room=8 * arguments.tokens)
        except PromptError as error:
            refused += 1
            if " at #" not in str(error):
                failures.append({"schema": schema, "error": str(error)})
        except (ValueError, LookupError, jsonschema.ValidationError) as error:
            failures.append({"schema": schema, "error": str(error)})
    constrained, free = overhead(engine, arguments.repeats)
    return {
        "n": arguments.limit,
        "dtype": arguments.dtype,
        "failed": len(failures),
        "failures": failures,
        "refused": refused,
        "given_more_room": too_long,
        "seconds_per_token": {"grammar": constrained, "free": free},
        "overhead": constrained / free - 1,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.set_defaults(limit=500)
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="most tokens of an answer; default: 64")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timings of each kind; default: 5")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    seconds = figures["seconds_per_token"]
    common.show_table(
        f"Grammars: {figures['n']} random schemas, {figures['dtype']}",
        ("", "value"),
        [
            ("answers that did not parse or validate", figures["failed"]),
            ("schemas that were refused, with the place", figures["refused"]),
            ("schemas that need more room, and got it", figures["given_more_room"]),
            ("ms per token, with grammar", f"{1000 * seconds['grammar']:.1f}"),
            ("ms per token, without", f"{1000 * seconds['free']:.1f}"),
            ("overhead", f"{figures['overhead']:.1%}"),
        ],
    )
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
