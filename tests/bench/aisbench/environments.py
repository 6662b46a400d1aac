"""An environment in which AISBench seems to be: its command is `fake_ais_bench`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.bench.aisbench import fake_ais_bench

VERSION = "3.1.20260630"


def fake_environment(folder: Path, version: str = VERSION) -> Path:
    """Its Python loads a tokenizer from every folder that has a `tokenizer.json`."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib" / "python3.11" / "site-packages" / f"ais_bench_benchmark-{version}.dist-info").mkdir(parents=True)
    python = (
        '#!/bin/sh\nfor last; do :; done\n[ -f "$last/tokenizer.json" ] || { echo no tokenizer in $last; exit 1; }\n'
    )
    command = f'#!/bin/sh\nexec {shlex.join([sys.executable, str(fake_ais_bench.__file__)])} "$@"\n'
    for name, text in (("python", python), ("ais_bench", command)):
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    return folder
