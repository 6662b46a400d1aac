"""What the manifests of a deployment are made from: its configuration as the pods have it, and what the cluster is told
of image, devices, volumes and sizes. Checked here, so that `render.py` only writes down.

Pods are alike: each lends some devices, and the controller places the layout on those that there are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from deploy.memory.shared_memory import RESERVE_MIB, SharedMemory, usual_arena_mib, wanted_mib
from deploy.options.addresses import port_range
from deploy.options.config import DeployConfig
from deploy.options.stage_args import parse_stage_args
from deploy.plan.allot import allot, copies
from deploy.plan.machines import Machine, Machines
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.model_facts import check_model_fits, read_model_facts
from epd_serve.placement import InstancePlan, check_servable, lower
from npu_ops.discovery import DeviceInventory, Kind
from proxy.config.tree import Checked, CountFrom0, settings_of

NODE_PORT, ADMIN_PORT = 9443, 9000
"""Of every pod's node process, for the controller and for probes; of the controller's admin listener, where the
configuration names none."""

CONFIG_FILE, SECRETS_DIR, ADMIN_DIR = "/etc/epd/deployment.yaml", "/etc/epd/secrets", "/etc/epd/admin"

MOST_IN_A_POD = 8
"""Devices of a pod where nobody gives their number: those of a usual machine, or all of the layout if it has fewer."""

RESOURCES: dict[Kind, str] = {"npu": "huawei.com/Ascend910", "cuda": "nvidia.com/gpu", "cpu": ""}
"""What a pod asks the cluster for. On CPU devices are virtual."""

ASCEND_DRIVER = (
    "/usr/local/Ascend/driver,/usr/local/dcmi,/usr/local/bin/npu-smi,/etc/ascend_install.info,/etc/hccn.conf"
)
"""Of the host, where no Ascend Docker Runtime brings them into containers (docs/guides/ascend.md)."""

PRESUMED_MIB = 64 << 10
"""Memory of a pod that nobody has limited, as far as the size of its arena goes."""

GRACE_S = 30
"""For stages to end after the last request of their pod."""

_READ = ("api_key_file", "tls_cert_file", "tls_key_file", "follow_profile", "sim_profile", "media.allowed_local_root")
_WRITTEN = ("trace_dir", "trace_path", "access_log", "recording")
_ELSEWHERE = ("runtime", "run_root", "ray_address", "node_secrets", "fronts")
"""Settings that are no business of the file: the command line of the controller has them, or they are Ray's."""

