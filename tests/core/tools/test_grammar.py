"""Schemas with bounds, references and formats: answers validate and end, or the schema is refused with its place."""

import itertools
import json
import random
import re
from decimal import Decimal
from functools import cache

import pytest
import torch

from benchmarks.grammar import valid_answer
from kp_core import Tool
from kp_core.engines.local import grammar
from kp_core.engines.local.grammar import Grammars
from kp_core.errors import OptionError, PromptError
from kp_core.tools import AnswerShape, format_of
from tests.conftest import tiny_engine
from tests.kits import tiny_tokenizer


def holding(part, **others):
    return {"type": "object", "properties": {"a": part, **others}, "required": ["a"]}


def number(kind="number", **bounds):
    return {"type": kind, **bounds}


NUMBERS = {
    "positive": number(exclusiveMinimum=0),
    "share": number(exclusiveMinimum=0, exclusiveMaximum=1),
    "score": number(minimum=-1, maximum=1),
    "latitude": number(minimum=-90, maximum=90),
    "longitude": number(minimum=-180, exclusiveMaximum=180),
    "negative": number(exclusiveMaximum=0),
    "loss": number(exclusiveMinimum=-1, exclusiveMaximum=0),
    "small": number(exclusiveMinimum=0, maximum=1e-9),
    "narrow": number(exclusiveMinimum=150, exclusiveMaximum=150.25),
    "below": number(minimum=-3.5, exclusiveMaximum=-3),
    "sevens": number("integer", multipleOf=7, minimum=1),
    "hours": number("integer", multipleOf=3600, minimum=1),
    "prime": number("integer", multipleOf=997, exclusiveMinimum=0),
    "cents": number(multipleOf=0.01, exclusiveMinimum=0),
    "quarters": number(multipleOf=0.25, minimum=0.3, maximum=2),
    "years": number("integer", minimum=1900, maximum=2100),
    "one": number("integer", exclusiveMinimum=3, exclusiveMaximum=5),
    "huge": number("integer", minimum=10**12),
    "far below": number("integer", maximum=-(10**9)),
    "optional": {"anyOf": [number(exclusiveMinimum=0, maximum=1), {"type": "null"}]},
    "list": {"type": "array", "items": number(exclusiveMinimum=0), "minItems": 3, "maxItems": 4},
    "lists": {"type": "array", "items": {"type": "array", "items": number(minimum=-1, maximum=1), "minItems": 2}},
    "either": {"anyOf": [number("integer", multipleOf=12, minimum=1), number(exclusiveMaximum=0)]},
}


SLOW = ("hours", "prime", "cents", "lists")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NUMBERS]
)
def test_numbers_with_bounds_end_and_validate(name):
    valid_answer(tiny_engine(), holding(NUMBERS[name]), forced_call=len(name) % 2 == 0, room=100)


@pytest.mark.parametrize("name", ["share", pytest.param("hours", marks=pytest.mark.slow)])
def test_sampled_numbers_with_bounds_end_and_validate(name, thin):
    for seed in range(2):
        answer = thin.generate("Go.", response_schema=holding(NUMBERS[name]), max_tokens=24, temperature=1.5, seed=seed)
        value = json.loads(answer.text)["a"]
        assert value > 0
        assert name != "share" or value < 1


def fits(value, part):
    """Whether the decimal `value` satisfies the number schema `part`, whose numbers are decimals or whole."""
    return (
        (part["type"] == "number" or value == value.to_integral_value())
        and part.get("minimum", value) <= value <= part.get("maximum", value)
        and ("exclusiveMinimum" not in part or value > part["exclusiveMinimum"])
        and ("exclusiveMaximum" not in part or value < part["exclusiveMaximum"])
        and ("multipleOf" not in part or value % part["multipleOf"] == 0)
    )


