"""`kp`, as a new user would try it: on good and on broken input."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kp_cli.app import app, run
from kp_cli.sources import FORMATS
from kp_core import Session
from tests.cli.conftest import Kp, as_json, started


@pytest.fixture
def once(smol: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands have the bundled model of all tests; that they load it, `kp` in a process of its own and others show."""
    monkeypatch.setattr("kp_core.load_engine", lambda _model, **_options: smol)


@pytest.fixture
def at_once(thin: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands have a model that answers at once, nonsense."""
    monkeypatch.setattr("kp_core.load_engine", lambda _model, **_options: thin)


def test_help_names_every_command_and_the_exit_codes(kp: Kp) -> None:
    code, out, _ = kp("--help")
    assert code == 0
    for command in ("build", "remove", "search", "ask", "status", "verify", "doctor"):
        assert f"│ {command} " in out
        assert kp(command, "--help")[0] == 0
    assert "Exit codes" in out
    assert "--install-completion" in out


def test_brackets_are_printed_as_they_are(kp: Kp, bank: Path, at_once: None) -> None:
    row = {"text": "Glyphs of [/orrelay] are [red]red[/red].", "title": "[b]Glyphs[/]"}
    (bank.parent / "glyphs.jsonl").write_text(json.dumps(row))
    assert kp("build", "bank", "glyphs.jsonl")[0] == 0
    code, out, _ = kp("search", "bank", "What are the glyphs of Orrelay?", "--k", "1")
    assert code == 0
    assert "[b]Glyphs[/]" in out
    assert "Glyphs of [/orrelay] are [red]red[/red]." in out
    code, out, _ = kp("ask", "bank", "What are the glyphs?", "-k", "1", "--max-tokens", "8")
    assert code == 0
    assert "[b]Glyphs[/]" in out


def test_removing_a_file_leaves_the_equal_paragraph_of_another(kp: Kp, tmp_path: Path) -> None:
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text(f"Return the key before nine.\n\nOnly {name} says this.\n")
    assert as_json(kp("build", "keys", "a.md", "b.md", "--json"))["facts"] == 4
    again = as_json(kp("build", "keys", "a.md", "b.md", "--json"))
    assert (again["added"], again["duplicates"]) == (0, 4)
    assert len(as_json(kp("remove", "keys", "--source", "a.md", "--json"))["removed"]) == 2
    hits = as_json(kp("search", "keys", "When is the key returned?", "--json"))["hits"]
    assert sorted((hit["source"], hit["text"]) for hit in hits) == [
        ("b.md", "Only b.md says this."),
        ("b.md", "Return the key before nine."),
    ]


def test_what_a_file_said_earlier_stays_and_is_named_until_it_is_removed(kp: Kp, tmp_path: Path) -> None:
    notes = tmp_path / "a.md"
    notes.write_text("The ferry leaves at six.\n\nThe lamp burns blue.\n")
    kp("build", "notes", "a.md")
    lamp, ferry = (
        as_json(kp("search", "notes", about, "-k", "1", "--json"))["hits"][0]["id"] for about in ("lamp", "ferry")
    )
    kp("edit", "notes", lamp, "--old", "blue", "--new", "green", "--engine", "tests.cli.engines:tiny")
    assert as_json(kp("build", "notes", "a.md", "--json"))["outdated"] == {}, "what was edited is still of the file"
    notes.write_text("The ferry leaves at seven.\n\nThe lamp burns blue.\n")
    _, out, _ = kp("build", "notes", "a.md")
    said = "Facts that a.md had, and that stay: 1. `kp remove notes --source a.md`, then build again."
    assert said in " ".join(out.split())
    assert as_json(kp("build", "notes", "a.md", "--json"))["outdated"] == {"a.md": [ferry]}
    (tmp_path / "log.jsonl").write_text('{"text": "The mill has four sails.", "source": "book"}\n')
    kp("build", "notes", "log.jsonl")
    (tmp_path / "log.jsonl").write_text('{"text": "The weir has three gates.", "source": "book"}\n')
    assert as_json(kp("build", "notes", "log.jsonl", "--json"))["outdated"] == {}, "no file of the build is that source"
    assert as_json(kp("build", "notes", "a.md", "--namespace", "other", "--json"))["outdated"] == {}
    kp("remove", "notes", "--source", "a.md")
    again = as_json(kp("build", "notes", "a.md", "--json"))
    assert (again["added"], again["outdated"]) == (2, {})


def test_a_filter_that_nothing_passes_is_shown_what_is_there(kp: Kp, tmp_path: Path) -> None:
    (tmp_path / "boats.csv").write_text("name,cabins\nVeyl,30\nSorrel,12\n")
    kp("build", "boats", "boats.csv")
    for where in ('{"cabins": {"$gt": 20}}', '{"$or": [{"deck": 1}, {"cabins": 30}]}'):
        for command in (("search", "boats", "x"), ("remove", "boats")):
            _, out, _ = kp(*command, "--where", where)
            assert 'No fact passes the filter. One has {"cabins": "30"}.' in " ".join(out.split())
    assert len(as_json(kp("search", "boats", "x", "--where", '{"cabins": "30"}', "--json"))["hits"]) == 1
    assert kp("search", "boats", "x", "--where", '{"deck": 1}')[1].endswith("No fact passes the filter.\n")
    assert (
        "No fact is in the namespace boat; there are default." in kp("search", "boats", "x", "--namespace", "boat")[1]
    )


def test_a_collection_knows_where_its_packs_are(kp: Kp, tmp_path: Path) -> None:
    tiny = ("--compile", "--engine", "tests.cli.engines:tiny")
    said = "The safe code of Brask is seven thousand and thirty-one, and nobody writes it down."
    kp("build", "notes", "--fact", said, "--id", "code", *tiny, "--packs", "one")
    kp("build", "notes", "--fact", "The ferry of Brask leaves at six in the morning.", *tiny, "--packs", "two")
    kp("build", "notes", *tiny)
    kp("build", "notes", "--fact", "The mill of Brask has four sails, all of them red.")

    def holding(text: str) -> set[str]:
        return {file.relative_to(tmp_path).parts[0] for file in tmp_path.rglob("*.txt") if text in file.read_text()}

    assert as_json(kp("status", "notes", "--json"))["packs"]["packs"] == 2, "those of the last place"
    assert (holding("safe code"), holding("ferry")) == ({"one", "two"}, {"two"})
    (tmp_path / "notes").rename(tmp_path / "moved")
    assert as_json(kp("remove", "moved", "code", "--json"))["packs"] == 2
    assert (holding("safe code"), holding("ferry")) == (set(), {"two"})
    kp("build", "moved", *tiny, "--packs", "moved/packs")
    assert as_json(kp("status", "moved", "--json"))["packs"]["packs"] == 2
    (tmp_path / "moved").rename(tmp_path / "again")
    assert as_json(kp("status", "again", "--json"))["packs"]["packs"] == 2, "its own folder moves with it"
    (tmp_path / "again" / "packs.json").write_text("3")
    code, _, err = kp("remove", "again", "--unused")
    assert (code, "packs.json is damaged; remove it" in " ".join(err.split())) == (1, True)


def test_collections_that_share_a_place_remove_their_own_packs(kp: Kp) -> None:
    tiny = ("--packs", "shared", "--compile", "--engine", "tests.cli.engines:tiny")
    kp("build", "one", "--fact", "Apple trees grow in the gardens of Arl, and are old.", "--id", "apple", *tiny)
    kp("build", "two", "--fact", "Bees live in the gardens of Borl, and make honey.", "--id", "bees", *tiny)
    assert as_json(kp("remove", "two", "bees", "--json"))["packs"] == 1
    assert as_json(kp("status", "shared", "--json"))["packs"] == 1
    edit = ("edit", "one", "apple", "--old", "Apple", "--new", "Pear", "--how", "rebuild", *tiny[3:])
    kp(*edit)
    assert as_json(kp("remove", "one", "apple", "--json"))["packs"] == 2, "with what it was before the edit"
    assert as_json(kp("status", "shared", "--json"))["packs"] == 0


def test_a_build_says_how_to_ask_with_its_packs(kp: Kp) -> None:
    _, out, _ = kp("build", "new", "--fact", "The ferry leaves at six.", "--packs", "elsewhere")
    assert '`kp ask new "QUESTION" --packs elsewhere` answers from it.' in out


def test_build_search_add_remove(kp: Kp, bank: Path) -> None:
    code, out, _ = kp("search", "bank", "Which bird is it?", "-k", "1")
    assert code == 0
    assert "heron" in out
    assert "bank" not in out.replace("banks", "")
    report = as_json(kp("build", "bank", "facts.jsonl", "--json"))
    assert (report["added"], report["duplicates"], report["facts"]) == (0, 4, 4)
    assert as_json(kp("build", "bank", "--fact", "The ferry leaves at six.", "--id", "ferry", "--json"))["added"] == 1
    assert kp("build", "bank", "--fact", "The ferry leaves at nine.", "--id", "ferry")[0] == 1
    assert kp("build", "bank", "--fact", "The ferry leaves at nine.", "--id", "fery", "--replace")[0] == 1
    code, out, _ = kp("build", "bank", "--fact", "The ferry leaves at nine.", "--id", "ferry", "--replace")
    assert (code, out.splitlines()[:2]) == (0, ["Facts added: 1; already stored: 0; skipped: 0.", "Now 5 facts."])
    [hit] = as_json(kp("search", "bank", "When does the ferry leave?", "-k", "1", "--json"))["hits"]
    assert (hit["id"], hit["text"]) == ("ferry", "The ferry leaves at nine.")
    hits = as_json(kp("search", "bank", "x", "--where", '{"year": {"$lt": 1900}}', "--json"))["hits"]
    assert [hit["id"] for hit in hits] == ["mill"]
    hits = as_json(kp("search", "bank", "The heron flag", "-k", "1", "--json"))["hits"]
    assert [hit["id"] for hit in hits] == ["bird"]


def test_rows_that_make_no_fact_stop_a_build_or_are_counted(kp: Kp, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "A good row."}\n{"text": \n')
    code, _, err = kp("build", "bank", "bad.jsonl")
    assert code == 1
    assert "bad.jsonl, line 2: is not JSON" in err
    assert "Traceback" not in err
    assert not (tmp_path / "bank").exists()
    report = as_json(kp("build", "bank", "bad.jsonl", "--on-error", "skip", "--json"))
    assert report["added"] == 1
    assert "line 2" in report["skipped"][0]
    assert kp("build", "bank", "bad.jsonl", "--on-error", "ignore")[0] == 2
    (tmp_path / "worse.jsonl").write_text('{"text": \n')
    assert kp("build", "new", "worse.jsonl")[0] == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serch", "x"], 2, "Did you mean 'search'"),
        (["search", "bank"], 2, "Missing argument"),
        (["search", "banc", "x"], 1, "Did you mean bank?"),
        (["search", "bank", " "], 1, "blank question"),
        (["search", "bank", "x", "--where", "{"], 1, "expected JSON"),
        (["search", "bank", "x", "-k", "0"], 2, "-k"),
        (["search", "bank", "x", "-k", "99999999999"], 2, "-k"),
        (["ask", "bank", "x", "-k", "99999999999"], 2, "-k"),
        (["build", "new", "fact.jsonl"], 1, "Did you mean facts.jsonl?"),
        (["build", "new", "--compile"], 2, "neither files nor --fact"),
        (["build", "new", "facts.jsonl", "--encoding", "utf-9"], 1, "Got encoding='utf-9'"),
        (["build", "facts.jsonl", "facts.jsonl"], 2, "`kp build NAME facts.jsonl facts.jsonl` makes one"),
        (["build", "bank"], 2, "neither files nor --fact"),
        (["build", "bank", "--fact", "a", "--fact", "b", "--id", "c"], 2, "--id goes with exactly one --fact"),
        (["remove", "bank"], 2, "neither ids nor --where nor --source"),
        (["remove", "bank", "mil"], 0, ""),
        (["remove", "bank", "b"], 1, "the ids of 2 facts begin so"),
        (["remove", "bank", "mlil"], 1, "Did you mean mill?"),
        (["remove", "bank", "mill", ""], 1, "Got the id ''; expected an id, or its first characters."),
        (["remove", "nothing", "--unused"], 1, "There is no collection in nothing"),
        (["status", "nothing"], 1, "neither a collection"),
        (["verify", "nothing"], 1, "neither a collection"),
        (["status", "facts.jsonl"], 1, "facts.jsonl is no entry of a store, or damaged"),
        (["verify", "facts.jsonl"], 1, "neither a collection nor a store"),
        (["ask", "bank", "x", "--unit", "page"], 2, "'page' is not one of 'fact', 'bank', 'document'"),
        (["ask", "bank", "x", "--model", "./nothing"], 1, "kp:"),
    ],
)
def test_errors_are_one_line_and_say_what_to_do(
    kp: Kp, bank: Path, arguments: list[str], code: int, words: str
) -> None:
    got, _, err = kp(*arguments)
    assert got == code, err
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_errors_are_json_where_json_was_asked_for_and_tracebacks_where_those_were(kp: Kp, bank: Path) -> None:
    code, out, _ = kp("search", "nowhere", "x", "--json")
    assert code == 1
    assert json.loads(out)["error"] == "FactError"
    from kp_core.errors import FactError

    with pytest.raises(FactError):
        run(["search", "nowhere", "x", "--debug"])


def test_ask_answers_with_sources_and_counts(kp: Kp, bank: Path, once: None) -> None:
    code, out, _ = kp(
        "ask", "bank", "Which bird is on the flag?", "-k", "1", "--dtype", "float32", "--max-tokens", "12"
    )
    assert code == 0
    assert "heron" in out.split("Sources:")[0]
    assert "1. Flag" in out
    assert "packs delivered" in out
    asked = ("ask", "bank", "Which bird is on the flag?", "-k", "2", "--dtype", "float32", "--json")
    about = as_json(kp(*asked))
    packs, text = about["answers"]["packs"], as_json(kp(*asked, "--text"))["answers"]["text"]
    assert packs["text"] == text["text"]
    assert packs["usage"]["pack_tokens"] > text["usage"]["pack_tokens"] == 0
    assert packs["usage"]["pack_tokens"] + packs["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"]
    [hit] = as_json(kp("search", "bank", "Which bird is on the flag?", "-k", "1", "--json"))["hits"]
    assert hit["handle"] == about["sources"][0]["handle"]
    assert as_json(kp("status", "bank", "--json"))["packs"]["packs"] == 2
    assert as_json(kp("verify", "bank", "--json"))["wrong"] == []
    assert "Sources: none" in kp("ask", "bank", "Which bird?", "--where", '{"year": 1}', "--max-tokens", "2")[1]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lines for a chat to read, after which its input ends."""

    def type_lines(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return type_lines


def test_chat_goes_on_until_an_empty_line(kp: Kp, bank: Path, at_once: None, typed: Callable[..., None]) -> None:
    typed("Which bird is on the flag?", "Who wrote the novel?", "", "Never asked.")
    code, out, _ = kp("ask", "bank", "-k", "1", "--dtype", "float32", "--max-tokens", "8")
    assert code == 0
    assert out.count("packs delivered") == 2
    assert out.index("from Flag ·") < out.index("from Novel ·")


def test_chat_looks_where_it_is_told_to(kp: Kp, bank: Path, at_once: None, typed: Callable[..., None]) -> None:
    question = "Which bird is on the flag?"
    typed(question)
    assert "from Novel · facts.jsonl, Bread" in kp("ask", "bank", "--where", '{"year": 1987}', "--max-tokens", "2")[1]
    typed(question)
    assert "no fact passes the filter" in kp("ask", "bank", "--where", '{"year": 1}', "--max-tokens", "2")[1]
    typed(question)
    assert "no fact of the namespace 'other'" in kp("ask", "bank", "--namespace", "other", "--max-tokens", "2")[2]
    typed(question)
    code, _, err = kp("ask", "bank", "--where", "year", "--max-tokens", "2")
    assert (code, "expected JSON" in err) == (1, True)


@pytest.mark.slow
def test_chat_forgets_the_oldest_question_when_the_model_can_read_no_more(
    kp: Kp, bank: Path, once: None, typed: Callable[..., None]
) -> None:
    # Of 8,192 positions this leaves room for one question, its fact and the template.
    questions, few = ("Which bird is on the flag?", "Who wrote the novel?", "When is bread baked?"), "8090"
    typed(*questions)
    code, out, _ = kp("ask", "bank", "-k", "1", "--dtype", "float32", "--max-tokens", few)
    assert code == 0
    assert (out.count("packs delivered"), out.count("the oldest question is forgotten")) == (3, 2)
    typed("Which bird? " * 40)
    code, _, err = kp("ask", "bank", "-k", "1", "--dtype", "float32", "--max-tokens", few)
    assert (code, "has 8192 positions" in err) == (1, True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="A terminal of its own needs a Unix.")
def test_an_interrupt_ends_an_answer_and_not_the_chat(bank: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    command = ("ask", str(bank), "-k", "1", "--max-tokens", "4000")
    with started(*command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = ""

        def until(words: str) -> None:
            nonlocal said
            while words not in said:
                said += os.read(ours, 1024).decode(errors="replace")

        until("you: ")
        os.write(ours, b"Tell a very long story about every bird that you know.\n")
        said = ""
        until("know.\r\n")
        # Something of the answer has come.
        while not said.partition("know.\r\n")[2].strip():
            said += os.read(ours, 1024).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        until("(stopped; this question is forgotten)")
        until("you: ")
        assert process.poll() is None
        # Python loses an interrupt that comes while an object is taken down; a person presses again.
        for _ in range(10):
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
                break
        ended = process.poll()
        process.kill()
        assert ended == 0
    os.close(ours)


@pytest.mark.parametrize("options", [["--json"], pytest.param([], marks=pytest.mark.slow)])
def test_a_reader_that_has_enough_ends_a_command_quietly(bank: Path, options: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with started("search", str(bank), "the novel", *options, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        _, err = process.communicate()
        assert all(b" ..." in line for line in err.splitlines()), err
        assert process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="This machine has no full device.")
def test_output_that_cannot_be_written_is_an_error_of_one_line(bank: Path) -> None:
    with (
        Path("/dev/full").open("wb") as full,
        started("status", str(bank), "--json", stdout=full, stderr=subprocess.PIPE) as process,
    ):
        _, err = process.communicate()
    assert process.returncode == 1
    assert [line for line in err.decode().splitlines() if not line.endswith(" ...")] == [
        "kp: OSError: [Errno 28] No space left on device"
    ]


def test_doctor_measures_where_a_store_will_be_and_leaves_nothing(kp: Kp, tmp_path: Path, at_once: None) -> None:
    about = as_json(kp("doctor", "--packs", "new/packs", "--json"))["model"]
    assert (about["supported"], about["store_mb_per_s"] > 0, list(tmp_path.glob("*"))) == (True, True, [])
    assert about["store"] == f"there is no folder new/packs; measured in {tmp_path}"
    (tmp_path / "file").touch()
    about = as_json(kp("doctor", "--packs", "file", "--json"))["model"]
    assert (about["supported"], about["store"]) == (True, f"there is no folder file; measured in {tmp_path}")
    assert "advice" in about


@pytest.mark.slow
def test_doctor_says_what_is_supported_and_why_not(kp: Kp, tmp_path: Path) -> None:
    about = as_json(kp("doctor", "--json"))
    assert about["model"]["supported"]
    pace, size = about["model"]["prefill_tokens_per_s"], about["model"]["kv_bytes_per_token"]
    assert size in {23040, 46080}
    least = re.search(r"gives more than ([\d.,]+) MB a second", about["model"]["advice"])
    assert least
    assert float(least[1].replace(",", "")) == pytest.approx(pace * size / 1e6, rel=0.05)
    code, out, _ = kp("doctor", "--model", str(tmp_path / "nothing"), "--json")
    assert code == 3
    assert not json.loads(out)["model"]["supported"]
    assert str(tmp_path / "nothing") in json.loads(out)["model"]["why_not"]
    assert kp("doctor", "--dtype", "float8")[0] == 2


def test_completion_is_there_for_shells(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert app.info.name == "kp"
    # As bash asks when Tab is pressed behind `kp rem`.
    typed = {"COMP_WORDS": "kp rem", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "kp rem"}
    for name, value in {"_KP_COMPLETE": "complete_bash", **typed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run([])
    assert capfd.readouterr().out.split() == ["remove"]
    assert set(FORMATS) == {".jsonl", ".csv", ".txt", ".md", ".docx", ".pptx", ".xlsx", ".pdf", ".html", ".htm"}
