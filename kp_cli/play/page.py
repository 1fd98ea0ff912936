"""The page of the playground: its elements, what they do, and its server on this machine alone.

Only this module imports gradio. It must turn off gradio's analytics before the import.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import gradio as gr
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from kp_cli.play.look import answers_html, documents_html, empty_html, head_html, plan_html, problem_html
from kp_cli.play.world import Answer, Way, World
from kp_cli.shared import ERRORS, message_of
from kp_core.errors import ModelError
from kp_core.steering import preset_about, preset_names

__all__ = ["make_page", "serve"]

_HOST = "127.0.0.1"
_OWN_HOSTS = {_HOST, "localhost"}
_UPLOAD = "20mb"
_CSS = Path(__file__).with_name("page.css")
_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Helvetica Neue", "sans-serif"]
_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
# White text on the theme's own teal has too little contrast.
_BUTTONS = {f"button_primary_background_fill{way}": "#0b6b68" for way in ("", "_dark", "_hover", "_hover_dark")}
_QUESTIONS = ("Who is the harbour master?", "Who is the miller?", "Where is the kelp mill?")
_ASK_FIRST = "Ask something: the answers come side by side, and below them where each token of the prompt comes from."
# The model computes one thing at a time, for all visitors.
_ONE: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}


class _Here:
    """Serves only requests that this page or a person made: it refuses other origins and other host names."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - of ASGI
        if scope["type"] in ("http", "websocket"):
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get("host", ""), headers.get("origin")
            if urlsplit(f"//{host}").hostname not in _OWN_HOSTS or origin not in (None, f"http://{host}"):
                await PlainTextResponse("The playground answers its own page alone.", 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def serve(world: World, port: int | None = None) -> gr.Blocks:
    """Open the page on the loopback interface, by default on the first free port from 7860. `close` ends it.

    Raises `ModelError` for a port that is in use.
    """
    # Warm up: the first answer of a process is slow, and the first question's packs would pay for it.
    world.session.generate("Hello", max_tokens=1, reuse=False)
    page = make_page(world)
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
            css_paths=_CSS,
            app_kwargs={"middleware": [Middleware(_Here)]},
        )
    except OSError as error:
        reason = f"Port {port} cannot be used" if port else "No port from 7860 to 7959 is free"
        raise ModelError(f"{reason}; give another one with --port.") from error
    return page


def make_page(world: World) -> gr.Blocks:
    """The page over `world`, which all visitors share."""
    page: gr.Blocks
    with gr.Blocks(title="Knowledge Packs playground", analytics_enabled=False, fill_width=True) as page:
        _html(head_html(world.session, world.address))
        with gr.Row(elem_classes="kp-body"):
            with gr.Column(scale=1, min_width=300):
                documents = _documents(world)
                with gr.Accordion("Steer the voice", open=False):
                    alpha = gr.Slider(-2, 2, value=0, step=0.25, label="Strength", info="0 is off.")
                    choices = [(f"{name}: {preset_about(name)}", name) for name in preset_names()]
                    style = gr.Dropdown(choices, value="formal", label="Towards, and away from")
            with gr.Column(scale=3, min_width=300):
                _asking(world, documents, style, alpha)
        page.load(lambda: _listed(world), None, documents)
    return page


def _documents(world: World) -> gr.HTML:
    listing = _html()
    with gr.Accordion("Add your own", open=False):
        text = gr.Textbox(
            label="Paste text", lines=4, max_lines=8, max_length=400_000, placeholder="Some paragraphs ..."
        )
        label = "Or drop files: text, Markdown, PDF, Word, HTML, CSV, JSON lines"
        files = gr.File(label=label, file_count="multiple", height=120)
        add = gr.Button("Compile", variant="primary")

    def adding(pasted: str, dropped: list[str] | None) -> Iterator[tuple[Any, ...]]:
        try:
            yield _listed(world, empty_html("Reading ...")), gr.skip(), gr.skip()
            added = [world.add(list(map(Path, dropped)))] if dropped else []
            for document in chain(*added, world.paste(pasted) if pasted.strip() or not dropped else ()):
                status = empty_html(f"Compiled {document.name}: {document.tokens:,} tokens.")
                yield _listed(world, status), gr.skip(), gr.skip()
            yield _listed(world), "", None
        except ERRORS as error:
            yield _listed(world, problem_html(message_of(error))), gr.skip(), None
        finally:
            for name in dropped or ():
                Path(name).unlink(missing_ok=True)

    add.click(adding, [text, files], [listing, text, files], show_progress="hidden", **_ONE)
    return listing


def _asking(world: World, documents: gr.HTML, style: gr.Dropdown, alpha: gr.Slider) -> None:
    with gr.Row(equal_height=True):
        question = gr.Textbox(
            label="Question", value=_QUESTIONS[0], max_length=4000, elem_id="kp-question", scale=6, min_width=260
        )
        ask_button = gr.Button("Ask", variant="primary", min_width=90)
        stop = gr.Button("Stop", min_width=90)
    gr.Examples([[example] for example in _QUESTIONS], question, label="Of the sample")
    with gr.Accordion("How it is sent", open=False):
        k = gr.Slider(1, 4, value=1, step=1, label="Documents sent")
        composer = gr.Radio(
            [("exact", "exact"), ("splice (approximate)", "splice"), ("blend (approximate)", "blend")],
            value="exact",
            label="KV of packs that stand behind other packs",
        )
    board, plan = _html(empty_html(_ASK_FIRST), elem_id="kp-board"), _html()

    def asking(text: str, count: int, composed_by: str, name: str, strength: float) -> Iterator[tuple[Any, ...]]:
        try:
            yield empty_html("Looking for documents ..."), "", gr.skip()
            prepared = world.ask(text, int(count), composer=composed_by, style=name, alpha=strength)
            listed = _listed(world, used=[document.name for document in prepared.documents])
            badge = f"steered: {name} {strength:+g}" if strength else ""
            answers: dict[Way, Answer] = {}
            plan_view = ""
            for way, request in prepared.requests.items():
                with closing(world.watch(way, request)) as answer_stream:
                    for answer in answer_stream:
                        answers[way] = answer
                        # Only a server knows which KV it has.
                        if answer.generation is not None and way == "packs" and not world.address:
                            plan_view = plan_html(prepared.plan, answer.generation.prompt.token_ids, world.session)
                        yield answers_html(answers, badge), plan_view or gr.skip(), listed
        except ERRORS as error:
            yield problem_html(message_of(error)), "", gr.skip()

    inputs = [question, k, composer, style, alpha]
    events: list[Any] = [
        trigger(asking, inputs, [board, plan, documents], show_progress="hidden", **_ONE)
        for trigger in (ask_button.click, question.submit)
    ]
    stop.click(None, cancels=events)


def _html(value: str = "", **about: Any) -> gr.HTML:  # noqa: ANN401 - of `gr.HTML`
    return gr.HTML(value, apply_default_css=False, **about)


def _listed(world: World, note: str = "", used: Iterable[str] = ()) -> str:
    return documents_html(world.documents.values(), used) + note
