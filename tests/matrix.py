"""The models of tests that are for every model: a few of them with every change, all of them in `make test-nightly`."""

import os

import pytest
import torch

from tests.kits import ARCHITECTURES

EXAMPLES = int(os.environ.get("KP_EXAMPLES") or 5)
"""What hypothesis tries of each law; `make test-nightly` tries more."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WITH_EVERY_CHANGE = {
    # Plain, and the one of these with the same bits however a prompt is reached.
    "llama": ("float32", "bfloat16"),
    # Keys are turned in part.
    "gpt_neox": ("float32",),
    # Experts.
    "qwen3_moe": ("bfloat16",),
}


def _param(name, dtypes, *values, **options):
    is_nightly = not set(dtypes) & set(_WITH_EVERY_CHANGE.get(name, ()))
    return pytest.param(name, *values, marks=pytest.mark.nightly if is_nightly else (), **options)


architectures = pytest.mark.parametrize("architecture", [_param(name, _DTYPES) for name in ARCHITECTURES])
models = pytest.mark.parametrize(
    ("architecture", "dtype"),
    [_param(name, [said], dtype, id=f"{name}-{said}") for name in ARCHITECTURES for said, dtype in _DTYPES.items()],
)
