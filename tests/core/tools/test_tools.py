"""Tools, schemas and reasoning: shapes, formats, reading, and grammars on real and on random models."""

import json
import random
import re
from dataclasses import replace
from itertools import pairwise

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.grammar import random_schema, valid_answer
from kp_core import Request, TokenStream, Tool, load_engine
from kp_core.errors import GenerationTimeoutError, OptionError, PromptError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.tools import THINK, AnswerReader, AnswerShape, HarmonyReader, ToolFormat, format_of, formats
from kp_core.tools.formats import braced, tagged
from tests.conftest import tiny_engine
from tests.kits import CHATML, tiny_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
        },
    },
}
CLOCK = {"name": "clock", "description": "The time."}
SAID = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Pa\\"ris}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "Pa\\"ris}"}}; {"name": "clock", "parameters": {}}',
    "mistral": 'Let me see.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Pa\\"ris}"}}, '
    '{"name": "clock", "arguments": {}}]',
    "mistral-args": 'Let me see.[TOOL_CALLS]weather[ARGS]{"city": "Pa\\"ris}"}[TOOL_CALLS]clock[ARGS]{}',
}
FORMATS = [value for value in vars(formats).values() if isinstance(value, ToolFormat)]
FORM = {form.name: form for form in FORMATS}


def read(reader, pieces):
    deltas = [delta for piece in pieces for delta in reader.push(piece)]
    return deltas + reader.finish()


def cut(text, places):
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:stop] for start, stop in pairwise(edges)]


@pytest.mark.parametrize("name", SAID)
@given(places=st.lists(st.integers(0, 500), max_size=12))
def test_calls_are_read_wherever_the_pieces_are_cut(name, places):
    reader = AnswerReader(FORM[name], {"weather": {}, "clock": {}})
    deltas = read(reader, cut(SAID[name], places))
    assert [(call.name, call.arguments) for call in reader.calls] == [("weather", {"city": 'Pa"ris}'}), ("clock", {})]
    assert reader.text == ("" if name == "llama3" else "Let me see.")
    assert "".join(delta.text for delta in deltas) == reader.text
    pieces = [delta.tool_call for delta in deltas if delta.tool_call]
    for index, call in enumerate(reader.calls):
        mine = [piece for piece in pieces if piece.index == index]
        assert (mine[0].id, mine[0].name) == (call.id, call.name)
        assert json.loads("".join(piece.arguments for piece in mine)) == call.arguments


@given(places=st.lists(st.integers(0, 500), max_size=8))
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_told_from_the_answer(places, opened):
    said = ("" if opened else "<think>\n") + "Is 2 < 3? Yes.\n</think>\n\nYes, 2 < 3."
    reader = AnswerReader(None, thought=THINK, opened=opened)
    deltas = read(reader, cut(said, places))
    assert (reader.reasoning, reader.text) == ("Is 2 < 3? Yes.", "Yes, 2 < 3.")
    assert "".join(delta.reasoning for delta in deltas) == reader.reasoning


