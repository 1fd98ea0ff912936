"""`SECURITY.md` names tests and classes of attacks that exist."""

import re
from pathlib import Path

from tests.attack.harness import NAMES

ROOT = Path(__file__).parents[2]


def test_every_promise_has_a_test_that_exists():
    said = (ROOT / "SECURITY.md").read_text()
    table = said.partition("| promise | shown by |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:-1] for row in table.strip().splitlines()[1:]]
    named = set()
    for promise, shown in rows:
        tests, attacks = re.findall(r"`(tests/\S+?)::(\w+)`", shown), re.findall(r"`attack: (\w+)`", shown)
        assert len(tests) + len(attacks) == shown.count("`") // 2 > 0, promise
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text(), name
        assert set(attacks) <= set(NAMES), promise
        named |= set(attacks)
    assert named == set(NAMES), "a class of attacks that shows no promise"
