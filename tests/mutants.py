"""Faults put into the code one by one. The short tests named beside a fault must fail on it.

`python -m tests.mutants` copies the packages to a temporary folder, tests the copy unchanged, then with one fault at a
time, and prints the faults that no test noticed; the exit status is then 1. `--only NAME` takes faults whose file name
contains NAME.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

__all__ = ["FAULTS", "Fault", "main"]

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """`text` of a `file` is replaced with `fault`; one of `tests` must fail."""

    file: str
    text: str
    fault: str
    tests: str


_ENGINES = "tests/core/engines"
FAULTS = (
    # Arithmetic: each of these changes bits, or what a token sees.
    Fault(
        "kp_core/engines/hf/attention.py",
        "visible = keys <= rows",
        "visible = keys < rows",
        f"{_ENGINES}/test_attention.py",
    ),
    Fault("kp_core/engines/hf/attention.py", "_LANES = 16", "_LANES = 1", f"{_ENGINES}/test_attention.py"),
    Fault("kp_core/engines/hf/attention.py", "_ROWS = 4", "_ROWS = 1", f"{_ENGINES}/test_attention.py"),
    Fault("kp_core/engines/hf/attention.py", "TILE // 2, 32", "TILE - 64, 32", f"{_ENGINES}/test_attention.py"),
    Fault(
        "kp_core/engines/hf/rows.py",
        "shared = min(tiles, common",
        "shared = max(tiles, common",
        f"{_ENGINES}/test_scheduler.py",
    ),
    Fault(
        "kp_core/engines/hf/replay.py",
        "buffer.blank(buffer.length + len(row), buffer.capacity)",
        "pass",
        f"{_ENGINES}/test_replay.py",
    ),
    Fault(
        "kp_core/engines/hf/replay.py",
        "layers[layer].put(key[row : row + 1], value[row : row + 1], self._positions[row])",
        "pass",
        f"{_ENGINES}/test_replay.py",
    ),
    Fault(
        "kp_core/engines/local/tree.py",
        "parts = to_host(parts[0]), to_host(parts[1])",
        "pass",
        f"{_ENGINES}/test_tree.py",
    ),
    Fault("kp_core/engines/hf/rows.py", "ends % TILE,", "(ends + 1) % TILE,", f"{_ENGINES}/test_scheduler.py"),
    Fault("kp_core/engines/local/buffer.py", "side[:, :, stop:end] = 0", "pass", f"{_ENGINES}/test_attention.py"),
    Fault(
        "kp_core/engines/local/buffer.py",
        "side[:, :, self.length] = token",
        "side[:, :, self.length - 1] = token",
        f"{_ENGINES}/test_scheduler.py",
    ),
    Fault(
        "kp_core/engines/local/buffer.py",
        "skipped = max(0, skipped - kv.tokens)",
        "skipped = 0",
        f"{_ENGINES}/test_pool.py {_ENGINES}/test_engine.py",
    ),
    Fault(
        "kp_core/engines/local/scheduler.py",
        "self._rows = None  # Its copies",
        "pass  # Its copies",
        f"{_ENGINES}/test_scheduler.py",
    ),
    # What is cached, for whom, and for how long.
    Fault(
        "kp_core/engines/local/tree.py",
        "[child for child in children if child.owners <= readable]",
        "[child for child in children]",
        f"{_ENGINES}/test_tree.py",
    ),
    Fault("kp_core/engines/local/tree.py", "node.begin += at", "node.begin += at - 1", f"{_ENGINES}/test_tree.py"),
    Fault(
        "kp_core/engines/local/tree.py",
        "return not (node.users or any",
        "return not (any",
        f"{_ENGINES}/test_tree.py",
    ),
    Fault(
        "kp_core/engines/local/tree.py",
        "node.kv = node.kv.clone()",
        "pass",
        f"{_ENGINES}/test_tree.py",
    ),
    Fault(
        "kp_core/engines/local/buffer.py",
        "room = self.budget_bytes - self.used - size",
        "room = self.budget_bytes - size",
        f"{_ENGINES}/test_pool.py",
    ),
    Fault(
        "kp_core/kv.py",
        "self.states if stop == self.tokens else ()",
        "self.states",
        "tests/laws/test_laws.py tests/core/engines/test_tree.py",
    ),
    Fault(
        "kp_core/rope.py",
        "torch.stack((-sin, sin), dim=-1).flatten()",
        "torch.stack((sin, -sin), dim=-1).flatten()",
        "tests/core/test_rope.py",
    ),
    Fault("kp_core/rope.py", "torch.cat((-sin, sin))", "torch.cat((sin, -sin))", "tests/core/test_rope.py"),
    Fault(
        "kp_core/engines/hf/sampling.py",
        "return best * _PART + int(",
        "return int(",
        f"{_ENGINES}/test_sampling.py",
    ),
    Fault(
        "kp_core/engines/hf/packed.py",
        "(count := rows.numel() // self.in_features) >= self.rows:",
        "(count := rows.numel() // self.in_features) >= 1:",
        f"{_ENGINES}/test_packed.py {_ENGINES}/test_attention.py",
    ),
    Fault(
        "kp_core/plan/plan.py",
        '_add("value", steered_kv.values',
        '_add("value", steered_kv.keys',
        "tests/core/steering tests/laws/test_steering_laws.py",
    ),
    # Packs: who may read them, and what they are.
    Fault(
        "kp_core/packs/view.py",
        "find_handles(text) if role in self.trusted_roles else []",
        "find_handles(text)",
        "tests/core/prompt tests/core/engines/test_session.py",
    ),
    Fault(
        "kp_core/packs/view.py",
        "handle in readable and (parts",
        "(parts",
        "tests/core/prompt tests/core/packs",
    ),
    Fault(
        "kp_core/packs/handle.py", "key=secret, ", "", "tests/core/packs/test_handle.py tests/core/packs/test_store.py"
    ),
    Fault(
        "kp_core/packs/handle.py",
        'parts += [text[at : match.start()], " " if text',
        'parts += [text[at : match.start()], "" if text',
        "tests/core/packs/test_handle.py",
    ),
    Fault(
        "kp_core/packs/fingerprint.py",
        "if mine[name] != theirs[name]}",
        "if name == 'weights' and mine[name] != theirs[name]}",
        "tests/core/packs/test_fingerprint.py",
    ),
    Fault("kp_core/packs/entry.py", "!= self.digests[index]:", "== 'none':", "tests/core/packs/test_entry.py"),
    Fault(
        "kp_core/packs/envelope.py",
        'if metadata["digest"] != self._digest',
        'if "" == self._digest',
        "tests/core/packs tests/core/steering",
    ),
    Fault(
        "kp_core/prompt/conversation.py",
        "[s.handle if isinstance(s, PackRef) else s",
        "['' if isinstance(s, PackRef) else s",
        "tests/core/prompt",
    ),
    # What is made of packs.
    Fault(
        "kp_core/plan/composer.py",
        "span.start - len(pack.prefix), place",
        "span.start - len(pack.prefix) + 1, place",
        "tests/core/compose",
    ),
    Fault(
        "kp_core/engines/local/run.py",
        "[region.start + place for place in places]",
        "[region.start + place for place in places][:-1]",
        "tests/core/compose",
    ),
    Fault(
        "kp_methods/edit.py", "position = correction.stop", "position = correction.start", "tests/methods/test_edit.py"
    ),
    Fault(
        "kp_core/steering/value.py",
        "return self + -other if",
        "return self + other if",
        "tests/core/steering tests/laws/test_steering_laws.py",
    ),
    # Facts, requests and what a caller is told.
    Fault(
        "kp_core/banks/filters.py",
        'together = all if name == "$and" else any',
        "together = any",
        "tests/core/banks/test_facts.py",
    ),
    Fault(
        "kp_core/banks/filters.py",
        "_is_number(held) and compare(held, value)",
        "compare(held, value)",
        "tests/core/banks/test_facts.py",
    ),
    Fault(
        "kp_core/banks/store.py",
        "for space in dict.fromkeys(fact.namespace for fact in facts):",
        "for space in list(dict.fromkeys(fact.namespace for fact in facts))[:1]:",
        "tests/core/banks tests/core/banks/test_delivery.py",
    ),
    Fault(
        "kp_langchain/messages.py",
        "input_tokens=usage.prompt_tokens + usage.pack_tokens,",
        "input_tokens=usage.prompt_tokens,",
        "tests/langchain/test_chat_model.py",
    ),
    Fault(
        "kp_serve/rights.py",
        "if not isinstance(signed, str) or not hmac.compare_digest(_mac(key, text).encode(), mac.encode()):",
        "if not isinstance(signed, str):",
        "tests/serve",
    ),
    Fault("kp_serve/rights.py", 'if claims["salt"] != salt:', "if False:", "tests/serve"),
)


def main() -> int:
    """Try all faults; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="faults of files whose name contains NAME")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only in fault.file]
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "site", "bench-out"))
        paths = sorted({path for fault in faults for path in fault.tests.split()})
        if not _passes(copy, paths):
            sys.stderr.write("The tests fail without a fault; see above.\n")
            return 2
        for fault in track(faults, "faults"):
            file = copy / fault.file
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(fault.text, fault.fault), encoding="utf-8")
            if _passes(copy, fault.tests.split()):
                unnoticed.append(fault)
            file.write_text(text, encoding="utf-8")
    for fault in unnoticed:
        sys.stdout.write(f"No test noticed {fault.fault!r} in {fault.file} ({fault.tests}).\n")
    sys.stdout.write(f"{len(faults) - len(unnoticed)} of {len(faults)} faults were noticed.\n")
    return 1 if unnoticed else 0


def _passes(copy: Path, tests: list[str]) -> bool:
    """Whether the short tests of these paths pass in `copy`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