@given(st.text(alphabet='<>tool_cal/{}"nme: \n', max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_without_tools_and_thoughts_text_is_text(text, places):
    assert "".join(delta.text for delta in read(AnswerReader(None), cut(text, places))) == text


@given(st.text(alphabet='<tol_ca \n"{}', max_size=40), st.lists(st.integers(0, 60), max_size=6))
def test_nothing_is_lost_while_it_might_be_markup(text, places):
    for form in FORMATS:
        reader = AnswerReader(form, {"weather": {}}, thought=THINK)
        said = "".join(delta.text for delta in read(reader, cut(text, places)))
        begun = re.search("<tool_(c|ca)$", text) if form.name == "hermes" else None
        assert said.strip() == (text[: begun.start()] if begun else text).strip()


PARIS = '{"name": "weather", "arguments": {"city": "Pa\\"r\\u00e9is}", "unit": "C"}}'
TIME = '{"name": "clock", "parameters": {}}'
UNTAGGED = {
    PARIS: ["weather"],
    f" \n{TIME}\n\n": ["clock"],
    '{"arguments": {"city": "Rome"}, "name": "weather"}': ["weather"],
    '{\n  "name": "clock",\n  "arguments": {}\n}': ["clock"],
    '{"name":"weather","arguments":{"city":"Rome"}}': ["weather"],
    f"[{PARIS}]": ["weather"],
    f"[{PARIS}, {TIME}]": ["weather", "clock"],
    f"[\n  {PARIS},\n  {TIME}\n]": ["weather", "clock"],
    f"{PARIS}\n{TIME}": ["weather", "clock"],
    f"{PARIS}; {TIME}": ["weather", "clock"],
    f"{PARIS}\n{PARIS}\n{TIME}\n{PARIS}\n{TIME[:9]}": ["weather", "clock"],
    f"```json\n{PARIS}\n```": ["weather"],
    f"```\n{TIME}\n```\n": ["clock"],
    f"```json\n[{PARIS}, {TIME}]\n```": ["weather", "clock"],
    f"```json\n{PARIS}\n{TIME}\n```": ["weather", "clock"],
    f"```json\n{TIME}": ["clock"],
    f'{PARIS}\n{{"name": "weather", "argu': ["weather"],
    f"[{PARIS}, {TIME}": ["weather", "clock"],
    json.dumps({"name": "weather", "arguments": json.dumps({"city": "Rome"})}): ["weather"],
    json.dumps({"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}): ["weather"],
    '{"type": "function", "name": "clock", "parameters": {}}': ["clock"],
    '{"type":"function","function":{"name":"clock","arguments":"{}"}}\n' * 2: ["clock"],
    f"{PARIS}\n</tool_call>": ["weather"],
    f"{PARIS}\n</tool_call>\n{TIME}\n</tool_call>": ["weather", "clock"],
    f"{TIME}</tool_": ["clock"],
    f"```json\n{PARIS}\n```\n\n```json\n{TIME}\n```": ["weather", "clock"],
    f"```JSON\n{TIME}\n```": ["clock"],
    f"`{TIME}`": ["clock"],
    f"[[{TIME}]]": ["clock"],
    f"[{PARIS}]\n[{TIME}]": ["weather", "clock"],
    f"{PARIS}{TIME}": ["weather", "clock"],
    f"[{PARIS},\n{TIME},\n]": ["weather", "clock"],
    '{"name": "weather", "arguments": {"city": "Paris\n(the one in Texas)"}}': ["weather"],
    '{\r\n\t"name": "clock",\r\n\t"arguments": {\r\n\t}\r\n}\r\n': ["clock"],
    '{ "name" : "weather" , "arguments" : { "city" : "[\\"{" } }': ["weather"],
    '{"parameters": {"city": "name\\": \\"clock"}, "name": "weather"}': ["weather"],
    '{"name": "weather", "arguments": {"city": "\\ud83d\\ude00 <tool \\u00e9"}}': ["weather"],
    '{"name": "weather", "arguments": {"unit": "F", "city": "' + "Paris " * 400 + '"}}': ["weather"],
    '{"name": "\\u00e9t\\u00e9", "arguments": {}}': ["\u00e9t\u00e9"],
    '{"name": "\u00e9t\u00e9", "arguments": {}}': ["\u00e9t\u00e9"],
}
NO_CALLS = [
    "Yes.",
    f"I will look.\n{PARIS}",
    f"{PARIS}\nI will wait.",
    f"```json\n{PARIS}\n```\nThat is the call.",
    f"```python\n{PARIS}\n```",
    f"{PARIS} {{}}",
    f"[{PARIS}, 5]",
    "[]",
    "{}",
    "``",
    '"clock"',
    '{"name": "rain", "arguments": {}}',
    '{"name": "weather", "arguments": {"town": "Paris"}}',
    '{"name": "weather", "arguments": {"city": 5}}',
    '{"name": "weather", "arguments": {"city": "Paris", "unit": "K"}}',
    '{"name": "weather", "arguments": {"city": "Paris", "day": 1}}',
    '{"name": "weather", "arguments": {}}',
    f'[{TIME}, {{"name": "weather", "arguments": {{}}}}]',
    '{"name": "clock"}',
    '{"name": "clock", "arguments": []}',
    '{"name": "clock", "arguments": {}, "why": "?"}',
    '{"name": "clock", "description": "The time.", "parameters": {"type": "object", "properties": {}}}',
    '{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}',
    '{"name": ["clock"], "arguments": {}}',
    '{"name": "weather", "arguments": {"city": "Par',
    "{'name': 'clock', 'arguments': {}}",
    '{"name": "clock", "arguments": {"a": ' + "[" * 5000,
    '{"name": "weather", "arguments": "Paris"}',
    '{"name": "weather", "arguments": "{\\"city"}',
    '{"name": "clock", "arguments": "[]"}',
    '{"name": "clock", "arguments": null}',
    '{"type": "object", "name": "clock", "arguments": {}}',
    '{"name": "clock", "type": "tool", "arguments": {}}',
    '{"type": "function", "function": "clock", "arguments": {}}',
    '{"type": "function", "function": {"name": "rain", "arguments": {}}}',
    '{"type": "function", "function": {"name": "clock", "description": "The time."}}',
    '{"tool": "clock", "arguments": {}}',
    '{"name": "weather", "parameters": {"city": "Paris"}, "arguments": {"city": "Rome"}}',
    '{"name": "clock", "arguments": {}, "name": "rain"}',
    '{"name": "weather", "arguments": {"city": NaN}}',
    '{"name": "weather", "arguments": {"city": "Paris", "unit": null}}',
    f"{TIME}.",
    f"1. {TIME}",
    f"- {TIME}\n- {PARIS}",
    f"Action: {TIME}",
    f"{TIME} // now",
    f'{TIME}\n{{"result": "12:00"}}',
    f"```json\n{TIME}\n```\nResult:\n```json\n5\n```",
    "json",
    "[1] The gate.",
    "</tool_call>",
]


def untagged_reader(form):
    nothing = {"type": "object", "properties": {}}
    tools = {"weather": WEATHER["function"]["parameters"], "clock": nothing, "\u00e9t\u00e9": nothing}
    if form is formats.HARMONY:
        return HarmonyReader(tools, untagged=9)
    return AnswerReader(form, tools, thought=THINK, untagged=9)


@pytest.mark.parametrize("form", ["hermes", "mistral-args"])
@pytest.mark.parametrize("said", [*UNTAGGED, *NO_CALLS], ids=lambda said: said[:70])
def test_each_answer_without_marks_is_read_alike_in_pieces_of_every_size(said, form):
    for size in (1, 2, 3, 7, 50, len(said)):
        reader = untagged_reader(FORM[form])
        deltas = read(reader, [said[at : at + size] for at in range(0, len(said), size)])
        assert [call.name for call in reader.calls] == UNTAGGED.get(said, [])
        assert reader.text == "".join(delta.text for delta in deltas) == ("" if said in UNTAGGED else said)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(places=st.lists(st.integers(0, 500), max_size=12), said=st.sampled_from([*UNTAGGED]))
def test_an_answer_of_calls_without_their_marks_is_calls(form, places, said):
    for lead in (
        "",
        "<think>\nI call.\n</think>\n\n" if form is not formats.HARMONY else "<|channel|>final<|message|>",
    ):
        reader = untagged_reader(form)
        deltas = read(reader, cut(lead + said, places))
        assert [call.name for call in reader.calls] == UNTAGGED[said]
        assert reader.text == "".join(delta.text for delta in deltas) == ""
        pieces = [delta.tool_call for delta in deltas if delta.tool_call]
        for index, call in enumerate(reader.calls):
            mine = [piece for piece in pieces if piece.index == index]
            assert (mine[0].id, mine[0].name) == (call.id, call.name)
            assert json.loads("".join(piece.arguments for piece in mine)) == call.arguments


@pytest.mark.parametrize("form", [form for form in FORMATS if form.trigger], ids=lambda form: form.name)
@given(places=st.lists(st.integers(0, 500), max_size=12), said=st.sampled_from(NO_CALLS))
def test_what_is_not_only_calls_is_given_whole(form, places, said):
    reader = untagged_reader(form)
    deltas = read(reader, cut(said, places))
    assert reader.calls == []
    assert reader.text == "".join(delta.text for delta in deltas) == said


@pytest.mark.parametrize("said", ["Yes, ", '{"city"', "[1", "```python", '{"name": "rain"', f"{TIME} and", "{'"])
def test_text_is_given_as_soon_as_it_cannot_be_calls(said):
    assert "".join(delta.text for delta in untagged_reader(FORM["hermes"]).push(said)).strip() == said.strip()


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_calls_with_their_marks_are_read_as_before_among_untagged_ones(name):
    reader = untagged_reader(FORM[name])
    deltas = read(reader, [f"{TIME}\n{SAID[name]}"])
    assert reader.text == "".join(delta.text for delta in deltas) == f"{TIME}\nLet me see."
    assert [call.name for call in reader.calls] == ["weather", "clock"]


class Repeats:
    """An engine that says the last message again."""

    def __init__(self):
        self.tokenizer, self.max_positions, self.lacks = tiny_tokenizer(), 4096, {}
        self.supports, self.identity = frozenset({"grammar"}), replace(ModelFingerprint.unknown(), weights="none")

    def run(self, plan):
        text = self.tokenizer.decode(plan.prompt.token_ids).split("<|im_start|>")[-2].partition("\n")[2]
        tokens = self.tokenizer.encode(text.partition("<|im_end|>")[0], add_special_tokens=False)

        def said(stream):
            yield from tokens[: plan.token_budget]
            stream.finish = "stop"

        return TokenStream(said)

    def kv(self, plans):
        raise AssertionError("not offered, so never asked for")


def test_untagged_calls_are_answers_of_a_session():
    session = load_engine(Repeats())
    stream = session.stream(PARIS, tools=[WEATHER, CLOCK])
    deltas = [*stream.deltas()]
    assert [delta.text for delta in deltas if delta.text] == []
    answer = stream.result()
    assert [(call.name, call.arguments["unit"]) for call in answer.tool_calls] == [("weather", "C")]
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")
    for options in ({"tool_choice": "none"}, {"response_schema": True}):
        plain = session.generate(PARIS, tools=[WEATHER, CLOCK], **options)
        assert (plain.text, plain.tool_calls, plain.finish_reason) == (PARIS, (), "stop")
    assert "".join(session.stream('{"name": "rain"}', tools=[WEATHER])) == '{"name": "rain"}'
    [first] = session.generate(f"{TIME}\n{PARIS}", tools=[WEATHER, CLOCK], parallel_tool_calls=False).tool_calls
    assert first.name == "clock"
    cut_off = session.generate(PARIS, tools=[WEATHER], max_tokens=20)
    assert (cut_off.text, cut_off.tool_calls) == (PARIS[:20], ())


def test_a_call_that_was_cut_off_is_no_call():
    reader = AnswerReader(FORM["hermes"], {"weather": {}})
    read(reader, ['<tool_call>\n{"name": "weather", "arguments": {"city": "Par'])
    assert reader.calls == []


@pytest.mark.parametrize("begun", ["<tool_", "<tool_call", '<tool_call>\n{"na'])
def test_a_call_that_was_cut_off_is_no_text_either(begun):
    reader = AnswerReader(FORM["hermes"], {"weather": {}})
    read(reader, ["Let me see. ", begun])
    assert reader.text == "Let me see."
    assert reader.calls == []


@pytest.mark.parametrize("form", [form for form in FORMATS if form.separator is not None], ids=lambda form: form.name)
@given(places=st.lists(st.integers(0, 500), max_size=12))
def test_calls_by_bare_names_are_read_wherever_the_pieces_are_cut(form, places):
    calls = [("weather", '{"city": "a </function><tool_call|><end_function_call> b"}'), ("clock", "{}")]
    said = form.opening + form.between.join(f"{name}{form.separator}{arguments}" for name, arguments in calls)
    if form.between:
        reader = AnswerReader(form, {"weather": {}, "clock": {}})
        read(reader, cut(f"Let me see. {said}{form.closing}", places))
    else:
        reader = HarmonyReader({"weather": {}, "clock": {}})
        messages = [f"{form.opening}{name}{form.separator}{arguments}" for name, arguments in calls]
        read(reader, cut("<|channel|>final<|message|>Let me see.<|end|>" + "<|call|>".join(messages), places))
    assert [(call.name, json.dumps(call.arguments)) for call in reader.calls] == calls
    assert reader.text == "Let me see."


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": Paris}}]'),
        ("gemma4", "<|tool_call>call:weather{city:Paris}<tool_call|>"),
        ("qwen-tags", "<tool_call>\n<function=weather>\nParis\n</function>\n</tool_call>"),
    ],
)
def test_arguments_that_cannot_be_read_are_no_call(form, said):
    reader = AnswerReader(FORM[form], {"weather": {}})
    read(reader, [said])
    assert (reader.calls, reader.text) == ([], "")


def test_values_are_what_the_schema_says():
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    said = "".join(f"<parameter={key}>\n5\n</parameter>\n" for key in "abc") + "<parameter=d>\nfive\n</parameter>"
    assert tagged(said, schema) == {"a": "5", "b": 5, "c": 5, "d": "five"}
    nested = 'x:{y:[<|"|>a "b" {c:1}<|"|>,2,true],"z":null}'
    assert braced('<|"|>')("{" + nested + "}", {}) == {"x": {"y": ['a "b" {c:1}', 2, True], "z": None}}


@pytest.mark.parametrize("said", ["", "t", "to", "Yes.", "to=", "to be or not"])
def test_an_answer_without_channels_is_text(said):
    reader = HarmonyReader({})
    read(reader, list(said))
    assert reader.text == said


def test_formats_are_told_by_their_templates():
    assert format_of("{{ '[TOOL_CALLS] [' }}").name == "mistral"
    assert format_of("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}").name == "mistral-args"
    assert format_of("<tool_call>").name == "hermes"
    assert format_of("<|python_tag|>").name == "llama3"
    assert format_of(CHATML).name == "hermes"


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"tools": [WEATHER, WEATHER]}, "a different name for each"),
        ({"tools": [WEATHER], "tool_choice": "rain"}, "expected one of: auto, none, any, weather"),
        ({"tool_choice": "any"}, "expected one of: auto, none"),
        ({"tools": [{"function": {}}]}, "expected {'type': 'function'"),
        ({"tools": ["weather"]}, "Got the tool 'weather'"),
        ({"tools": [{"name": "f", "parameters": {"type": "string"}}]}, "a JSON Schema of an object"),
        ({"tools": [WEATHER], "tool_choice": "any", "response_schema": {}}, "a call or an object, not both"),
        ({"response_schema": "object"}, "or True for any object"),
    ],
)
def test_what_contradicts_itself_is_named(request_, complaint):
    with pytest.raises(PromptError, match=complaint):
        assert Request.of(request_).shape


