"""Proof that a prompt is what its text says, and what each pack in it delivers."""

from __future__ import annotations

from dataclasses import dataclass

from kp_core.errors import TemplateError
from kp_core.packs.pack import common_length
from kp_core.prompt.encoding import Encoded
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["SpanCheck", "checked"]


@dataclass(frozen=True)
class SpanCheck:
    """What `ChatTemplate.verify` found about one pack: how much of its text its tokens deliver."""

    handle: str
    tokens: int
    delivered: str
    """Characters delivered as KV."""
    as_text: str
    """Characters at the edges that share a token with what is around the pack, and are prefilled with it."""


def checked(prompt: Prompt, encoded: Encoded) -> tuple[SpanCheck, ...]:
    """What each pack of `prompt` delivers; raises `TemplateError` at the first token that `encoded` has otherwise."""
    got, expected = prompt.token_ids, encoded.ids
    if (at := common_length(got, expected)) < min(len(got), len(expected)):
        raise TemplateError(f"Token {at} of the prompt is {got[at]}; the single pass gives {expected[at]}.")
    if len(got) != len(expected):
        raise TemplateError(f"The prompt has {len(got)} tokens; the single pass gives {len(expected)}.")
    return tuple(_check(span, encoded) for span in prompt.spans)


def _check(span: Span, encoded: Encoded) -> SpanCheck:
    delivered = encoded.text_of(span.start, span.stop)
    before, found, after = span.reference.text.partition(delivered)
    if not found:
        raise TemplateError(f"The span of {span.handle} holds {delivered[:40]!r}, which is not in the pack's text.")
    return SpanCheck(span.handle, len(span), delivered, before + after)