LOWS = [{}, *({key: low} for key in ("minimum", "exclusiveMinimum") for low in (-90, -0.25, 0, 1e-4, 1, 150))]
HIGHS = [{}, *({key: high} for key in ("maximum", "exclusiveMaximum") for high in (-1, 0, 5e-3, 0.75, 1, 150.25, 180))]
STEPS = [{}, *({"multipleOf": step} for step in (1, 7, 60, 256, 3600, 0.5, 0.1, 0.01))]
KINDS = [
    {"type": kind, **low, **high, **step}
    for kind, low, high, step in itertools.product(("number", "integer"), LOWS, HIGHS, STEPS)
]
WRAPPED = [
    holding,
    lambda part: holding({"anyOf": [part, {"enum": ["none"]}]}),
    lambda part: {"type": "object", "properties": {"a": part, "b": part}, "required": ["b"]},
    lambda part: holding({"type": "array", "items": part, "minItems": 1, "maxItems": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.nightly) for share in range(1, 9))])
def test_every_combination_of_bounds_ends_and_validates_or_holds_nothing(thin, share):
    """All combinations in nine shares, in turn as number, member of a union, optional and list, as call and as answer.

    No whole number from -400 to 4000, and none from -2 to 2 in steps of 0.0025, may satisfy a refused schema.
    """
    candidates = [*(Decimal(at) / 400 for at in range(-800, 801)), *map(Decimal, range(-400, 4001))]
    refused, parts = [], random.Random(5).sample(KINDS, len(KINDS))[share::9]
    for at, part in enumerate(parts):
        try:
            valid_answer(thin, WRAPPED[at % 4](part), forced_call=at % 8 < 4, room=120)
        except PromptError as error:
            refused.append((part, str(error)))
    for part, reason in refused:
        assert "Unsatisfiable" in reason
        assert " at #" in reason
        exact = json.loads(json.dumps(part), parse_float=Decimal)
        assert not any(fits(value, exact) for value in candidates), part
    assert len(parts) // 10 < len(refused) < len(parts) // 2


@cache
def grammars():
    tokenizer = tiny_tokenizer()
    return tokenizer, Grammars(tokenizer, len(tokenizer), {tokenizer.eos_token_id})


def written(tools, text, room=200):
    """What becomes of an answer that says `text`, whose model decides whether to call."""
    tokenizer, made = grammars()
    allowed = AnswerShape.of(tools).grammar(format_of(""), lambda _: None, thinks=False, opened=False)
    constraint = made.constraint(allowed, room)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.decode([constraint.accept(token, room - at) for at, token in enumerate(ids)])


BOUNDS = (150, 1, 0.1, 1e-4, 0.25, 1 / 3, 12.34, 99999, 123456789.5, 1e12)
OTHERS = ({}, {"maximum": 10**15}, {"minimum": -(10**15)})


@pytest.mark.parametrize(
    ("wrap", "bound", "sign", "other"),
    [  # All nightly; every fifth with every change, among which are each bound, and each pair of the others.
        pytest.param(*case, marks=pytest.mark.nightly if at % 5 else ())
        for at, case in enumerate(itertools.product(WRAPPED[:2], BOUNDS, (1, -1), OTHERS))
    ],
)
def test_what_is_read_as_an_excluded_bound_is_excluded(wrap, bound, sign, other):
    bound, side = sign * bound, "exclusiveMinimum" if sign > 0 else "exclusiveMaximum"
    tokenizer, made = grammars()
    shape = AnswerShape.of(schema=wrap(number(**{side: bound}, **other)))
    allowed = shape.grammar(format_of(""), lambda _: None, thinks=False, opened=False)

    def takes(value):
        constraint = made.constraint(allowed, 200)
        for at, token in enumerate(tokenizer.encode(f'{{"a": {value}}}', add_special_tokens=False)):
            if constraint.mask(torch.zeros(1, len(tokenizer)))[0, token] != 0:
                return False
            constraint.accept(token, 200 - at)
        return True

    exact = Decimal(repr(bound))
    for factor in (0, "1e-25", "1e-17"):
        assert not takes(f"{exact + exact * Decimal(factor):f}")
    for factor in ("1e-14", "1e-9", "1e-3", 1):
        assert takes(f"{exact + exact * Decimal(factor):f}")


