"""Packs on a real S3 server: kills, faults of the network, several processes, restarts, and what is said of errors."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest

from benchmarks import objects, s3server
from benchmarks.objects import blobs_at
from kp_core.errors import PackError
from kp_core.packs.objects import ObjectBlobs
from kp_core.packs.store import PackStore
from kp_langchain import ChatKnowledgePacks
from kp_llamaindex import KnowledgePackLLM
from tests.cli.conftest import Kp, kp
from tests.conftest import tiny_engine
from tests.core.packs.made import make_pack, same

__all__ = ["kp"]

pytestmark = pytest.mark.slow

SECRET = "5e" * 32
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def at(s3_server, request, tmp_path, monkeypatch):
    """Where this test has its packs; the environment says how to get there."""
    key, secret = s3server.KEYS["owner"]
    for name, value in {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL": s3_server,
        "KP_SECRET": SECRET,
        "KP_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    return f"s3://packs/{request.node.name.replace('[', '-').replace(']', '')}"


def numbered(number: int):
    return make_pack(f"text {number}", seed=number, tokens=300)


def test_a_second_process_reads_and_a_restart_loses_nothing(at):
    def others() -> None:
        store = PackStore(at)
        assert same(store.get(store.handle("text 0", "geo")), numbered(0))
        store.put(numbered(1))
        os._exit(17)

    store = PackStore(at)
    first = store.put(numbered(0))
    process = FORK.Process(target=others)
    process.start()
    process.join(120)
    assert process.exitcode == 17
    second = store.handle("text 1", "geo")
    for each in (store, PackStore(at)):
        assert set(each) == {first, second}
        assert same(each.get(first), numbered(0))
        assert same(each.get(second), numbered(1))


def test_writers_that_are_killed_lose_nothing_acknowledged(at):
    """10 kills at random moments; each writer goes on in the store that the one before left."""
    chosen, acknowledged = random.Random(0), 0
    store = PackStore(at)

    def write(start: int, said) -> None:
        for number in range(start, start + 1000):
            store.put(numbered(number))
            said.send(number)

    for _ in range(10):
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=write, args=(acknowledged, theirs))
        process.start()
        assert ours.poll(60)
        time.sleep(chosen.uniform(0, 0.2))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        theirs.close()
        while ours.poll():
            try:
                acknowledged = ours.recv() + 1
            except EOFError:
                break
    direct = PackStore(ObjectBlobs(at, cache_bytes=0))
    assert acknowledged >= 10
    assert all(same(direct.get(direct.handle(f"text {n}", "geo")), numbered(n)) for n in range(acknowledged))
    # What was under way is there as a whole, or not at all.
    assert list(direct.verify()) == []


def test_answers_are_right_while_the_network_fails(s3_server, at):
    found = objects.under_faults(s3_server, at, objects.tiny(), 40)
    assert (found["wrong"], found["lost"]) == (0, 0)
    assert found["faults"] >= 40
    assert found["answers"] > 0.8 * (found["answers"] + found["refused"])


@pytest.mark.parametrize(
    ("bucket", "key", "words"),
    [
        ("none-such", "owner", "there is no bucket 'none-such'. Create it, or correct the name"),
        ("packs", "nobody", "Access Denied. Check the keys"),
        ("packs", ("owner-key", "wrong"), "signature we calculated does not match.*Check the keys"),
        ("packs", ("who", "wrong"), "access key ID you provided does not exist.*Check the keys"),
    ],
)
def test_what_is_wrong_is_said_at_the_first_touch(s3_server, at, bucket, key, words):
    key, secret = s3server.KEYS[key] if isinstance(key, str) else key
    with pytest.raises(PackError, match=words):
        PackStore(ObjectBlobs(f"s3://{bucket}/packs", key=key, secret=secret))


def test_the_command_line_says_it_in_one_line(at, kp, monkeypatch):
    PackStore(at).put(numbered(0))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    code, _, told = kp("status", at)
    assert code == 1
    assert told.startswith(f"kp: {at} cannot be reached, or refuses")
    assert "Check the keys" in told


def test_a_server_that_is_away_is_said_at_the_first_touch(at, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(PackError, match=r"cannot be reached.*Check the network and the address"):
        PackStore(at)


def test_who_may_only_read_reads(s3_server, at):
    handle = PackStore(at).put(numbered(0))
    key, secret = s3server.KEYS["reader"]
    store = PackStore(ObjectBlobs(at, key=key, secret=secret))
    assert same(store.get(handle), numbered(0))
    with pytest.raises(PermissionError, match=r"Access Denied\. Check the keys"):
        store.put(numbered(1))
    assert list(PackStore(at)) == [handle]


def test_a_server_without_conditional_writes(s3_server, at, monkeypatch):
    """Where the server says that it has none, a look before the write has to do."""
    blobs = blobs_at(s3_server, at)
    real = blobs._system.pipe_file

    def pipe(path, data, mode="overwrite"):
        if mode == "create":
            error = OSError(38, "A header you provided implies functionality that is not implemented")
            error.__cause__ = type("ClientError", (Exception,), {"response": {"Error": {"Code": "NotImplemented"}}})()
            raise error
        return real(path, data)

    monkeypatch.setattr(blobs._system, "pipe_file", pipe)
    assert blobs.write("a", [b"one"], if_absent=True)
    assert not blobs.write("a", [b"two"], if_absent=True)
    assert bytes(blobs.read("a")) == b"one"


def test_both_adapters_answer_from_packs_in_s3(at):
    engine = tiny_engine()
    text = "The mill of Aldburgh has four sails, and a heron stands beside it."
    handle = PackStore(at).put(engine.build_pack(text))
    asked, plain = f"{handle}\n\nWhat stands there?", f"{text}\n\nWhat stands there?"
    settings = {"engine": engine, "store": at, "namespaces": ["default"], "max_tokens": 8}
    engine.clear_cache()
    chat = ChatKnowledgePacks(**settings)
    assert chat.invoke(asked).content == chat.invoke(plain).content
    llm = KnowledgePackLLM(**settings)
    assert llm.complete(asked).text == llm.complete(plain).text


def test_kp_keeps_its_packs_in_s3(at, kp: Kp, tmp_path):
    (tmp_path / "facts.jsonl").write_text('{"text": "The mill of Aldburgh has four sails."}\n')
    tiny = ("--engine", "tests.cli.engines:tiny")
    code, _, err = kp("build", "bank", "facts.jsonl", "--compile", "--packs", at, *tiny)
    assert code == 0, err
    store = PackStore(at)
    (handle,) = store
    assert store.peek(handle).stored_bytes > 0
    assert not (tmp_path / "bank" / "packs").exists()
    code, out, err = kp("status", at, "--json")
    assert (code, json.loads(out)["packs"]) == (0, 1), err
    code, out, err = kp("verify", at)
    assert (code, "Nothing is wrong" in out) == (0, True), err
    code, out, err = kp("ask", "bank", "How many sails?", "--packs", at, "--json", "--max-tokens", "4", *tiny)
    assert code == 0, err
    assert str(handle) in out
