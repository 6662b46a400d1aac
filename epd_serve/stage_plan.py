"""What one stage process is to be, decided, and the command that starts it. Data, for every engine there is."""

from __future__ import annotations

from dataclasses import dataclass

from epd_serve.endpoint import unix_url
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from npu_ops.core_grants import CoreOrder
from store.addresses import authority

LAUNCHER_ENV = "EPD_SERVE_LAUNCHER_PID"  # a stage whose launcher has this pid dies with it
MEMORY_NAMES_ENV = "EPD_SERVE_MEMORY_NAMES"  # what the names of a stage's shared memory begin with


@dataclass(frozen=True)
class StagePlan:
    """One instance, decided: where it runs, what it serves, how it is wired.

    Attributes:
        device: `npu`, `cuda` or `cpu`.
        device_ids: devices it occupies, len == tp.
        cores: CPU cores its OpenMP workers are pinned to (device `cpu` only).
        model: directory or hub name; served_model_name: the name clients use.
        uds: path of the Unix socket on which its HTTP server listens; "" for `port` of `host`.
        host: address for what else of it listens.
        colocated: how many instances share the device, itself included.
        memory_share: fraction of device memory, or None for the default share.
        core_order: what its workers have to do about cores, or None for no limit.
        kv_cache_bytes: of KV cache on each device, or None where vLLM finds out itself.
        extra_args: vLLM flags of the operator, appended last.
        engine: what the process is: `vllm`, or `sim` for a simulated stage (`epd_serve.sim`).
        sim_profile: its profile file, "" for one that takes no time.
        memory_names: what the names of its shared memory begin with, "" for names of chance.
    """

    instance: str
    role: Role
    device: str
    device_ids: tuple[int, ...]
    cores: tuple[int, ...]
    tp: int
    model: str
    served_model_name: str
    port: int
    host: str
    wiring: StageWiring
    extra_args: tuple[str, ...] = ()
    colocated: int = 1
    memory_share: float | None = None
    core_order: CoreOrder | None = None
    kv_cache_bytes: int | None = None
    engine: str = "vllm"
    sim_profile: str = ""
    memory_names: str = ""
    uds: str = ""

    @property
    def guarded(self) -> bool:
        """Others reach its server, so it wants a key (`stage_guard`). Whoever spawns it sets it in its environment."""
        return not self.uds

    @property
    def url(self) -> str:
        """Where its HTTP server answers (`epd_serve.endpoint`)."""
        return unix_url(self.uds) if self.uds else f"http://{authority(self.host, self.port)}"


@dataclass(frozen=True)
class StageCommand:
    """argv, and what to add to the environment (PYTHONPATH entries are to be prepended to an existing value)."""

    argv: tuple[str, ...]
    env: dict[str, str]