def test_the_tighter_of_an_excluded_and_an_included_bound_holds():
    for both in (number(exclusiveMinimum=1, minimum=3), number(exclusiveMinimum=3, minimum=1)):
        assert valid_answer(tiny_engine(), holding({**both, "maximum": 3.5}), forced_call=False, room=60)["a"] >= 3


@pytest.mark.parametrize("names", [("back\\slash", "tags"), ("a b", "a c"), ("große", "grün")])
@pytest.mark.parametrize("key", ['"quoted"', "q"])
def test_an_ending_is_found_where_forced_text_closes_one_string_and_opens_the_next(names, key):
    part = {"g": {"enum": [*names, 1]}, key: {"type": "string", "format": "uuid"}}
    schema = holding({"anyOf": [{"type": "null"}, {"type": "object", "properties": part, "required": [*part]}]})
    tokenizer, made = grammars()
    allowed = AnswerShape.of(schema=schema).grammar(format_of(""), lambda _: None, thinks=False, opened=False)
    wanted = json.dumps({"a": {"g": names[0], key: "0" * 8}}, ensure_ascii=False)
    for room in range(24, 100, 4):
        constraint, said = made.constraint(allowed, room), list[int]()
        for at, token in enumerate(tokenizer.encode(wanted, add_special_tokens=False)[:room]):
            said.append(constraint.accept(token, room - at))
            if said[-1] != token:
                break
        assert constraint._way is not None, room
        assert len(said) + len(constraint._way) <= room


@pytest.mark.parametrize("name", [True, [2], "a", 0])
def test_a_property_called_name_that_is_no_schema_is_refused_with_its_place(name):
    schema = {"type": "object", "properties": {"name": name, "a": number(minimum=3, maximum=1)}, "required": ["a"]}
    for given in (schema, {"type": "object", "properties": [name]}):
        with pytest.raises(PromptError, match=r"at #.* of the answer's schema"):
            tiny_engine().generate("Hi", response_schema=given, max_tokens=20)


PAY = {"name": "pay", "parameters": holding(number(exclusiveMinimum=0))}
WAIT = {"name": "wait", "parameters": holding(number("integer", multipleOf=99991, minimum=1))}
NEVER = {"name": "never", "parameters": holding({"type": "array", "minItems": 3000})}
MANY = {"name": "many", "parameters": holding({"type": "array", "minItems": 30, "items": {"type": "integer"}})}
CLOCK = {"name": "clock"}


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        ([PAY], '{"name": "pay", "arguments": {"a": 0.25}}'),
        ([PAY, CLOCK], '{"name": "clock", "arguments": {}}'),
        ([NEVER, CLOCK], '{"name": "clock", "arguments": {}}'),
        ([CLOCK, NEVER], '{"name": "clock", "arguments": {}}'),
        ([WAIT], '{"name": "wait", "arguments": {"a": 99991}}'),
        ([WAIT, CLOCK], '{"name": "clock", "arguments": {}}'),
    ],
)
def test_a_free_call_is_written_whatever_else_is_on_offer(tools, call):
    said = f"<tool_call>\n{call}\n</tool_call>"
    assert written(tools, said) == said


@pytest.mark.parametrize("room", [20, 60, 100])
@pytest.mark.parametrize("choices", [[MANY], [MANY, MANY | {"name": "more"}], [NEVER]])
def test_a_free_call_without_room_is_cut_off_and_not_ended(choices, room):
    said = f'<tool_call>\n{{"name": "{choices[0]["name"]}", "arguments": {{"a": [' + ", ".join(["1"] * 30)
    answer = written(choices, said, room)
    assert said.startswith(answer)
    assert len(answer) > len('<tool_call>\n{"name"')


