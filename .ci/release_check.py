"""`make release-check`: what is uploaded, and the wheel with each extra in an empty environment.

Run by an environment with build, twine and uv; the arguments install torch. Extras are tried one after the other; no
environment is left.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK, DIST = ROOT / "build" / "release", ROOT / "dist"
TOOLS, NEW, EMPTY = Path(sys.executable).parent, WORK / "new", WORK / "empty"
README, INDEX = ((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/index.md"))
BLOCK = re.compile(r"```python\n((?:(?!```).)*)```\n+```text\n(.*?)```", re.DOTALL)
# What an extra runs, and what that prints. The others are installed and imported.
RUNS = dict(zip(("", "langchain", "llamaindex"), [*BLOCK.findall(INDEX), *BLOCK.findall(README)], strict=True))
COMMANDS = ("build notes notes.md", "ask notes 'Who keeps the lighthouse?'", "verify notes")
# vLLM is large, and llama.cpp builds for long: it is asked whether there are releases that fit.
RESOLVED = ("llama", "serve")
# What Python compiles is kept: every environment has the same path.
KEPT = {"KP_CACHE": str(WORK / "cache"), "PYTHONPYCACHEPREFIX": str(WORK / "compiled")}
VARIABLES = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KP_"))} | KEPT


def say(line: str) -> None:
    """A line, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run(*command: object, folder: Path = ROOT) -> str:
    """What a command prints; the check ends where it fails."""
    words = [*map(str, command)]
    ran = subprocess.run(words, cwd=folder, env=VARIABLES, capture_output=True, text=True, check=False)  # noqa: S603
    if ran.returncode:
        sys.exit(f"{ran.stdout}{ran.stderr}\nrelease-check: see above, this failed: {shlex.join(words)}")
    return ran.stdout


def install(*words: object) -> str:
    """Install into the new environment."""
    return run(TOOLS / "uv", "pip", "install", "--python", NEW / "bin" / "python", *words)


def tried(wheel: Path, extra: str) -> str:
    """Install the wheel with an extra into an empty environment, run what the pages show, and say what was done."""
    run(TOOLS / "uv", "venv", "--clear", "--python", sys.executable, NEW)
    install(*sys.argv[1:])
    if extra in RESOLVED:
        install("--dry-run", f"{wheel}[{extra}]")
        return "resolves"
    install(f"{wheel}[{extra}]")
    run(TOOLS / "uv", "pip", "check", "--python", NEW / "bin" / "python")
    EMPTY.mkdir()
    code, printed = RUNS.get(extra, ("import kp_core, kp_methods", ""))
    if extra in {*RUNS, "cli"}:
        [models] = re.findall(r"^pip install (--no-deps .+?) +#", README, re.MULTILINE)
        for words in models.split(" && pip install "):
            install(*words.split())
    if (said := run(NEW / "bin" / "python", "-c", code, folder=EMPTY).strip()) != printed.strip():
        sys.exit(f"release-check: with [{extra}], the code of the page prints\n{said}\nand not\n{printed}")
    if extra == "cli":
        (EMPTY / "notes.md").write_text("The lighthouse of Veyl is kept by Orla Venn.\n")
        for line in COMMANDS:
            run(NEW / "bin" / "kp", *shlex.split(line), folder=EMPTY)
    shutil.rmtree(EMPTY)
    return "runs"


shutil.rmtree(DIST, ignore_errors=True)
try:
    run(sys.executable, "-m", "build", "--installer", "uv", "--outdir", DIST)  # The sdist, and the wheel from it.
    run(sys.executable, "-m", "build", "--installer", "uv", "--wheel", "--outdir", WORK / "direct")
    [wheel], [direct] = DIST.glob("*.whl"), (WORK / "direct").glob("*.whl")
    if wheel.read_bytes() != direct.read_bytes():
        sys.exit(f"release-check: the sdist builds another {wheel.name} than the checkout does.")
    say(run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *DIST.iterdir()))
    for extra in ("", *tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]):
        say(f"knowledge-packs[{extra}] {tried(wheel, extra)}")
finally:
    shutil.rmtree(WORK)
