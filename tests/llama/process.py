"""What processes of the tests do. Imports no more than a user's program does."""

from pathlib import Path

from kp_core import PackStore, load_engine

TEXTS = [
    f"Note {at}. Keeper {at * 7} of the light counted {at * 31 + 2} ships in {1800 + at}.\n" * 3 for at in range(4)
]
QUESTION = "How many ships did the keeper count?"


def answer(gguf, folder, answers):
    """Build packs if they are not stored, ask about them, and send what came."""
    engine, store = load_engine(gguf, engine="llama", cells=2048), PackStore(Path(folder))
    handles = [str(store.put(engine.build_pack(text))) for text in TEXTS[:3]]
    engine.clear_cache()
    message = "\n".join(handles) + f"\n{QUESTION}"
    generation = engine.generate(message, view=store.view("default"), keep="always", max_tokens=6)
    answers.send({**generation.usage.to_dict(), "text": generation.text, "fingerprint": engine.fingerprint.id})


def build(gguf, folder, first, stored):
    """Store one pack after the other, and send the number and handle of each that is stored."""
    engine, store = load_engine(gguf, engine="llama", cells=512), PackStore(Path(folder))
    for number in range(first, first + 1000):
        stored.send((number, str(store.put(engine.build_pack(f"Ship {number} came in at night.")))))
