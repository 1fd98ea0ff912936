"""Chat templates of the model families, written for these tests from what their makers say of the format."""

from dataclasses import dataclass

from tokenizers import AddedToken

from tests.kits import tiny_tokenizer


@dataclass(frozen=True)
class Family:
    """A template, its control tokens (`plain` ones are not called special), and an answer in the family's own form."""

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...]
    form: str
    said: str
    """An answer that calls `weather(city='Pa"ris')`, and `clock()` where there may be two calls."""
    calls: int = 2
    text: str = ""
    reasoning: str = ""

    def tokenizer(self, merges=7):
        made = tiny_tokenizer(self.template, merges)
        made.add_special_tokens({"additional_special_tokens": list(self.special)})
        made.add_tokens([AddedToken(token, special=False, normalized=False) for token in self.plain])
        return made


_CHATML_TOOLS = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% if tools or system %}<|im_start|>system\n{{ system }}{% if tools %}\n\n<tools>{% for tool in tools %}\n"
    "{{ tool | tojson }}{% endfor %}\n</tools>%HOW%{% endif %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n"
    "</tool_response><|im_end|>\n{% elif m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}%CALL%{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def _chatml(how, call):
    return _CHATML_TOOLS.replace("%HOW%", how).replace("%CALL%", call)


def _bar(name):
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


_USER, _ASSISTANT, _EOS = _bar("User"), _bar("Assistant"), _bar("end of sentence")
_CALLS, _CALLS_END = _bar("tool calls begin"), _bar("tool calls end")
_CALL, _CALL_END, _SEP = _bar("tool call begin"), _bar("tool call end"), _bar("tool sep")
_OUT, _OUT_END = _bar("tool output begin"), _bar("tool output end")


def _deepseek(call, between, prompt):
    """System text first, then turns; arguments are joined to text, so they must be text."""
    return (
        "{{ bos_token }}{% for m in messages if m['role'] == 'system' %}{{ m['content'] }}{% endfor %}"
        "{% for m in messages %}{% if m['role'] == 'user' %}" + _USER + "{{ m['content'] }}{% endif %}"
        "{% if m['role'] == 'assistant' %}" + _ASSISTANT + "{{ (m['content'] or '').split('</think>')[-1] }}"
        "{% for call in m['tool_calls'] or [] %}{{ '" + _CALLS + "' if loop.first else '" + between + "' }}"
        "{{ " + call + " }}{% if loop.last %}" + _CALLS_END + "{% endif %}{% endfor %}" + _EOS + "{% endif %}"
        "{% if m['role'] == 'tool' %}" + _OUT + "{{ m['content'] }}" + _OUT_END + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + _ASSISTANT + prompt + "{% endif %}"
    )


_DEEPSEEK_MARKS = (_USER, _ASSISTANT, _CALLS, _CALLS_END, _CALL, _CALL_END, _SEP, _OUT, _OUT_END, "<think>", "</think>")


def _llama(start, stop, end, tag):
    """Tools in the first user message; one call at a time; results of tools as JSON."""
    return (
        "{{ bos_token }}{% set shown = namespace(tools=tools) %}{% for m in messages %}"
        "{% if m['role'] == 'assistant' and m['tool_calls'] %}{% if m['tool_calls'] | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once') }}{% endif %}"
        f"{start}assistant{stop}\n\n{tag}"
        "{{ '{\"name\": \"' ~ m['tool_calls'][0]['function']['name'] ~ '\", \"parameters\": ' ~ "
        "(m['tool_calls'][0]['function']['arguments'] | tojson) ~ '}' }}" + end + "{% elif m['role'] == 'tool' %}"
        f"{start}ipython{stop}\n\n" + "{{ m['content'] | tojson }}" + end + "{% else %}"
        f"{start}" + "{{ m['role'] }}" + f"{stop}\n\n"
        "{% if m['role'] == 'user' and shown.tools %}{% for tool in shown.tools %}{{ tool | tojson }}\n{% endfor %}"
        "{% set shown.tools = none %}{% endif %}{{ m['content'] | trim }}" + end + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + f"{start}assistant{stop}\n\n" + "{% endif %}"
    )


_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

