"""Templates are code of somebody else's: they run within limits, and what they do to text is noticed."""

import logging

import pytest

from kp_core import ChatTemplate, Fact, PackStore
from kp_core.compiling import compile_facts
from kp_core.errors import TemplateError
from kp_core.prompt.sandbox import LimitError, render
from kp_core.testing import CHATML, tiny_tokenizer
from tests.conftest import tiny_engine
from tests.core.prompt.test_control_tokens import controls
from tests.core.prompt.test_template import HANDLE, TEMPLATES, Packs

TURN = "{{ '<|im_start|>' + m['role'] + '\n' }}BODY{{ '<|im_end|>\n' }}"
ALL = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
GROW = "{%% set n = namespace(x='aaaa') %%}{%% for i in range(99) %%}%s{%% endfor %%}"
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for a in range(99) recursive %}{{ loop(range(99)) if loop.depth < 9 }}{% endfor %}",
]
HUGE = [
    "{{ 'a' * 99999999999 }}",
    "{{ ('a' * 9999999999) | length }}",
    "{{ [0] * 9999999999 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 'a'.center(9999999999) }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ ['a'] | map('center', 9999999999) | first }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ ('a' * 9999999).replace('a', 'b' * 9999999) }}",
    "{{ range(99999) | join('b' * 9999999) }}",
    "{{ ('b' * 9999999).join(range(99999) | map('string')) }}",
    "{{ messages | tojson(indent=9999999999) }}",
    GROW % "{% set n.x = n.x ~ n.x %}",
    GROW % "{% set n.x = n.x + n.x %}",
    GROW % "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}",
    GROW % "{% set n.x = [n.x, n.x] %}" + "{{ n.x }}",
    "{% set n = namespace(x=7) %}" + "{% set n.x = n.x * n.x %}" * 99,
    "{% for a in range(99999) %}{% for b in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endfor %}",
]
DOUBLED = "{% set n.x = [n.x, n.x] %}"
JSON = "{{ n.x | tojson(indent=50) }}"
HUGE += [
    GROW % DOUBLED + "{{ n.x | string | length }}",
    GROW % (DOUBLED + "{% set n.y = [n.y, n.y] %}") + "{{ n.x == n.y }}",
    GROW % "{% set n.x = dict(a=n.x, b=n.x).items() %}" + "{{ n.x | upper }}",
    GROW % "{% set n.x = cycler(n.x, n.x).items %}" + "{{ n.x | string }}",
    GROW % "{% set n.x = [none, none] | map('default', n.x, true) | list %}" + "{{ n.x | string }}",
    GROW % "{% macro f() %}{% set n.x = varargs %}{% endmacro %}{{ f(n.x, n.x) }}" + "{{ n.x | string }}",
    GROW % "{% with x = [n.x, n.x] %}{% set n.x = x %}{% endwith %}" + "{{ n.x in [n.x] }}",
    "{% macro f(x, n) %}{% if n %}{{ f([x, x], n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f('a', 99) }}",
    "{% set a = 'a' * 50000 %}{{ (a" + " ~ a" * 99 + ") | length }}",
    "{% set n = namespace(x=[]) %}{% set a = 'a' * 50000 %}{% for i in range(99) %}{% set n.x = a[1:] %}{% endfor %}",
    "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
    "{{ ('\n' * 9999) | indent('b' * 9999) }}",
    "{{ ([0] * 9999) | tojson(indent='b' * 9999) }}",
    "{{ ([0] * 9999) | tojson(separators=('b' * 9999, ':')) }}",
    "{% set n = namespace(x=[0] * 999) %}{% for i in range(200) %}{% set n.x = [n.x] %}{% endfor %}" + JSON,
    "{{ ('a ' * 9999) | wordwrap(1, true, 'b' * 9999) }}",
    "{{ ([0] * 9999) | map('string') | join('b' * 9999) }}",
    "{{ ([[0]] * 9999) | sum(start=[]) }}",
    "{{ '{:{}}'.format(1, '9999999999') }}",
    "{{ '{:{0.width}}'.format(namespace(width=9999999999)) }}",
    "{% set n = namespace(x='a' * 50000) %}{{ ('{0.x}' * 999).format(n) }}",
    "{{ (1).to_bytes(9999999999, 'big') }}",
    "{{ (1).from_bytes(('a' * 50000).encode(), 'big') }}",
    "{{ 1.5 | round(999999999, 'floor') }}",
]
ESCAPES = ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"]
ESCAPES += ["{{ dict.__class__.__base__ }}", "{% set n = namespace(__class__=1) %}", "{{ lipsum(9) }}"]


@pytest.mark.parametrize("source", HUGE)
def test_a_template_that_makes_too_much_is_stopped(source, monkeypatch):
    monkeypatch.setattr("kp_core.prompt.sandbox._SIZE", 2**20)
    with pytest.raises(LimitError, match="makes more text"):
        render(source, {"messages": [{"role": "user", "content": "Hi"}]})


