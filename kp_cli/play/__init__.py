"""The playground, `kp play`: see in a browser what packs do, before writing a line of code."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Annotated

import typer

from kp_cli import waiting
from kp_cli.options import ModelOptions, existing, spread
from kp_cli.output import console, warn
from kp_core.bundled import needing
from kp_core.errors import FactError, ModelError
from kp_core.progress import bar_of

__all__ = ["play"]


@spread
def play(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Documents to begin with. Default: some about an invented island."),
    ] = None,
    *,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: the first free one from 7860 on.")
    ] = None,
    model: ModelOptions,
) -> None:
    """Try it in a browser: ask, and see answers from packs and from text side by side.

    Only this machine can open the page, and it sends nothing anywhere. Ctrl-C or SIGTERM closes it and deletes its
    documents.
    """
    if port:
        _try(port)  # Before a model is loaded, which may take minutes.
    out = console()
    roots = [existing(path) for path in files or ()]
    paths = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*")))]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kp-play-") as folder:
        # Uploads are deleted with this folder.
        os.environ["GRADIO_TEMP_DIR"] = str(Path(folder) / "uploads")
        with waiting("Loading libraries"), needing("kp play needs gradio", "play"):
            from kp_cli.play.page import serve
            from kp_cli.play.world import QUESTIONS, SAMPLE, World
            from kp_core.banks.embed import SentenceTransformerEmbedder
        session = model.load()
        world = World(session, SentenceTransformerEmbedder(), Path(folder), model.address)
        try:
            with bar_of("Compiling", None, "pack") as bar:
                for _ in world.add([path for path in paths if path.is_file()] if files else SAMPLE):
                    bar.update()
        except FactError as error:
            if not world.documents:
                raise
            warn(str(error))
        page = serve(world, port, () if files else QUESTIONS)
        try:
            out.print(f"The playground of {session.name} is at {page.local_url} (Ctrl-C closes it).", soft_wrap=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            out.print("\nThe playground is closed; its documents are gone.")
            raise typer.Exit(130) from None
        finally:
            page.close(verbose=False)
            session.close()


def _try(port: int) -> None:
    """Raise `ModelError` for a port that is in use."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise ModelError(f"Port {port} cannot be used; give another one with --port.") from error
