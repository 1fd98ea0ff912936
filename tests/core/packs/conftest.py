import pytest

from kp_core.packs.store import PackStore


@pytest.fixture
def store(tmp_path) -> PackStore:
    return PackStore(tmp_path / "deep" / "store")
