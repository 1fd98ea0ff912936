"""`python -m cookbooks.steering`: one model, one pack, and ways of speaking that cost no token."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import kp_core
from benchmarks.steering_range import calibrate, likeness
from kp_core.errors import OptionError
from kp_core.steering import load_steering, preset, save_steering

FACTS = (
    "Veyl is a harbour town on the isle of Orrelay. Its lighthouse was built in 1887 by Maren Holt. "
    "The ferry to the mainland leaves every day at seven in the morning."
)
QUESTION = "Who built the lighthouse of Veyl, and what is the town like?"
TASKS = ("What is the sun?", "Why do people sleep?", "How can I save money?", "Tell me about dogs.")


def main(argv: list[str] | None = None) -> None:
    """Tell the story."""
    parser = argparse.ArgumentParser("python -m cookbooks.steering", description=__doc__)
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="most tokens of an answer (default: 40)")
    tokens = parser.parse_args(argv).tokens
    # Answers are to be the same wherever this runs, so float32 on the CPU.
    engine = kp_core.load_engine(dtype="float32", device="cpu")

    print("# 1. A direction, from 26 pairs of formal and casual texts")
    formal = engine.make_steering(preset("formal"), progress=False)
    print(
        f"layers {formal.layers[0]} to {formal.layers[-1]}; strength {formal.strength:.2f} of the cached values' norm"
    )

    print("\n# 2. The same question, steered. No token is added and nothing is computed twice")
    for alpha in (-1, 0, 0.7, 1.5, 4):
        said = engine.generate("What is the sun?", steering=(formal, alpha), max_tokens=tokens)
        print(f"alpha {alpha:>4}, {said.usage.prompt_tokens} tokens sent: {' '.join(said.text.split())}")

    print("\n# 3. A pack that speaks otherwise: what it knows comes from its keys, how it speaks from its values")
    pack = engine.build_pack(FACTS, compiled_for="system")
    for name, chosen in (("plain", pack), ("formal", pack.steer(formal)), ("casual", pack.steer(formal, -1))):
        said = engine.generate(QUESTION, packs=[chosen], max_tokens=tokens)
        print(f"{name}: {' '.join(said.text.split())}")
    same = engine.generate(QUESTION, packs=[pack.steer(formal, 2).steer(formal, -2)], max_tokens=tokens)
    print(f"steered there and back: {' '.join(same.text.split())}")

    print("\n# 4. Directions are values: they add, turn round, and can be compared")
    casual = -formal.at_strength(0.12)
    concise = engine.make_steering(preset("concise"), progress=False).at_strength(0.12)
    print(f"cosine of casual and concise: {casual.cosine(concise):.2f}")
    for name, chosen in (("plain", None), ("casual", casual), ("concise", concise), ("both", casual + concise)):
        said = engine.generate("Why is the sea salty?", steering=chosen, max_tokens=tokens + tokens // 2)
        print(f"{name}, {said.usage.completion_tokens} tokens: {' '.join(said.text.split())}")

    print("\n# 5. How much does this model take? The effect is likeness to the formal side, by embedding")
    score = likeness(preset("formal"), kp_core.SentenceTransformerEmbedder())
    found = calibrate(
        engine, formal, TASKS, score, alphas=(-2, -1, 0.7, 1.5, 3), max_tokens=tokens // 2, progress=False
    )
    print(found.table())
    formal = found.steering
    print(f"at its default strength it is now scaled by {formal.default_alpha(with_knowledge=False):g}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.generate(TASKS[0], steering=(formal, 6), max_tokens=1)
    print(*(f"warning: {warning.message}" for warning in caught), sep="\n")

    print("\n# 6. Kept in a file with what was measured, and refused where it does not belong")
    with tempfile.TemporaryDirectory() as folder:
        path = save_steering(formal, Path(folder) / "formal.safetensors")
        back = load_steering(path)
        print(f"{path.stat().st_size} bytes; comes back the same: {back == formal}, {back.recommended}")
    for wrong in ({"scope": "pack"}, {"steering": (formal, float("nan"))}):
        try:
            engine.generate(QUESTION, **({"steering": formal} | wrong))
        except OptionError as error:
            print(error)


if __name__ == "__main__":
    main()