@pytest.mark.parametrize(
    "schema", [{"type": "array", "uniqueItems": True}, {"not": {"type": "string"}}, {"$ref": "http://example.com/x"}]
)
def test_a_schema_that_cannot_be_enforced_is_named_before_any_compute(schema):
    with pytest.raises(PromptError, match="cannot be enforced"):
        tiny_engine().stream("Hi", response_schema={"type": "object", "properties": {"a": schema}})


def test_templates_without_tools_list_them_in_the_system_message(thin):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = thin.template.text(thin.template.render(messages, shape=AnswerShape.of([WEATHER])))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call tools.")
    assert '{"name": "weather", "description": "The weather of a city."' in text


def test_tools_behind_memory_leave_packs_their_tokens(thin):
    packs = [thin.build_pack(f"Island {n} lies {n} miles from Veyl.", compiled_for="system") for n in (1, 2)]
    thin.clear_cache()
    for count in (1, 2):
        usage = thin.prefill("Which island?", packs=packs[:count], tools=[WEATHER]).usage
        assert usage.pack_tokens == sum(len(pack.token_ids) for pack in packs[:count])
        assert usage.computed_tokens <= usage.prompt_tokens + (len(packs[1].token_ids) if count == 2 else 0)


def test_templates_with_tools_show_them_themselves():
    template = "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}" + CHATML
    engine = tiny_engine(template=template)
    text = engine.template.text(engine.template.render("Hi", shape=AnswerShape.of([WEATHER])))
    assert text.startswith('<tool_call>{"type": "function", "function": {"name": "weather"')
    assert "You can call tools" not in text


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_random_models_answer_random_schemas_with_valid_json(seed):
    """A model that says random bytes has to be led to an end."""
    rng = random.Random(seed)
    engine = tiny_engine(("llama", "qwen3", "gemma")[seed % 3])
    for number in range(2):
        valid_answer(engine, random_schema(rng), forced_call=number % 2 == 0, room=400)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_real_tokens_answer_random_schemas_with_valid_json(seed, thin):
    valid_answer(thin, random_schema(random.Random(100 + seed)), forced_call=seed % 2 == 0, room=160)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(1, marks=pytest.mark.slow), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (0, 2, 3))],
)
def test_the_real_model_answers_random_schemas_with_valid_json(seed, smol):
    valid_answer(smol, random_schema(random.Random(100 + seed)), forced_call=seed % 2 == 0, room=160)


