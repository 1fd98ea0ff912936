"""Known advisories against what `requirements.lock` names, as pip-audit tells them: `python -m tests.audit`.

Fails for an advisory that can be reached. Without a network, or where the index does not know advisories, it says that
it could not ask, and goes on: a test must pass on a machine that is offline.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["UNREACHABLE", "judge", "main"]

LOCK = Path(__file__).parents[1] / "requirements.lock"
_PATIENCE_S = 600

UNREACHABLE: Mapping[str, str] = {
    "CVE-2026-45829": "in Chroma's HTTP server, which we never start; the docs say to keep one on a trusted network",
}
"""Advisories that nothing of ours leads to, each with the reason."""


def judge(report: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The exit code for what pip-audit found, and what there is to say."""
    packages = report.get("dependencies", [])
    asked = [package for package in packages if "skip_reason" not in package]
    if not asked:
        # pip-audit itself says "no known vulnerabilities" here.
        return 0, [f"pip-audit: the index answered for none of {len(packages)} packages; nothing was audited."]
    code, said = 0, [f"pip-audit: the index answered for {len(asked)} of {len(packages)} packages."]
    for package in asked:
        for each in package.get("vulns", []):
            names = [each["id"], *each.get("aliases", [])]
            reason = next((UNREACHABLE[name] for name in names if name in UNREACHABLE), None)
            fixed = ", ".join(each.get("fix_versions", [])) or "no release"
            where = f"{package['name']} {package['version']}: {', '.join(names)}"
            said.append(f"  skipped: {where}: {reason}" if reason else f"  FOUND: {where}; fixed in {fixed}")
            code = code if reason else 1
    return code, said


def main() -> int:
    """Ask, and say what was found."""
    command = [sys.executable, "-m", "pip_audit", "-r", str(LOCK), "--no-deps", "--disable-pip", "-f", "json"]
    command += ["--progress-spinner", "off", "--timeout", "15"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)  # noqa: S603 - our own
        report = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        sys.stdout.write("pip-audit: could not ask the index; nothing was audited.\n")
        return 0
    code, said = judge(report)
    sys.stdout.write("\n".join(said) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
