"""`python -m tests.npu.run [PYTEST ARGUMENT…]`: all tests that need a card, then one archive to send. `make test-npu`.

In this order: what the machine is (`epd-serve doctor`), the device operations in a process of their own, so that no
context of ours holds device memory when stages profile it, and then the stages. The archive is written whatever fails,
also when it is ended by Ctrl-C or SIGTERM; running stages are ended first.

Exit status: 0 all passed, 1 something failed, 2 there is no such card, 130 it was ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.npu.card import Card, read_card
from tests.npu.report import ROOT, Report

FOLDER = ROOT / "build" / "npu-report"
ARCHIVE = ROOT / "build" / "npu-report.tar.gz"
PYTEST = (sys.executable, "-m", "pytest")
DOCTOR_S = 180.0
OPS_S = 600.0
STAGES_S = 3600.0  # a bound, not the expectation: every wait inside has a shorter one
LOOK_EVERY_S = 0.2
ENDING_S = 90.0  # from the interruption of pytest until its launches have taken their stages down


def main(arguments: list[str]) -> int:
    card = read_card()
    if not card.ids:
        print(f"no {card.kind} device here ({card.note}). Rehearse without a card: make test-npu EPD_TEST_DEVICE=cpu")
        return 2
    shutil.rmtree(FOLDER, ignore_errors=True)
    report = Report(FOLDER)
    begun = time.monotonic()
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    report.machine(card.kind, devices=dict(zip(card.ids, card.names, strict=True)), model=card.given_model)
    try:
        _doctor(report, card)
        failed = [part for part in ("ops", "stages") if not (ended.is_set() or _pytest(part, arguments, ended))]
    finally:
        report.result(test="all", outcome="ended", seconds=round(time.monotonic() - begun, 1))
        report.pack(ARCHIVE)
    _summarise(report, time.monotonic() - begun)
    return 130 if ended.is_set() else 1 if failed else 0


def _doctor(report: Report, card: Card) -> None:
    """Its findings do not decide: a card that passes the tests is a card that works."""
    command = [sys.executable, "-m", "deploy.cli", "doctor", "--device", card.kind, "--imports", "--json"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DOCTOR_S)
    except subprocess.TimeoutExpired:
        print(f"epd-serve doctor did not answer within {DOCTOR_S:g} s")
        return
    (report.folder / "doctor.json").write_text(done.stdout or json.dumps({"error": done.stderr[-2000:]}))
    print(f"epd-serve doctor: exit status {done.returncode}, in {report.folder / 'doctor.json'}", flush=True)


def _pytest(part: str, arguments: list[str], ended: threading.Event) -> bool:
    folder, limit_s = f"tests/npu/{part}", OPS_S if part == "ops" else STAGES_S
    command = [*PYTEST, folder, "-v", "-rA", *arguments]
    environment = {**os.environ, "EPD_TEST_REPORT": str(FOLDER)}
    # Of a session of its own: Ctrl-C at the terminal reaches it once, through us.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    until = time.monotonic() + limit_s
    while process.poll() is None and not ended.wait(LOOK_EVERY_S):
        if time.monotonic() > until:
            Report(FOLDER).result(test=folder, outcome="failed", why=f"did not end within {limit_s:g} s")
            break
    _end(process)
    return process.returncode in (0, 5)  # 5: the arguments chose no test of this part


def _end(process: subprocess.Popen[bytes]) -> None:
    """Pytest takes its launches down when it is interrupted; killed, it would leave them on the card."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _summarise(report: Report, seconds: float) -> None:
    print(f"\n{seconds / 60:.1f} minutes. Figures (measured, none of them decides):")
    for figure in report.read("figures.jsonl"):
        where = f"  [{figure['launch']}]" if figure["launch"] else ""
        print(f"  {figure['name']:40} {figure['value']}{where}")
    print(f"\nSend this one file, whether it passed or not: {Path(os.path.relpath(ARCHIVE))}  (docs/ascend.md)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