def test_a_free_call_without_room_has_the_finish_reason_length(monkeypatch):
    """The tiny model is random, so the scores for a call stand in for its own; the rest of the engine is real."""
    engine, room = tiny_engine(), 60
    said = '<tool_call>\n{"name": "many", "arguments": {"a": [' + ", ".join(["1"] * 30)
    ids, made = tiny_tokenizer().encode(said, add_special_tokens=False), engine.engine.model.sampler

    def sampler(*parts):
        choose = made(*parts)
        return lambda scores, left: choose(
            torch.zeros_like(scores).index_fill(-1, torch.tensor(ids[room - left]), 9), left
        )

    monkeypatch.setattr(engine.engine.model, "sampler", sampler, raising=False)
    answer = engine.generate("Go.", tools=[MANY], max_tokens=room)
    assert (answer.finish_reason, len(answer.token_ids), answer.tool_calls) == ("length", room, ())


def test_without_a_known_ending_an_answer_is_held_to_its_grammar(monkeypatch):
    monkeypatch.setattr(grammar, "_ALL_SECONDS", 0.0)  # No ending is found in time.
    answer = tiny_engine().generate("Go.", response_schema=PAY["parameters"], max_tokens=24)
    assert re.fullmatch(r'\{"a": [0-9.]+\}?', answer.text)
    assert answer.finish_reason == "length" or answer.text.endswith("}")
    said = '<tool_call>\n{"name": "pay", "arguments": {"a": 0.25}}\n</tool_call>'
    assert written([PAY], said) == said


def test_a_grammar_that_becomes_too_complex_is_an_error_and_no_answer():
    part = number("integer", minimum=1, maximum=10**9, multipleOf=604800)
    with pytest.raises(OptionError, match="grammar cannot follow any further"):
        tiny_engine().generate("Go.", response_schema=holding(part), max_tokens=40)


