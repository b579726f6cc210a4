"""The files that one call crosses, in the order in which it enters them: `python -m tests.helpers.call_path`.

A file counts if a function of it is called. The call is a warm one: the model is proved and caches are filled, as for
every call but the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import normscope
from normscope import Analyzer, default_model

SOURCE = Path(normscope.__file__).parent
SENTENCE = "Colin Fleming plays tennis."


def crossed_files(call: Callable[[], Any]) -> list[str]:
    """The files of the package whose functions `call` runs, without the folder of the package."""
    call()
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            found.setdefault(path.relative_to(SOURCE).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return list(found)


def calls(lens: Analyzer) -> dict[str, Callable[[], Any]]:
    """The calls whose paths are kept short."""
    return {"analyze": lambda: lens.analyze(SENTENCE), "flow": lambda: lens.flow(SENTENCE).maps}


if __name__ == "__main__":
    for name, call in calls(Analyzer.from_pretrained(default_model.find())).items():
        files = crossed_files(call)
        print(f"{name}: {len(files)} files", *files, sep="\n  ")
