import pytest
import torch

from kp_core import KVTensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 127, 128, 300])
def test_what_is_written_into_vllms_cache_is_read_back(dtype, tokens):
    pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` runs this")
    from kp_core.engines.vllm.blocks import PagedKV

    made = torch.Generator().manual_seed(tokens)
    caches = {f"model.layers.{at}.attn": torch.randn(7, 3, 128, 128, generator=made).to(dtype) for at in (0, 2, 10, 1)}
    paged = PagedKV.of(caches)
    assert [id(cache) for cache in paged.layers] == [id(caches[f"model.layers.{at}.attn"]) for at in (0, 1, 2, 10)]
    halves = [[torch.randn(3, tokens, 64, generator=made).to(dtype) for _ in range(4)] for _ in range(2)]
    kv, blocks = KVTensors(tuple(halves[0]), tuple(halves[1])), [5, 0, 3][: -(-tokens // 128)]
    assert paged.fits(kv)
    untouched = paged.layers[0][6].clone()
    paged.write(kv, blocks)
    assert paged.read(blocks, tokens).equal(kv)
    assert torch.equal(paged.layers[0][6], untouched)
