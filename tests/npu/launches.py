"""Layouts served on the card, each as a user starts it, on as many devices as there are.

Owns how a layout is started on the device under test and what is kept of it for the report. What a user's launch
promises at its end is checked by `tests.e2e.serving`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from epd_serve.layout_parser import parse
from epd_serve.phases.stamps import Timeline
from tests.e2e.serving import MODEL, Serving
from tests.npu.report import tool_output
from tests.npu.rig import Rig


class CardServing(Serving):
    """`epd-serve serve` on the card, with traces, and logs that outlive it in the report."""

    def __init__(self, rig: Rig, layout: str, *flags: str, model: str = "", core_share: str = "") -> None:
        card = rig.card
        self.rig = rig
        self.traces = rig.scratch / f"traces-{rig.part}-{time.monotonic_ns()}"
        # Room for the longest prompt here and no more: a real checkpoint's 128 K would take the device's memory.
        common = "--max-model-len 8192 --max-num-seqs 32" + (" --enforce-eager" if card.eager else "")
        # A CPU has to have a core for each stage that has a share: a rehearsal may go without.
        few = card.kind == "cpu" and len(os.sched_getaffinity(0)) // parse(layout).device_count < core_share.count("=")
        self.core_share = "" if few else core_share
        words = ["--device", card.kind, "--share-devices", "--served-model-name", MODEL]
        words += ["--trace-dir", str(self.traces), *(["--core-share", core_share] if self.core_share else [])]
        super().__init__(layout, *words, *flags, "--stage-args", f"all:{common}", model or card.model(rig.scratch))

    def keep_logs(self) -> None:
        """Now, for a launch removes its run directory; the first time with who has how much of the devices."""
        if not (devices := self.root / "devices.txt").exists():
            devices.write_text(tool_output(self.rig.card.kind))
        kept = [self.log, devices, *self.traces.glob("*.jsonl"), *(self.root / "run").glob("last-failure-*.log")]
        with contextlib.suppress(ValueError, OSError):  # it may have ended before it had a run directory
            kept += [path for path in self.run.iterdir() if path.suffix in (".log", ".json", ".jsonl")]
        self.rig.report.keep_logs(self.rig.part, self.layout, *kept)


def stage_events(timeline: Timeline, request: str) -> dict[tuple[str, str], float]:
    """When what happened to a request, by role and event (the last of several): proxy and stages share names.

    What took time is there twice: as EVENT when it was over, as EVENT_begun when it began.
    """
    found: dict[tuple[str, str], float] = {}
    for stamp in timeline.stamps(request):
        role = stamp.instance.rstrip("0123456789")
        found[role, stamp.event] = stamp.t
        if "t0" in stamp.more:
            found[role, f"{stamp.event}_begun"] = stamp.more["t0"]
    return found


@contextlib.contextmanager
def served(rig: Rig, layout: str, *flags: str, core_share: str = "") -> Iterator[CardServing]:
    """A ready launch; its end is checked as a user's Ctrl-C. Its logs are kept whatever happened."""
    launch = CardServing(rig, layout, *flags, core_share=core_share)
    with rig.layout(layout):
        try:
            begun = time.monotonic()
            launch.wait_ready(rig.card.start_s)
            rig.row("ready_s", round(time.monotonic() - begun, 1))
            yield launch
            launch.keep_logs()
            _end(launch)
        finally:
            launch.keep_logs()
            launch.destroy()


def _end(launch: CardServing) -> None:
    """What is wrong with its end is one more thing that is wrong, and not why a part has no rows."""
    begun, why = time.monotonic(), ""
    try:
        launch.stop()
    except AssertionError as error:
        why = str(error)
    launch.rig.check(not why, "it ends by Ctrl-C and leaves nothing", why)
    launch.rig.row("ended_s", round(time.monotonic() - begun, 1))
