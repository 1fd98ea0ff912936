"""What the playground does, on a tiny model; the page itself is tested in a browser (`test_page.py`)."""

from __future__ import annotations

import pytest

from kp_cli.play.world import MOST_CHARACTERS, World
from kp_core.errors import FactError
from tests.conftest import roomy_engine

MILL = "The mill of Veyl has four sails. Its miller is Greta Ashdown, who came from the north."
BELL = "The bell of Veyl rings at eight. It was cast in a barn by three sisters."


@pytest.fixture
def world(tmp_path, embedder):
    made = World(roomy_engine(), embedder, tmp_path)
    for name, text in (("mill.md", MILL), ("bell.txt", BELL)):
        (tmp_path / name).write_text(text)
    assert [each.name for each in made.add([tmp_path / "mill.md", tmp_path / "bell.txt"])] == ["mill.md", "bell.txt"]
    return made


def answered(world, asked, way):
    requests, _ = asked
    return world.session.generate(**requests[way] | {"max_tokens": 12})


def test_packs_and_text_are_one_prompt_and_one_answer(world):
    for composer, k in (("exact", 1), ("exact", 2)):
        question = "Who is the miller of the mill?"
        asked, documents = world.ask(question, k, composer=composer), world.search(question, k)
        assert documents[0].name == "mill.md"
        packs, text = (answered(world, asked, way) for way in ("packs", "text"))
        assert packs.prompt.token_ids == text.prompt.token_ids
        assert packs.token_ids == text.token_ids
        assert packs.usage.pack_tokens == sum(each.tokens for each in documents)
        assert text.usage.pack_tokens == text.usage.reused_tokens == 0
        assert sum(asked[1].counts.values()) == len(packs.prompt)
    selected = answered(world, world.ask("Who is the miller of the mill?", 2, composer="select"), "packs")
    assert 1 <= len(selected.packs) == 2 - selected.usage.unread_packs
    assert selected.usage.approximate_tokens == 0
    assert answered(world, world.ask("The mill?", 2, composer="splice"), "packs").usage.approximate_tokens > 0


def test_documents_tell_their_tokens_and_bytes_on_disk(world):
    for document in world.documents.values():
        [pack] = world.store.entries(document.handle)
        assert (document.tokens, document.kv_bytes) == (len(pack.token_ids), pack.stored_bytes)
        assert document.kv_bytes >= world.session.bytes_per_token * document.tokens


def test_a_long_document_is_several_packs_and_a_new_version_takes_its_place(world, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text("\n\n".join(f"Paragraph {number} tells of boat {number}. " + "Wind. " * 40 for number in range(30)))
    names = [each.name for each in world.add([long])]
    assert names[0] == "long.txt, part 1"
    assert len(names) > 3
    assert all(world.documents[name].tokens <= 1300 for name in names)
    assert "boat 29" in world.search("boat 29", 1)[0].text
    long.write_text("Nothing is left of the boats.")
    list(world.add([long]))
    assert sorted(world.documents) == ["bell.txt", "long.txt", "mill.md"]
    assert world.search("Nothing is left of the boats.", 1)[0].name == "long.txt"


def test_files_of_one_name_do_not_displace_one_another(world, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text(f"The text of {folder}.")
    made = list(world.add([tmp_path / "one" / "same.txt", tmp_path / "two" / "same.txt"]))
    assert [each.name for each in made] == ["same.txt", "two/same.txt"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", "", "holds no text"),
        ("blank.md", " \n\n ", "holds no text"),
        ("tool.exe", "MZ", "expected one of"),
        ("broken.pdf", "no PDF", "is not PDF"),
        ("huge.txt", "word " * (MOST_CHARACTERS // 4), "takes 200,000 at once"),
    ],
)
def test_what_is_no_document_is_left_out_and_named(world, tmp_path, name, content, said):
    before = dict(world.documents)
    good, bad = tmp_path / "good.txt", tmp_path / name
    good.write_text("The good one.")
    bad.write_text(content)
    with pytest.raises(FactError, match=said) as caught:
        list(world.add([bad, good]))
    assert world.documents.keys() - before.keys() == ({"good.txt"} if name != "huge.txt" else set())
    assert str(tmp_path) not in str(caught.value)
    assert "on-error" not in str(caught.value)
    with pytest.raises(FactError, match="Got nothing"):
        list(world.paste("  \n"))


def test_a_file_that_replaces_another_and_cannot_be_read_leaves_it(world, tmp_path):
    before = dict(world.documents)
    (tmp_path / "mill.md").write_text("")
    with pytest.raises(FactError, match=r"mill\.md: holds no text"):
        list(world.add([tmp_path / "mill.md"]))
    assert world.documents == before


def test_of_many_bad_files_three_are_named(world, tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.exe").write_text("MZ")
    with pytest.raises(FactError, match=r"Left out: 0\.exe.*1\.exe.*2\.exe.* And 2 more\.$"):
        list(world.add(sorted(tmp_path.glob("*.exe"))))


def test_pasted_text_is_named_by_its_first_words_and_leaves_no_file(world, tmp_path):
    [made] = world.paste("../../etc: the harbour <b>of</b> Veyl")
    assert made.name == "etc the harbour b of b Veyl.md"
    assert not list(tmp_path.glob("*Veyl.md"))
