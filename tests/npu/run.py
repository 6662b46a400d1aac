"""`python -m tests.npu.run`: what a card has to show, part by part, then one archive to send. `make test-npu`.

Each part (`plan.py`) runs in a process of its own, so that no context of ours holds device memory when stages profile
it, and is ended with all that it started when its time is over. Results are written as they come; a second call goes
on where the first ended: what is finished is not run again, what was interrupted is.

Exit status: 0 every part that was asked for has passed or cannot run here, 1 one has failed, 2 there is no such card
or part, 3 some are left for another call, 130 it was ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from deploy.host import processes
from deploy.host.launches import reap_dead
from deploy.host.parent_death_exec import parent_death_exec
from npu_ops.discovery import discover
from npu_ops.properties import read_properties
from tests.npu.card import EAGER, Card, read_card
from tests.npu.part import FAILED, PASSED, SKIPPED
from tests.npu.plan import BUDGET_S, PARTS, Part, chosen, lines
from tests.npu.report import ROOT, Report

MARK = "EPD_TEST_RUN"  # in the environment of all that a part starts
TALKATIVE = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
"""So that a stage that crashes in a library says where. torch's C++ traces would take minutes of every start."""
OUTCOMES = {PASSED: "passed", FAILED: "failed", SKIPPED: "skipped"}
DOCTOR_S = 120.0
LOOK_EVERY_S = 0.2
COPY_EVERY_S = 3.0  # so much of it a run that is cut off may lack
ENDING_S = 60.0  # a part's launches take their stages down in that time
SWEEP_S = 20.0


def main(words: list[str], build: Path = ROOT / "build") -> int:
    arguments = parsed(words)
    try:
        card = read_card()
        parts = chosen(arguments.parts, card.modes)
    except ValueError as error:
        print(error)
        return 2
    if arguments.plan:
        print("\n".join(lines(parts, card.kind)))
        return 0
    if not card.ids:
        print(f"no {card.kind} device here ({card.note}). Rehearse without a card: make test-npu EPD_TEST_DEVICE=cpu")
        return 2
    report = Report(build / f"{card.kind}-report")
    try:
        report.copy_to(arguments.out)
    except OSError as error:
        print(f"OUT={arguments.out} cannot be written: {error.strerror}")
        return 2
    run = _Run(card, report, time.monotonic() + arguments.budget_s)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: run.ended.set())
    run.machine()
    for part in chosen(arguments.parts, card.modes, needed=False) if arguments.again else ():
        report.forget(part.name, files=True)
        report.part(part.name, outcome="to be repeated")
    for part in parts:
        run.part(part)
    return run.over(parts, words)


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-npu TEST_ARGS=…", description=__doc__.split("\n\n")[0])
    parser.add_argument("--parts", default="", metavar="A,B", help=f"of {', '.join(part.name for part in PARTS)}; all")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="S", help="no part begins that takes longer"
    )
    parser.add_argument("--again", action="store_true", help="also when they are finished")
    parser.add_argument("--plan", action="store_true", help="minutes per part; runs nothing")
    parser.add_argument("--out", default=os.environ.get("OUT"), metavar="DIR", help="copied there while it grows")
    return parser.parse_args(words)