_AMOUNT = re.compile("([0-9]+(?:[.][0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_MIB = {"k": 1e3 / 2**20, "M": 1e6 / 2**20, "G": 1e9 / 2**20, "T": 1e12 / 2**20}
_MIB |= {"Ki": 2**-10, "Mi": 1, "Gi": 2**10, "Ti": 2**20, "": 2**-20}
_NAME = re.compile("[A-Za-z0-9_./-]+")
_MOUNT = re.compile("(pvc|secret|configmap|host):([^:]+):(/[^:]*)(:rw)?")
_LABEL = re.compile("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class Mount(NamedTuple):
    """A volume that pods see at `path`, read only unless `writable`.

    Attributes:
        kind: `pvc`, `secret`, `configmap` or `host`. name: of that object, or the host's folder.
    """

    kind: str
    name: str
    path: str
    writable: bool = False

    @property
    def source(self) -> dict[str, Any]:
        """As a volume of a pod has it."""
        sources: dict[str, dict[str, Any]] = {
            "pvc": {"persistentVolumeClaim": {"claimName": self.name, "readOnly": not self.writable}},
            "secret": {"secret": {"secretName": self.name, "defaultMode": 0o440}},
            "configmap": {"configMap": {"name": self.name}},
            "host": {"hostPath": {"path": self.name}},
        }
        return sources[self.kind]


@dataclass(frozen=True)
class Values(Checked):
    """Flags of `epd-serve render kubernetes`, and what follows from them. All but the first raise ConfigError where
    what is asked for cannot be.

    Attributes:
        image: that all pods run, made from a file in containers/; with its tag or digest.
        namespace: of all objects (default: default).
        devices_per_pod: of which an instance takes no more (default: all that the layout takes, 8 at most).
        nodes: how few and how many pods the controller may have as it wants devices, FIRST-LAST (default: as many as
            there are).
        resource: what stands for one device (default: huawei.com/Ascend910 or nvidia.com/gpu, on CPU none).
        limit: further resource of a node's pod, for example memory=256Gi; repeatable.
        mount: volume of all pods as KIND:NAME:/PATH, for example pvc:models:/models; KIND is pvc, secret, configmap or
            host (then NAME is a path); with :rw at its end it is not read only; repeatable.
        drivers: files and folders of the host that nodes see, with commas between (default: those of the NPUs' driver,
            without --runtime-class).
        runtime_class: RuntimeClass of the nodes' pods, for example nvidia.
        env: variable of all pods, NAME=VALUE; repeatable.
        shm_mib: size of a pod's /dev/shm (default: twice what arena and KV links take).
        strategy: of an update: surge has all new pods beside the old ones before these end, which takes as many devices
            again; rolling ends one before it begins the next; recreate ends all first (default: surge).
        await_empty_s: how long a pod that ends waits until its instances are elsewhere (default: 300).
        service_monitor: write one for the Prometheus operator, too.
    """

    image: str = ""
    namespace: str = "default"
    devices_per_pod: CountFrom0 = 0
    nodes: str = ""
    resource: str = "auto"
    limit: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    mount: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    drivers: str = "auto"
    runtime_class: str = ""
    env: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    shm_mib: CountFrom0 = 0
    strategy: Literal["surge", "rolling", "recreate"] = "surge"
    await_empty_s: CountFrom0 = 300
    service_monitor: bool = False
    given: DeployConfig = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.image or self.image.split() != [self.image]:
            raise ConfigError(
                "--image says what the pods run: build one from containers/ascend, cuda or cpu.Containerfile, push it, "
                "and name it with its tag or digest",
                param="--image",
            )
        if not self.given.name[0].isalpha():
            raise ConfigError(f"name {self.given.name}: that of a Service begins with a letter", param="name")
        if not _LABEL.fullmatch(self.namespace):
            raise ConfigError(f"--namespace {self.namespace!r}: small letters, digits, dashes", param="--namespace")

    @cached_property
    def config(self) -> DeployConfig:
        """With the addresses and files that it has in pods."""
        config = self.given
        if config.node_host:
            raise ConfigError("node_host: a pod says its own address; drop it", param="node_host")
        host = {"127.0.0.1": "0.0.0.0", "::1": "::"}.get(config.host, config.host)
        if host not in ("0.0.0.0", "::"):
            raise ConfigError(f"host {host}: a pod's address is the cluster's choice; take 0.0.0.0 or ::", param="host")
        admin_port = config.admin_port or ADMIN_PORT
        for key, port in (("port", config.port), ("admin_port", admin_port)):
            if port == NODE_PORT or port in port_range(config.node_ports):
                raise ConfigError(
                    f"{key} {port} is one of nodes ({NODE_PORT} and node_ports {config.node_ports})", param=key
                )
        for key in (*_READ, *_WRITTEN):
            value = attrgetter(key)(config)
            if value not in ("", "-", None) and not self._has(value, *["/tmp"] * (key in _WRITTEN)):
                raise ConfigError(
                    f"{key} {value}: no pod has it; bring a volume that has it by --mount KIND:NAME:/PATH, as "
                    "--mount secret:client-keys:/etc/keys",
                    param=key,
                )
        key_file = f"{ADMIN_DIR}/key"
        if config.admin_key_file not in ("", key_file):
            raise ConfigError(f"admin_key_file: Secret {config.name}-admin has it; drop it", param="admin_key_file")
        return replace(config, host=host, admin_host=host, admin_port=admin_port, admin_key_file=key_file)

    @cached_property
    def kind(self) -> Kind:
        """Of the devices."""
        kind = "cpu" if self.given.engine == "sim" else self.given.device
        assert kind != "auto", "the configuration has been checked"
        return kind

    @cached_property
    def layout(self) -> Layout:
        layout = parse(self.given.layout)
        check_servable(layout)
        if (model := self.given.model) and Path(model).is_dir():
            check_model_fits(read_model_facts(model), layout)
        return layout

    @cached_property
    def devices(self) -> int:
        """Of each pod."""
        devices = self.devices_per_pod or min(MOST_IN_A_POD, self.layout.device_count)
        if widest := next((group for group in self.layout.groups if group.tp > devices), None):
            raise ConfigError(
                f"{widest} takes {widest.tp} devices and a pod has {devices}: instances are within a pod, there is no "
                "LeaderWorkerSet; take more by --devices-per-pod, or a smaller tp",
                param="--devices-per-pod",
            )
        return devices

    @cached_property
    def placed(self) -> tuple[Machines, tuple[InstancePlan, ...]]:
        """The fewest pods that hold the layout, and which of its instances may be together in one, by their devices."""
        one, groups = DeviceInventory(self.kind, tuple(range(self.devices)), ("",) * self.devices), copies(self.layout)
        count = math.ceil(self.layout.device_count / self.devices)
        while True:
            pods = Machines(tuple(Machine(str(number), one) for number in range(count)))
            found = allot(groups, pods.inventory.ids)
            if all(found):
                plans = lower(self.layout, [device for some in found for device in some])
                parse_stage_args(self.given.stage_args, plans)
                return pods, plans
            count += 1

    @cached_property
    def replicas(self) -> int:
        count, (first, _, last) = len(self.placed[0].nodes), self.nodes.partition("-")
        if self.nodes and not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= count <= int(last)):
            raise ConfigError(
                f"--nodes {self.nodes!r} is not FIRST-LAST around the {count} of {self.layout}, as 1-{2 * count}",
                param="--nodes",
            )
        return count

    @cached_property
    def limits(self) -> dict[str, str]:
        """Of a pod; its devices among them."""
        limits = _pairs(self.limit, "--limit")
        for name, amount in limits.items():
            if not _AMOUNT.fullmatch(amount):
                raise ConfigError(f"--limit {name}={amount} is no quantity, such as 16, 500m or 64Gi", param="--limit")
        resource = RESOURCES[self.kind] if self.resource == "auto" else self.resource
        return limits | ({resource: str(self.devices)} if resource else {})

    @cached_property
    def variables(self) -> dict[str, str]:
        return _pairs(self.env, "--env")

    @cached_property
    def mounts(self) -> tuple[Mount, ...]:
        return tuple(map(_mount, self.mount))

    @cached_property
    def driver_paths(self) -> tuple[str, ...]:
        usual = ASCEND_DRIVER if self.kind == "npu" and not self.runtime_class else ""
        given = (usual if self.drivers == "auto" else self.drivers).split(",")
        paths = tuple(path.strip() for path in given if path.strip())
        if wrong := [path for path in paths if not path.startswith("/")]:
            raise ConfigError(f"--drivers {wrong[0]!r} is no absolute path", param="--drivers")
        return paths

    @cached_property
    def shm(self) -> int:
        """MiB: of the pod that wants most, twice, for a change begins beside what runs; in whole GiB."""
        pods, every = self.placed
        amount = _AMOUNT.fullmatch(self.limits.get("memory", "0"))
        assert amount is not None, "it has been looked at"
        memory_mib, size = int(float(amount[1]) * _MIB.get(amount[2] or "", 0)), self.shm_mib
        for _, plans in () if self.shm_mib else pods.split(every):
            encoders = sum(plan.role.sends_features for plan in plans)
            travel = any(plan.role.sends_features or plan.role.takes_features for plan in plans)
            arena_mib = self.given.arena_mib or usual_arena_mib((memory_mib or PRESUMED_MIB) << 20, encoders)
            memory = SharedMemory(arena_mib, self.given.kv_staging_mib)
            wanted = 2 * wanted_mib(memory, plans, features_travel=travel) + RESERVE_MIB
            size = max(size, math.ceil(wanted / 1024) * 1024)
        if memory_mib and size >= memory_mib:
            raise ConfigError(
                f"--limit memory={self.limits['memory']}: /dev/shm alone may take {size} MiB of it; give more, or less "
                "to it by --shm-mib",
                param="--limit",
            )
        return size

    @property
    def grace_s(self) -> int:
        """From the order to end a pod until it is killed."""
        return math.ceil(self.await_empty_s + self.given.lame_duck_s + self.given.drain_s) + GRACE_S

    def warnings(self) -> Iterable[str]:
        """A line each, to be shown."""
        model, sends = self.given.model, any(role.sends_features for role in self.layout.roles)
        if model.startswith("/") and not self._has(model):
            yield f"model {model}: no --mount brings it, so it has to be in the image"
        if (spare := self.replicas * self.devices - self.layout.device_count) > 0:
            yield f"{self.replicas} pods of {self.devices} devices have {spare} more than {self.layout} takes"
        if self.kind == "npu" and self.replicas > 1 and sends and self.given.mm_store == "auto":
            yield "features of NPUs stay in their pod, and others compute them again: mm_store=mooncake tries it"

    def document(self) -> dict[str, Any]:
        """The configuration as the file of `serve --config` has it: what differs from the defaults."""
        usual, written = DeployConfig(), dict[str, Any]()
        for key in settings_of(DeployConfig):
            value, default = map(attrgetter(key), (self.config, usual))
            if value != default and key not in _ELSEWHERE:
                section, _, name = key.rpartition(".")
                into = written.setdefault(section, {}) if section else written
                into[name] = list(value) if isinstance(value, tuple) else value
        return written | {"fronts": "every"}

    def _has(self, path: str, *more: str) -> bool:
        """Pods see that path by a volume."""
        return any(Path(path).is_relative_to(one) for one in (*more, *(mount.path for mount in self.mounts)))


def _mount(text: str) -> Mount:
    found = _MOUNT.fullmatch(text)
    if found is None or ".." in text or (found[1] == "host") is not found[2].startswith("/"):
        raise ConfigError(
            f"--mount {text!r} is not KIND:NAME:/PATH, KIND one of pvc, secret, configmap, host (NAME is then a "
            "path); as pvc:models:/models",
            param="--mount",
        )
    kind, name, path, writable = found.groups()
    if path == "/tmp" or path.startswith(("/etc/epd", "/dev/shm")):
        raise ConfigError(f"--mount {text!r}: pods have something of their own at {path}", param="--mount")
    return Mount(kind, name, path, writable is not None)


def _pairs(texts: Iterable[str], flag: str) -> dict[str, str]:
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not value or not _NAME.fullmatch(name):
            raise ConfigError(f"{flag} {text!r} is not NAME=VALUE", param=flag)
        found[name] = value
    return found
