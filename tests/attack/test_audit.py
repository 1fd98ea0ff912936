"""What the audit of the lock says: found, skipped with a reason, or not asked at all."""

from tests.audit import judge

OLD = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.0"]}
KNOWN = {"id": "PYSEC-2", "aliases": ["CVE-2026-45829"], "fix_versions": []}
UNASKED = {"name": "a", "skip_reason": "not found"}


def package(*vulns):
    return {"name": "b", "version": "1.0", "vulns": list(vulns)}


def test_an_advisory_fails_and_one_that_is_out_of_reach_is_skipped_with_its_reason():
    code, said = judge({"dependencies": [package(OLD, KNOWN), UNASKED]})
    assert code == 1
    assert said[0].endswith("1 of 2 packages.")
    assert "FOUND: b 1.0: PYSEC-1, CVE-1; fixed in 2.0" in said[1]
    assert "skipped: b 1.0: PYSEC-2, CVE-2026-45829: in Chroma's HTTP server" in said[2]
    assert judge({"dependencies": [package(KNOWN)]})[0] == 0


def test_an_index_that_answers_nothing_is_no_clean_bill():
    code, said = judge({"dependencies": [UNASKED, UNASKED]})
    assert code == 0
    assert "none of 2 packages; nothing was audited" in said[0]
