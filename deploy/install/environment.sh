#!/usr/bin/env bash
# Makes the virtual environments of the Makefile's goals and of AISBench. Usage: environment.sh GOAL, which is one of
# serve, test, vllm023, docs, aisbench.
#
# It writes into $VENV only. `test` adds the development tools, Mooncake, and (where it may) the system library that
# Mooncake needs. `vllm023` is `test` for CPU with vLLM 0.23 instead of the vLLM that is served with, and wants a $VENV of its own.
# `docs` is what builds the documentation, `aisbench` what `epd-bench aisbench` loads endpoints with: each has a $VENV of
# its own, and nothing of it is seen by the others. A second call with nothing changed installs nothing: stamps hold a
# digest of all that goes in.
#
# Reads: VENV (.venv), PYTHON (python3.11), DEVICE (auto|cpu|npu|cuda), PIP_ARGS (passed to every pip install).
set -euo pipefail
cd "$(dirname "$0")/../.."

goal=${1:?usage: environment.sh serve|test|vllm023|docs|aisbench}
VENV=${VENV:-.venv}
DEVICE=${DEVICE:-auto}
read -r -a pip_args <<<"${PIP_ARGS:-}"

say() { printf 'epd-serve: %s\n' "$*"; }
die() {
    printf 'epd-serve: error: %s\n' "$*" >&2
    exit 1
}

# --- tools that see nothing of ours: the documentation, AISBench ----------------------------------------------------
if [[ $goal == docs || $goal == aisbench ]]; then
    lock=requirements/$goal.txt
    case $goal in
        docs) pythons="python3.11 python3" tool=mkdocs size="170 MB" needed_mb=500 flags=--no-deps marker=$VENV/.epd-serve-docs ;;
        aisbench) pythons="python3.11 python3.12" tool=ais_bench size="2.2 GB" needed_mb=4000 flags= marker=$VENV/.epd-bench-aisbench ;;
    esac
    wanted=$(sha256sum <"$lock" | cut -d' ' -f1)
    exec 9<"$lock" && flock 9 # another call may be making it
    [[ -x $VENV/bin/$tool && $(cut -d' ' -f1 "$marker" 2>/dev/null) == "$wanted" ]] && exit 0
    [[ ! -e $VENV || -f $marker || -z $(ls -A "$VENV") ]] || die "$VENV exists and is not ours: remove it, or name another folder"
    # shellcheck disable=SC2086  # a list of names
    python=${PYTHON:-$(command -v $pythons | head -n 1)}
    [[ -n $python ]] || die "none of $pythons was found: install one, or set PYTHON=/path/to/it"
    mkdir -p "$(dirname "$VENV")" || die "$VENV cannot be written: name another folder"
    free_mb=$(df -Pm "$(dirname "$VENV")" | awk 'NR == 2 {print $4}')
    ((free_mb >= needed_mb)) || die "$VENV needs $needed_mb MB of free disk, there are $free_mb MB: free some, or name a folder on another disk"
    say "$VENV with the tools of $lock ($size): once, some minutes"
    mkdir -p "$VENV"
    echo unfinished >"$marker"
    find "$VENV" -mindepth 1 -maxdepth 1 ! -path "$marker" -exec rm -rf {} +
    "$python" -m venv "$VENV" || die "$python cannot make a virtual environment (Debian: install python3-venv)"
    # shellcheck disable=SC2086  # no flag is no word
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "${pip_args[@]}" $flags -r "$lock" ||
        die "pip could not install $lock, see above: no room, no network, or a package index without it (PIP_INDEX_URL)"
    [[ $goal == docs ]] || "$VENV/bin/python" -c "import pyarrow, datasets, transformers, ais_bench.benchmark" ||
        die "AISBench was installed and cannot be imported, see above"
    echo "$wanted" >"$marker"
    exit 0
fi

# --- which device, which Python ---------------------------------------------------------------------------------
npu_answers() { command -v npu-smi >/dev/null && npu-smi info >/dev/null 2>&1; }

if [[ $DEVICE == auto ]]; then
    DEVICE=cpu
    if npu_answers; then
        DEVICE=npu
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        DEVICE=cuda
    fi
fi
[[ $goal == vllm023 ]] && DEVICE=cpu
[[ $DEVICE =~ ^(cpu|npu|cuda)$ ]] || die "DEVICE=$DEVICE is unknown: one of auto, cpu, npu, cuda"

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

python=${PYTHON:-}
if [[ -z $python && $DEVICE == cpu ]]; then
    for candidate in python3.11 python3; do
        if [[ $(python_version "$candidate") == 3.11 ]]; then
            python=$candidate
            break
        fi
    done
    [[ -n $python ]] || die "the CPU environment needs Python 3.11 and none was found: install it, or set PYTHON=/path/to/python3.11"
fi
python=${python:-python3}
version=$(python_version "$python")
[[ -n $version ]] || die "PYTHON=$python does not run"
if [[ $DEVICE == cpu ]]; then
    [[ $version == 3.11 ]] || die "PYTHON=$python is Python $version: the pinned CPU environment needs 3.11"
    [[ $(uname -s)-$(uname -m) == Linux-x86_64 ]] || die "the pinned CPU environment is for Linux on x86-64, this is $(uname -s) on $(uname -m)"
else
    # The device's own vLLM stays as it is: our environment only looks through to it.
    "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)' ||
        die "DEVICE=$DEVICE uses the vLLM that is installed, and $python has none: set PYTHON= to the one that has (or DEVICE=cpu)"
