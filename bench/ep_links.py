"""One E→P link per mode of `epd-bench transfer ep`: two processes, wired as the launcher wires two stages.

Owns how one feature is sent and its request admitted. In the Mooncake modes E and P have arenas of their own, as on two
hosts, and every byte passes the second tier over TCP.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.children import Child, Message
from bench.overlap import Sample
from bench.paper import HIDDEN_SIZE
from epd_serve.errors import StageError
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring

MODES = ("sync_arena", "arena", "sync_mooncake", "mooncake")
"""Synchronous: P is told when E has put the feature, and fetches it when the request asks. Else: event-driven."""
LOCAL_AFTER_S = 0.005
"""Where there is no scheduling latency: time enough for the command to be there before its moment."""
WAIT_S = 20.0
START_S = 120.0
WARM_TRIES = 20
WARM_S = 1.0


@dataclass(frozen=True)
class Places:
    """Where features lie: arenas of E's and P's host (one and the same in the arena modes), the pool's master."""

    encoder_arena: str
    prefill_arena: str
    master: str = ""
    segment_bytes: int = 0


@dataclass
class Link:
    """An encoder process and a prefill process of one mode."""

    mode: str
    encoder: Child
    prefill: Child
    traces: Path
    _names: Iterator[int] = field(default_factory=itertools.count)

    @property
    def synchronous(self) -> bool:
        return self.mode.startswith("sync_")

    def send(
        self, picture: str, tokens: int, model: str, scheduling_s: float, number: int, limit_s: float = WAIT_S
    ) -> Sample:
        """Send a feature to a request that P could admit `scheduling_s` after the end of encoding.

        Without `model`, the request waits already, and the sample is the whole transfer.

        Raises:
            StageError: the feature did not arrive, or its announcement did not within `limit_s` (synchronous modes).
        """
        key = f"{self.mode}-{picture}-{next(self._names)}"
        taken = self._synchronous(key, tokens, scheduling_s, limit_s) if self.synchronous else None
        if taken is None:
            taken = self._event_driven(key, tokens, scheduling_s) if model else self._waited_for(key, tokens)
        encoded, admission = taken
        if not admission["heard"]:
            raise StageError(f"{self.mode}: {picture} was not announced within {limit_s:g} s", stage=self.mode)
        # As long a wait as before: a thread that slept long wakes later, and that is not the transfer's doing.
        local = self._admit(f"{key}-local", key, time.monotonic() + max(LOCAL_AFTER_S, scheduling_s))
        assert self.prefill.ask(do="release", requests=[key, f"{key}-local"])["released"]
        if not admission["local"]:
            raise StageError(f"{self.mode}: the feature of {picture} did not arrive", stage=self.mode)
        exposed_s = admission["admitted"] - (encoded + scheduling_s)
        if model:
            exposed_s -= local["admitted"] - local["request_at"]
        return Sample(self.mode, picture, tokens, model, number, scheduling_s, exposed_s, local["load_s"])

    def warm(self, tokens: int) -> None:
        """Until a feature has passed: sockets (what is announced before a subscription is there is lost), the pool."""
        for attempt in range(WARM_TRIES):
            try:
                self.send("warm", tokens, "", 0.0, attempt, WARM_S)
                return
            except StageError:
                if attempt == WARM_TRIES - 1:
                    raise

    def burst(self, events: int, every_s: float, tokens: int) -> list[str]:
        """Keys of `events` small features, sent one by one; how long their events took is in the traces."""
        keys = [f"burst-{next(self._names)}" for _ in range(events)]
        self.encoder.ask(60 + 2 * events * every_s, keys=keys, tokens=tokens, every_s=every_s)
        return keys

    def stop(self) -> None:
        self.prefill.stop()
        self.encoder.stop()

    def _synchronous(self, key: str, tokens: int, scheduling_s: float, limit_s: float) -> tuple[float, Message]:
        self.prefill.tell(do="admit", request=key, key=key, at=scheduling_s, after_announcement=True, limit_s=limit_s)
        return self._save_when_armed(key, tokens)

    def _waited_for(self, key: str, tokens: int) -> tuple[float, Message]:
        self.prefill.tell(do="admit", request=key, key=key)
        return self._save_when_armed(key, tokens)

    def _event_driven(self, key: str, tokens: int, scheduling_s: float) -> tuple[float, Message]:
        encoded = float(self.encoder.ask(keys=[key], tokens=tokens)["encoded"])
        return encoded, self._admit(key, key, encoded + scheduling_s)

    def _save_when_armed(self, key: str, tokens: int) -> tuple[float, Message]:
        assert self.prefill.hear()["armed"]
        encoded = float(self.encoder.ask(keys=[key], tokens=tokens)["encoded"])
        return encoded, self.prefill.hear()

    def _admit(self, request: str, key: str, at: float) -> Message:
        self.prefill.tell(do="admit", request=request, key=key, at=at)
        assert self.prefill.hear()["armed"]
        return self.prefill.hear()


@contextlib.contextmanager
def opened(
    modes: Sequence[str], places: dict[str, Places], tokens: Sequence[int], scratch: Path
) -> Iterator[list[Link]]:
    """Start both processes of every mode, all at once, and send a first feature through each."""
    with contextlib.ExitStack() as stack:
        links = [_link(mode, places[mode], tokens, scratch, stack) for mode in modes]
        for link in links:
            assert link.encoder.hear(START_S)["ready"] and link.prefill.hear(START_S)["ready"]
        for link in links:
            link.warm(tokens[0])
        yield links


def _link(mode: str, places: Places, tokens: Sequence[int], scratch: Path, stack: contextlib.ExitStack) -> Link:
    traces = scratch / mode
    traces.mkdir()
    socket = f"ipc://{scratch}/{mode}.sock"
    encoder = StageWiring(
        instance="E0",
        role=Role.E,
        incarnation="bench",
        arena=places.encoder_arena,
        arena_id=places.encoder_arena,
        publish=socket,
        mooncake_master=places.master,
        mooncake_segment_bytes=places.segment_bytes,
        trace_path=str(traces / "E0.jsonl"),
    )
    synchronous = mode.startswith("sync_")
    prefill = StageWiring(
        instance="P0",
        role=Role.P,
        incarnation="bench",
        arena=places.prefill_arena,
        arena_id=places.prefill_arena,
        events={} if synchronous else {"E0": socket},
        feature_prefetch="demand" if synchronous else "event",
        publish=f"ipc://{scratch}/{mode}.p.sock",
        mooncake_master=places.master,
        feature_wait_s=WAIT_S,
        trace_path=str(traces / "P0.jsonl"),
    )
    quiet = {"MC_LOG_LEVEL": "ERROR", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    encoding = Child(
        "bench.ep_encoder", {"wiring": encoder.to_json(), "tokens": list(tokens), "hidden": HIDDEN_SIZE}, quiet
    )
    stack.callback(encoding.stop)
    prefilling = Child(
        "bench.ep_prefill", {"wiring": prefill.to_json(), "announced": socket, "pooled": bool(places.master)}, quiet
    )
    stack.callback(prefilling.stop)
    return Link(mode, encoding, prefilling, traces)
