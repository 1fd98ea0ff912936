import pytest
import torch

from kp_core import ExactComposer, NaiveComposer, PackStore
from kp_core.testing import ARCHITECTURES
from tests.conftest import tiny_engine

COMPOSERS = [ExactComposer(), NaiveComposer()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("composer", COMPOSERS, ids=lambda composer: composer.name)
def test_composers(composer, architecture, dtype, tmp_path):
    engine, store = tiny_engine(architecture, dtype), PackStore(tmp_path)
    engine.clear_cache()
    texts = ["The first island is green.", "The second island is blue."]
    handles = [store.put(engine.build_pack(text, namespace="isles")) for text in texts]
    view = store.view("isles")
    one, both = f"{handles[0]}\n\nWhich?", f"{handles[0]}\n\n{handles[1]}\n\nWhich?"
    oracle_one, oracle_both = (engine.prefill(question, view=view, reuse=False) for question in (one, both))
    found_one, found_both = (engine.prefill(question, view=view, composer=composer) for question in (one, both))
    # One pack behind the head it was built for: every composer is exact.
    assert torch.equal(found_one.logits, oracle_one.logits)
    assert found_both.usage.reused_tokens >= len(found_both.prompt.spans[0])
    is_exact = torch.equal(found_both.logits, oracle_both.logits)
    assert is_exact == (composer.name == "exact")
    if composer.name == "naive":
        assert found_both.usage.reused_tokens > found_both.usage.pack_tokens
    # What one composer computed is not found by another.
    assert torch.equal(engine.prefill(both, view=view).logits, oracle_both.logits)
