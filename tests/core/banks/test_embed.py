"""The sentence-transformers embedder, with the bundled model."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kp_core.banks.embed import SentenceTransformerEmbedder, _question_encoder
from kp_core.bundled import bundled_embedder
from kp_core.errors import MissingDependencyError

BGE_PROMPT = "Represent this sentence for searching relevant passages: "
TEXTS = ["A cat.", "The harbour master of Port Averley keeps nine bells in a row.", "Rain", "A kitten!"]


@pytest.fixture(scope="module")
def embedder() -> SentenceTransformerEmbedder:
    return SentenceTransformerEmbedder()


def test_rows_are_normalised_and_in_order(embedder: SentenceTransformerEmbedder) -> None:
    rows = embedder.embed(TEXTS)
    assert rows.shape == (4, 384)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    for text, row in zip(TEXTS, rows, strict=True):
        np.testing.assert_allclose(embedder.embed([text])[0], row, atol=1e-5)
    assert rows[0] @ rows[3] > 0.5 > rows[0] @ rows[1]


def test_no_texts_make_no_rows(embedder: SentenceTransformerEmbedder) -> None:
    assert embedder.embed([]).shape == (0, 384)


def test_a_question_is_embedded_plainly_unless_the_model_wants_a_prompt(embedder: SentenceTransformerEmbedder) -> None:
    query = embedder.embed_query("Who keeps bells?")
    assert query.shape == (384,)
    assert query.dtype == np.float32
    np.testing.assert_allclose(query, embedder.embed(["Who keeps bells?"])[0], atol=1e-5)


@pytest.mark.parametrize(
    "text", [*TEXTS, "", " Who,\tkeeps\nBELLS? ", "Où est l'île? 港 🦀 \x07 [SEP]", "keeper of bells " * 200]
)
def test_a_question_alone_is_embedded_as_the_library_does_it(embedder: SentenceTransformerEmbedder, text: str) -> None:
    alone = _question_encoder(bundled_embedder())(text)
    assert (alone.shape, alone.dtype) == ((384,), np.float32)
    np.testing.assert_allclose(alone, embedder.embed([text])[0], atol=1e-5)


def test_a_question_alone_loads_no_library() -> None:
    script = (
        "import sys; from kp_core.banks.embed import SentenceTransformerEmbedder as E; E().embed_query('bells');"
        "print({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    assert found.stdout.strip() == "set()"


def test_the_prompt_goes_in_front_of_questions_only() -> None:
    folder = bundled_embedder()
    bge = SentenceTransformerEmbedder(folder, name="BAAI/bge-large-en-v1.5")
    own = SentenceTransformerEmbedder(folder, query_prompt="question: ")
    off = SentenceTransformerEmbedder(folder, name="BAAI/bge-large-en-v1.5", query_prompt="")
    for embedder, prompt in ((bge, BGE_PROMPT), (own, "question: "), (off, "")):
        np.testing.assert_allclose(embedder.embed_query("Bells?"), own.embed([prompt + "Bells?"])[0], atol=1e-5)
        np.testing.assert_allclose(embedder.embed(["Bells?"]), own.embed(["Bells?"]), atol=1e-5)


def test_names_are_known_before_anything_is_loaded() -> None:
    folder = bundled_embedder()
    assert SentenceTransformerEmbedder().name == "all-MiniLM-L6-v2"
    assert SentenceTransformerEmbedder("BAAI/bge-large-en-v1.5").name == "BAAI/bge-large-en-v1.5"
    assert SentenceTransformerEmbedder(folder).name == folder.name
    assert SentenceTransformerEmbedder(folder, name="mine").name == "mine"


def test_without_the_library_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    embedder = SentenceTransformerEmbedder()
    with pytest.raises(MissingDependencyError, match=r'pip install "knowledge-packs\[embed\]"'):
        embedder.embed(["a"])
