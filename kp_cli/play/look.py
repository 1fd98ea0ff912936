"""The HTML of the page. Everything that people, files and models wrote goes through `escape`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from kp_cli.play.world import Answer, Document, Way
from kp_core.engines.explain import Explanation, Row
from kp_core.engines.session import Session

__all__ = ["answers_html", "documents_html", "empty_html", "head_html", "plan_html", "problem_html"]

_ABOUT: Mapping[Way, tuple[str, str]] = {
    "packs": ("Packs", "a handle is sent, its KV is read"),
    "text": ("Text", "the documents are sent, all is computed"),
}
_SOURCES = {
    "tree": "in memory",
    "pack": "from a pack",
    "kept": "kept",
    "composed": "approximate",
    "steered": "steered",
    "computed": "computed",
}
_FIRST, _LAST = 90, 30
"""Numbers of first and last tokens shown of a long region."""


def head_html(session: Session, address: str = "") -> str:
    """The top of the page: what this is, which model answers, and its server's address if it has one."""
    location = f"answered by {address}" if address else "runs on this machine, talks to no other"
    intro = escape(f"{session.name} · {session.max_positions:,} positions · {location}")
    return (
        '<div class="kp-head"><h1>Knowledge Packs <span>playground</span></h1>'
        f"<p>Documents are compiled once into KV caches; the model reads those, not the text.</p><p>{intro}</p></div>"
    )


def problem_html(message: str) -> str:
    """An error in a box that screen readers announce."""
    return f'<div class="kp-problem" role="alert">{escape(message)}</div>'


def empty_html(message: str) -> str:
    """A placeholder for what will stand here."""
    return f'<div class="kp-empty">{escape(message)}</div>'


def documents_html(documents: Iterable[Document], used: Iterable[str] = ()) -> str:
    """The documents with their tokens and bytes. Those in `used` were sent with the last question."""
    rows, used_names = list(documents), set(used)
    items = "".join(
        f"<li{' class=kp-used' if row.name in used_names else ''}><b>{escape(row.name)}</b>"
        f"<span>{row.tokens:,} tokens</span><span>{_size(row.kv_bytes)} of KV</span></li>"
        for row in rows
    )
    return f'<div class="kp-docs"><h2>Documents</h2>{f"<ul>{items}</ul>" if rows else empty_html("None yet.")}</div>'


def answers_html(answers: Mapping[Way, Answer], badge: str = "") -> str:
    """Both answers side by side, each with the seconds to its first token and its counts."""
    seconds = [answer.generation.usage.ttft_s for answer in answers.values() if answer.generation]
    cards = "".join(_card(way, answers.get(way), max([*seconds, 1e-9]), badge) for way in _ABOUT)
    return f'<div class="kp-duel">{cards}</div><p class="kp-verdict" aria-live="polite">{_verdict(answers)}</p>'


def plan_html(plan: Explanation, token_ids: Sequence[int], session: Session) -> str:
    """The prompt, token by token, coloured by the source of each token's KV."""
    legend = "".join(
        f'<li class="kp-{source}"><i></i>{_SOURCES[source]} <b>{count:,}</b></li>'
        for source, count in plan.counts.items()
    )
    regions = "".join(_region(row, token_ids[row.start : row.stop], session) for row in plan.rows)
    return (
        f'<div class="kp-plan"><h3>What the model reads, and where each token comes from</h3><ul>{legend}</ul>'
        f'<div class="kp-tokens" tabindex="0" role="region" aria-label="Tokens of the prompt">{regions}</div></div>'
    )


def _card(way: Way, answer: Answer | None, slowest: float, badge: str) -> str:
    title, intro = _ABOUT[way]
    mark = f' <em class="kp-badge">{escape(badge)}</em>' if badge and way == "packs" else ""
    head = f'<h3>{title}{mark}</h3><p class="kp-about">{intro}</p>'
    if answer is None:
        wait = '<p class="kp-wait">comes next, so that the two do not share the processor</p>'
        return f'<section class="kp-card kp-way-{way}">{head}{wait}</section>'
    if answer.generation is None:
        text = escape(answer.text) or "reading …"
        return f'<section class="kp-card kp-way-{way}">{head}<p class="kp-answer">{text}</p></section>'
    usage = answer.generation.usage
    counts = {"sent": usage.prompt_tokens, "delivered": usage.pack_tokens, "at hand": usage.reused_tokens}
    counts["computed"] = usage.computed_tokens
    if usage.approximate_tokens:
        counts["approximate"] = usage.approximate_tokens
    cells = "".join(f"<div><dt>{name}</dt><dd>{count:,}</dd></div>" for name, count in counts.items())
    return (
        f'<section class="kp-card kp-way-{way} kp-done">{head}'
        f'<p class="kp-clock"><b>{usage.ttft_s:.2f} s</b> to the first token</p>'
        f'<div class="kp-bar"><i style="width:{100 * usage.ttft_s / slowest:.1f}%"></i></div>'
        f'<p class="kp-answer">{escape(answer.text)}</p><dl>{cells}</dl></section>'
    )


def _verdict(answers: Mapping[Way, Answer]) -> str:
    packs, text = (answers[way].generation if way in answers else None for way in ("packs", "text"))
    if packs is None or text is None:
        return ""
    ratio = text.usage.ttft_s / max(packs.usage.ttft_s, 1e-9)
    pace = f"<b>{ratio:.1f} times</b> sooner" if ratio >= 1 else f"{1 / ratio:.1f} times later"
    sentence = f"The first token came {pace} from packs. "
    if packs.prompt.token_ids != text.prompt.token_ids:
        return f"{sentence}The prompts differ."
    comparison = "the same" if packs.text == text.text else "not the same"
    return f"{sentence}Both read the same {len(text.prompt):,} tokens, and the answers are {comparison}."


def _region(row: Row, ids: Sequence[int], session: Session) -> str:
    if (hidden := len(ids) - _FIRST - _LAST) > 10:
        body = f"{_tokens(ids[:_FIRST], session)}<u>… {hidden:,} more …</u>{_tokens(ids[-_LAST:], session)}"
    else:
        body = _tokens(ids, session)
    label = f"{_SOURCES[row.source]}{f' ({row.method})' if row.method else ''}, {row.tokens:,} tokens"
    return f'<span class="kp-run kp-{row.source}"><small>{escape(label)}</small>{body}</span>'


def _tokens(ids: Iterable[int], session: Session) -> str:
    pieces = (session.tokenizer.decode([token]).replace("\ufffd", "·").replace("\n", "⏎") for token in ids)
    return "".join(f"<i>{escape(piece)}</i>" for piece in pieces)


def _size(nbytes: int) -> str:
    if not nbytes:
        return "no bytes"  # A server keeps it in memory.
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:,.0f} kB"
