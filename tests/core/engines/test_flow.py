"""How much code one request passes through."""

import sys
from pathlib import Path

import kp_core
from kp_core import PackStore
from tests.conftest import tiny_engine

CORE = str(Path(kp_core.__file__).parent)
MOST_FILES, MOST_KINDS = 44, 53
"""What a request passes through today, values included. Lower these with each step that joins files or types."""


def test_a_request_passes_through_no_more_files_and_classes_than_before(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    handles = [store.put(engine.build_pack(f"Island {n} is green.", namespace="isles")) for n in range(2)]
    question, view = f"{handles[0]}\n{handles[1]}\n\nWhich?", store.view("isles")
    engine.generate(question, view=view, max_tokens=2)
    engine.clear_cache()
    files, kinds = set(), set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(CORE):
            files.add(frame.f_code.co_filename.removeprefix(f"{CORE}/"))
            kind = type(frame.f_locals.get("self"))
            if kind.__module__.startswith("kp_core"):
                kinds.add(kind.__name__)

    sys.setprofile(note)
    try:
        engine.generate(question, view=view, max_tokens=2)
    finally:
        sys.setprofile(None)
    assert len(files) <= MOST_FILES, " ".join(sorted(files))
    assert len(kinds) <= MOST_KINDS, " ".join(sorted(kinds))
