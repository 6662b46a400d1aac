"""One E→P link per mode of `epd-bench transfer ep`: two processes, wired as the launcher wires two stages.

Owns how one feature is sent and its request admitted. In the Mooncake modes E and P have arenas of their own, as on two
hosts, and every byte passes the second tier over TCP.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.children import Child, Message
from bench.micro.ep.mooncake_get import master
from bench.micro.measurement import Row
from bench.papers.printed import HIDDEN_SIZE
from deploy.shared_memory import free_mib
from epd_serve.errors import ConfigError, StageError
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from store.arena import Arena

MODES = ("sync_arena", "arena", "sync_mooncake", "mooncake")
"""Synchronous: P is told when E has put the feature, and fetches it when the request asks. Else: event-driven."""
WAITING = "waiting"
"""The request waits already: nothing hides the transfer."""
SLACK = 4.4  # a consumer prefetches up to a quarter of the arena: the largest feature has to fit into that
LOCAL_AFTER_S = 0.005
"""Where there is no scheduling latency: time enough for the command to be there before its moment."""
WAIT_S = 20.0
START_S = 120.0
WARM_TRIES = 20
WARM_S = 1.0


@dataclass
class Link:
    """An encoder process and a prefill process of one mode. `traces`: folder of their stamps."""

    mode: str
    encoder: Child
    prefill: Child
    traces: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def send(self, image: str, tokens: int, model: str, scheduling_s: float, turn: int, limit_s: float = WAIT_S) -> Row:
        """Send a feature to a request that P could admit `scheduling_s` after the end of encoding.

        Args:
            model: of P, or `WAITING`: the row then has the whole `transfer_ms`, else what is `exposed_ms`.

        Raises:
            StageError: the feature did not arrive, or its announcement did not within `limit_s` (synchronous modes).
        """
        key = f"{self.mode}-{image}-{next(self._numbers)}"
        synchronous = self.mode.startswith("sync_")
        if synchronous or model == WAITING:
            at = scheduling_s if synchronous else 0.0
            self.prefill.tell(admit=key, key=key, at=at, synchronous=synchronous, limit_s=limit_s)
            assert self.prefill.hear()["armed"]
            encoded = self.encode([key], tokens)
            admission = self.prefill.hear()
        else:
            encoded = self.encode([key], tokens)
            admission = self._admit(key, key, encoded + scheduling_s)
        if not admission["heard"]:
            raise StageError(f"{self.mode}: {image} was not announced within {limit_s:g} s", stage=self.mode)
        # As long a wait as before: a thread that slept long wakes later, and that is not the transfer's doing.
        local = self._admit(f"{key}-local", key, time.monotonic() + max(LOCAL_AFTER_S, scheduling_s))
        self.prefill.ask(release=[key, f"{key}-local"])
        if not admission["local"]:
            raise StageError(f"{self.mode}: the feature of {image} did not arrive", stage=self.mode)
        exposed_s = admission["admitted"] - (encoded + scheduling_s)
        if model != WAITING:
            exposed_s -= local["admitted"] - local["request_at"]
        return {
            "mode": self.mode,
            "picture": image,
            "tokens": tokens,
            "prefill": model,
            "round": turn,
            "scheduling_ms": round(scheduling_s * 1e3, 4),
            "transfer_ms" if model == WAITING else "exposed_ms": round(exposed_s * 1e3, 4),
            "load_ms": round(local["load_s"] * 1e3, 4),
        }

    def encode(self, keys: Sequence[str], tokens: int, every_s: float = 0.0) -> float:
        """Have features encoded one by one; when the last one was."""
        order = {"keys": keys, "tokens": tokens, "every_s": every_s}
        return float(self.encoder.ask(60 + 2 * len(keys) * every_s, **order)["encoded"])

    def warm(self, tokens: int) -> None:
        """Until a feature has passed: sockets (what is announced before a subscription is there is lost), the pool."""
        for attempt in range(WARM_TRIES):
            try:
                self.send("warm", tokens, WAITING, 0.0, attempt, WARM_S)
                return
            except StageError:
                if attempt == WARM_TRIES - 1:
                    raise

    def _admit(self, request: str, key: str, at: float) -> Message:
        self.prefill.tell(admit=request, key=key, at=at, synchronous=False)
        assert self.prefill.hear()["armed"]
        return self.prefill.hear()


@contextlib.contextmanager
def links(modes: Sequence[str], tokens: Sequence[int], scratch: Path) -> Iterator[list[Link]]:
    """Make the arenas and start both processes of every mode, all at once, and send a first feature through each.

    Raises:
        ConfigError: /dev/shm is too small, or Mooncake is not installed; before anything is started.
    """
    capacity = int(max(tokens) * HIDDEN_SIZE * 2 * SLACK)
    hosts = {host for mode in modes for host in (("e", "p") if "mooncake" in mode else ("one",))}
    paths = {host: f"/dev/shm/epd-bench-{os.getpid()}-{host}" for host in hosts}
    needed_mib, free = len(paths) * capacity >> 20, free_mib(Path("/dev/shm"))
    if needed_mib > free:
        raise ConfigError(f"/dev/shm has {free} MiB free, {needed_mib} are needed: leave 4k out of --pictures")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(master()) if "e" in hosts else ""
        for path in paths.values():
            stack.callback(Arena.unlink, path)
            stack.callback(Arena.create(path, capacity, prefault=False).close)
        opened = []
        for mode in modes:
            pooled = (
                (paths["e"], paths["p"], address, capacity) if "mooncake" in mode else (paths["one"],) * 2 + ("", 0)
            )
            opened.append(_link(mode, *pooled, tokens, scratch, stack))
        for link in opened:
            link.encoder.hear(START_S)
            link.prefill.hear(START_S)
        for path in paths.values():  # all have them open: whatever ends us from here on, nothing stays behind
            Arena.unlink(path)
        for link in opened:
            link.warm(tokens[0])
        yield opened


def _link(
    mode: str,
    encoder_arena: str,
    prefill_arena: str,
    address: str,
    segment_bytes: int,
    tokens: Sequence[int],
    scratch: Path,
    stack: contextlib.ExitStack,
) -> Link:
    traces, socket = scratch / mode, f"ipc://{scratch}/{mode}.sock"
    traces.mkdir()
    encoder = StageWiring(
        instance="E0",
        role=Role.E,
        incarnation="bench",
        arena=encoder_arena,
        arena_id=encoder_arena,
        publish=socket,
        mooncake_master=address,
        mooncake_segment_bytes=segment_bytes,
        trace_path=str(traces / "E0.jsonl"),
    )
    synchronous = mode.startswith("sync_")
    prefill = StageWiring(
        instance="P0",
        role=Role.P,
        incarnation="bench",
        arena=prefill_arena,
        arena_id=prefill_arena,
        events={} if synchronous else {"E0": socket},
        feature_prefetch="demand" if synchronous else "event",
        publish=f"ipc://{scratch}/{mode}.p.sock",
        mooncake_master=address,
        feature_wait_s=WAIT_S,
        trace_path=str(traces / "P0.jsonl"),
    )
    configs = {
        "encoder": {"wiring": encoder.to_json(), "tokens": list(tokens), "hidden": HIDDEN_SIZE},
        "prefill": {"wiring": prefill.to_json(), "announced": socket, "pooled": bool(address)},
    }
    quiet = {"MC_LOG_LEVEL": "ERROR", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    children = {name: Child(f"bench.micro.ep.{name}", config, quiet) for name, config in configs.items()}
    for child in children.values():
        stack.callback(child.stop)
    return Link(mode, children["encoder"], children["prefill"], traces)
