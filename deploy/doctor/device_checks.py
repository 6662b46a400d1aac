"""Devices: Ascend's driver, CANN and packages; enough devices, free, and nobody else's; how NPUs reach each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

from deploy.doctor.check import ERROR, OK, WARNING, Check, Verdict
from deploy.doctor.facts import Facts
from deploy.options.config import DeployConfig
from deploy.options.versions import ASCEND_SETS, DRIVERS, SAME_NPU_FROM, numbers, series, spelled
from deploy.options.ways import draw_ways

_GIB = 1 << 30
_TAKEN = 0.1
"""More than this share of a device in use is somebody's: the drivers themselves keep 3 to 5 %."""

_ROCE = "HCCL_INTRA_ROCE_ENABLE"
_POOL = "ASCEND_BUFFER_POOL"
_OLDEST, _NEWEST = spelled(min(DRIVERS)), spelled(max(DRIVERS))
_NPU = ("npu",)


def _driver_and_cann(facts: Facts) -> Iterator[SimpleNamespace]:
    """By the vendor's table (`options/versions.py` names it). A CANN or driver newer than the table is believed."""
    cann, driver = series(facts.ascend.cann), series(facts.ascend.driver)
    if cann is not None and driver is not None:
        fitting = DRIVERS.get(cann)
        yield SimpleNamespace(
            older=cann < min(DRIVERS),
            newer=fitting is None,
            fits=fitting and (driver in fitting or driver > max(fitting)),
            series=spelled(cann),
            drivers=", ".join(map(spelled, fitting or ())),
            newest=spelled(max(fitting or ((),))),
        )


def _ascend_packages(facts: Facts) -> Iterator[SimpleNamespace]:
    """vllm-ascend, and what that release is made for."""
    versions = facts.packages.versions
    ascend = versions.get("vllm-ascend", "")
    found, cann = series(ascend), series(facts.ascend.cann)
    made_for = ASCEND_SETS.get(found, {}) if found else {}
    missing = ", ".join(name for name in ("vllm", "vllm-ascend", "torch-npu") if name not in versions)
    yield SimpleNamespace(
        missing=missing,
        made_for=made_for,
        wrong=", ".join(
            f"{name} {versions[name]} (it is made for {version})"
            for name, version in made_for.items()
            if name in versions and not _starts(versions[name], version)
        ),
        vllm=spelled(numbers(ascend)[:3]),
        old_cann=not missing and made_for and cann and cann < numbers(made_for["cann"]),
        versions=versions,
    )


def _starts(version: str, wanted: str) -> bool:
    """Whether `2.10.0.post4` is a `2.10.0.post4`, and `0.23.1` a `0.23`; what is behind a `+` is no matter."""
    return numbers(version)[: len(numbers(wanted))] == numbers(wanted)


ASCEND = (
    Check(
        "driver",
        (
            Verdict(OK, "Ascend driver {facts.ascend.driver}", when="ascend.driver"),
            Verdict(
                WARNING,
                "its version is not known: no /usr/local/Ascend/driver/version.info",
                "whether it fits CANN cannot be told; in a container the file has to be mounted",
                "docker run … -v /usr/local/Ascend/driver/version.info:/usr/local/Ascend/driver/version.info",
            ),
        ),
        on=_NPU,
    ),
    Check(
        "cann",
        (
            Verdict(
                ERROR,
                "not found: no ASCEND_HOME_PATH, nothing below /usr/local/Ascend",
                "no NPU library can be loaded without it",
                "install CANN 9.1, or use the image quay.io/ascend/vllm-ascend:v0.23.0.post1",
                "not home",
                stops=True,
            ),
            Verdict(
                ERROR,
                "CANN {one.cann_or_unknown} is at {one.home}, but this shell does not know it",
                "libascendcl.so is on no library path: torch_npu cannot be imported",
                "source {one.toolkit}/set_env.sh",
                "not sourced",
                stops=True,
            ),
            Verdict(
                WARNING,
                "the version of {one.home} is not known",
                "whether it fits the driver and vllm-ascend cannot be told",
                "check that ASCEND_HOME_PATH names a complete toolkit",
                "not cann",
            ),
            Verdict(OK, "CANN {one.cann}, with HIXL", when="hixl"),
            Verdict(OK, "CANN {one.cann}"),
        ),
        lambda facts: (facts.ascend,),
        _NPU,
    ),
    Check(
        "driver and cann",
        (
            Verdict(
                WARNING,
                "CANN {facts.ascend.cann} on driver {facts.ascend.driver}",
                f"made for CANN {_NEWEST}; nothing below {_OLDEST} was looked at",
                "install CANN 9.1",
                "older",
            ),
            Verdict(
                OK,
                "CANN {facts.ascend.cann} on driver {facts.ascend.driver} "
                "(newer than the table of pairs that is known here)",
                when="newer",
            ),
            Verdict(OK, "CANN {facts.ascend.cann} on driver {facts.ascend.driver}", when="fits"),
            Verdict(
                ERROR,
                "CANN {facts.ascend.cann} on driver {facts.ascend.driver}",
                "the vendor's table has CANN {one.series} on drivers {one.drivers}",
                "on the host install Ascend HDK {one.newest} or one of those (hiascend.com/hardware/firmware-drivers), "
                "or another CANN here",
                stops=True,
            ),
        ),
        _driver_and_cann,
        _NPU,
    ),
    Check(
        "ascend packages",
        (
            Verdict(
                ERROR,
                "not installed: {one.missing}",
                "stages on NPUs are vLLM servers with these packages",
                "pip install 'epd-serve[npu]', or use the image quay.io/ascend/vllm-ascend:v0.23.0.post1",
                "missing",
                stops=True,
            ),
            Verdict(
                WARNING,
                "vllm-ascend {one.versions[vllm-ascend]} with vllm {one.versions[vllm]}",
                "this was written for and checked against vllm-ascend 0.23.0.post1",
                "pip install vllm==0.23.0 vllm-ascend==0.23.0.post1",
                "not made_for",
            ),
            Verdict(
                ERROR,
                "vllm-ascend {one.versions[vllm-ascend]} beside {one.wrong}",
                "its compiled operators and its patches of vLLM fit one set of versions",
                "pip install vllm=={one.vllm} torch-npu=={one.made_for[torch-npu]} torch=={one.made_for[torch]}",
                "wrong",
                stops=True,
            ),
            Verdict(
                OK,
                "vllm-ascend {one.versions[vllm-ascend]}, vllm {one.versions[vllm]}, "
                "torch-npu {one.versions[torch-npu]}",
            ),
        ),
        _ascend_packages,
        _NPU,
    ),
    Check(
        "cann and vllm-ascend",
        (
            Verdict(
                WARNING,
                "CANN {facts.ascend.cann} under vllm-ascend {one.versions[vllm-ascend]}",
                "that release is built for CANN {one.made_for[cann]}: operators may be missing",
                "install CANN {one.made_for[cann]}",
                "old_cann",
            ),
        ),
        _ascend_packages,
        _NPU,
    ),
)


