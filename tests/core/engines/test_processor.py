"""Another kind of processor, made of this one: the variables of `make test-avx2` change what is computed."""

import json
import os
import subprocess
import sys

import pytest
import torch

from kp_core.engines.hf.model import LIMITS

# `make test-avx2` sets these.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
_SEEN = """
import json, torch
from kp_core import load_engine
from kp_core.engines.hf.loading import best_dtype
from tests.kits import tiny_model, tiny_tokenizer
made = torch.Generator().manual_seed(0)
tokens, weight = torch.randn(300, 576, generator=made), torch.randn(96, 576, generator=made)
packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
product = torch.ops.mkldnn._linear_pointwise(tokens, packed, None, "none", [], "")
print(json.dumps({
    "capability": torch.backends.cpu.get_cpu_capability(),
    "default": str(best_dtype(torch.device("cpu"))),
    "product": product.view(torch.int32).sum().item(),
    "passes": load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer()).fingerprint.passes,
}))
"""


def seen(variables):
    """What a process computes under these variables."""
    environment = {name: value for name, value in os.environ.items() if name not in LIMITS} | variables
    environment["OMP_NUM_THREADS"] = "1"  # With more threads not every processor computes passes bit for bit.
    done = subprocess.run([sys.executable, "-c", _SEEN], env=environment, capture_output=True, text=True, check=True)  # noqa: S603 - our own code
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_limit_of_instruction_sets_changes_what_is_computed_and_the_fingerprint():
    here = seen({})
    if "AVX512" not in here["capability"]:
        pytest.skip(f"this processor has {here['capability']}, so the limit changes nothing")
    there, torch_alone = seen(AVX2), seen({"ATEN_CPU_CAPABILITY": "avx2"})
    onednn_alone = seen({"DNNL_MAX_CPU_ISA": "AVX2"})  # The older name of the variable.
    assert there["capability"] == torch_alone["capability"] == "AVX2"
    assert there["default"] == onednn_alone["default"] == "torch.float32"
    assert here["product"] == torch_alone["product"] != there["product"] == onednn_alone["product"]
    assert len({each["passes"] for each in (here, there, torch_alone, onednn_alone)}) == 4


@pytest.mark.skipif(os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX2", reason="`make test-avx2` runs this")
def test_this_process_computes_as_a_machine_without_avx512():
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
    assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()