_GEMMA4 = (
    '{% macro said(value) %}{% if value is string %}<|"|>{{ value }}<|"|>{% elif value is mapping %}'
    "{{ '{' }}{% for key, each in value.items() %}{{ ',' if not loop.first }}{{ key }}:{{ said(each) }}{% endfor %}}"
    "{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
    "{{ bos_token }}{% set first = messages[0]['role'] == 'system' %}{% if first or tools or enable_thinking %}"
    "<|turn>system\n{% if enable_thinking %}<|think|>\n{% endif %}{{ (messages[0]['content'] | trim) if first }}"
    "{% for tool in tools or [] %}<|tool>declaration:{{ tool['function']['name'] }}"
    "{description:<|\"|>{{ tool['function']['description'] }}<|\"|>,parameters:{{ said(tool['function']['parameters'])"
    " }}}<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% for m in messages if m['role'] != 'system' %}{% if m['role'] == 'tool' %}<|tool_response>response:"
    "{{ m['name'] or 'tool' }}{value:{{ said(m['content']) }}}<tool_response|>{% else %}"
    "<|turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}"
    "{% for call in m['tool_calls'] or [] %}<|tool_call>call:{{ call['function']['name'] }}"
    "{{ said(call['function']['arguments']) }}<tool_call|>{% endfor %}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}"
    "{% endif %}"
)

_GEMMA4_PAIRS = ("turn", "tool", "tool_call", "tool_response", "channel")

_HARMONY = (
    "<|start|>system<|message|>You are a model with channels.\nReasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% set first = messages[0]['role'] == 'system' %}{% if first or tools %}<|start|>developer<|message|>"
    "{% if first %}# Instructions\n\n{{ messages[0]['content'] }}\n\n{% endif %}{% if tools %}# Tools\n\n"
    "namespace functions {\n{% for tool in tools %}// {{ tool['function']['description'] }}\n"
    "type {{ tool['function']['name'] }} = (_: {{ tool['function']['parameters'] | tojson }}) => any;\n{% endfor %}}"
    "{% endif %}<|end|>{% endif %}{% set last = namespace(name='') %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}<|start|>user<|message|>{{ m['content'] }}<|end|>"
    "{% elif m['role'] == 'assistant' and m['tool_calls'] %}{% set call = m['tool_calls'][0]['function'] %}"
    "{% set last.name = call['name'] %}{% if m['content'] %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m['content'] }}<|end|>{% endif %}<|start|>assistant to=functions.{{ call['name'] }}<|channel|>commentary json"
    "<|message|>{{ call['arguments'] | tojson }}<|call|>"
    "{% elif m['role'] == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m['content'] }}<|end|>"
    "{% elif m['role'] == 'tool' %}{% if not last.name %}{{ raise_exception('A result without a call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m['content'] | tojson }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

_MISTRAL = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}{{ bos_token }}"
    "{% set seen = namespace(role='') %}{% for m in turns %}{% if m['role'] == 'user' %}"
    "{% if seen.role == 'user' %}{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ system + '\n\n' if loop.last and system }}{{ m['content'] }}[/INST]"
    "{% elif m['tool_calls'] %}[TOOL_CALLS] [{% for call in m['tool_calls'] %}{% if call['id'] | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ ', ' if not loop.first }}{{ call['function'] | tojson }}{% endfor %}]{{ eos_token }}"
    "{% elif m['role'] == 'tool' %}[TOOL_RESULTS] {\"content\": {{ m['content'] | tojson }}}[/TOOL_RESULTS]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% set seen.role = m['role'] %}{% endfor %}"
)

_MISTRAL_ARGS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}[SYSTEM_PROMPT]{{ m['content'] }}"
    "[/SYSTEM_PROMPT]{% elif m['role'] == 'user' %}{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m['content'] }}[/INST]{% elif m['role'] == 'tool' %}[TOOL_RESULTS]"
    "{{ m['content'] }}[/TOOL_RESULTS]{% else %}{{ m['content'].split('[/THINK]')[-1] }}"
    "{% for call in m['tool_calls'] or [] %}[TOOL_CALLS]{{ call['function']['name'] }}[ARGS]"
    "{{ call['function']['arguments'] | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)

_ARGUMENTS = '{"city": "Pa\\"ris"}'
_TWO = ("weather", _ARGUMENTS), ("clock", "{}")
_THOUGHT = "<think>\nIs 2 < 3? Yes.\n</think>\n\nLet me see."