fi

# --- is everything there already? -------------------------------------------------------------------------------
[[ $goal =~ ^(serve|test|vllm023)$ ]] || die "unknown goal $goal: serve, test or vllm023"
lock=requirements/cpu.txt download="0.6 GB" installed_mb=4000
[[ $goal == vllm023 ]] && lock=requirements/vllm023.txt download="2 GB" installed_mb=7000
base="$DEVICE $python $version $PWD"
[[ $goal == vllm023 ]] && base="$base vllm023"
marker=$VENV/.epd-serve
digest_of() { cat "$@" | sha256sum | cut -d' ' -f1; }
wants() { # digest of all that goes into an environment for goal $1
    local inputs=(pyproject.toml deploy/install/environment.sh "$lock")
    [[ $1 != serve ]] && inputs+=(requirements/dev.txt requirements/mooncake.txt requirements/ray.txt)
    digest_of "${inputs[@]}"
}
stamp() { echo "$VENV/.epd-serve-$1"; }

ready() { [[ -x $VENV/bin/python && $(cat "$marker" 2>/dev/null) == "$base" && $(cat "$(stamp "$goal")" 2>/dev/null) == "$(wants "$goal")" ]]; }

# --- the environment --------------------------------------------------------------------------------------------
pip_install() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "${pip_args[@]}" "$@"
}

# --system-site-packages looks through to the base interpreter only. Where the vLLM that is installed lives in a virtual
# environment itself, a .pth file of ours leads to its packages (addsitedir: its own .pth files count too).
see_parent_environment() {
    local ours
    ours=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" - >"$ours/epd_serve_parent.pth" <<'PYTHON'
import site, sys
if sys.prefix != sys.base_prefix:
    for folder in site.getsitepackages():
        print(f"import site; site.addsitedir({folder!r})")
PYTHON
}

install() {
    local needed_mb=500 free_mb
    [[ $DEVICE == cpu && ! -f $VENV/.epd-serve-serve ]] && needed_mb=$installed_mb
    free_mb=$(df -Pm "$(dirname "$VENV")" | awk 'NR == 2 {print $4}')
    ((free_mb >= needed_mb)) ||
        die "installing needs $needed_mb MB of free disk for $VENV, there are $free_mb MB: free some, or set VENV= to another disk"
    say "[1/3] $VENV with Python $version for $DEVICE ($free_mb MB of disk free)"
    if [[ -e $VENV && ! -f $marker ]]; then
        die "$VENV exists and is not ours: remove it, or set VENV= to another folder"
    fi
    if [[ ! -x $VENV/bin/python || $(cat "$marker" 2>/dev/null) != "$base" ]]; then
        mkdir -p "$VENV"
        echo unfinished >"$marker"
        find "$VENV" -mindepth 1 -maxdepth 1 ! -path "$marker" -exec rm -rf {} +
        local options=()
        [[ $DEVICE == cpu ]] || options+=(--system-site-packages)
        "$python" -m venv "${options[@]}" "$VENV" || die "$python cannot make a virtual environment (Debian: install python$version-venv)"
        [[ $DEVICE == cpu ]] || see_parent_environment
        echo "$base" >"$marker"
    fi
    if [[ $DEVICE == cpu ]]; then
        say "[2/3] vLLM for CPU and what it needs (about $download to download)"
        pip_install --no-deps -r "$lock" ||
            die "pip failed, see above. If it found no torch +cpu: that build is on PyTorch's CPU wheel index; add it to pip's configuration or to PIP_ARGS='--extra-index-url …'"
        pip_install --no-deps --no-build-isolation -e .
    else
        say "[2/3] EPD-Serve beside the vLLM that is installed"
        pip_install -e .
    fi
    if [[ $goal != serve ]]; then
        local tools=requirements/dev.txt
        say "[3/3] tools of $tools"
        if [[ $DEVICE == cpu ]]; then
            pip_install --no-deps -r "$tools" -r requirements/mooncake.txt -r requirements/ray.txt
        else
            # --ignore-installed: into our environment even where the one below has them, or their commands are missing.
            pip_install --no-deps --ignore-installed -r "$tools"
            say "Mooncake and Ray: left as installed (extras mooncake-cuda, mooncake-npu and ray name them)"
        fi
    fi
    wants serve >"$(stamp serve)" # the test environment holds all that serving needs
    [[ $goal != serve ]] && wants "$goal" >"$(stamp "$goal")"
    say "environment ready"
}

# Mooncake links against libibverbs.so.1. Never asked for by `make serve`; without it its tests are skipped.
system_library() {
    ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' && return
    local command="apt-get install -y --no-install-recommends libibverbs1" runner=()
    if ((EUID != 0)); then
        sudo -n true 2>/dev/null && runner=(sudo -n)
    fi
    if command -v apt-get >/dev/null && { ((EUID == 0)) || ((${#runner[@]})); }; then
        say "installing libibverbs1, which Mooncake needs"
        for step in "$command" "apt-get update" "$command"; do
            # shellcheck disable=SC2086  # a command with its words
            DEBIAN_FRONTEND=noninteractive timeout 180 "${runner[@]}" $step >/dev/null 2>&1 || true
            ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' && return
        done
    fi
    say "libibverbs1 is missing, so Mooncake's tests are skipped. To run them: sudo $command"
}

ready || install
[[ $goal == test || $goal == vllm023 ]] && system_library
exit 0
