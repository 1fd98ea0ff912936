"""Several packs in one prompt on the bundled model: warm, cold, restarted and reordered give the same bits."""

import pytest
import torch

from kp_core import PackStore
from tests.conftest import bundled_dtypes

FACTS = [
    "Orla Venn keeps the lighthouse of Brask.",
    "The ferry to Brask leaves at six in the morning.",
    "The mayor of Brask is a beekeeper. " * 6,
    "Nobody has swum to Brask in winter. " * 12,
]
QUESTION = "Who keeps the lighthouse of Brask?"


@pytest.mark.slow
@pytest.mark.parametrize("smol_of", bundled_dtypes(pytest.mark.nightly), indirect=True)
def test_warm_is_cold_in_every_order(smol_of, tmp_path):
    engine, store = smol_of, PackStore(tmp_path)
    handles = [str(store.put(pack)) for pack in engine.build_packs(FACTS, namespace="brask", progress=False)]
    view = store.view("brask")
    engine.clear_cache()
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        for question in (QUESTION, "What is Brask?"):
            prompt = "\n\n".join((*(handles[at] for at in order), question))
            cold = engine.prefill(prompt, view=view, reuse=False)
            warm = engine.prefill(prompt, view=view)
            assert torch.equal(cold.logits, warm.logits)
