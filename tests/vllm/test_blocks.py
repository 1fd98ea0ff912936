import pytest
import torch

from kp_core import KVTensors
from kp_core.errors import PackError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 127, 128, 300])
def test_what_is_written_into_vllms_cache_is_read_back(dtype, tokens):
    from kp_serve.blocks import PagedKV

    made = torch.Generator().manual_seed(tokens)
    caches = {f"model.layers.{at}.attn": torch.randn(7, 3, 128, 128, generator=made).to(dtype) for at in (0, 2, 10, 1)}
    paged = PagedKV.of(caches)
    assert [id(cache) for cache in paged.layers] == [id(caches[f"model.layers.{at}.attn"]) for at in (0, 1, 2, 10)]
    halves = [[torch.randn(3, tokens, 64, generator=made).to(dtype) for _ in range(4)] for _ in range(2)]
    kv, blocks = KVTensors(tuple(halves[0]), tuple(halves[1])), [5, 0, 3][: -(-tokens // 128)]
    # What stands behind it in the same block, as of tokens that are computed meanwhile.
    later, room = torch.randn(2, 3, 1, 64, generator=made).to(dtype), len(blocks) * 128 - tokens
    if room:
        filled = torch.zeros(3, tokens, 64, dtype=dtype)
        paged.write(0, [(torch.cat([filled, later[0]], 1), torch.cat([filled, later[1]], 1))], blocks)
    untouched = paged.layers[0][6].clone()
    for layer in range(kv.layers):
        cuts = [slice(0, tokens // 3), slice(tokens // 3, tokens)]
        paged.write(layer, [(kv.keys[layer][:, cut], kv.values[layer][:, cut]) for cut in cuts], blocks)
    assert paged.read(blocks, tokens).equal(kv)
    assert torch.equal(paged.layers[0][6], untouched)
    if room:
        behind = paged.read(blocks, tokens + 1).slice(tokens, tokens + 1)
        assert torch.equal(behind.keys[0], later[0])
        assert torch.equal(behind.values[0], later[1])
    for wrong in (
        (kv.keys[0].double(), kv.values[0]),
        (kv.keys[0][:2], kv.values[0][:2]),
        (kv.keys[0][..., 1:], kv.values[0]),
    ):
        with pytest.raises(PackError, match="is not that of this model"):
            paged.write(0, [wrong], blocks)