class _Run:
    """One call: parts one after the other until its time is over or it is ended."""

    def __init__(self, card: Card, report: Report, until: float) -> None:
        self.card, self.report = card, report
        self.ended = threading.Event()
        self._until, self._mark = until, uuid.uuid4().hex
        self._archive = report.folder.with_name(f"{report.folder.name}.tar.gz")

    def machine(self) -> None:
        """What the machine is. Doctor's findings do not decide: a card that passes the parts is a card that works."""
        devices = dict(zip(self.card.ids, self.card.names, strict=True))
        self.report.machine(self.card.kind, devices=devices, model=self.card.given_model)
        command = [sys.executable, "-m", "deploy.cli", "doctor", "--device", self.card.kind, "--json"]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DOCTOR_S)
        except subprocess.TimeoutExpired:
            print(f"epd-serve doctor did not answer within {DOCTOR_S:g} s")
            return
        (self.report.folder / "doctor.json").write_text(done.stdout or json.dumps({"error": done.stderr[-2000:]}))

    def part(self, part: Part) -> None:
        """Run it, unless it is finished, or there is no time for it."""
        left_s = self._until - time.monotonic()
        if self.ended.is_set() or self.report.finished(part.name):
            return
        if part.expected_s(self.card.kind) > left_s:
            print(f"{part.name}: takes {part.expected_s(self.card.kind):.0f} s, {left_s:.0f} are left", flush=True)
            return
        self.report.forget(part.name, files=False)
        self.report.part(part.name, event="begun")
        print(f"\n== {part.name}: {part.what}", flush=True)
        begun = time.monotonic()
        outcome, why = self._run(part, min(part.limit_s, left_s))
        swept = self._sweep()
        seconds = round(time.monotonic() - begun, 1)
        self.report.part(part.name, outcome=outcome, seconds=seconds, why=why, swept=swept, **self._memory())
        print(f"== {part.name}: {outcome} after {seconds:.0f} s  {why}", flush=True)
        self._written()

    def over(self, parts: tuple[Part, ...], words: list[str]) -> int:
        text, outcomes = self._written(), self.report.outcomes()
        left = [part.name for part in parts if not self.report.finished(part.name)]
        print(f"\n{text}")
        if left:
            print(f"Left: {', '.join(left)}. The same command goes on with them.")
        archive = os.path.relpath(self._archive)
        print(f"Send this one file, whether all passed or not: {archive}  (docs/guides/ascend-testing.md)")
        if self.ended.is_set():
            return 130
        if any(outcomes.get(part.name, {}).get("outcome") == "failed" for part in parts):
            return 1
        return 3 if left else 0

    def _written(self) -> str:
        """The page and the archive, as of now: a run that is killed leaves those of the part before."""
        text = self.report.summarise(f"{self.card.label}, {len(self.card.ids)} device(s): what was asked of it")
        self.report.pack(self._archive)
        self._copy()
        return text

    def _copy(self) -> None:
        """A place that takes no more ends no run: the report is whole where it is made."""
        try:
            self.report.copy(self._archive)
        except OSError as error:
            print(f"not copied: {error}", flush=True)

    def _run(self, part: Part, limit_s: float) -> tuple[str, str]:
        own = self.report.folder / "parts" / part.name
        own.mkdir(parents=True, exist_ok=True)
        (own / "outcome.json").unlink(missing_ok=True)
        mode = {"EAGER": "1" if part.mode == EAGER else "0"}
        environment = {**os.environ, **TALKATIVE, **mode, MARK: self._mark}
        # It is tied to us: a run that is killed leaves no part behind.
        command = [sys.executable, "-m", "tests.npu.part", part.name, part.entry, str(self.report.folder)]
        with (own / "log.txt").open("wb") as log:
            # Of a session of its own: Ctrl-C at the terminal reaches it once, through us.
            process = subprocess.Popen(
                [sys.executable, "-m", *parent_death_exec(command, signal.SIGTERM)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            until = time.monotonic() + limit_s
            copied = time.monotonic()
            while process.poll() is None and time.monotonic() < until and not self.ended.wait(LOOK_EVERY_S):
                if time.monotonic() > copied + COPY_EVERY_S:
                    self._copy()
                    copied = time.monotonic()
            ran_out = process.poll() is None
            _end(process)
        if ran_out and self.ended.is_set():
            return "interrupted", "the run was ended"
        if ran_out and limit_s < part.limit_s:
            return "interrupted", f"no time was left after {limit_s:.0f} s"
        if ran_out:
            return "failed", f"did not end within {limit_s:.0f} s: log.txt and failure.txt say how far it came"
        try:
            found = json.loads((own / "outcome.json").read_text())
            return OUTCOMES[found["code"]], found["why"]
        except (OSError, ValueError, KeyError):
            tail = (own / "log.txt").read_text(errors="replace")[-1000:]
            return "failed", f"it ended with {process.returncode} without an outcome: {tail}"

    def _sweep(self) -> list[str]:
        """End what a part has left running, and remove what dead launches have left; says what there was."""
        killing, until, found = processes.Killing(), time.monotonic() + SWEEP_S, dict[int, str]()
        while marked := [
            one.pid for one in processes.running() if processes.has_environment(one.pid, MARK, self._mark)
        ]:
            found |= {pid: _command_of(pid) for pid in marked if pid not in found}
            killing.strike(marked)
            if time.monotonic() > until:
                break
            time.sleep(LOOK_EVERY_S)
        for root in [*Path("/tmp").glob("epd-e2e-*/run"), *Path("/tmp").glob("epd-bench-*/run")]:
            if dead := reap_dead(root):
                found |= {-len(found): f"launch {name}" for name in dead}
                shutil.rmtree(root.parent, ignore_errors=True)
        return list(found.values())

    def _memory(self) -> dict[str, list[int | None]]:
        """What is free on the devices after a part: what it did not give back shows here."""
        if self.card.kind == "cpu":
            return {}
        return {"free_bytes": [one.free_bytes for one in read_properties(discover(self.card.kind))]}


def _end(process: subprocess.Popen[bytes]) -> None:
    """A part takes its launches down when it is terminated; killed, it leaves them to the sweep."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return f"process {pid}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
