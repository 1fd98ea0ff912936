"""A fact store of each kind: in memory, in a folder, on a real server."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kp_core.banks import ChromaFactStore, MemoryFactStore
from kp_core.banks.chroma import open_client
from tests.conftest import until
from tests.kits import HashEmbedder


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The address of a Chroma server that runs beside the tests."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("chroma")), "run", "--path", str(tmp_path_factory.mktemp("server"))]
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL) as process:  # noqa: S603
        address = f"http://127.0.0.1:{port}"
        try:
            until(lambda: _answers(address))
            yield address
        finally:
            process.terminate()


@pytest.fixture
def emptied(server):
    """The server, without what tests before left."""
    _empty(server)
    return server


@pytest.fixture(params=["memory", "folder", pytest.param("server", marks=pytest.mark.slow)])
def make_store(request, tmp_path):
    """What makes a store; each one anew."""
    opened = []

    def make(embedder=None, **options):
        embedder = embedder or HashEmbedder()
        if request.param == "memory":
            return MemoryFactStore(embedder, **options)
        path = tmp_path / f"store{len(opened)}"
        if request.param == "server":
            path = request.getfixturevalue("server")
            _empty(path)
        opened.append(ChromaFactStore(path, embedder, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def _empty(address):
    client = open_client(address)
    for collection in client.list_collections():
        client.delete_collection(collection.name)


def _answers(address):
    try:
        return open_client(address, timeout_s=1).heartbeat() > 0
    except Exception:  # noqa: BLE001 - it may fail in any way until it is there
        return False
