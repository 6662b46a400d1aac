"""`python -m tests.contract`: our code against the released wheels that it names, by the committed manifest.

Exit status: 0 when all fits, 1 with one line for each thing that does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.contract.check import ROOT, examine, sources, unexpected
from tests.contract.document import DOCUMENT, compatibility
from tests.contract.facts import Facts, WheelFacts
from tests.contract.findings import Examined
from tests.contract.manifest import FOLDER, Manifest, Recorder, load, write
from tests.contract.request_fields import GENERATED, check_request_fields, fields_text
from tests.contract.wheels import WHEELS, Wheel, download


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description=__doc__)
    parser.add_argument("--refresh", type=Path, metavar="FOLDER", help="download the wheels to it and read them")
    parser.add_argument("--document", action="store_true", help=f"write {DOCUMENT} (a refresh does it, too)")
    flags = parser.parse_args(arguments)
    if flags.refresh is not None:
        flags.refresh.mkdir(parents=True, exist_ok=True)
        refresh(flags.refresh)
    manifests = {wheel: load(FOLDER, wheel) for wheel in WHEELS}
    results = examine_all(manifests)
    if flags.document or flags.refresh is not None:
        (ROOT / DOCUMENT).write_text(compatibility(manifests, results, sources()), encoding="utf-8")
    findings = unexpected(results) + check_request_fields(available(manifests), (ROOT / GENERATED).read_text("utf-8"))
    for finding in findings:
        print(finding)
    uses = sum(len(set(result.uses)) for result in results)
    print(f"npu contract: {uses} uses against {len(results)} wheels, {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


def examine_all(manifests: dict[Wheel, Manifest]) -> list[Examined]:
    """Our code against what was recorded of the wheels that could be had."""
    return examine(sources(), available(manifests))


def available(manifests: Mapping[Wheel, Manifest]) -> dict[Wheel, Facts]:
    """What was recorded of the wheels that could be had."""
    return {wheel: manifest for wheel, manifest in manifests.items() if manifest.available}


def refresh(folder: Path) -> None:
    """Downloads what is not there, examines our code against the wheels themselves, and writes down every answer."""
    got = {wheel: download(wheel, folder) for wheel in WHEELS}
    recorders: dict[Wheel, Facts] = {
        wheel: Recorder(WheelFacts(one.path, wheel.package)) for wheel, one in got.items() if one.path is not None
    }
    examine(sources(), recorders)
    text = fields_text(recorders)
    check_request_fields(recorders, text)  # asks what it will ask of the manifest
    (ROOT / GENERATED).write_text(text, encoding="utf-8")
    for wheel, one in got.items():
        print(f"{wheel.name}: {one.path.name if one.path else 'not available: ' + one.reason}", file=sys.stderr)
        recorder = recorders.get(wheel)
        write(FOLDER, wheel, one.facts(), recorder.rows if isinstance(recorder, Recorder) else {})


if __name__ == "__main__":
    sys.exit(main())
