"""The demo's corpus is what its README says."""

import json
import re
from collections import Counter
from pathlib import Path

DEMO = Path(__file__).parents[2] / "cookbooks" / "demo"


def read(name):
    with (DEMO / name).open() as lines:
        return [json.loads(line) for line in lines]


FACTS, QUESTIONS = read("facts.jsonl"), read("questions.jsonl")


def test_the_readme_counts_right():
    readme = (DEMO / "README.md").read_text()
    entities = {fact["title"] for fact in FACTS}
    assert f"{len(FACTS)} facts about {len(entities)} entities" in readme
    assert f"{len(QUESTIONS)} questions" in readme
    hops = [question["hops"] for question in QUESTIONS]
    one, two = hops.count(1), hops.count(2)
    assert hops == [1] * one + [2] * two
    assert f"first {one} questions need one fact and the last {two} need two" in readme


def test_ids_and_texts_are_unique():
    for field in ("id", "text"):
        assert not [value for value, count in Counter(fact[field] for fact in FACTS).items() if count > 1]
    assert len({question["id"] for question in QUESTIONS}) == len(QUESTIONS)
    assert all(set(fact) == {"id", "title", "text"} for fact in FACTS)


def test_each_question_names_its_facts_and_is_answered_by_one_of_them():
    facts = {fact["id"]: fact["text"] for fact in FACTS}
    for question in QUESTIONS:
        assert len(question["facts"]) == question["hops"]
        texts = " ".join(facts[fact] for fact in question["facts"])
        assert re.search(rf"\b{re.escape(question['answer'])}\b", texts, re.IGNORECASE), question["id"]
