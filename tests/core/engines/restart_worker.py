"""One step of an agent in a process of its own: `python -m tests.core.engines.restart_worker STORE MESSAGES MODE`."""

import json
import sys
from pathlib import Path

from kp_core import PackStore, load_engine


def main(store_path: str, messages_path: str, mode: str) -> None:
    """With `run`, ten searches, each answered; with `go on`, the next step alone, and what it cost."""
    engine, store = load_engine(dtype="bfloat16", device="cpu"), PackStore(store_path)
    view, path = store.view("notes"), Path(messages_path)
    messages = json.loads(path.read_text(encoding="utf-8"))
    if mode == "run":
        for at in range(10):
            text = (
                f"Note {at}. Keeper {at * 7} of the lighthouse counted {at * 31 + 2} ships in the year {1800 + at}.\n"
            )
            handle = str(store.put(engine.build_pack(text, namespace="notes")))
            call = {"id": f"call{at}", "type": "function",
                    "function": {"name": "search", "arguments": json.dumps({"query": f"keeper {at}"})}}  # fmt: skip
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": call["id"], "content": handle}]  # fmt: skip
            answer = engine.generate(messages, view=view, keep="always", compact=True, max_tokens=4)
            print(json.dumps(answer.usage.to_dict()))
        path.write_text(json.dumps(messages), encoding="utf-8")
        return
    found = engine.prefill(messages, view=view, keep="always", compact=True)
    oracle = engine.prefill(messages, view=view, compact=True, reuse=False)
    same = bool((found.logits == oracle.logits).all())
    print(json.dumps({**found.usage.to_dict(), "same": same}))


if __name__ == "__main__":
    main(*sys.argv[1:])
