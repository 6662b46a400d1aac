"""A profile is measured part by part, and goes on where it was ended."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from deploy.planner.measure import Report, measured, progress_bar
from deploy.planner.steps import Part, Sent, Step
from deploy.planner.sweep import Launch, launches
from epd_serve.errors import ConfigError

LAUNCHES = launches(2, [1], multimodal=True)
ABOUT = {"model": "m", "device": "d"}


class Runner:
    """Measures nothing; is interrupted at a part."""

    def __init__(self, until: str = "") -> None:
        self._until = until
        self.ran: list[str] = []

    def __call__(self, launch: Launch, report: Report) -> Part:
        if launch.name == self._until:
            raise KeyboardInterrupt
        self.ran.append(launch.name)
        report("prompts of 64", 0.5)
        return Part(launch.name, launch.layout, 1, 1.5, [Step("E0", 1.0, 2.0, item_tokens=5)], [Sent(0.5, 3.0)])


def run(path: Path, runner: Runner, about: dict[str, str] = ABOUT, *, terminal: bool = False) -> tuple[list[Part], str]:
    said = io.StringIO()
    progress = progress_bar(Console(file=said, force_terminal=terminal, width=200))
    return measured(path, about, LAUNCHES, runner, progress), said.getvalue()


def test_a_second_run_goes_on_where_the_first_was_ended(tmp_path: Path) -> None:
    path, whole = tmp_path / "p.json.part", run(tmp_path / "other", Runner())[0]
    first = Runner(until="encode+decode")
    with pytest.raises(KeyboardInterrupt):
        run(path, first)
    with path.open("ab") as file:
        file.write(b'{"name": "encode+dec')  # whoever was killed in the middle of a line
    second = Runner()
    parts, said = run(path, second)
    assert first.ran + second.ran == [one.name for one in LAUNCHES] and len(first.ran) == 2
    assert parts == whole and "2 of 5 parts are there already" in said
    assert run(path, Runner(until="alone"))[0] == whole, "nothing is left to measure"


def test_parts_of_another_profile_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json.part"
    run(path, Runner())
    with pytest.raises(ConfigError, match=r"model was 'm' and is 'n' now; remove it"):
        run(path, Runner(), {"model": "n", "device": "d"})
    path.write_text("something else\n")
    with pytest.raises(ConfigError, match="is no file of parts"):
        run(path, Runner())
    with pytest.raises(ConfigError, match="cannot be written"):
        run(tmp_path / "no" / "folder", Runner())


def test_a_terminal_sees_how_far_it_is(tmp_path: Path) -> None:
    _, said = run(tmp_path / "p.json.part", Runner(), terminal=True)
    assert "part 5 of 5, beside on (E-PD)x2: prompts of 64" in said
    assert re.search(r"\d:\d\d:\d\d", said), "by all that was done, not by the last half minute"


def test_parts_are_those_that_the_devices_can_hold() -> None:
    assert [(one.name, one.layout) for one in launches(4, [1, 2], multimodal=True)] == [
        ("alone", "E:tp1-PD:tp1"),
        ("alone-tp2", "E:tp2-PD:tp2"),
        ("encode+prefill", "(E-P)-D"),
        ("encode+decode", "(E-D)-P"),
        ("prefill+decode", "E-(P-D)"),
        ("beside", "(E-PD)x2"),
    ]
    assert [one.layout for one in launches(1, [1], multimodal=True)] == ["TP1", *["(E-P-D)"] * 3]
    assert [one.layout for one in launches(2, [1, 2], multimodal=False)] == ["TP1", "TP2", "(P-D)", "TP1x2"]
    assert [one.name for one in launches(2, [1], multimodal=True, only=["alone"])] == ["alone"]
    with pytest.raises(ConfigError, match="--tp 4 takes 4"):
        launches(2, [4], multimodal=True)
    with pytest.raises(ConfigError, match="--parts has no alon; there are alone, "):
        launches(2, [1], multimodal=True, only=["alon"])
