"""The HTML of the page. Everything that people, files and models wrote goes through `escape`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from kp_cli.play.world import Answer, Document, Step, Way
from kp_core.engines.explain import Explanation, Row
from kp_core.engines.session import Session

__all__ = ["answers_html", "documents_html", "empty_html", "head_html", "plan_html", "problem_html", "steps_html"]

_ABOUT: Mapping[Way, tuple[str, str]] = {
    "packs": ("Packs", "a handle is sent, its KV is read"),
    "text": ("Text", "the documents are sent, all is computed"),
}
SOURCES = {
    "tree": ("in memory", "KV that an earlier request left in memory"),
    "pack": ("from a pack", "KV of a compiled pack, read from the disk"),
    "kept": ("kept", "KV that was computed behind other packs before, read from the disk"),
    "composed": ("approximate", "KV of packs, moved here by an approximate composer"),
    "steered": ("steered", "KV that a steering alters"),
    "computed": ("computed", "tokens that a forward pass has to read"),
}
_ENDS = (90, 30)
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
    total = f"{len(rows)} pack{'s' * (len(rows) != 1)}, {_size(sum(row.kv_bytes for row in rows))} of KV on disk"
    listing = f"<ul>{items}</ul><p>{total}</p>" if rows else empty_html("None yet.")
    return f'<div class="kp-docs"><h2>Documents</h2>{listing}</div>'


def answers_html(answers: Sequence[Answer], kv_bytes: int, badge: str = "") -> str:
    """Both answers side by side, each with its clock and counts. `kv_bytes` is the size of the packs' KV on disk."""
    slowest = max([answer.clock for answer in answers] + [1e-9])
    by_way = {answer.way: answer for answer in answers}
    cards = "".join(_card(way, by_way.get(way), slowest, kv_bytes, badge) for way in _ABOUT)
    return f'<div class="kp-duel">{cards}</div><p class="kp-verdict" aria-live="polite">{_verdict(by_way)}</p>'


def plan_html(plan: Explanation, token_ids: Sequence[int], session: Session) -> str:
    """The prompt, token by token, coloured by the source of each token's KV."""
    legend = "".join(
        f'<li class="kp-{source}" title="{SOURCES[source][1]}"><i></i>{SOURCES[source][0]} <b>{count:,}</b></li>'
        for source, count in plan.counts.items()
    )
    regions = "".join(_region(row, token_ids, session) for row in plan.rows)
    return (
        f'<div class="kp-plan"><h3>What the model reads, and where each token comes from</h3><ul>{legend}</ul>'
        f'<div class="kp-tokens" tabindex="0" role="region" aria-label="Tokens of the prompt">{regions}</div></div>'
    )


def steps_html(steps: Sequence[Step], task: str, running: str | None = None) -> str:
    """The steps of an agent, and the length of its prompt at each, with handles and as text."""
    most_tokens = max([step.text_tokens for step in steps] + [1])
    rows = "".join(_step(step, most_tokens) for step in steps)
    if running is not None:
        rows += f'<li class="kp-step kp-running"><b>{len(steps) + 1}</b><p>{escape(running) or "reading …"}</p></li>'
    return f'<div class="kp-agent"><h3>{escape(task)}</h3><ol>{rows}</ol></div>'