def test_sampling_at_high_temperature_stays_valid(thin):
    schema = WEATHER["function"]["parameters"]
    for seed in range(3):
        answer = thin.generate("Paris", response_schema=schema, temperature=2.0, seed=seed, max_tokens=40)
        jsonschema.validate(json.loads(answer.text), schema)


@pytest.mark.slow
def test_a_forced_call_is_that_call(smol):
    answer = smol.generate(
        "What is the weather in Paris?", tools=[WEATHER, CLOCK], tool_choice="weather", max_tokens=48
    )
    [call] = answer.tool_calls
    assert (call.name, call.arguments["city"]) == ("weather", "Paris")
    assert answer.text == ""
    assert answer.finish_reason == "tool_calls"


def test_a_forced_call_is_streamed(thin):
    stream = thin.stream("What time is it?", tools=[WEATHER, CLOCK], tool_choice="clock", max_tokens=48)
    pieces = [delta.tool_call for delta in stream.deltas()]
    assert pieces[0].name == "clock"
    assert "".join(piece.arguments for piece in pieces) == "{}"


def test_several_calls_end_in_time(thin):
    answer = thin.generate(
        "Weather of Paris and Rome?", tools=[WEATHER], tool_choice="any", parallel_tool_calls=True, max_tokens=80
    )
    assert len(answer.tool_calls) >= 1
    assert thin.tokenizer.decode(answer.token_ids).count("<tool_call>") == len(answer.tool_calls)


