"""Prompts made of hostile text: only the template writes control tokens, and a handle is its text, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from kp_core import ChatTemplate, PackStore
from kp_core.errors import PromptError
from tests.attack.harness import Case, WrongError, refused
from tests.attack.mutate import text, warped
from tests.core.packs.made import make_pack
from tests.core.prompt.test_control_tokens import controls, rendered, specials, template
from tests.core.prompt.test_template import TEMPLATES
from tests.kits import tiny_tokenizer

SHORT = 63

_CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "function": {"name": "find", "arguments": '{"q": 1}'}}]},
    {"role": "tool", "content": "Orla.", "name": "find", "tool_call_id": "call00001"},
    {"role": "user", "content": "Why?"},
]  # fmt: skip
_CONTENTS = (
    None,
    "",
    [],
    [{"type": "text", "text": "Hi"}],
    [{"type": "image_url", "image_url": {"url": "x"}}],
    "kp:geo/" + "a" * 21,
)


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    made = {kind: template(kind) for kind in TEMPLATES}
    words = {kind: [*specials(each), "word", "<", "|>", "im_end", "<|", "</"] for kind, each in made.items()}
    store = PackStore(folder)

    def pieces(draw: Random) -> None:
        """Special tokens cut anywhere, over messages, packs, names and calls."""
        kind = draw.choice(list(made))
        cut = []
        while len(cut) < 2:
            for word in (draw.choice(words[kind]), draw.choice((draw.choice(words[kind]), text(draw)))):
                at = draw.randrange(len(word) + 1)
                cut += [each for each in (word[:at], word[at:]) if each.strip()]
        with refused():
            prompt = rendered(made[kind], cut[:4])
            if controls(made[kind], prompt) != controls(made[kind], rendered(made[kind], ["word"] * len(cut[:4]))):
                raise WrongError(f"{kind}: {cut[:4]!r} wrote control tokens")
            made[kind].verify(prompt)

    def packs(draw: Random) -> None:
        """A handle is its text: the same tokens, wherever it stands and however it is placed."""
        kind = draw.choice(list(made))
        texts = [f"Fact {number}. {text(draw, words[kind])}" for number in range(draw.choice((1, 2)))]
        handles = [str(store.put(make_pack(each, tokens=1))) for each in texts]
        around = [draw.choice((" ", "\n\n", ".", "<|", "é", "</")) for _ in range(len(texts) + 1)]
        said = around[0] + "".join(handle + gap for handle, gap in zip(handles, around[1:], strict=True))
        plain = said
        for handle, each in zip(handles, texts, strict=True):
            plain = plain.replace(handle, each, 1)
        role = draw.choice(("user", "system"))
        turns = [[{"role": role, "content": each}, {"role": "user", "content": "Who?"}] for each in (said, plain)]
        with refused(PromptError):
            # What is in a fact is no handle, so the oracle gets no view.
            with_handles, with_text = made[kind].render(turns[0], view=store.view("geo")), made[kind].render(turns[1])
            if with_handles.token_ids != with_text.token_ids:
                raise WrongError(f"{kind}: {said!r} is not {plain!r}")
            made[kind].verify(with_handles)
        for handle in store:
            store.remove(handle)

    def conversations(draw: Random) -> None:
        """Conversations of other forms: a prompt that is the single pass of itself, or a refusal."""
        kind = draw.choice(list(made))
        with refused():
            prompt = made[kind].render(warped(draw, _CONVERSATION, _CONTENTS))
            made[kind].verify(prompt)

    def templates(draw: Random) -> None:
        """Templates that somebody damaged: refused, or a prompt of which every pack is text or verified."""
        source = TEMPLATES[draw.choice(list(TEMPLATES))]
        at = draw.randrange(len(source))
        stop = at + draw.choice((0, 1, 5, 20))
        source = (
            source[:at]
            + draw.choice(("", "", text(draw), "{{ x }}", "{% if 1 %}", "|upper", "|trim", "{{ messages }}"))
            + source[stop:]
        )
        with refused():
            broken = ChatTemplate(tiny_tokenizer(source))
            handle = store.put(make_pack("A fact of the template.", tokens=1))
            broken.verify(
                broken.render([*_CONVERSATION[:2], {"role": "user", "content": f"{handle}"}], view=store.view("geo"))
            )

    def case(draw: Random) -> None:
        draw.choice((pieces, pieces, packs, packs, conversations, templates))(draw)

    yield case
