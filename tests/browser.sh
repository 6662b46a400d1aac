#!/usr/bin/env bash
# What `make test-page` needs beside the test environment in $VENV: requirements/page.txt, and a Chromium of the system,
# which is installed where it may be. Without it those tests are skipped by name.
#
# Reads: VENV (.venv), PIP_ARGS (passed to pip install).
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
read -r -a pip_args <<<"${PIP_ARGS:-}"
"$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --quiet "${pip_args[@]}" --no-deps -r requirements/page.txt

there() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
there >/dev/null && exit 0
command="apt-get install -y --no-install-recommends chromium"
runner=()
if ((EUID != 0)); then
    runner=(sudo -n)
fi
if command -v apt-get >/dev/null; then
    echo "epd-serve: installing chromium, which the tests of the page drive"
    for step in "$command" "apt-get update" "$command"; do
        # shellcheck disable=SC2086  # a command with its words
        DEBIAN_FRONTEND=noninteractive timeout 600 "${runner[@]}" $step >/dev/null 2>&1 || true
        there >/dev/null && exit 0
    done
fi
echo "epd-serve: chromium is missing, so the tests of the page are skipped. To run them: sudo $command"
