"""What our second tier costs beyond Mooncake: a fetch against the raw client's `get_into` of the same values over TCP.

One process owns the values, another one reads them, with both clients in turn: Mooncake's own with memory registered
beforehand, and `MooncakeStore.fetch_into` as a stage uses it (its size asked first, deadline and breaker around both
calls, codec), with and without verifying the checksum.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from bench.children import Child, Message, answering, commands
from bench.micro.arena import timed
from bench.scratch import scratch
from bench.started import answers, started
from deploy.pool_master import mooncake_command
from deploy.ports import free_ports
from store.checksum import Bytes
from store.codec import TRAILER_BYTES, verify_payload
from store.errors import StoreError
from store.mooncake.client import MooncakeConfig, load_mooncake
from store.mooncake.master import MasterSettings, health_url, rpc_address
from store.mooncake.tier import MooncakeStore

MODULE = "bench.micro.ep.mooncake_get"
HOST = "127.0.0.1"
KEYS = tuple(f"value-{number}" for number in range(6))
RATIOS = {
    "mooncake_get_over_raw_client_8m": "fetch",
    "mooncake_get_over_raw_client_8m_nosum": "fetch, no checksum",
}
START_S, READ_S = 15.0, 120.0


@contextlib.contextmanager
def master() -> Iterator[str]:
    """A `mooncake_master` on free ports of loopback. Yields the address that clients are given.

    Raises:
        ConfigError: it is not installed. StageError: not ready in time; with the end of its log.
    """
    rpc_port, metrics_port = free_ports(2)
    settings = MasterSettings(rpc_port=rpc_port, metrics_port=metrics_port)
    argv = mooncake_command(settings)
    with scratch() as folder, started(argv, folder / "master.log") as process:
        process.ready(lambda: answers(health_url(settings), says="service_ready"), START_S)
        yield rpc_address(settings)


def measure(address: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds per variant, turn by turn, with the master at `address`.

    Raises:
        StageError: a process of it ended or did not answer.
    """
    config = {"master": address, "nbytes": nbytes, "rounds": rounds}
    with contextlib.ExitStack() as stack:
        owner = Child(MODULE, {**config, "own": True})
        stack.callback(owner.stop)
        owner.hear()
        reader = Child(MODULE, {**config, "own": False})
        stack.callback(reader.stop)
        return reader.hear(READ_S)


def figures(taken_ms: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians of the ratios of one turn: what slows the machine down slows all that take the same turn."""
    return {
        figure: float(np.median(np.divide(taken_ms[variant], taken_ms["raw client"])))
        for figure, variant in RATIOS.items()
    }


def main() -> None:
    """One of the two processes."""
    answer, orders = answering(), commands()
    config = next(orders)
    if config["own"]:
        _own(config, answer, orders)
    else:
        answer(**_read(config))


def _own(config: Message, answer: Callable[..., None], orders: Iterator[Message]) -> None:
    """Until the end of its input."""
    segment = 2 * len(KEYS) * (config["nbytes"] + TRAILER_BYTES)
    store = MooncakeStore.connect(MooncakeConfig(master=config["master"], segment_bytes=segment))
    rng = np.random.default_rng(0)
    for key in KEYS:
        store.put(key, rng.integers(0, 255, config["nbytes"], np.uint8), shape=(config["nbytes"],), dtype="uint8")
    answer(ready=True)
    for _ in orders:
        pass
    store.close()


def _read(config: Message) -> dict[str, list[float]]:
    nbytes, mooncake = config["nbytes"], MooncakeConfig(master=config["master"])
    store, target = MooncakeStore.connect(mooncake), _memory(nbytes)
    store.register(target.ctypes.data, target.nbytes)
    raw, raw_target = load_mooncake(HOST).MooncakeDistributedStore(), _memory(nbytes + TRAILER_BYTES)
    if raw.setup(HOST, "P2PHANDSHAKE", 0, mooncake.buffer_bytes, "tcp", "", config["master"]) != 0:
        raise StoreError("the raw client does not connect")
    raw.register_buffer(raw_target.ctypes.data, raw_target.nbytes)

    def get_raw(turn: int) -> None:
        read = raw.get_into(mooncake.namespace + KEYS[turn % len(KEYS)], raw_target.ctypes.data, raw_target.nbytes)
        if read != raw_target.nbytes:
            raise StoreError(f"the raw client's get: {read} instead of {raw_target.nbytes} bytes")

    def fetch(turn: int, *, verify: bool) -> None:
        key = KEYS[turn % len(KEYS)]
        size = store.size(key)
        meta = store.fetch_into(key, target.ctypes.data, nbytes, on_failure=lambda: None)
        assert meta is not None and size == nbytes
        if verify:
            verify_payload(meta, target)

    variants = {
        "raw client": get_raw,
        "fetch": lambda turn: fetch(turn, verify=True),
        "fetch, no checksum": lambda turn: fetch(turn, verify=False),
    }
    taken_ms = timed(variants, config["rounds"], warm_up=len(KEYS))  # each value once before it counts
    raw.close()
    store.close()
    return taken_ms


def _memory(nbytes: int) -> Bytes:
    """Page-aligned, and there: no page fault is anybody's cost."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    memory[:] = 1
    return memory


if __name__ == "__main__":
    main()
