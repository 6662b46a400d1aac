"""One E→P link per mode of `bench/micro/ep/transfers.py`: two processes, wired as the launcher wires two stages.

Owns how one feature is sent and its request admitted. In the Mooncake modes E and P have arenas of their own, as on two
hosts, and every byte passes the second tier over TCP.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.clients.process import Child
from bench.micro.measurement import Row
from bench.served import answers, scratch
from deploy.agent.second_tier import mooncake_command
from deploy.host.ports import free_ports
from deploy.host.started import started
from deploy.memory.shared_memory import free_mib
from deploy.options.mooncake import what_is_missing
from epd_serve.errors import ConfigError, StageError
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from store.arena import Arena
from store.mooncake.client import LEAST_SEGMENT_BYTES
from store.mooncake.master import MasterSettings, health_url, rpc_address

HIDDEN_SIZE = 3584
"""Of openPangu-7B-VL's features, in EPD-Serve's Table 3."""
MODES = ("arena", "mooncake")
WAITING = "waiting"
"""The request waits already: nothing hides the transfer."""
SLACK = 4.4  # a consumer prefetches up to a quarter of the arena: the largest feature has to fit into that
WAIT_S, ADMITTED_S = 20.0, 90.0
START_S, MASTER_S = 120.0, 15.0
STAGES = "bench.micro.ep.stages"
WARM_TRIES = 20
QUIET = {"MC_LOG_LEVEL": "ERROR", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}


@dataclass
class Link:
    """An encoder process and a prefill process of one mode."""

    mode: str
    encoder: Child
    prefill: Child
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def send(self, image: str, tokens: int, model: str, scheduling_s: float, turn: int) -> Row:
        """Send a feature to a request that P could admit `scheduling_s` after the end of encoding.

        Args:
            model: of P, or `WAITING`: the row then has the whole `transfer_ms`, else what is `exposed_ms`.

        Raises:
            StageError: the feature did not arrive.
        """
        key, waiting = f"{self.mode}-{image}-{next(self._numbers)}", model == WAITING
        if waiting:
            self.prefill.ask((key, 0.0, scheduling_s))
        encoded = self.encode([key], tokens)
        if not waiting:
            self.prefill.ask((key, encoded + scheduling_s, scheduling_s))
        admission = self.prefill.hear(ADMITTED_S)
        if not admission["local"]:
            raise StageError(f"{self.mode}: the feature of {image} did not arrive", stage=self.mode)
        exposed_s = admission["admitted"] - (encoded + scheduling_s) - (0.0 if waiting else admission["local_s"])
        return {
            "mode": self.mode,
            "picture": image,
            "tokens": tokens,
            "prefill": model,
            "round": turn,
            "scheduling_ms": round(scheduling_s * 1e3, 4),
            "transfer_ms" if waiting else "exposed_ms": round(exposed_s * 1e3, 4),
            "load_ms": round(admission["load_s"] * 1e3, 4),
        }

    def encode(self, keys: Sequence[str], tokens: int, every_s: float = 0.0) -> float:
        """Have features encoded one by one; when the last one was."""
        return float(self.encoder.ask((keys, tokens, every_s), 60 + 2 * len(keys) * every_s))

    def warm(self, tokens: int) -> None:
        """Until a feature has passed: sockets (what is announced before a subscription is there is lost), the pool."""
        for attempt in range(WARM_TRIES):
            try:
                self.send("warm", tokens, WAITING, 0.0, attempt)
                return
            except StageError:
                if attempt == WARM_TRIES - 1:
                    raise


def installed_modes() -> tuple[str, ...]:
    """Those that can be measured here; what the others lack is printed."""
    missing = what_is_missing("cpu", master=True)
    if missing:
        print(f"without Mooncake: {missing}", flush=True)
    return tuple(mode for mode in MODES if not (missing and mode == "mooncake"))


@contextlib.contextmanager
def links(modes: Sequence[str], tokens: Sequence[int], folder: Path) -> Iterator[list[Link]]:
    """Make the arenas and start both processes of every mode, all at once, and send a first feature through each.

    The stamps of a link are in the folder of its mode.

    Raises:
        ConfigError: /dev/shm is too small, or Mooncake is not installed; before anything is started.
    """
    capacity = max(LEAST_SEGMENT_BYTES, int(max(tokens) * HIDDEN_SIZE * 2 * SLACK))
    hosts = {mode: ("e", "p") if mode == "mooncake" else ("one", "one") for mode in modes}
    paths = {host: f"/dev/shm/epd-bench-{os.getpid()}-{host}" for both in hosts.values() for host in both}
    needed_mib, free = len(paths) * capacity >> 20, free_mib(Path("/dev/shm"))
    if needed_mib > free:
        raise ConfigError(f"/dev/shm has {free} MiB free, {needed_mib} are needed: leave 4k out of --pictures")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(mooncake_master()) if "e" in paths else ""
        for path in paths.values():
            stack.callback(Arena.unlink, path)
            stack.callback(Arena.create(path, capacity, prefault=False).close)
        opened = []
        for mode, (e, p) in hosts.items():
            (folder / mode).mkdir()
            pool = (address, capacity) if mode == "mooncake" else ("", 0)
            to_e, to_p = wirings(mode, paths[e], paths[p], f"{folder}/{mode}", *pool)
            encoder, prefill = Child(STAGES, to_e, tokens, HIDDEN_SIZE, env=QUIET), Child(STAGES, to_p)
            stack.callback(encoder.stop)
            stack.callback(prefill.stop)
            opened.append(Link(mode, encoder, prefill))
        for link in opened:
            link.encoder.hear(START_S)
            link.prefill.hear(START_S)
        for path in paths.values():  # all have them open: whatever ends us from here on, nothing stays behind
            Arena.unlink(path)
        for link in opened:
            link.warm(tokens[0])
        yield opened


@contextlib.contextmanager
def mooncake_master() -> Iterator[str]:
    """A `mooncake_master` on free ports of loopback. Yields the address that clients are given.

    Raises:
        ConfigError: it is not installed. StageError: not ready in time; with the end of its log.
    """
    rpc_port, metrics_port = free_ports(2)
    settings = MasterSettings(rpc_port=rpc_port, metrics_port=metrics_port)
    argv = mooncake_command(settings)
    with scratch() as folder, started(argv, folder / "master.log") as process:
        process.ready(lambda: answers(health_url(settings), says="service_ready"), MASTER_S)
        yield rpc_address(settings)


def wirings(
    mode: str, encoder_arena: str, prefill_arena: str, folder: str, master: str, segment_bytes: int
) -> tuple[StageWiring, StageWiring]:
    """Of E and P, as the launcher would wire them. `folder`: for their stamps. `master`: of Mooncake, or ""."""
    socket = f"ipc://{folder}.sock"
    both: dict[str, Any] = {"incarnation": "bench", "mooncake_master": master}
    peers = Path(f"{folder}.peers.json")
    write_peers(peers, [Peer("E0", Role.E, events=socket)])
    encoder = StageWiring(
        instance="E0",
        role=Role.E,
        arena=encoder_arena,
        arena_id=encoder_arena,
        publish=socket,
        mooncake_segment_bytes=segment_bytes,  # P has none: every byte comes from E's host
        trace_path=f"{folder}/E0.jsonl",
        **both,
    )
    prefill = StageWiring(
        instance="P0",
        role=Role.P,
        arena=prefill_arena,
        arena_id=prefill_arena,
        peers=str(peers),
        feature_prefetch="event",
        publish=f"ipc://{folder}.p.sock",
        feature_wait_s=WAIT_S,
        trace_path=f"{folder}/P0.jsonl",
        **both,
    )
    return encoder, prefill
