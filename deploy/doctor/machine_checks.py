"""The host: cores and memory of the cgroup, limits, shared memory, hugepages, what the CPU can do. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.doctor.facts import Facts, MachineFacts
from deploy.doctor.finding import Finding, error, ok, warning
from deploy.memory.shared_memory import RESERVE_MIB

_GIB = 1 << 30
FILES_PER_STAGE = 1024
"""An API server with hundreds of streams, its engine and workers."""

LEAST_LOCKED = 64 << 20
GIB_PER_CPU_STAGE = 2
"""Code and interpreter of vLLM's processes of one stage, without any weights (1.3 to 1.9 GiB measured)."""


def machine_checks(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    stages = max(1, len(facts.wanted.plans))
    yield _cores(facts)
    yield _memory(machine, stages if facts.wanted.device == "cpu" else 0)
    if facts.wanted.device == "cpu":
        yield _instructions(machine)
    yield _open_files(machine, stages)
    yield from _locked(facts)
    yield _shared_memory(facts)
    if facts.wanted.device == "npu":
        yield _hugepages(machine)


def _cores(facts: Facts) -> Finding:
    machine = facts.machine
    usable = min(machine.cores, machine.quota_cores or machine.cores)
    seen = f"{machine.cores} cores"
    if machine.quota_cores is not None and machine.quota_cores < machine.cores:
        return warning(
            "cpu cores",
            f"{seen}, of which the cgroup grants {machine.quota_cores:g} at a time",
            "processes see all cores, start as many threads, and are then stopped in the middle of their work",
            f"give the container whole cores: docker run --cpuset-cpus=0-{max(0, int(machine.quota_cores) - 1)}",
        )
    devices = {one for plan in facts.wanted.plans for one in plan.devices}
    if facts.wanted.device == "cpu" and len(devices) > usable:
        why = f"{len(devices)} virtual devices share them: it works, and is slow"
        return warning("cpu cores", seen, why, "use fewer devices, for example (E-P-D) or TP1")
    return ok("cpu cores", seen)


def _memory(machine: MachineFacts, cpu_stages: int) -> Finding:
    free = machine.memory_bytes
    if machine.memory_limit_bytes is not None:
        left = machine.memory_limit_bytes - (machine.memory_used_bytes or 0)
        free = left if free is None else min(free, left)
    if free is None:
        return warning("memory", "not known", "whether the stages fit cannot be told", "cat /proc/meminfo")
    limit = machine.memory_limit_bytes
    of = f" of the cgroup's {limit / _GIB:.1f} GiB" if limit is not None else ""
    seen = f"{free / _GIB:.1f} GiB free{of}"
    need = cpu_stages * GIB_PER_CPU_STAGE
    if free < need * _GIB:
        why = f"{cpu_stages} stages on a CPU take about {need} GiB before their weights; the kernel then kills one"
        return warning("memory", seen, why, "use fewer instances, or give the container more (docker run --memory)")
    return ok("memory", seen)


def _instructions(machine: MachineFacts) -> Finding:
    """vLLM's CPU wheels have kernels for AVX2 and AVX-512 (x86), and for NEON with or without BF16 (Arm)."""
    flags = machine.cpu_flags
    if machine.architecture == "x86_64":
        if flags and "avx2" not in flags:
            why = "vLLM's kernels for CPUs need it"
            return error("cpu instructions", "no AVX2", why, "use another machine; --engine sim runs here")
        found = [
            name
            for flag, name in (("avx512f", "AVX-512"), ("avx512_bf16", "BF16"), ("amx_bf16", "AMX"))
            if flag in flags
        ]
        if "avx512f" not in flags:
            why = "bfloat16 takes eight times as long as float32 in products here; vLLM has fewer kernels, too"
            fix = "epd-serve serve --stage-args 'all:--dtype float32', for models of bfloat16"
            return warning("cpu instructions", "AVX2, no AVX-512", why, fix)
        return ok("cpu instructions", ", ".join(("AVX2", *found)))
    return ok("cpu instructions", machine.architecture + (", BF16" if "bf16" in flags else ""))


def _open_files(machine: MachineFacts, stages: int) -> Finding:
    if machine.open_files is None or machine.open_files >= FILES_PER_STAGE:
        return ok("open files", "unlimited" if machine.open_files is None else f"{machine.open_files} per process")
    why = "every stream is a socket in the proxy and another in a stage"
    return warning(
        "open files", f"{machine.open_files} per process", why, f"ulimit -n {FILES_PER_STAGE * max(8, stages)}"
    )


def _locked(facts: Facts) -> Iterator[Finding]:
    """Registered and pinned host memory counts as locked."""
    limit = facts.machine.locked_bytes
    if limit is None or limit >= LEAST_LOCKED or facts.wanted.device == "cpu":
        yield ok("locked memory", "unlimited" if limit is None else f"{limit >> 20} MiB")
    else:
        yield warning(
            "locked memory",
            f"{limit >> 10} KiB",
            "RDMA and pinned buffers are registered as locked memory, and fail above it",
            "ulimit -l unlimited (docker run --ulimit memlock=-1)",
        )


def _shared_memory(facts: Facts) -> Finding:
    """As `deploy/memory/shared_memory.py` will size it: what is there is shared out, down to a smallest size."""
    free, wanted = facts.machine.shm_free_mib, facts.wanted.shm_mib
    if free is None:
        why = "features and KV travel through it"
        return error("/dev/shm", "not there", why, "mount a tmpfs at /dev/shm", stops=False)
    seen = f"{free} MiB free" + (f", {wanted} MiB wanted for features and KV" if wanted else "")
    if wanted + RESERVE_MIB > free:
        return warning(
            "/dev/shm",
            seen,
            "arena and staging are made smaller, so fewer features stay and packets wait for room",
            f"docker run --shm-size={max(1, -(-(wanted + RESERVE_MIB) // 1024))}g, or remove old files there",
        )
    return ok("/dev/shm", seen)


def _hugepages(machine: MachineFacts) -> Finding:
    total, free = machine.hugepages
    return ok("hugepages", f"{free} of {total} free" if total else "none on the host, where none are needed")