LEAF = {"enum": [1]}
LINKS = {
    "a property": holding(LEAF, b={"$ref": "#/properties/a"}),
    "the whole": holding(LEAF, b={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "a list of the whole": holding(LEAF, b={"type": "array", "items": {"$ref": "#"}, "maxItems": 2}),
    "definitions": {**holding({"$ref": "#/$defs/x"}), "$defs": {"x": LEAF}},
    "old definitions": {**holding({"$ref": "#/definitions/x"}), "definitions": {"x": LEAF}},
    "definitions in a property": holding({"$ref": "#/properties/a/$defs/x", "$defs": {"x": LEAF}}),
    "an escaped name": {**holding({"$ref": "#/properties/b~1c"}, **{"b/c": LEAF})},
    "a part of a property": holding(holding(LEAF), b={"$ref": "#/properties/a/properties/a"}),
    "a property called name": holding(LEAF, name={"enum": ["ann"]}, b={"$ref": "#/properties/name"}),
    "a property called $ref": holding({"$ref": "#/properties/$ref"}, **{"$ref": {"type": "boolean"}}),
    "data that reads like one": holding({"const": {"$ref": "#"}}),
    "members that require": {"type": "object", "properties": {"a": LEAF, "b": LEAF}, "oneOf": [
        {"required": ["a"]}, {"required": ["b"]}
    ]},
    "members that add": {**holding(LEAF), "oneOf": [
        {"properties": {"x": LEAF}, "required": ["x"]}, {"properties": {"y": LEAF}, "required": ["y"]}
    ]},
    "any that add": {**holding(LEAF), "anyOf": [{"properties": {"x": LEAF}, "required": ["x"]}, {"required": ["a"]}]},
    "members with a kind": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "oneOf": [
        {"properties": {"a": {"const": "x"}}}, {"properties": {"a": {"const": "y"}}}
    ]},
    "a member in a property": holding({
        "type": "object", "properties": {"x": LEAF, "y": LEAF}, "oneOf": [{"required": ["x"]}, {"required": ["y"]}]
    }),
}  # fmt: skip


def test_stop_does_not_cut_what_a_schema_holds():
    engine, schema = tiny_engine(), {"type": "object", "properties": {"a": {"const": "x, y"}}, "required": ["a"]}
    answer = engine.generate("Go.", response_schema=schema, stop=[",", "{"], max_tokens=60)
    assert json.loads(answer.text) == {"a": "x, y"}


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("forced_call", [False, True])
def test_references_and_members_are_those_of_the_tool(name, forced_call):
    schema = LINKS[name]
    if "required" in schema and name.startswith("a") and "b" in schema["properties"]:
        schema = {**schema, "required": ["a", "b"]}
    value = valid_answer(tiny_engine(), schema, forced_call=forced_call, room=300)
    assert not {"arguments", "parameters"} & set(value)


@pytest.mark.parametrize("name", ["path", "password", "binary", "int32", "color", "base64url", "my own"])
def test_a_format_that_no_grammar_knows_is_an_annotation(name):
    schema = holding({"type": "string", "format": name, "maxLength": 3})
    for forced_call in (False, True):
        valid_answer(tiny_engine(), schema, forced_call=forced_call, room=140)
    tools = [{"name": "keep", "parameters": schema}, CLOCK]
    assert tiny_engine().generate("Go.", tools=tools, tool_choice="clock", max_tokens=120).tool_calls[0].name == "clock"


WRONG = {"not": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (holding(WRONG), "#/properties/a"),
        (holding({"type": "array", "items": WRONG}), "#/properties/a/items"),
        (holding({"anyOf": [LEAF, WRONG]}), "#/properties/a/anyOf/1"),
        ({**holding({"$ref": "#/$defs/x"}), "$defs": {"x": {"type": "object", "properties": {"b/c": WRONG}}}}, "/b~1c"),
        (holding(number(minimum=3, maximum=2)), "#/properties/a"),
        (holding({"$ref": "#/$defs/x", "$defs": {"x": LEAF}}), "#/properties/a"),  # `#` is the whole schema.
    ],
)
def test_a_schema_that_is_refused_is_named_with_its_place(schema, place):
    with pytest.raises(PromptError, match="of the answer's schema") as refused:
        tiny_engine().stream("Go.", response_schema=schema)
    assert f"{place} of" in str(refused.value)
    with pytest.raises(PromptError, match="of the parameters of the tool 'bad'") as refused:
        tiny_engine().stream("Go.", tools=[CLOCK, {"name": "bad", "parameters": schema}])
    assert f"{place} of" in str(refused.value)


@pytest.mark.slow
def test_patterns_end_with_few_tokens():
    for pattern in ("^[a-z]+@[a-z]+\\.org$", "^[A-Z]{2}-[0-9]{4}$", "^(ab|cd)*xyz$", "^я+$", '^"x"$'):
        value = valid_answer(tiny_engine(), holding({"type": "string", "pattern": pattern}), forced_call=False, room=50)
        assert value["a"]


def test_the_shortest_member_of_any_is_found_behind_one_without_an_end():
    schema = {"anyOf": [NEVER["parameters"], {"type": "object", "properties": {"b": LEAF}, "required": ["b"]}]}
    engine = tiny_engine()
    assert json.loads(engine.generate("Go.", response_schema=schema, max_tokens=60).text) == {"b": 1}


def test_parameters_stay_as_they_are_for_the_prompt():
    schema = LINKS["members that require"]
    before = json.dumps(schema)
    tiny_engine().prefill("Go.", tools=[Tool("f", "", schema)])
    assert json.dumps(schema) == before


@pytest.mark.parametrize("bound", ["exclusiveMinimum", "exclusiveMaximum", "maximum"])
def test_a_bound_that_no_float_holds_is_refused(bound):
    other = "minimum" if "Max" in bound or bound == "maximum" else "exclusiveMaximum"
    schema = {"type": "object", "properties": {"a": number(**{bound: 10**400, other: 0.5})}}
    with pytest.raises(PromptError, match="cannot be enforced at #/properties/a"):
        tiny_engine().generate("x", max_tokens=4, response_schema=schema)
