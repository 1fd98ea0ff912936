"""What the demo prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cookbooks.demo.corpus import Corpus
from cookbooks.demo.ways import MAX_TOKENS, PROMPT, Result, Turn, World, join

__all__ = ["show_example", "show_results", "show_turns"]


def show_example(console: Console, world: World, text: Result, packs: Result) -> None:
    """The first question that text answers rightly (else the first), as it was asked by text and by packs."""
    questions = world.corpus.questions
    rights = [question.is_answered_by(reply) for question, reply in zip(questions, text.texts, strict=True)]
    chosen = rights.index(True) if True in rights else 0
    question = questions[chosen].text
    documents = world.facts.invoke(question)
    panels = []
    for title, result, retrieved in (
        ("text in the prompt", text, "\n".join(document.metadata["text"] for document in documents)),
        ("handles in the prompt", packs, join(documents)),
    ):
        messages = PROMPT.format_messages(context=retrieved, question=question)
        reply = result.replies[chosen]
        sent = reply.response_metadata["kp"]["prompt_tokens"]
        body = Text(messages[-1].text)
        body.append(f"\n\n{reply.text}", style="bold green")
        panels.append(Panel(body, title=f"{title}: {sent} tokens", width=(console.width - 1) // 2))
    console.print(Columns(panels))


def show_results(console: Console, corpus: Corpus, results: Sequence[Result]) -> None:
    """The first table."""
    count = len(corpus.questions)
    table = Table(title=f"{count} questions about {corpus.name}", title_style="bold", caption_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("right", "same", "sent", "by\npack", "computed", "first\ntoken", "sooner"):
        table.add_column(heading, justify="right")
    by_name = {result.way.name: result for result in results}
    for result in results:
        asked = len(result.replies)
        other = by_name.get(result.way.like)
        same = sooner = ""
        if other is not None:
            agreed = sum(one == two for one, two in zip(result.texts, other.texts, strict=True))
            same = f"{agreed}/{asked}"
        time = f"{result.median('ttft_s'):.2f} s"
        if other is not None:
            sooner = f"{other.median('ttft_s') / result.median('ttft_s'):.1f} x"
        counts = [f"{result.median(name):.0f}" for name in ("prompt_tokens", "pack_tokens", "computed_tokens")]
        table.add_row(result.way.name, f"{result.right / asked:.0%}", same, *counts, time, sooner)
        if result.way.like:
            table.add_section()
    table.caption = (
        f"Right: the reply (greedy, at most {MAX_TOKENS} tokens) contains the answer or an alias as whole words, in "
        "any case. Same: answers identical to those from text. Sent, by pack, computed: tokens, medians per question. "
        "First token: median time to it; sooner: than with text, in medians. Text and packs run on the same "
        "engine, every question with nothing in its memory; what packs bring is read from disk. Of several packs in a "
        "prompt the first is used as stored, and the others are computed once behind it: single facts make the prompt "
        "short, a whole bank under one handle makes it short and the answer soon. Banks answer every second question."
    )
    console.print(table)


def show_turns(console: Console, turns: Sequence[Turn]) -> None:
    """The second table."""
    table = Table(title="An agent that searches again and again", title_style="bold", caption_justify="left")
    table.add_column("searches", justify="right")
    for heading in ("sent", "computed", "first token"):
        for way in ("text", "packs"):
            table.add_column(f"{heading}\n{way}", justify="right")
    for turn in turns:
        text, packs = turn.text.response_metadata["kp"], turn.packs.response_metadata["kp"]
        table.add_row(
            str(turn.searches),
            *(str(usage["prompt_tokens"]) for usage in (text, packs)),
            *(str(usage["computed_tokens"]) for usage in (text, packs)),
            *(f"{usage['ttft_s']:.2f} s" for usage in (text, packs)),
        )
    table.caption = (
        "Each search brings a bank of facts; then a question is asked. Text stands in messages, packs as memory at the "
        'head of the system message (placement="system"). Both agents keep the engine\'s memory from turn to turn, so '
        "both compute only what is new; the prompt that the pack agent sends does not grow."
    )
    console.print(table)
