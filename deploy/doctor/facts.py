"""What the doctor has found out about a machine before it judges. Values only; all of it may be written down in a test.

Everything that is unknown is None or empty, and `notes` says why where a tool was asked. No secrets, no names of users:
environment variables are kept by name, and with their values only where `KEPT_VALUES` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.doctor.ascend_files import AscendFiles
from deploy.options.mooncake import install_command
from deploy.options.stage_args import SCHEDULER_VARIABLES
from epd_serve.placement import InstancePlan
from npu_ops.properties import DeviceProperties

KEPT_VALUES = frozenset(
    {
        *("VLLM_PLUGINS", "HCCL_INTRA_ROCE_ENABLE", "ASCEND_BUFFER_POOL", "NO_PROXY", "no_proxy"),
        *("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", *SCHEDULER_VARIABLES),
        *("RAY_AUTH_MODE", "RAY_ADDRESS"),
    }
)
"""Their values are numbers, names of plugins, or hosts: no secrets. Printed only where a check says so."""

PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
"""Only that they are set is kept."""

MEMORY_MONITOR = "RAY_memory_monitor_refresh_ms"
SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"


@dataclass(frozen=True)
class MachineFacts:
    """The host, or the container's share of it.

    Attributes:
        cpu_flags: those of /proc/cpuinfo (x86 `flags`, Arm `Features`).
        cores: usable by this process. quota_cores: what the cgroup grants per second, None without a limit.
        memory_bytes: that can be had now. memory_limit_bytes: the cgroup's, None without.
        shm_free_mib: free in /dev/shm; None where there is none.
        open_files, locked_bytes: soft limits of this process; None: unlimited.
        hugepages: (total, free) of the default size.
    """

    python: tuple[int, ...]
    architecture: str
    cpu_flags: frozenset[str] = frozenset()
    cores: int = 0
    quota_cores: float | None = None
    memory_bytes: int = 0
    memory_limit_bytes: int | None = None
    shm_free_mib: int | None = None
    open_files: int | None = None
    locked_bytes: int | None = None
    hugepages: tuple[int, int] = (0, 0)
    libibverbs: bool = False


@dataclass(frozen=True)
class PackageFacts:
    """Python packages, by metadata alone.

    Attributes:
        versions: of those installed, by distribution.
        mooncake: all builds that are installed, with their versions.
        plugin: our entry point of vLLM is registered.
        imports: by module, how its import in a process of its own ended: "" well, else the last line said. Only where
            asked for.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    mooncake: Mapping[str, str] = field(default_factory=dict)
    plugin: bool = False
    imports: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Namesake:
    """Something else that is imported, or was installed, under the name of one of our packages.

    Attributes:
        distributions: other installed distributions that bring a package of this name.
        origin: the file that an import of the name leads to, where that is not ours; "" where it is.
    """

    distributions: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True)
class MasterFacts:
    """The program `mooncake_master`. `unknown_flags`: those of ours that its --help does not name."""

    found: bool = False
    note: str = ""
    unknown_flags: str = ""


@dataclass(frozen=True)
class LinkFacts:
    """How NPUs are joined.

    Attributes:
        topology: (npu, npu) → HCCS, SYS, PHB …, of `npu-smi info -t topo`.
        ports: NPU → state of its RoCE port by hccn_tool: UP, DOWN, or why it is unknown.
        note: why the topology is unknown.
    """

    topology: Mapping[tuple[int, int], str] = field(default_factory=dict)
    ports: Mapping[int, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class HostFacts:
    """One node of a Ray cluster.

    Attributes:
        address: that others are to reach it at. refusal: why it could not be asked, "" where it was.
        versions: of ours, Python, Ray and what stages import, by name.
        free_ports: how many of the range for stages are free at its address.
        unheard: names of nodes whose connection to such a port did not come through.
        exposed: ports of stages that run there and answer at other addresses, too.
        niceness: what Ray's workers there have beyond its raylet's, which stages inherit. settings: of Ray there.
        secrets: marks of the files there by which nodes know each other. no_secrets: why they make it no member, or "".
    """

    name: str
    address: str
    refusal: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    free_ports: int = 0
    unheard: tuple[str, ...] = ()
    exposed: tuple[int, ...] = ()
    niceness: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    no_secrets: str = ""


@dataclass(frozen=True)
class RayFacts:
    """What several hosts are served on.

    Attributes:
        version: "" where it is not installed.
        token: where the token of this user was found: a variable or a file, "" for none. token_is_open: others may
            read that file.
        asked: somebody wants to know of a cluster: the one at `address`, or why it did not answer (`refusal`).
        ports: the range for stages, `20000-24999`.
    """

    version: str = ""
    token: str = ""
    token_is_open: bool = False
    asked: bool = False
    address: str = ""
    refusal: str = ""
    ports: str = ""
    hosts: tuple[HostFacts, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """What the operator is about to serve; a layout may be left out.

    Attributes:
        device: `npu`, `cuda` or `cpu`.
        plans: instances of the layout, on the devices that they would get; empty without a layout.
        layout, refusal: as given; why it cannot be served, "" where it can.
        shm_mib: what arena and staging want of /dev/shm; 0 without a layout.
    """

    device: str
    plans: tuple[InstancePlan, ...] = ()
    layout: str = ""
    refusal: str = ""
    shm_mib: int = 0

    @property
    def placed(self) -> frozenset[int]:
        """Devices that an instance is on."""
        return frozenset(device for plan in self.plans for device in plan.devices)


@dataclass(frozen=True)
class Facts:
    """Of one machine at one moment.

    Attributes:
        environment: variables that matter, by name; `set` in place of a value that is nobody's business.
        namesakes: what else goes by the name of one of our top-level packages, by that name.
        devices_note: why no device was found. driver_tool, compute_modes: of CUDA, by nvidia-smi.
    """

    wanted: Wanted
    machine: MachineFacts
    packages: PackageFacts = PackageFacts()
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[DeviceProperties, ...] = ()
    devices_note: str = "none is listed"
    driver_tool: str = ""
    compute_modes: tuple[str, ...] = ()
    ascend: AscendFiles = field(default_factory=AscendFiles)
    links: LinkFacts = LinkFacts()
    master: MasterFacts = MasterFacts()
    ray: RayFacts = RayFacts()
    namesakes: Mapping[str, Namesake] = field(default_factory=dict)

    @property
    def install(self) -> str:
        """The command that brings the Mooncake for this kind of device."""
        return install_command(self.wanted.device)