def _card(way: Way, answer: Answer | None, slowest: float, kv_bytes: int, badge: str) -> str:
    title, intro = _ABOUT[way]
    if answer is None:
        return (
            f'<section class="kp-card kp-way-{way}"><h3>{title}</h3><p class="kp-about">{intro}</p>'
            '<p class="kp-wait">comes next, so that the two do not share the processor</p></section>'
        )
    state = "waiting for the first token" if answer.first is None else "to the first token"
    share = min(100.0, 100 * answer.clock / slowest)
    mark = f' <em class="kp-badge">{escape(badge)}</em>' if badge and way == "packs" else ""
    counts = dict.fromkeys(("sent", "delivered", "at hand", "computed"), "...")
    if answer.generation is not None:
        usage = answer.generation.usage
        token_counts = (usage.prompt_tokens, usage.pack_tokens, usage.reused_tokens, usage.computed_tokens)
        counts = {name: f"{count:,}" for name, count in zip(counts, token_counts, strict=True)}
        if usage.approximate_tokens:
            counts["approximate"] = f"{usage.approximate_tokens:,}"
    counts["KV on disk"] = _size(kv_bytes) if way == "packs" else "none"
    cells = "".join(f"<div><dt>{name}</dt><dd>{count}</dd></div>" for name, count in counts.items())
    css = "" if answer.generation is None else " kp-done"
    return (
        f'<section class="kp-card kp-way-{way}{css}"><h3>{title}{mark}</h3><p class="kp-about">{intro}</p>'
        f'<p class="kp-clock"><b>{answer.clock:.2f} s</b> {state}</p>'
        f'<div class="kp-bar"><i style="width:{share:.1f}%"></i></div>'
        f'<p class="kp-answer">{escape(answer.text)}</p><dl>{cells}</dl></section>'
    )


def _verdict(by_way: Mapping[Way, Answer]) -> str:
    packs, text = (by_way[way].generation if way in by_way else None for way in ("packs", "text"))
    if packs is None or text is None:
        return ""
    ratio = text.usage.ttft_s / max(packs.usage.ttft_s, 1e-9)
    pace = f"<b>{ratio:.1f} times</b> sooner" if ratio >= 1 else f"{1 / ratio:.1f} times later"
    sentence = f"The first token came {pace} from packs. "
    if packs.prompt.token_ids != text.prompt.token_ids:
        return f"{sentence}The prompts differ."
    comparison = "the same" if packs.text == text.text else "not the same"
    return f"{sentence}Both read the same {len(text.prompt):,} tokens, and the answers are {comparison}."


def _region(row: Row, token_ids: Sequence[int], session: Session) -> str:
    ids = list(token_ids[row.start : row.stop])
    first, last = _ENDS
    cut = len(ids) > first + last + 10
    body = _tokens(ids[:first] if cut else ids, session)
    if cut:
        body += f"<u>… {len(ids) - first - last:,} more …</u>{_tokens(ids[-last:], session)}"
    name, hint = SOURCES[row.source]
    label = f"{name}{f' ({row.method})' if row.method else ''}, {row.tokens:,} tokens"
    return f'<span class="kp-run kp-{row.source}" title="{escape(hint)}"><small>{escape(label)}</small>{body}</span>'


def _tokens(ids: Iterable[int], session: Session) -> str:
    pieces = (session.tokenizer.decode([token]).replace("\ufffd", "·").replace("\n", "⏎") for token in ids)
    return "".join(f"<i>{escape(piece)}</i>" for piece in pieces)


def _step(step: Step, most: int) -> str:
    usage = step.generation.usage
    sent_tokens = usage.prompt_tokens
    if step.words:
        action = f"searched for <q>{escape(step.words)}</q>, read <b>{escape(step.found)}</b>"
    else:
        action = f"answered: <b>{escape(step.generation.text)}</b>"
    by_packs = f"{sent_tokens:,} tokens sent, {usage.pack_tokens:,} by packs, {usage.computed_tokens:,} computed"
    bars = "".join(
        f'<div class="kp-bar kp-way-{way}"><i style="width:{100 * count / most:.1f}%"></i><span>{label}</span></div>'
        for way, count, label in (
            ("packs", sent_tokens, by_packs),
            ("text", step.text_tokens, f"{step.text_tokens:,} as text"),
        )
    )
    return f'<li class="kp-step"><b>{step.number}</b><p>{action}</p>{bars}</li>'


def _size(nbytes: int) -> str:
    if not nbytes:
        return "no bytes"  # A server keeps it in memory.
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:,.0f} kB"