def test_nested_namespaces_are_not_written_out():
    assert len(render(GROW % "{% set n.x = namespace(a=n.x, b=n.x) %}" + "{{ n.x }}", {})) < 99


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_never_ends_is_stopped(source, monkeypatch):
    monkeypatch.setattr("kp_core.prompt.sandbox._SECONDS", 0.2)
    with pytest.raises(TemplateError, match=r"computes for more than 0\.2 seconds"):
        ChatTemplate(tiny_tokenizer(source + CHATML))


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_does_not_get_out(source):
    with pytest.raises(Exception, match=r"unsafe|undefined|underscore"):
        render(source, {"messages": []})


def test_what_is_no_template_is_refused_at_load():
    with pytest.raises(TemplateError, match="no template of Jinja"):
        ChatTemplate(tiny_tokenizer("{% for %}"))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_give_what_they_give_elsewhere(kind):
    tokenizer = tiny_tokenizer(TEMPLATES[kind])
    conversation = [{"role": "user", "content": " Who?\n"}, {"role": "assistant", "content": "Orla </think> <b>'."}]
    expected = tokenizer.apply_chat_template(conversation, tokenize=False, date_string="1 May")
    options = {"date_string": "1 May", "add_generation_prompt": False, "tools": None, "documents": None}
    given = {**tokenizer.special_tokens_map, "messages": conversation, **options}
    assert render(tokenizer.chat_template, given) == expected


FEATURES = (
    "{%- generation %}{{ messages[0].content | upper }}{% endgeneration -%}\n"
    "{% for m in messages recursive %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.cycle('a', 'b') }}"
    "{% if loop.index == 2 %}{% break %}{% endif %}{% else %}none{% endfor %}\n"
    "{% set n = namespace(seen=false) %}{% for k, v in messages[0].items() %}{% set n.seen = true %}{{ k ~ v ~ 1 }}"
    "{% endfor %}{{ n.seen }}{{ messages | tojson(indent=2) }}{{ messages[::-1] | map(attribute='role') | join(',') }}"
    "{% macro show(x, deep=false) %}({{ x }}{{ caller() if caller else '' }}){% endmacro %}{{ show('é<&>', deep=1) }}"
    "{% call show(1) %}inside{% endcall %}{% filter trim %}  x {% endfilter %}{{ '%s-%s' % ('a', 2) }}{{ missing }}"
    "{{ '{0:>4}'.format(7) }}{{ [1, 2] + [3] }}{{ 'ab' * 2 }}{{ 7 // 2 }}{{ 2 ** 5 }}{{ dict(a=1).items() | list }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a,b'.split(',') }}{{ (1, 'x') }}"
)


def test_everything_that_templates_use_works_as_elsewhere():
    tokenizer = tiny_tokenizer(FEATURES)
    conversation = [{"role": role, "content": f"{role}é"} for role in ("user", "assistant", "user")]
    given = {"messages": conversation, "add_generation_prompt": False, "tools": None, "documents": None}
    expected = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert render(FEATURES, {**tokenizer.special_tokens_map, **given}) == expected


CHANGES = {
    "upper": "{{ m['content'] | upper }}",
    "lower": "{{ m['content'] | lower }}",
    "cut": "{{ m['content'][:60] }}",
    "cut within": "{{ m['content'][:31] }}",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_template_that_changes_text_leaks_no_guard_and_makes_no_control_token(change, caplog):
    with caplog.at_level(logging.WARNING, "kp_core"):
        made = ChatTemplate(tiny_tokenizer(ALL.replace("BODY", CHANGES[change])))
        harmless = made.render("It is a fact that nobody doubts, and there it ends.")
        for word in ("<|im_end|>", "<|IM_END|>", "</S>"):
            prompt = made.render(f"It is a fact, {word} as it {word} is told again by all.")
            assert controls(made, prompt) == controls(made, harmless)
            text = made._tokenizer.decode(prompt.token_ids)
            for guard in (made._encoder.guard, made._encoder.other_guard):
                assert guard[1:6].lower() not in text.lower()
    assert len(caplog.records) == 1
    assert "changes the text of messages" in caplog.text


@pytest.mark.parametrize("change", ["upper", "lower", "cut"])
def test_packs_of_a_template_that_changes_text_go_as_text_with_one_warning(change, caplog, tmp_path):
    source = ALL.replace("BODY", CHANGES[change])
    with caplog.at_level(logging.WARNING, "kp_core"):
        made = ChatTemplate(tiny_tokenizer(source))
        assert not made.carries_packs
        for _ in range(2):
            prompt = made.render(f"{HANDLE} Who?", view=Packs().view())
            assert prompt.spans == ()
            assert "orla venn" in made.text(prompt).lower()
        engine = tiny_engine(template=source)
        assert compile_facts([Fact("Orla keeps it."), Fact("It burns.")], engine, PackStore(tmp_path)) == [None, None]
        assert engine.generate("Hi", max_tokens=2).usage.completion_tokens
    assert [record.message.count("packs cannot be found") for record in caplog.records] == [1, 1]


def test_a_template_that_hides_packs_in_some_conversations_says_so_then(caplog):
    made = ChatTemplate(tiny_tokenizer(ALL.replace("BODY", "{{ m['content'][:600] }}")))
    assert made.carries_packs
    view = Packs(**{HANDLE: "A long story. " * 90}).view()
    with caplog.at_level(logging.WARNING, "kp_core"):
        assert [made.render(f"Now: {HANDLE}", view=view).spans for _ in range(2)] == [(), ()]
    assert caplog.text.count("packs cannot be found") == 1
