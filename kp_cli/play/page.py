"""The page of the playground: its elements, what they do, and its server on this machine alone.

Only this module imports gradio. It must turn off gradio's analytics before the import. What people, files and models
wrote stands only in elements that show plain text.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import gradio as gr
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from kp_cli.output import ERRORS, message_of
from kp_cli.play.world import Way, World
from kp_core import Generation
from kp_core.errors import ModelError
from kp_core.session.explain import Explanation

_HOST = "127.0.0.1"
_OWN_HOSTS = {_HOST, "localhost"}
_UPLOAD = "20mb"
_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Helvetica Neue", "sans-serif"]
_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
# White text on the theme's own teal has too little contrast.
_BUTTONS = {f"button_primary_background_fill{way}": "#0b6b68" for way in ("", "_dark", "_hover", "_hover_dark")}
_FIRST, _LAST = 90, 30  # Numbers of first and last tokens shown of a long region.
_SOURCES = {
    "tree": ("in memory", "#1d8a4e"),
    "pack": ("from a pack", "#2b7fd0"),
    "kept": ("kept", "#5b6fd8"),
    "composed": ("approximate", "#8a5cc7"),
    "computed": ("computed", "#d08a1d"),
}
# The model computes one thing at a time, for all visitors.
_ONE: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "show_progress": "hidden"}
_ONE["api_visibility"] = "private"


def _own_requests(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Serve only requests that this page or a person made: refuse other origins and other host names."""

    async def serve_own(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - of ASGI
        if scope["type"] in ("http", "websocket"):
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get("host", ""), headers.get("origin")
            if urlsplit(f"//{host}").hostname not in _OWN_HOSTS or origin not in (None, f"http://{host}"):
                await PlainTextResponse("The playground answers its own page alone.", 403)(scope, receive, send)
                return
        await app(scope, receive, send)

    return serve_own


def serve(world: World, port: int | None = None, questions: Sequence[str] = ()) -> gr.Blocks:
    """Open the page on this machine, with examples of questions. Raises `ModelError` if no port is free."""
    # Warm up: the first answer of a process is slow, and the first question's packs would pay for it.
    world.session.generate("Hello", max_tokens=1, reuse=False)
    page = make_page(world, questions)
    # Gradio checks whether its server answers; this must not go through a proxy.
    os.environ["no_proxy"] = f"{os.environ.get('no_proxy') or os.environ.get('NO_PROXY', '')},{_HOST}".strip(",")
    try:
        page.launch(
            server_name=_HOST,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            max_file_size=_UPLOAD,
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            theme=gr.themes.Base(primary_hue="teal", neutral_hue="slate", font=_FONTS, font_mono=_MONO).set(**_BUTTONS),
            app_kwargs={"middleware": [Middleware(_own_requests)]},
        )
    except OSError as error:
        reason = f"Port {port} cannot be used" if port else "No port from 7860 to 7959 is free"
        raise ModelError(f"{reason}; give another one with --port.") from error
    return page


def make_page(world: World, questions: Sequence[str] = ()) -> gr.Blocks:
    """The page over `world`, which all visitors share."""
    page: gr.Blocks
    location = f"answered by {world.address}" if world.address else "runs on this machine, talks to no other"
    with gr.Blocks(title="Knowledge Packs playground", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown("# Knowledge Packs playground\nDocuments are compiled once into KV caches; the model reads those.")
        gr.Text(f"{world.session.name}, {world.session.max_positions:,} positions, {location}", label="Model")
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                documents = _documents(world)
            with gr.Column(scale=3, min_width=300):
                _asking(world, questions)
        page.load(lambda: _rows(world), None, documents)
    return page


def _documents(world: World) -> gr.Dataframe:
    headers = ["Document", "Tokens", "KV"]
    listing = gr.Dataframe(headers=headers, wrap=True, interactive=False, elem_id="kp-documents")
    with gr.Accordion("Add your own", open=False):
        text = gr.Textbox(label="Paste text", lines=4, max_lines=8, max_length=400_000)
        label = "Or drop files: text, Markdown, PDF, Word, HTML, CSV, JSON lines"
        files = gr.File(label=label, file_count="multiple", height=120)
        add = gr.Button("Compile", variant="primary")

    def adding(pasted: str, dropped: list[str] | None) -> Iterator[dict[Any, Any]]:
        try:
            with _shown_errors():
                earlier = {document.file for document in world.documents.values()}
                added = [world.add(list(map(Path, dropped)))] if dropped else []
                for document in chain(*added, world.paste(pasted) if pasted.strip() or not dropped else ()):
                    if document.file in earlier:
                        gr.Info(f"{document.file} takes the place of an earlier one of this name.")
                        earlier.remove(document.file)
                    yield {listing: _rows(world)}
                yield {text: ""}
            yield {listing: _rows(world), files: None}
        finally:
            for name in dropped or ():
                Path(name).unlink(missing_ok=True)

    add.click(adding, [text, files], [listing, text, files], **_ONE)
    return listing


def _asking(world: World, questions: Sequence[str]) -> None:
    with gr.Row(equal_height=True):
        question = gr.Textbox(*questions[:1], label="Question", max_length=4000, scale=6, min_width=260)
        ask_button = gr.Button("Ask", variant="primary", min_width=90)
        stop = gr.Button("Stop", min_width=90)
    if questions:
        gr.Examples([[example] for example in questions], question, label="Questions about the sample")
    with gr.Accordion("How it is sent", open=False):
        k = gr.Slider(1, 4, value=1, step=1, label="Documents sent")
        composers = [
            ("all, exact", "exact"),
            ("select: those that the question is about, exact", "select"),
            ("all, splice (approximate)", "splice"),
        ]
        composer = gr.Radio(composers, value="exact", label="How several packs are read")
    answers: dict[Way, gr.Textbox] = {}
    costs: dict[Way, gr.Markdown] = {}
    with gr.Row():
        for way in ("packs", "text"):
            with gr.Column(min_width=290):
                answers[way] = gr.Textbox(label=f"Answer from {way}", lines=3)
                costs[way] = gr.Markdown(elem_id=f"kp-cost-{way}")
    verdict = gr.Markdown(elem_id="kp-verdict")
    plan = gr.HighlightedText(
        label="What the model reads, and where each token comes from",
        show_legend=True,
        show_inline_category=False,
        color_map=dict(_SOURCES.values()),
        elem_id="kp-plan",
    )
    outputs = [*answers.values(), *costs.values(), verdict, plan]

    def asking(text: str, count: int, composed_by: str) -> Iterator[dict[Any, Any]]:
        yield dict.fromkeys(outputs[:-1], "") | {plan: []}
        with _shown_errors():
            requests, explanation = world.ask(text, int(count), composer=composed_by)
            generations: dict[Way, Generation] = {}
            for way, request in requests.items():
                so_far = ""
                with closing(world.session.stream(**request)) as stream:
                    for piece in stream:
                        so_far += piece
                        yield {answers[way]: so_far}
                    generations[way] = stream.result()
                yield {answers[way]: generations[way].text, costs[way]: _cost(generations[way])}
                # Only a server knows which KV it has.
                if way == "packs" and not world.address:
                    yield {plan: _coloured(explanation, generations[way], world.session.tokenizer)}
            yield {verdict: _verdict(generations["packs"], generations["text"])}

    inputs = [question, k, composer]
    events: list[Any] = [trigger(asking, inputs, outputs, **_ONE) for trigger in (ask_button.click, question.submit)]
    stop.click(None, cancels=events)


def _rows(world: World) -> list[list[str]]:
    return [[row.name, f"{row.tokens:,}", f"{row.kv_bytes / 1e6:,.1f} MB"] for row in world.documents.values()]


def _cost(generation: Generation) -> str:
    usage = generation.usage
    approximate = f" · approximate {usage.approximate_tokens:,}" if usage.approximate_tokens else ""
    return (
        f"## {usage.ttft_s:.2f} s\nto the first token. Tokens: sent {usage.prompt_tokens:,} · delivered "
        f"{usage.pack_tokens:,} · at hand {usage.reused_tokens:,} · computed {usage.computed_tokens:,}{approximate}"
    )


def _verdict(packs: Generation, text: Generation) -> str:
    if not packs.usage.computed_tokens:
        return "All of this prompt was in memory, since it was asked before. Ask something else to compare."
    ratio = text.usage.ttft_s / max(packs.usage.ttft_s, 1e-9)
    pace = f"**{ratio:.1f} times** sooner" if ratio >= 1 else f"{1 / ratio:.1f} times later"
    if packs.prompt.token_ids == text.prompt.token_ids:
        comparison = "the same" if packs.text == text.text else "not the same"
        read = f"Both read the same {len(text.prompt):,} tokens, and the answers are {comparison}."
    else:
        unread = packs.usage.unread_packs
        documents = "1 document was" if unread == 1 else f"{unread} documents were"
        read = f"The prompts differ{f': {documents} not read' if unread else ''}."
    return f"The first token came {pace} from packs. {read}"


def _coloured(plan: Explanation, generation: Generation, tokenizer: Any) -> list[tuple[str, str | None]]:  # noqa: ANN401
    """The tokens of a prompt with the sources of their KV. The middle of a long region is left out."""
    tokens: list[tuple[str, str | None]] = []
    for row in plan.rows:
        source, _ = _SOURCES[row.source]
        ids = generation.prompt.token_ids[row.start : row.stop]
        pieces: list[tuple[str, str | None]]
        pieces = [(tokenizer.decode([token]).replace("\ufffd", "·").replace("\n", "⏎"), source) for token in ids]
        if (hidden := len(pieces) - _FIRST - _LAST) > 10:
            pieces[_FIRST:-_LAST] = [(f" … {hidden:,} more … ", None)]
        tokens += pieces
    return tokens


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Show errors to the visitor."""
    try:
        yield
    except ERRORS as error:
        gr.Warning(escape(message_of(error)), duration=None)