def _devices(facts: Facts) -> Iterator[SimpleNamespace]:
    """Those that the layout uses, or all; the others where their memory is known."""
    placed = facts.wanted.placed
    for device in facts.devices:
        used = not placed or device.index in placed
        known = device.free_bytes is not None and device.total_bytes
        free, total = device.free_bytes or 0, device.total_bytes or 0
        users = ", ".join(f"{one.name or 'process'} ({one.pid})" for one in device.users)
        if known or used:
            yield SimpleNamespace(
                index=device.index,
                name=device.name,
                known=known,
                note=device.note or "memory unknown",
                free_gib=free / _GIB,
                total_gib=total / _GIB,
                taken=used and (users or free < (1 - _TAKEN) * total),
                users=f"; in use by {users}" if users else "",
            )


def _layout(facts: Facts) -> Iterator[SimpleNamespace]:
    wanted = facts.wanted
    yield SimpleNamespace(
        layout=wanted.layout, refusal=wanted.refusal, instances=len(wanted.plans), devices=len(wanted.placed)
    )


def _compute_modes(facts: Facts) -> Iterator[SimpleNamespace]:
    modes = sorted({mode for mode in facts.compute_modes if mode.lower().startswith(("exclusive", "prohibited"))})
    if modes:
        shared = any(plan.colocated_with for plan in facts.wanted.plans)
        yield SimpleNamespace(modes=", ".join(modes), shared=shared)


_ONE_PROCESS = "only one process may use such a GPU: stages that share one do not start"
_MANY_PROCESSES = "sudo nvidia-smi -c DEFAULT"

DEVICES = (
    Check(
        "layout",
        (
            Verdict(
                ERROR,
                "{one.refusal}",
                "it cannot be served here",
                "epd-serve layout SPEC shows what a layout means",
                "refusal",
            ),
            Verdict(
                OK,
                "{one.layout}: {one.instances} instances on {one.devices} devices",
                when="instances",
            ),
        ),
        _layout,
    ),
    Check(
        "devices",
        (
            Verdict(
                ERROR,
                "no {one.wanted.device} device: {one.devices_note}",
                "nothing can be placed",
                "check the driver and, in a container, --device flags; or use --device cpu",
                "not devices",
            ),
        ),
        on=("cuda", "npu"),
    ),
    Check(
        "device {one.index}",
        (
            Verdict(
                WARNING,
                "{one.name}: {one.note}",
                "its memory cannot be planned",
                "npu-smi info, or nvidia-smi, tells more",
                "not known",
            ),
            Verdict(
                WARNING,
                "{one.name}, {one.free_gib:.0f} of {one.total_gib:.0f} GiB free{one.users}",
                "vLLM plans with the whole device: it will not start, or be short of memory",
                "end those processes, or leave the device out (ASCEND_RT_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES)",
                "taken",
            ),
            Verdict(OK, "{one.name}, {one.free_gib:.0f} of {one.total_gib:.0f} GiB free"),
        ),
        _devices,
        ("cuda", "npu"),
    ),
    Check(
        "driver",
        (Verdict(OK, "NVIDIA driver {one.driver_tool}", when="driver_tool"),),
        on=("cuda",),
    ),
    Check(
        "compute mode",
        (
            Verdict(ERROR, "{one.modes}", _ONE_PROCESS, _MANY_PROCESSES, "shared"),
            Verdict(WARNING, "{one.modes}", _ONE_PROCESS, _MANY_PROCESSES),
        ),
        _compute_modes,
        ("cuda",),
    ),
)


