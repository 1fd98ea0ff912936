"""Templates are code of somebody else's: they run in a sandbox, and what they do to text is noticed."""

import logging

import pytest

from kp_core import ChatTemplate, Fact, PackStore
from kp_core.banks.compiling import compile_facts
from kp_core.errors import PromptError
from kp_core.prompt.template import _compiled
from tests.conftest import tiny_engine
from tests.core.prompt.test_control_tokens import controls
from tests.core.prompt.test_template import HANDLE, TEMPLATES, Packs
from tests.kits import tiny_tokenizer

TURN = "{{ '<|im_start|>' + m['role'] + '\n' }}BODY{{ '<|im_end|>\n' }}"
ALL = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ESCAPES = ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"]
ESCAPES += ["{{ dict.__class__.__base__ }}", "{% set n = namespace(__class__=1) %}"]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_does_not_get_out(source):
    with pytest.raises(Exception, match=r"unsafe|undefined|underscore"):
        _compiled(source).render({"messages": []})


def test_what_is_no_template_is_refused_at_load():
    with pytest.raises(PromptError, match="no template of Jinja"):
        ChatTemplate(tiny_tokenizer("{% for %}"))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_give_what_they_give_elsewhere(kind):
    tokenizer = tiny_tokenizer(TEMPLATES[kind])
    conversation = [{"role": "user", "content": " Who?\n"}, {"role": "assistant", "content": "Orla </think> <b>'."}]
    expected = tokenizer.apply_chat_template(conversation, tokenize=False, date_string="1 May")
    options = {"date_string": "1 May", "add_generation_prompt": False, "tools": None, "documents": None}
    given = {**tokenizer.special_tokens_map, "messages": conversation, **options}
    assert _compiled(tokenizer.chat_template).render(given) == expected


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
    assert _compiled(FEATURES).render({**tokenizer.special_tokens_map, **given}) == expected


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
            text = made.tokenizer.decode(prompt.token_ids)
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
