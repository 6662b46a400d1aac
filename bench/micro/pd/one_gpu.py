"""`epd-bench transfer pd --device cuda`: the sender on streams of one GPU, against layers of an 8B model's shape.

Real are the GPU's compute and copies, and the stages' own code from the layer hook to DONE: sender, packets, link, its
queue, receiver. There is no vLLM, no second process, no decode; D is memory, on the same GPU or pinned in the host:

    host      device to pinned host: what leaves a GPU over its bus
    device    device to device within one GPU: a copy that competes with compute for its memory

End of prefill and layers are the device's own events, one prompt at a time. All modes take turns within a round, in an
order drawn anew. The same code runs on CPU with small sizes, which is how it is tested.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.micro.measurement import Row
from bench.micro.pd.copy_side import CopyReceiveSide, CopySendSide
from bench.micro.pd.figures import row_of
from bench.micro.pd.transfers import PrefillStep, Transfer, arrived
from bench.scratch import scratch
from bench.stamps import read_stamps
from epd_serve.demo.decoder_layers import EIGHT_B, DecoderLayers, DecoderShape, cuda_missing, kv_caches
from epd_serve.engine.kv.link import Link
from epd_serve.engine.kv.link_jobs import Outgoing
from epd_serve.engine.kv.receiver import Expected, Receiver
from epd_serve.engine.kv.regions import layers_of, shape_of
from epd_serve.engine.kv.sender import ChunkJob, Sender
from epd_serve.errors import ConfigError, StageError
from epd_serve.kv.faults import Faults
from epd_serve.kv.grouping import Grouping, parse_grouping
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey
from npu_ops.fences import TimedFence
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import open_memory

PATHS = ("host", "device")
BLOCK_SIZE = 16
FLOOR_BYTES = 1 << 20
WAIT_S = 30.0
STAMPS_S = 5.0


class Chosen:
    """A grouping whose mode changes between two prompts."""

    def choose(self, mode: str) -> None:
        grouping: Grouping = parse_grouping(mode, FLOOR_BYTES)
        self.name, self.cuts = grouping.name, grouping.cuts


@dataclass(frozen=True)
class Prefilled:
    """A prompt that was computed and has arrived. Times are CLOCK_MONOTONIC seconds; `step` by the device's events."""

    name: str
    begun: float
    step: PrefillStep


