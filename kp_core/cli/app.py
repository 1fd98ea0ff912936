"""All commands in one, and what becomes of their errors."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from kp_core.cli import asking, checking, doctor, editing, knowledge, looking, packet, serving, steer
from kp_core.cli.shared import ERRORS, WrongError, plain
from kp_core.errors import KnowledgePackError

__all__ = ["app", "run"]

# Typer brings a Click of its own in some releases, and does not name this class.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="kp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    epilog="Exit codes: 0 done · 1 error · 2 bad usage · 3 `verify` or `doctor` found a fault · 130 interrupted",
)
app.command()(knowledge.build)
app.command()(knowledge.add)
app.command()(editing.edit)
app.command()(knowledge.remove)
app.command()(knowledge.gc)
app.command()(knowledge.search)
app.command()(asking.ask)
app.command()(asking.chat)
app.command()(looking.inspect)
app.command()(checking.verify)
app.command()(doctor.doctor)
app.command()(serving.serve)
app.command()(serving.key)
app.add_typer(steer.steer)
app.add_typer(packet.packet)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


@app.callback()
def _top(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and everything that is logged.")] = False,
) -> None:
    """Collections of facts, found by meaning and handed to open-weight models as compiled packs."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    logging.getLogger().handlers[0].setFormatter(_Plain())
    if debug:
        logging.getLogger("kp_core").setLevel(logging.DEBUG)
    else:
        warnings.simplefilter("ignore")
        # What is wrong with a file, we say in one sentence.
        logging.getLogger("pypdf").setLevel(logging.CRITICAL)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in given:
        # It counts wherever it stands.
        given = ["--debug", *(argument for argument in given if argument != "--debug")]
    # Of the libraries below: a bar for every load of a model that takes a second.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        code = app(given, standalone_mode=False, prog_name="kp")
        sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write("Interrupted. What was reported as done is stored; a build goes on from there.\n")
        return 130
    except _UsageError as error:
        error.show()
        return error.exit_code
    except WrongError:
        return 3
    except BrokenPipeError:
        # Who read it has enough (`kp search … | head`); what is still in the buffer must not fail at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KnowledgePackError, *ERRORS) as error:
        if "--debug" in given:
            raise
        message = str(error) if isinstance(error, KnowledgePackError) else f"{type(error).__name__}: {error}"
        message = plain(" ".join(message.splitlines()))
        if "--json" in given:
            sys.stdout.write(json.dumps({"error": type(error).__name__, "message": message}) + "\n")
        sys.stderr.write(f"kp: {message}\n")
        return 1
    return code if isinstance(code, int) else 0
