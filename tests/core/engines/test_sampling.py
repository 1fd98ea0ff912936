"""Choosing tokens."""

import pytest
import torch

from kp_core.engines.hf.sampling import sampler_of
from kp_core.plan.plan import Sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [7, 16384, 49152, 50001])
def test_the_likeliest_token_is_found_in_parts_as_at_once(vocabulary, dtype):
    draw = torch.Generator().manual_seed(vocabulary)
    greedy = sampler_of(Sampling(temperature=0), (), torch.device("cpu"))
    for kind in ("plain", "ties", "nan", "infinite", "nothing"):
        logits = torch.randn(vocabulary, generator=draw).to(dtype)
        if kind == "ties":
            logits[[1, vocabulary // 2, vocabulary - 1]] = 9.0
        elif kind == "nan":
            logits[[0, vocabulary - 1]] = torch.nan
        elif kind == "infinite":
            logits[vocabulary - 2] = torch.inf
        elif kind == "nothing":
            logits[:] = -torch.inf
        at_once = logits.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf).argmax()
        assert greedy(logits, 5) == int(at_once), kind