FAMILIES = {
    "qwen3": Family(
        _chatml(
            "\nCall them as <tool_call>.",
            "\n<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>",
        ),
        ("<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        "hermes",
        _THOUGHT
        + "".join(f'\n<tool_call>\n{{"name": "{name}", "arguments": {said}}}\n</tool_call>' for name, said in _TWO),
        text="Let me see.",
        reasoning="Is 2 < 3? Yes.",
    ),
    "qwen3_coder": Family(
        _chatml(
            "\nCall them as <tool_call>\n<function=name>.",
            "\n<tool_call>\n<function={{ call['function']['name'] }}>"
            "{% for key, value in call['function']['arguments'].items() %}\n<parameter={{ key }}>\n"
            "{{ value if value is string else value | tojson }}\n</parameter>{% endfor %}\n</function>\n</tool_call>",
        ),
        ("<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        "qwen-tags",
        'Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nPa"ris\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        text="Let me see.",
    ),
    "llama3": Family(
        _llama("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "{{ '<|python_tag|>' if false }}"),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        (),
        "llama3",
        "; ".join(f'{{"name": "{name}", "parameters": {said}}}' for name, said in _TWO),
    ),
    "llama4": Family(
        _llama("<|header_start|>", "<|header_end|>", "<|eot|>", "{{ '<|python_start|>' if false }}"),
        ("<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>"),
        (),
        "llama4",
        f'<|python_start|>{{"name": "weather", "parameters": {_ARGUMENTS}}}<|python_end|>',
        calls=1,
    ),
    "mistral": Family(
        _MISTRAL,
        (
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        (),
        "mistral",
        "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{name}", "arguments": {said}}}' for name, said in _TWO) + "]",
    ),
    "magistral": Family(
        _MISTRAL_ARGS,
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        (),
        "mistral-args",
        "[THINK]Is 2 < 3? Yes.[/THINK]Let me see." + "".join(f"[TOOL_CALLS]{name}[ARGS]{said}" for name, said in _TWO),
        text="Let me see.",
        reasoning="Is 2 < 3? Yes.",
    ),
    "gemma": Family(
        _GEMMA,
        ("<start_of_turn>", "<end_of_turn>"),
        (),
        "hermes",
        "Let me see."
        + "".join(f'\n<tool_call>\n{{"name": "{name}", "arguments": {said}}}\n</tool_call>' for name, said in _TWO),
        text="Let me see.",
    ),
    "gemma4": Family(
        _GEMMA4,
        (*(f"<|{name}>" for name in _GEMMA4_PAIRS), *(f"<{name}|>" for name in _GEMMA4_PAIRS), '<|"|>', "<|think|>"),
        (),
        "gemma4",
        '<|channel>thought\nIs 2 < 3? Yes.\n<channel|>Let me see.<|tool_call>call:weather{city:<|"|>Pa"ris<|"|>}'
        "<tool_call|><|tool_call>call:clock{}<tool_call|>",
        text="Let me see.",
        reasoning="Is 2 < 3? Yes.",
    ),
    "gpt_oss": Family(
        _HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
        (),
        "harmony",
        "<|channel|>analysis<|message|>Is 2 < 3? Yes.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{_ARGUMENTS}<|call|>",
        calls=1,
        text="Let me see.",
        reasoning="Is 2 < 3? Yes.",
    ),
    "deepseek_r1": Family(
        _deepseek(
            f"'{_CALL}function{_SEP}' + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + "
            f"'\\n```{_CALL_END}'",
            "\\n",
            "<think>\n",
        ),
        (_EOS,),
        _DEEPSEEK_MARKS,
        "deepseek",
        f"Is 2 < 3? Yes.\n</think>\n\nLet me see.{_CALLS}"
        + "\n".join(f"{_CALL}function{_SEP}{name}\n```json\n{said}\n```{_CALL_END}" for name, said in _TWO)
        + _CALLS_END,
        text="Let me see.",
        reasoning="Is 2 < 3? Yes.",
    ),
    "deepseek_31": Family(
        _deepseek(
            f"'{_CALL}' + call['function']['name'] + '{_SEP}' + call['function']['arguments'] + '{_CALL_END}'",
            "",
            "{{ '<think>' if thinking is defined and thinking else '</think>' }}",
        ),
        (_EOS,),
        _DEEPSEEK_MARKS,
        "deepseek-3.1",
        f"Let me see.{_CALLS}" + "".join(f"{_CALL}{name}{_SEP}{said}{_CALL_END}" for name, said in _TWO) + _CALLS_END,
        text="Let me see.",
    ),
}
