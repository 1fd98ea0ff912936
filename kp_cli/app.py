"""All commands, and the handling of their errors."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from kp_cli import INTERRUPTED, importing, waiting
from kp_cli.output import ERRORS, message_of, plain, print_json, warn

# Some releases of Typer bring their own Click, and do not export this class.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

_COMMANDS = {
    "demo": ("demo", "See in a minute what packs do, with the bundled model."),
    "build": ("knowledge", "Make a collection of facts and files, add to it, or go on with an interrupted build."),
    "edit": ("knowledge", "Correct what a fact or a pack says, by a line behind it."),
    "remove": ("knowledge", "Remove facts, and packs that no fact uses then."),
    "search": ("searching", "Find the facts nearest to a question."),
    "ask": ("asking", "Answer from a collection: one question, or one after another."),
    "play": ("play", "A page in the browser: packs and text side by side."),
    "status": ("checking", "What a collection, store or entry holds."),
    "verify": ("checking", "Check that a collection or a store of packs can be trusted."),
    "doctor": ("doctor", "Machine, packages, whether a model is supported, and where storing KV pays."),
    "serve": ("serving", "Serve a model with its packs to a team, on vLLM."),
    "steer": ("steer", "Change how a model speaks, without a word in the prompt."),
    "calibrate": ("composing", "Which composers answer as well as the text, and how much sooner."),
    "packet": ("composing", "Soft tokens around packs: train them, and see what they are worth."),
}
"""Each command: its module, which is imported on call, as some take seconds; and its help."""

_NO_VACUUM = "`chroma vacuum --path COLLECTION` is Chroma's own command"
_KEYS = "keys are in the variable KP_API_KEYS (`kp serve --help`)"
_RENDERED = "no model renders packs there; `kp ask --explain` shows a prompt with its packs"
_SERVER = (
    "a token is in Chroma's own variables (CHROMA_CLIENT_AUTH_PROVIDER, CHROMA_CLIENT_AUTH_CREDENTIALS), a tenant or "
    "database of a server in `ChromaFactStore(URL, tenant=..., database=...)`"
)
_GONE = {
    "add": "use `kp build COLLECTION [FILE...] [--fact TEXT]`",
    "ask --order": "packs stand as they are found",
    "build --dataset": "write its rows as JSON lines, `datasets.load_dataset(NAME, split='train')"
    ".to_json('rows.jsonl')`, and build from rows.jsonl",
    "chat": "use `kp ask COLLECTION`, without a question",
    **dict.fromkeys(("up", "down"), "`kp serve`, `kp play` or a Python process keeps a model loaded"),
    "doctor MODEL": "use `kp doctor --model MODEL`",
    "gc": "use `kp remove COLLECTION --unused`",
    "inspect": "use `kp status PATH`",
    **dict.fromkeys(("key", "serve --keys", "serve --new-key", "serve --write"), _KEYS),
    "mcp": "give your agent a search tool (docs/agents.md), or a server of `kp serve --facts`",
    "remove --vacuum": _NO_VACUUM,
    "remove --no-vacuum": _NO_VACUUM,
    **dict.fromkeys(("size", "status --cost"), "`kp build COLLECTION --compile` says it before it compiles"),
    "status --watch": "use `watch kp status PATH`",
    **dict.fromkeys(("verify --template", "verify --no-template", "verify --model"), _RENDERED),
    **{
        f"{command} --{option}": _SERVER
        for command in ("build", "edit", "remove", "search", "ask", "status", "verify")
        for option in ("tenant", "database", "header")
    },
    **dict.fromkeys(("ask --lexical", "search --lexical"), "a question is compared by meaning alone"),
    "steer calibrate": "use `python -m benchmarks.steering_range FILE` of the repository",
}
"""Commands and options of earlier releases, and what to use instead."""

_GUIDE = """\
Knowledge Packs: facts found by meaning, for a model that has read them.

  kp demo                    see it in a minute; nothing to prepare
  kp build notes FOLDER      a collection of files: PDF, Word, Markdown, HTML
  kp ask notes "QUESTION"    an answer from it; asked again, its packs are ready
  kp status notes            what it holds, and what is compiled
  kp --help                  all commands\
"""


class _Late(TyperGroup):
    """Commands whose modules are imported on call."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - of Click, which Typer hides
        """See `TyperGroup.resolve_command`."""
        command, *words = map(str, args)
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        positional = [words[0], "MODEL"] if words and not words[0].startswith("-") else []
        for gone in (command, *(f"{command} {word}" for word in (*positional, *options))):
            if gone in _GONE:
                raise typer.BadParameter(f"`kp {gone}` is gone in 0.3; {_GONE[gone]}.")
        name, _, arguments = super().resolve_command(ctx, args)
        return name, None if name is None else load_command(name), arguments

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - of Click, which Typer hides
        """See `TyperGroup.invoke`. Newer releases of Typer would end at an interrupt without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise typer.Abort from interrupt


@functools.cache
def load_command(name: str) -> Any:  # noqa: ANN401 - a command of Click
    """A command with its options."""
    with importing(), waiting("Loading libraries"):
        command = getattr(importlib.import_module(f"kp_cli.{_COMMANDS[name][0]}"), name)
    if isinstance(command, typer.Typer):
        return get_group(command)
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    single.command(name)(command)
    return get_command(single)


app = typer.Typer(
    name="kp",
    cls=_Late,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    epilog="Exit codes: 0 done · 1 error · 2 bad usage · 3 `verify` or `doctor` found a fault · 130 interrupted",
)
for _name, (_, _about) in _COMMANDS.items():
    app.command(_name, help=_about)(lambda: None)


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warn(self.format(record))


@app.callback()
def _top(
    context: typer.Context,
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and everything that is logged.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Collections of facts, found by meaning and handed to open-weight models as compiled packs."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Warnings()], force=True, format="%(message)s")
    if debug:
        logging.getLogger("kp_core").setLevel(logging.DEBUG)
    else:
        warnings.simplefilter("ignore")
        # Our own error says in one sentence what is wrong with a file.
        logging.getLogger("pdfminer").setLevel(logging.CRITICAL)
    if version:
        typer.echo(importlib.metadata.version("knowledge-packs"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        from kp_core.banks.chroma import is_fact_store

        collections = sorted(folder.name for folder in Path().iterdir() if is_fact_store(folder))
        typer.echo(_GUIDE + (f"\n\nCollections here: {plain(', '.join(collections))}" if collections else ""))


def _drop_output() -> None:
    """Leave the rest of the buffer out, which must not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(error: Exception, *, as_json: bool) -> None:
    """Print an error in one line, and as JSON."""
    message = plain(" ".join(message_of(error).splitlines()))
    try:
        if as_json:
            print_json({"error": type(error).__name__, "message": message})
        typer.echo(nl=False)  # Write what is left, if there is an output.
    except OSError:
        _drop_output()
    warn(f"kp: {message}")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    argv = list(map(str, sys.argv[1:] if arguments is None else arguments))
    if "--debug" in argv:
        # `--debug` counts at any place.
        argv = ["--debug", *(argument for argument in argv if argument != "--debug")]
    # Otherwise libraries show a progress bar for each load of a model.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character shows a replacement; it must not fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = app(argv, standalone_mode=False, prog_name="kp")
        sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write(INTERRUPTED)
        return 130
    except _UsageError as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        _drop_output()  # The reader has closed the pipe (`kp search … | head`).
        return 1
    except ERRORS as error:
        if "--debug" in argv:
            raise
        _show(error, as_json="--json" in argv)
        return 1
    return code if isinstance(code, int) else 0
