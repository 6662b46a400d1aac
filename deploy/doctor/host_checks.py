"""The host: cores and memory of the cgroup, limits, shared memory, hugepages, what the CPU can do; and variables that
make a deployment fail in ways that do not look like them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from deploy.doctor.check import ERROR, OK, WARNING, Check, Verdict
from deploy.doctor.facts import PROXIES, Facts
from deploy.memory.check import VISIBLE
from deploy.memory.shared_memory import RESERVE_MIB
from deploy.options.stage_args import schedulers_of

_GIB = 1 << 30
FILES_PER_STAGE = 1024
"""An API server with hundreds of streams, its engine and workers."""

LEAST_LOCKED = 64 << 20
GIB_PER_CPU_STAGE = 2
"""Code and interpreter of vLLM's processes of one stage, without any weights (1.3 to 1.9 GiB measured)."""


def _machine(facts: Facts) -> Iterator[SimpleNamespace]:
    """The machine, and what the layout wants of it."""
    has, wanted, on_cpu = facts.machine, facts.wanted, facts.wanted.device == "cpu"
    stages = max(1, len(wanted.plans))
    devices = len(wanted.placed)
    need = stages * GIB_PER_CPU_STAGE
    shm = wanted.shm_mib + RESERVE_MIB
    locked = has.locked_bytes
    limit = has.memory_limit_bytes
    yield SimpleNamespace(
        has=has,
        cores_cut=has.quota_cores is not None and has.quota_cores < has.cores,
        last_core=max(1, int(has.quota_cores or 0)) - 1,
        cores_shared=on_cpu and devices > has.cores,
        devices=devices,
        free=f"{has.memory_bytes / _GIB:.1f} GiB free"
        + (f" of the cgroup's {limit / _GIB:.1f} GiB" if limit is not None else ""),
        short_memory=on_cpu and has.memory_bytes < need * _GIB,
        need_gib=need,
        stages=stages,
        few_files=has.open_files is not None and has.open_files < FILES_PER_STAGE,
        files="unlimited" if has.open_files is None else f"{has.open_files} per process",
        want_files=FILES_PER_STAGE * max(8, stages),
        little_locked=not on_cpu and locked is not None and locked < LEAST_LOCKED,
        locked_kib=(locked or 0) >> 10,
        locked="unlimited" if locked is None else f"{locked >> 20} MiB",
        no_shm=has.shm_free_mib is None,
        short_shm=shm > (has.shm_free_mib or 0),
        shm=f"{has.shm_free_mib} MiB free"
        + (f", {wanted.shm_mib} MiB wanted for features and KV" if wanted.shm_mib else ""),
        shm_gib=-(-shm // 1024),
        hugepages="{1} of {0} free".format(*has.hugepages)
        if any(has.hugepages)
        else "none on the host, where none are needed",
    )


def _instructions(facts: Facts) -> Iterator[SimpleNamespace]:
    architecture, flags = facts.machine.architecture, facts.machine.cpu_flags
    x86 = architecture == "x86_64"
    known = {"avx512f": "AVX-512", "avx512_bf16": "BF16", "amx_bf16": "AMX"} if x86 else {"bf16": "BF16"}
    yield SimpleNamespace(
        names=", ".join(("AVX2" if x86 else architecture, *(known[flag] for flag in known if flag in flags))),
        has_all=not x86 or ("avx512f" in flags and "avx2" in flags),
        lacks_avx2=flags and "avx2" not in flags,
    )


MACHINE = (
    Check(
        "cpu cores",
        (
            Verdict(
                WARNING,
                "{one.has.cores} cores, of which the cgroup grants {one.has.quota_cores:g} at a time",
                "processes see all cores, start as many threads, and are then stopped in the middle of their work",
                "give the container whole cores: docker run --cpuset-cpus=0-{one.last_core}",
                "cores_cut",
            ),
            Verdict(
                WARNING,
                "{one.has.cores} cores",
                "{one.devices} virtual devices share them: it works, and is slow",
                "use fewer devices, for example (E-P-D) or TP1",
                "cores_shared",
            ),
            Verdict(OK, "{one.has.cores} cores"),
        ),
        _machine,
    ),
    Check(
        "memory",
        (
            Verdict(
                WARNING,
                "{one.free}",
                "{one.stages} stages on a CPU take about {one.need_gib} GiB before their weights; the kernel "
                "then kills one",
                "use fewer instances, or give the container more (docker run --memory)",
                "short_memory",
            ),
            Verdict(OK, "{one.free}"),
        ),
        _machine,
    ),
    Check(  # vLLM's CPU wheels have kernels for AVX2 and AVX-512 (x86), and for NEON with or without BF16 (Arm)
        "cpu instructions",
        (
            Verdict(OK, "{one.names}", when="has_all"),
            Verdict(
                ERROR,
                "no AVX2",
                "vLLM's kernels for CPUs need it",
                "use another machine; --engine sim runs here",
                "lacks_avx2",
            ),
            Verdict(
                WARNING,
                "AVX2, no AVX-512",
                "bfloat16 takes eight times as long as float32 in products here; vLLM has fewer kernels, too",
                "epd-serve serve --stage-args 'all:--dtype float32', for models of bfloat16",
            ),
        ),
        _instructions,
        ("cpu",),
    ),
    Check(
        "open files",
        (
            Verdict(
                WARNING,
                "{one.files}",
                "every stream is a socket in the proxy and another in a stage",
                "ulimit -n {one.want_files}",
                "few_files",
            ),
            Verdict(OK, "{one.files}"),
        ),
        _machine,
    ),
    Check(  # registered and pinned host memory counts as locked
        "locked memory",
        (
            Verdict(
                WARNING,
                "{one.locked_kib} KiB",
                "RDMA and pinned buffers are registered as locked memory, and fail above it",
                "ulimit -l unlimited (docker run --ulimit memlock=-1)",
                "little_locked",
            ),
            Verdict(OK, "{one.locked}"),
        ),
        _machine,
    ),
    Check(  # as `deploy/memory/shared_memory.py` will size it: what is there is shared out, down to a smallest size
        "/dev/shm",
        (
            Verdict(
                ERROR,
                "not there",
                "features and KV travel through it",
                "mount a tmpfs at /dev/shm",
                "no_shm",
            ),
            Verdict(
                WARNING,
                "{one.shm}",
                "arena and staging are made smaller, so fewer features stay and packets wait for room",
                "docker run --shm-size={one.shm_gib}g, or remove old files there",
                "short_shm",
            ),
            Verdict(OK, "{one.shm}"),
        ),
        _machine,
    ),
    Check(
        "hugepages",
        (Verdict(OK, "{one.hugepages}"),),
        _machine,
        ("npu",),
    ),
)


def _proxies(facts: Facts) -> Iterator[SimpleNamespace]:
    """Our own requests between proxy and stages take no notice of these; clients on this machine do."""
    environment = facts.environment
    exempt = f"{environment.get('no_proxy', '')},{environment.get('NO_PROXY', '')}".replace(" ", "").split(",")
    yield SimpleNamespace(
        names=", ".join(name for name in PROXIES if name in environment),
        exempt=not {"127.0.0.1", "localhost", "*"}.isdisjoint(exempt),
    )


def _schedulers(facts: Facts) -> Iterator[SimpleNamespace]:
    for name, what in schedulers_of(facts.environment):
        yield SimpleNamespace(name=name, what=what, on_npu=facts.wanted.device == "npu")


def _visible(facts: Facts) -> Iterator[SimpleNamespace]:
    name = VISIBLE.get(facts.wanted.device, "")
    if name in facts.environment:
        yield SimpleNamespace(name=name, value=facts.environment[name])


_OTHER_SCHEDULER = (
    "starts vllm-ascend's {one.what}",
    "it takes the place of ours, which reports the load and waits for features",
    "unset {one.name}",
)

ENVIRONMENT = (
    Check(
        "http proxies",
        (
            Verdict(OK, "none", when="not names"),
            Verdict(OK, "{one.names}, loopback exempt", when="exempt"),
            Verdict(
                WARNING,
                "{one.names} set, and no_proxy does not name 127.0.0.1",
                "curl and OpenAI clients on this machine then ask that proxy for the endpoint (our processes do not)",
                "export no_proxy=127.0.0.1,localhost",
            ),
        ),
        _proxies,
    ),
    Check(
        "{one.name}",
        (
            Verdict(ERROR, *_OTHER_SCHEDULER, "on_npu", stops=True),
            Verdict(ERROR, *_OTHER_SCHEDULER),
        ),
        _schedulers,
    ),
    Check(
        "{one.name}",
        (Verdict(OK, "{one.value}"),),
        _visible,
    ),
)
