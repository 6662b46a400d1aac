#!/usr/bin/env bash
# `make test-npu`: the parts of tests/npu/plan.py with the interpreter that serves here. Arguments go to tests/npu/run.py.
#
# Nothing is downloaded and nothing is installed into that interpreter: this checkout goes before its packages, and the
# metadata by which vLLM finds our plugin is written to build/. Only on CPU, and where PYTHON names none, is an environment
# made (`environment.sh test`).
#
# Reads: EPD_TEST_DEVICE (npu|cuda|cpu), PYTHON (the interpreter with vLLM), VENV (.venv), and what tests/npu/card.py does.
set -euo pipefail
cd "$(dirname "$0")/../.."

die() {
    printf 'epd-serve: error: %s\n' "$*" >&2
    exit 2
}

device=${EPD_TEST_DEVICE:-npu}
VENV=${VENV:-.venv}
python=${PYTHON:-}
if [[ -z $python && -f $VENV/.epd-serve ]]; then
    python=$VENV/bin/python
fi
if [[ $device == cpu && -z ${PYTHON:-} ]]; then
    DEVICE=cpu deploy/install/environment.sh test
    python=$VENV/bin/python
fi
python=${python:-python3}
command -v "$python" >/dev/null || die "PYTHON=$python does not run"

metadata=build/plugin-metadata
"$python" - "$metadata" <<'PYTHON' || exit 2
import importlib.util
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def lacks(package):
    try:
        version(package)
    except PackageNotFoundError:
        return True
    return False


if sys.version_info < (3, 11):
    sys.exit(f"epd-serve: error: {sys.executable} is Python {sys.version.split()[0]}: 3.11 or newer is wanted")
if importlib.util.find_spec("vllm") is None:
    sys.exit(f"epd-serve: error: {sys.executable} has no vLLM: set PYTHON= to the interpreter that has")

import tomllib  # Python 3.11 is the first to have it

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
missing = [name for name in (re.split(r"[<>=]", one)[0] for one in project["dependencies"]) if lacks(name)]
if missing:
    sys.exit(f"epd-serve: error: {sys.executable} lacks {', '.join(missing)}: install what this names, no more is needed")

# What an installation would write for vLLM to find our plugin by; nothing is installed.
about = Path(sys.argv[1], "epd_serve.dist-info")
about.mkdir(parents=True, exist_ok=True)
ours = re.search('__version__ = "(.+)"', Path("epd_serve/__init__.py").read_text())[1]
(about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: epd-serve\nVersion: {ours}\n")
groups = project["entry-points"].items()
lines = [line for group, entries in groups for line in (f"[{group}]", *(f"{name} = {to}" for name, to in entries.items()))]
(about / "entry_points.txt").write_text("\n".join(lines) + "\n")
PYTHON

export PYTHONPATH=$PWD:$PWD/$metadata${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m tests.npu.run "$@"