def _topology(facts: Facts) -> Iterator[SimpleNamespace]:
    """HCCS is what Mooncake takes inside a server unless it is told to take RoCE."""
    kinds = Counter(facts.links.topology.values())
    if len(facts.devices) > 1:
        yield SimpleNamespace(
            devices=len(facts.devices),
            kinds=", ".join(f"{kind} {count // 2 or 1}×" for kind, count in kinds.most_common()),
            by_hccs=all(kind.startswith("HCCS") or kind == "SIO" for kind in kinds),
            note=facts.links.note or "npu-smi shows no matrix",
        )


def _links(facts: Facts) -> Iterator[SimpleNamespace]:
    """The NPUs' own ports, and what of the ways between them this layout takes."""
    if not facts.devices:
        return
    states = facts.links.ports
    down = [str(npu) for npu, state in states.items() if state == "DOWN"]
    roce = facts.environment.get(_ROCE, "0") not in ("", "0")
    pool = facts.environment.get(_POOL, "")
    cann = series(facts.ascend.cann) or ()
    able = cann >= SAME_NPU_FROM and facts.ascend.hixl
    ways = draw_ways(DeployConfig(), "npu", facts.wanted.plans)
    pairs = ", ".join(way.pair for way in ways.kv if way.beside)
    yield SimpleNamespace(
        hccn_conf=facts.ascend.hccn_conf,
        roce=roce,
        pool=pool if pool != "0:0" else "",
        states=states,
        down=", ".join(down),
        first_down="".join(down[:1]),
        down_and_needed=down and roce,
        unknown="".join([state for state in states.values() if state not in ("UP", "DOWN")][:1]),
        cann=facts.ascend.cann or "(unknown)",
        itself="can connect an NPU with itself (HIXL); off by default" if able else "cannot connect an NPU with itself",
        pairs=f"{pairs}: shared memory" if pairs else "pairs on one NPU take shared memory",
    )


LINKS = (
    Check(
        "npu topology",
        (
            Verdict(
                WARNING,
                "not known: {one.note}",
                "whether the NPUs are joined by HCCS cannot be told",
                "npu-smi info -t topo",
                "not kinds",
            ),
            Verdict(
                OK,
                "{one.kinds} between {one.devices} NPUs",
                when="by_hccs",
            ),
            Verdict(
                WARNING,
                "{one.kinds}",
                "KV and features between NPUs that HCCS does not join go over PCIe and the host, or by RoCE",
                f"put stages that exchange KV on NPUs with HCCS (ASCEND_RT_VISIBLE_DEVICES), or export {_ROCE}=1",
            ),
        ),
        _topology,
        _NPU,
    ),
    Check(  # needed by RoCE, and by Mooncake's Ascend transport for its addresses
        "card network",
        (
            Verdict(
                WARNING,
                "/etc/hccn.conf is not there, or empty",
                "Mooncake's Ascend transport reads the NPUs' addresses from it: links between NPUs stay on shared "
                "memory",
                "mount the host's: docker run … -v /etc/hccn.conf:/etc/hccn.conf",
                "not hccn_conf",
            ),
        ),
        _links,
        _NPU,
    ),
    Check(
        "roce ports",
        (
            Verdict(
                WARNING,
                f"down on NPU {{one.down}}, and {_ROCE} is on",
                "transfers inside this server are told to take ports that have no link",
                f"unset {_ROCE}, or connect them (hccn_tool -i {{one.first_down}} -link -g)",
                "down_and_needed",
            ),
            Verdict(
                WARNING,
                "not known: {one.unknown}",
                "needed between servers, and inside one only with RoCE",
                "hccn_tool -i 0 -link -g (it comes with the driver: /usr/local/Ascend/driver/tools)",
                "unknown",
            ),
            Verdict(OK, "down on NPU {one.down} (needed between servers only)", when="down"),
            Verdict(OK, "up", when="states"),
        ),
        _links,
        _NPU,
    ),
    Check(  # registered memory has to be, on HCCS; ours is (`npu_ops/memory.py`), the KV cache is vLLM's
        "alignment",
        (
            Verdict(
                OK,
                f"RoCE inside the server ({_ROCE}): registered memory needs no 2 MB alignment",
                when="roce",
            ),
            Verdict(
                WARNING,
                f"{_POOL}={{one.pool}}",
                "Mooncake then copies through buffers of its own, which costs what direct writes save",
                f"unset {_POOL} unless registration of the KV cache fails",
                "pool",
            ),
            Verdict(OK, "HCCS: our slabs and the KV cache are registered from 2 MB boundaries on"),
        ),
        _links,
        _NPU,
    ),
    Check(
        "pairs on one npu",
        (Verdict(OK, "CANN {one.cann} {one.itself}; {one.pairs}"),),
        _links,
        _NPU,
    ),
)
