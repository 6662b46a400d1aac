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

PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} "$python" - <<'PYTHON' || exit 2
import importlib.util
import re
import sys
from importlib.metadata import PackageNotFoundError, version


def lacks(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return True
    return False


sys.argv = ["setup.py", "--name"]  # importing it asks setuptools for a name, and gives us its requirements
sys.stdout = open("/dev/null", "w")
if sys.version_info < (3, 11):
    sys.exit(f"epd-serve: error: {sys.executable} is Python {sys.version.split()[0]}: 3.11 or newer is wanted")
if importlib.util.find_spec("vllm") is None:
    sys.exit(f"epd-serve: error: {sys.executable} has no vLLM: set PYTHON= to the interpreter that has")
if importlib.util.find_spec("setuptools") is None:
    sys.exit(f"epd-serve: error: {sys.executable} has no setuptools, which writes our plugin's metadata")
import setup

missing = [name for name in (re.split(r"[<>=]", one)[0] for one in setup.RUNTIME) if lacks(name)]
if missing:
    sys.exit(f"epd-serve: error: {sys.executable} lacks {', '.join(missing)}: install what this names, no more is needed")
PYTHON

metadata=build/plugin-metadata
mkdir -p "$metadata"
"$python" setup.py -q egg_info --egg-base "$metadata"
export PYTHONPATH=$PWD:$PWD/$metadata${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m tests.npu.run "$@"
