"""Two commands answer from documents as packs, before and after a restart."""

import json

from tests.cli.conftest import FACTS, as_json, kp

__all__ = ["kp"]

LLAMA = ("--engine", "llama")


def test_documents_are_compiled_once_and_answer_in_each_process(kp, tmp_path):
    facts = tmp_path / "facts.jsonl"
    facts.write_text("".join(json.dumps(fact) + "\n" for fact in FACTS), encoding="utf-8")
    assert kp("build", "bank", str(facts), "--compile", *LLAMA)[0] == 0
    asked = ("ask", "bank", "Which bird is on the flag?", "-k", "1", "--max-tokens", "8", *LLAMA, "--json")
    answers = [as_json(kp(*asked))["answers"]["packs"] for _ in range(2)]
    assert answers[0]["text"] == answers[1]["text"]
    for answer in answers:
        assert answer["usage"]["pack_tokens"] > 5
        assert answer["usage"]["computed_tokens"] == answer["usage"]["prompt_tokens"], "the pack came from the store"


def test_a_file_that_is_no_model_is_one_line(kp, tmp_path):
    (tmp_path / "text.gguf").write_text("hello", encoding="utf-8")
    code, _, err = kp("ask", "bank", "Which bird?", "--model", "text.gguf", *LLAMA)
    assert code != 0
    assert "Traceback" not in err
