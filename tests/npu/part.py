"""`python -m tests.npu.part NAME MODULE:FUNCTION FOLDER`: one part in a process of its own; what its failure leaves.

Exit status: 0 it passed, 1 it failed, 3 it was skipped. Why is in `outcome.json` of the part's folder, and of a failure
all that this process knows in `failure.txt`: the traceback, its memory on the device, streams, the vendor's tool.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from deploy.memory.check import VISIBLE
from tests.npu.card import read_card
from tests.npu.report import Report, tool_output
from tests.npu.rig import Rig, Skipped

PASSED, FAILED, SKIPPED = 0, 1, 3


def main(name: str, entry: str, folder: Path) -> int:
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C: what was started has to be stopped
    report, own = Report(folder), folder / "parts" / name
    own.mkdir(parents=True, exist_ok=True)
    (scratch := folder / "scratch").mkdir(exist_ok=True)
    card = read_card()
    if card.kind != "cpu":  # EPD_TEST_DEVICES may have left some out
        os.environ[VISIBLE[card.kind]] = ",".join(map(str, card.ids))
    rig = Rig(name, card, report, own, scratch)
    try:
        module, function = entry.split(":")
        getattr(importlib.import_module(module), function)(rig)
        rig.settle()
    except Skipped as reason:
        return _outcome(own, SKIPPED, str(reason))
    except BaseException as error:  # Ctrl-C and the limit too: what was known then is what helps
        traceback.print_exc()
        (own / "failure.txt").write_text(_facts(card.kind))
        _outcome(own, FAILED, f"{type(error).__name__}: {error}")
        if not isinstance(error, Exception):
            raise
        return FAILED
    return _outcome(own, PASSED, "")


def _outcome(own: Path, code: int, why: str) -> int:
    (own / "outcome.json").write_text(json.dumps({"code": code, "why": why}))
    return code


def _facts(kind: str) -> str:
    parts = [traceback.format_exc(), *_memory_facts(kind)]
    if kind != "cpu":
        parts.append(tool_output(kind))
    return "\n\n".join(parts)


def _memory_facts(kind: str) -> list[str]:
    """Of this process; torch is asked only where it was loaded and has touched the device."""
    torch = sys.modules.get("torch")
    module = getattr(torch, kind, None) if torch is not None and kind != "cpu" else None
    if module is None or not module.is_initialized():
        return ["this process has not touched a device"]
    told = []
    for what, ask in (
        ("current stream", lambda: str(module.current_stream())),
        ("default stream", lambda: str(module.default_stream())),
        ("free and total bytes", lambda: str(module.mem_get_info())),
        ("allocator", lambda: str(module.memory_summary())),
    ):
        try:
            told.append(f"{what}: {ask()}")
        except Exception as error:  # noqa: BLE001  (a broken device answers nothing; the traceback above is what counts)
            told.append(f"{what}: {error!r}")
    return told


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