def test_tools_on_show_are_not_called(smol):
    answer = smol.generate("Use the clock.", tools=[CLOCK], tool_choice="none", max_tokens=24)
    assert answer.tool_calls == ()
    assert "<tool_call>" not in answer.text


def test_room_too_small_for_the_schema_is_named(thin):
    with pytest.raises(OptionError, match="takes about"):
        thin.generate("Hi", tools=[WEATHER], tool_choice="any", max_tokens=5)


def test_a_call_in_the_history_is_written_as_the_model_would(thin):
    call = {"type": "function", "function": {"name": "clock", "arguments": {}}}
    messages = [{"role": "user", "content": "Time?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = thin.template.text(thin.template.render(messages, add_generation_prompt=False))
    assert '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>' in text


def test_special_token_markers_are_read():
    """`[TOOL_CALLS]` is a control token in Mistral's tokenizers: it must not be dropped as one."""
    tokenizer = tiny_tokenizer("{{ '[TOOL_CALLS]' ~ (tools | tojson) if tools }}" + CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    from tests.kits import tiny_model

    model = tiny_model("llama")
    model.resize_token_embeddings(len(tokenizer))
    engine = load_engine(model, tokenizer=tokenizer)
    answer = engine.generate("Hi", tools=[CLOCK], tool_choice="any", max_tokens=200)
    assert [call.name for call in answer.tool_calls] == ["clock"]
    assert tokenizer.convert_tokens_to_ids("[TOOL_CALLS]") in answer.token_ids


@pytest.mark.parametrize("opened", [False, True])
def test_a_thought_ends_in_time_for_a_forced_call(opened):
    """A random model would think for ever: the thought is ended while there is room for the call."""
    template = "{% if false %}</think>{% endif %}" + CHATML
    if opened:
        template = template.replace("assistant\n'", "assistant\n<think>\n'")
    engine = tiny_engine(template=template)
    answer = engine.generate("Hi", tools=[CLOCK], tool_choice="any", max_tokens=150)
    assert [call.name for call in answer.tool_calls] == ["clock"]
    assert answer.reasoning or not opened


def test_timeouts_end_a_generation(smol):
    with pytest.raises(GenerationTimeoutError, match=r"after 0\.01 s"):
        smol.generate("Tell a story.", timeout=0.01, max_tokens=400)
    assert smol.generate("Hi", timeout=600, max_tokens=2).usage.completion_tokens > 0
    with pytest.raises(OptionError, match="timeout"):
        smol.generate("Hi", timeout=0)


def test_tools_are_values():
    assert Tool.of(WEATHER) == Tool.of(WEATHER["function"])
    assert Tool.of(Tool.of(WEATHER).to_dict()) == Tool.of(WEATHER)


def required(**properties):
    return {"properties": properties, "required": list(properties)}


LINKED = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", **required(a={"$ref": "#/$defs/a"})}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10000, "items": {"type": "integer"}},
        {"type": "object", **required(a={"type": "array", "minItems": 3000})},
        {"type": "string", "minLength": 5000},
        LINKED,
    ],
    ids=["items", "nested", "letters", "itself"],
)
@pytest.mark.parametrize("as_tool", [False, True])
def test_a_schema_without_an_end_in_the_room_is_refused_before_any_compute(schema, as_tool):
    tool = {"name": "f", "parameters": required(a=schema) if "$ref" not in schema else {**schema, "type": "object"}}
    asked = {"tools": [tool], "tool_choice": "any"} if as_tool else {"response_schema": schema}
    with pytest.raises(OptionError, match="Got room for 100 tokens"):
        tiny_engine().stream("Hi", max_tokens=100, **asked)


def test_parameters_that_do_not_say_that_they_are_an_object_are_held_to_be_one():
    engine = tiny_engine()
    for parameters in (required(a={"type": "boolean"}), {"anyOf": [{"type": "string"}, required(a={"enum": [1]})]}):
        for seed in range(4):
            asked = {"tools": [{"name": "f", "parameters": parameters}], "tool_choice": "any"}
            answer = engine.generate("Hi", temperature=1, seed=seed, max_tokens=120, **asked)
            assert [type(call.arguments) for call in answer.tool_calls] == [dict]
    with pytest.raises(PromptError, match="JSON Schema of an object"):
        Tool("f", "", {"type": "string"})


@pytest.mark.parametrize("word", ["<|im_end|>", "<s>", "<|endoftext|>"])
def test_what_the_model_cannot_write_is_named(word):
    for schema in (required(**{word: {"type": "integer"}}), required(a={"enum": [word]})):
        with pytest.raises(PromptError, match=re.escape(f"reads like {word!r}")):
            tiny_engine().stream("Hi", response_schema={"type": "object", **schema})
    with pytest.raises(PromptError, match=re.escape(word)):
        tiny_engine().stream("Hi", tools=[{"name": word}], tool_choice="any")


@pytest.mark.parametrize("word", ["<tool_call>", "</tool_call>", "<think>", '"', "\\", "\n", "é中", " "])
def test_names_that_look_like_markup_are_names(word):
    tool = {"name": word, "parameters": required(**{word: {"enum": [word]}})}
    answer = tiny_engine().generate("Hi", tools=[tool], tool_choice="any", max_tokens=200)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [(word, {word: word})]
