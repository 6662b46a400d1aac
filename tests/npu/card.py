"""The card under test: its kind, its devices, the model. All that `make test-npu` can be told is read here, once.

EPD_TEST_DEVICE   npu (default), cuda, or cpu to rehearse the tests without a card
EPD_TEST_DEVICES  use so many devices at most; on cpu, where devices are virtual, so many there are (default 3)
MODEL             a checkpoint to serve instead of a small model with random weights
EAGER             1: without graphs (--enforce-eager) alone, 0: with graphs alone; else some parts both ways (plan.py).
                  A CPU has no graphs: there both ways are the same
TEXTVQA, AISBENCH folders of the TextVQA subset and of an environment with AISBench: with MODEL, accuracy is judged
OUT               a folder that the report is copied to while it grows
EPD_TEST_START_S  deadline for a launch to become ready (default 900)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from epd_serve.demo.presets import builtin_model_dir, write_preset
from npu_ops.discovery import DeviceInventory, discover

KINDS = ("npu", "cuda", "cpu")
GRAPHS, EAGER = "graphs", "eager"
MODES = {"": (GRAPHS, EAGER), "0": (GRAPHS,), "1": (EAGER,)}
"""How stages run, by the variable EAGER."""
VIRTUAL_DEVICES = 3
PRESET = {"npu": "npu", "cuda": "npu", "cpu": "demo"}
"""What is served without MODEL: random weights with heads that a card's kernels take; the trained demo model on CPU."""


@dataclass(frozen=True)
class Card:
    """What there is to test on.

    Attributes:
        ids: devices that may be used, as `discover` numbers them. names: their products.
        note: why there is none, else "".
        given_model: a checkpoint's path or hub name, or "" for the small model of `PRESET`.
        textvqa, aisbench: folders, or "".
        modes: that are asked for; of a part, one of them.
    """

    kind: str
    ids: tuple[int, ...]
    names: tuple[str, ...]
    note: str
    given_model: str
    modes: tuple[str, ...]
    start_s: float
    textvqa: str
    aisbench: str

    @property
    def eager(self) -> bool:
        """Stages are started without graphs."""
        return self.modes == MODES["1"]

    @property
    def mode(self) -> str:
        """What rows say of it."""
        return EAGER if self.eager or self.kind == "cpu" else GRAPHS

    @property
    def label(self) -> str:
        """What rows say they were seen on."""
        return "CPU: a rehearsal, no card" if self.kind == "cpu" else self.names[0]

    @property
    def answers_are_known(self) -> bool:
        """The trained demo model is served: a wrong picture's feature shows as a wrong word."""
        return not self.given_model and PRESET[self.kind] == "demo"

    def model(self, scratch: Path) -> str:
        """The model to serve; a preset is written under `scratch` when it is not there yet."""
        if self.given_model:
            return self.given_model
        preset = PRESET[self.kind]
        if preset == "demo":
            return str(builtin_model_dir())
        if not (folder := scratch / f"model-{preset}").exists():
            write_preset(folder, preset)
        return str(folder)


def read_card() -> Card:
    """From the environment and the machine.

    Raises:
        ValueError: EPD_TEST_DEVICE is no kind of device, EAGER neither 0 nor 1; or as `discover`, for a device that is
            not there.
    """
    kind = os.environ.get("EPD_TEST_DEVICE") or "npu"
    if kind not in KINDS:
        raise ValueError(f"EPD_TEST_DEVICE={kind} is unknown: one of {', '.join(KINDS)}")
    if (eager := os.environ.get("EAGER", "")) not in MODES:
        raise ValueError(f"EAGER={eager} is unknown: 1 for without graphs alone, 0 for with graphs alone")
    most = int(os.environ.get("EPD_TEST_DEVICES") or 0)
    found = discover(kind)
    if kind == "cpu":
        count = most or VIRTUAL_DEVICES
        found = DeviceInventory("cpu", tuple(range(count)), ("virtual",) * count)
    count = most or len(found.ids)
    return Card(
        kind=kind,
        ids=found.ids[:count],
        names=found.names[:count],
        note=found.note,
        given_model=os.environ.get("MODEL", ""),
        modes=MODES[eager],
        start_s=float(os.environ.get("EPD_TEST_START_S") or 900),
        textvqa=os.environ.get("TEXTVQA", ""),
        aisbench=os.environ.get("AISBENCH", ""),
    )
