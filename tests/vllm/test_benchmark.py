"""The benchmark of a server, on a few requests."""

import pytest

from benchmarks import vllm
from tests.conftest import DATA


@pytest.mark.nightly
def test_agents(server):
    if not (DATA / "wiki_passages.jsonl").is_file():
        pytest.skip("set KP_DATA to the folder that holds wiki_passages.jsonl")
    sizes = ("--requests", "8", "--agents", "2", "--documents", "1", "--tokens", "200", "--answer", "2")
    rows = vllm.agents(server, vllm.parser().parse_args(sizes))
    assert list(rows[0]) == ["way", "state", "users", "hit_share", "ttft_p50", "ttft_p90", "tok_s"]
    hits = {(row["way"], row["state"]): row["hit_share"] for row in rows}
    assert len(hits) == len(rows) == 9
    assert all(row["users"] == 2 and row["tok_s"] > 0 and 0 < row["ttft_p50"] <= row["ttft_p90"] for row in rows)
    # The first edition serves all of them as errata; what was compiled outlives the server, and text does not.
    assert hits["errata", "cold"] > hits["text", "cold"]
    assert min(hits["packs", "restart"], hits["errata", "restart"]) > 0.5 > hits["text", "restart"]