class Pair:
    """A P worker and a D worker in one process, joined by one path.

    Args:
        kind: `cuda` or `cpu`. device: its memory. tokens: of the longest prompt.
        folder: for the socket and the stamps of the two.
    """

    def __init__(
        self, path: str, shape: DecoderShape, kind: str, device: DeviceMemory, tokens: int, folder: Path
    ) -> None:
        self._device = device
        self._traces = folder
        self._blocks = -(-tokens // BLOCK_SIZE) + 2  # not two in all: K and V are two as well
        self._grouping = Chosen()
        self._grouping.choose("bulk")
        self._numbers = itertools.count()
        caches = kv_caches(shape, self._blocks, BLOCK_SIZE, kind)
        self._model = DecoderLayers(shape, caches, kind)
        self.source = layers_of(caches, self._blocks)
        self.target = layers_of(kv_caches(shape, self._blocks, BLOCK_SIZE, kind, pinned=path == "host"), self._blocks)
        self._layer_names = tuple(caches)
        self._shape = shape_of(
            self.source, names=caches, block_size=BLOCK_SIZE, dtype="bfloat16", tp=1, rank=0, platform=kind
        )
        self._endpoint, self._target = f"ipc://{folder}/D0", "D0:bench"
        self._trace = Trace(str(folder / "P0.jsonl"), "P0")
        self._d_trace = Trace(str(folder / "D0.jsonl"), "D0")
        self._side = CopySendSide(path, self.source, self.target, device)
        self._receiver = Receiver(
            self._endpoint,
            self._target,
            self._shape,
            [CopyReceiveSide(path)],
            self._d_trace,
            device=device,
            faults=Faults(),
        )
        self._sender = Sender(
            shape=self._shape, grouping=self._grouping, device=device, open_link=self._open, trace=self._trace
        )
        self._sender.warm([(self._endpoint,)])

    def prefill(self, tokens: int, mode: str) -> Prefilled:
        """Compute a prompt while its KV travels; returns when it has arrived.

        Raises:
            StageError: the transfer failed, or took longer than `WAIT_S`.
        """
        self._grouping.choose(mode)
        name = f"prompt-{next(self._numbers)}"
        blocks = range(-(-tokens // BLOCK_SIZE))
        key = TransferKey(name, "")
        self._receiver.expect([Expected(key, name, tuple(blocks))], ())
        chunk = ChunkJob(key, name, self._target, (self._endpoint,), tuple(blocks), tuple(blocks), remaining=0)
        written: list[TimedFence] = []

        def layer_written() -> None:
            self._sender.layer_saved(self._layer_names[len(written)])
            written.append(self._device.timed_fence())

        self._trace.stamp(name, "prefill_start")
        begun = time.monotonic()
        self._sender.begin_step([chunk], (), (), tokens)
        first = self._device.timed_fence()
        self._model.prefill(tokens, blocks, layer_written)
        last = self._device.timed_fence()
        self._sender.flush()
        last.wait()
        ended = time.monotonic()
        self._wait_over(name)
        since = [last.seconds_since(fence) for fence in (first, *written)]
        started, *layers = (ended - seconds for seconds in since if seconds is not None)
        return Prefilled(name, begun, PrefillStep(started, ended, tokens, tuple(layers)))

    def transfers(self, prompts: Sequence[Prefilled]) -> dict[str, Transfer]:
        """What the stamps say of them. The last stamp of a prompt may be written after it was reported."""
        steps, end = {prompt.name: prompt.step for prompt in prompts}, time.monotonic() + STAMPS_S
        while len(there := arrived(read_stamps(self._traces), steps)) < len(prompts):
            if time.monotonic() > end:
                raise StageError(f"{len(prompts) - len(there)} of {len(prompts)} prompts lack stamps", stage="P0")
            time.sleep(0.01)
        return {name: replace(there[name], steps=(step,), prefill_end=step.ended) for name, step in steps.items()}

    def arrived_whole(self, tokens: int) -> bool:
        """Whether D's blocks of the last prompt hold what P's do."""
        blocks = -(-tokens // BLOCK_SIZE)
        return all(
            bool(self._device.to_host(here.blocks(0, blocks)).equal(self._device.to_host(there.blocks(0, blocks))))
            for mine, theirs in zip(self.source, self.target, strict=True)
            for here, there in zip(mine, theirs, strict=True)
        )

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()
        self._trace.close()
        self._d_trace.close()

    def _open(self, endpoint: str, rank: int, on_over: Callable[[Outgoing], None]) -> Link:
        return Link(
            endpoint,
            rank=rank,
            source="P0:bench",
            shape=self._shape,
            sides=[self._side],
            device=self._device,
            timeout_s=WAIT_S,
            on_over=on_over,
            trace=self._trace,
        )

    def _wait_over(self, name: str) -> None:
        """Until both ends say so."""
        end = time.monotonic() + WAIT_S
        sent = received = False
        while not (sent and received):
            sent = sent or name in self._sender.take_over([name], idle=True)
            finished, failed = self._receiver.take_finished(idle=True)
            received = received or bool(finished)
            if failed or time.monotonic() > end:
                raise StageError(f"{name} did not arrive within {WAIT_S:g} s", stage="D0")


def measure_gpu(lengths: Sequence[int], modes: Sequence[str], rounds: int) -> Iterator[Row]:
    """`measure` on the first GPU, with layers of an 8B model's shape. Raises ConfigError where there is none."""
    if reason := cuda_missing():
        raise ConfigError(f"--device cuda: {reason}; without a GPU, leave --device away", param="--device")
    yield from measure(EIGHT_B, "cuda", open_memory("cuda"), lengths, modes, rounds)


def measure(
    shape: DecoderShape, kind: str, device: DeviceMemory, lengths: Sequence[int], modes: Sequence[str], rounds: int
) -> Iterator[Row]:
    """All paths one after the other, all modes in turns; rows come round by round.

    Raises:
        StageError: a transfer failed, or D's blocks differ from P's.
    """
    for path in PATHS:
        chance = random.Random(0)
        with scratch() as folder, contextlib.closing(Pair(path, shape, kind, device, max(lengths), folder)) as pair:
            for tokens, mode in itertools.product(sorted(lengths), modes):
                pair.prefill(tokens, mode)  # unmeasured: kernels are chosen, the link and the layers get to be known
                if not pair.arrived_whole(tokens):
                    raise StageError(f"{mode}, {tokens} tokens: D's blocks differ from P's", stage="D0")
            for turn in range(rounds):
                prompts = {
                    (tokens, mode): pair.prefill(tokens, mode)
                    for tokens in chance.sample(lengths, len(lengths))
                    for mode in chance.sample(modes, len(modes))
                }
                transfers = pair.transfers([*prompts.values()])
                for tokens, mode in itertools.product(lengths, modes):
                    prompt = prompts[tokens, mode]
                    transfer = transfers[prompt.name]
                    case = {"device": "cuda", "transport": path, "tokens": tokens, "concurrency": 1}
                    yield row_of(transfer, [transfer.done - prompt.begun], **case, mode=mode, round=turn)
