"""A P and a D made of the pure parts that the product runs, with block pools in place of vLLM: desks, what is handed
over, runs, cuts. Memory is a table of who wrote what, so that a wrong, missing or doubled block shows."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from epd_serve import wire
from epd_serve.kv.decode_desk import DecodeDesk
from epd_serve.kv.grouping import FixedGrouping, LinkCost, Step
from epd_serve.kv.plan import LayerPacket, Run, coalesce
from epd_serve.kv.prefill_desk import Admission, PrefillDesk, PromptShape
from epd_serve.kv.sending import Sending
from epd_serve.kv.slices import cut
from epd_serve.wire import TransferKey

BLOCK, LAYERS = 4, 3
BEAT_S = 0.5
SILENCE_S, PATIENCE_S = 10.0, 300.0
Cell = tuple[TransferKey, int, int, int]  # what a block holds: whose, layer, index in the prompt, tokens


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def cell(key: TransferKey, layer: int, index: int, tokens: int) -> Cell:
    """What the block holds once tokens [0, `tokens`) of the prompt are computed."""
    return (key, layer, index, min(BLOCK, tokens - index * BLOCK))


@dataclass(frozen=True)
class Prompt:
    """A request. `cached_at_p`, `cached_at_d`: tokens that each side's prefix cache hits, whole blocks."""

    key: TransferKey
    tokens: int
    cached_at_p: int
    cached_at_d: int


@dataclass
class Job:
    """One entry of the link's queue: a packet of layers, or the last word where `layers` is None."""

    key: TransferKey
    run: int
    layers: tuple[int, int] | None = None
    runs: tuple[Run, ...] = ()
    ok: bool = True


@dataclass
class AtP:
    """A request at P. `run` counts preemptions: what an earlier run queued is not sent."""

    prompt: Prompt
    computed: int = 0
    table: list[int] = field(default_factory=list)
    sending: Sending | None = None
    run: int = 0
    ending: bool = False  # its last word is queued
    over: bool = False  # … and said
    finished: bool = False


Scheduled = tuple[AtP, int, list[int], bool]  # tokens, new blocks, whether a run begins with them


class Prefill:
    """One life of P: its scheduler, and the link of its worker. Sends by `FixedGrouping(layers_per_packet)`."""

    def __init__(self, life: str, blocks: int, layers_per_packet: int, spare: int) -> None:
        """`spare`: blocks of a request that may go ahead of D."""
        self.desk = PrefillDesk(life, PATIENCE_S)
        self.spare = spare
        self.free = list(range(blocks))
        self.memory: dict[tuple[int, int], Cell] = {}  # (layer, block)
        self.cuts = FixedGrouping(layers_per_packet, "").cuts(Step(LAYERS, 1, 1.0), LinkCost(0.0, 0.0))
        self.requests: dict[TransferKey, AtP] = {}
        self.waiting: list[AtP] = []
        self.running: list[AtP] = []
        self.queue: deque[Job] = deque()
        self.came: set[TransferKey] = set()

    def arrive(self, prompt: Prompt) -> None:
        self.came.add(prompt.key)
        request = self.requests[prompt.key] = AtP(prompt)
        self.waiting.append(request)

    def step(self, most: int, now: float, *, admits: bool = True) -> bool:
        """Schedule and compute up to `most` tokens of each request, as vLLM does: the youngest gives way.

        Returns whether all of them have room that may run, but for the deferred ones. `admits`: new ones may begin.
        """
        scheduled: list[Scheduled] = []
        preempted = False
        for request in list(self.running):
            tokens = min(most, request.prompt.tokens - request.computed)
            while request in self.running and tokens:
                need = blocks_of(request.computed + tokens) - len(request.table)
                if need <= len(self.free):
                    scheduled.append((request, tokens, self._take(request, need), False))
                    break
                victim, preempted = self.running[-1], True
                scheduled = [entry for entry in scheduled if entry[0] is not victim]
                self._preempt(victim)
        has_room = not preempted
        for request in [] if preempted or not admits else list(self.waiting):
            prompt = request.prompt
            shape = PromptShape(prompt.tokens, "h", BLOCK, 1)
            admission = Admission.SEND if request.sending else self.desk.admit(prompt.key, shape, now)
            ahead = admission is Admission.WAIT
            if ahead and (self.desk.someone_ahead() or blocks_of(prompt.tokens) > self.spare):
                continue
            tokens = min(most, prompt.tokens - prompt.cached_at_p)
            need = blocks_of(prompt.cached_at_p + tokens)
            if need > len(self.free):
                has_room = False
                break
            request.computed = prompt.cached_at_p
            if ahead:
                admission = self.desk.admit(prompt.key, shape, now, ahead=True)
            if admission is Admission.SEND and request.sending is None:
                request.sending = Sending(prompt.key, prompt.tokens, BLOCK)
            self.waiting.remove(request)
            self.running.append(request)
            scheduled.append((request, tokens, self._take(request, need), True))
        self._forward(scheduled)
        return has_room

    def _forward(self, scheduled: Sequence[Scheduled]) -> None:
        leaving: list[tuple[AtP, tuple[Run, ...]]] = []
        computing = [request for request, *_ in scheduled]
        for request in [one for one in self.requests.values() if one not in computing]:
            self._late(request, leaving)
        for request, tokens, grown, restart in scheduled:
            request.computed += tokens
            for layer in range(LAYERS):
                for index in range(blocks_of(request.computed)):
                    self.memory[layer, request.table[index]] = cell(request.prompt.key, layer, index, request.computed)
            if request.sending is not None:
                request.sending.grow(grown, restart=restart)
                request.sending.computed = request.computed
                self._hand_over(request, leaving)
        for first, last in zip((0, *self.cuts), self.cuts, strict=False):
            for request, runs in leaving:
                packet = LayerPacket(first, last, ((request.prompt.key, runs),))
                for piece in cut(packet, [1] * LAYERS, 2):  # two blocks of one layer at once
                    ((key, some),) = piece.parts
                    self.queue.append(Job(key, request.run, (piece.first, piece.last), some))
        for request, _ in leaving:
            if request.sending is not None and request.sending.complete:
                self._end(request, ok=True)
        for request in computing:
            if request.computed == request.prompt.tokens:
                self._finish(request)

    def _hand_over(self, request: AtP, leaving: list[tuple[AtP, tuple[Run, ...]]]) -> None:
        assert request.sending is not None
        ready = self.desk.ready(request.prompt.key)
        chunk = request.sending.chunk(ready) if ready is not None else None
        if chunk is not None:
            leaving.append((request, coalesce(chunk.src, chunk.dst)))

    def _late(self, request: AtP, leaving: list[tuple[AtP, tuple[Run, ...]]]) -> None:
        """What was computed before D had blocks."""
        if request.sending is None or request.sending.complete:
            return
        self._hand_over(request, leaving)
        if request.finished and self.desk.fate(request.prompt.key) is not None:
            self._give_back(request)
            del self.requests[request.prompt.key]

    def _take(self, request: AtP, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(count)]
        request.table += taken
        return taken

    def _preempt(self, request: AtP) -> None:
        request.run += 1
        self._give_back(request)
        request.computed = 0
        if request.sending is not None:
            request.sending.lose()
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _give_back(self, request: AtP) -> None:
        for block in request.table:
            for layer in range(LAYERS):
                self.memory.pop((layer, block), None)
        self.free += request.table
        request.table = []

    # --- endings --------------------------------------------------------------------------------------------------

    def abort(self, key: TransferKey) -> None:
        """The client left, or the proxy gave it up."""
        request = self.requests.get(key)
        if request is not None and not request.finished:
            if self.desk.gone(key, "aborted"):
                self.stop(key)
            self._finish(request, aborted=True)

    def stop(self, key: TransferKey) -> None:
        request = self.requests.get(key)
        if request is None or request.sending is None or not request.sending.told:
            self.desk.stopped_unsent(key)
        elif not request.ending:
            request.run += 1
            self._end(request, ok=False)

    def hear(self, message: wire.ToPrefillScheduler, now: float, d: bytes = b"d") -> None:
        for key in self.desk.on_message(d, message, now):
            self.stop(key)

    def _finish(self, request: AtP, *, aborted: bool = False) -> None:
        request.finished = True
        for line in (self.waiting, self.running):
            if request in line:
                line.remove(request)
        if request.sending is None or not request.sending.told:
            if request.sending is not None and self.desk.is_wanted(request.prompt.key):
                assert not aborted
                return  # D has no blocks yet
            self._give_back(request)
            del self.requests[request.prompt.key]
        else:
            self._close(request)

    def _end(self, request: AtP, *, ok: bool) -> None:
        request.ending = True
        self.queue.append(Job(request.prompt.key, request.run, ok=ok))

    def said_last_word(self, key: TransferKey) -> None:
        self.requests[key].over = True
        self._close(self.requests[key])

    def _close(self, request: AtP) -> None:
        """vLLM hears of it when both have happened."""
        if request.over and request.finished:
            self.desk.closed(request.prompt.key)
            self._give_back(request)
            del self.requests[request.prompt.key]


@dataclass
class AtD:
    """A request at D. `writes` counts what was written to each (layer, index) in the run under way."""

    prompt: Prompt
    p: str
    table: list[int] = field(default_factory=list)
    run: int = -1
    writes: Counter[tuple[int, int]] = field(default_factory=Counter)
    done: bool | None = None
    left: bool = False


class Decode:
    """D: its scheduler, and the worker that takes packets."""

    def __init__(self, blocks: int, name: str = "D0") -> None:
        self.name = name
        self.desk = DecodeDesk(SILENCE_S)
        self.free = list(range(blocks))
        self.owner: dict[int, TransferKey] = {}
        self.memory: dict[tuple[int, int], Cell] = {}
        self.requests: dict[TransferKey, AtD] = {}
        self.waiting: list[AtD] = []
        self.outcomes: dict[TransferKey, str] = {}

    def arrive(self, prompt: Prompt, p: str = "p") -> None:
        request = self.requests[prompt.key] = AtD(prompt, p)
        self.waiting.append(request)
        self.desk.queued(prompt.key, p)

    def step(self, now: float, *, admits: bool = True) -> bool:
        """Report what is over, reserve for who waits. Returns whether all of them have room."""
        for key in self.desk.take_failures():
            if self.requests[key].done is None:
                self.requests[key].done = False
        for key, request in list(self.requests.items()):
            if request.done is not None:
                self._report(key, request, now)
        while admits and self.waiting and blocks_of(self.waiting[0].prompt.tokens) <= len(self.free):
            request = self.waiting.pop(0)
            prompt = request.prompt
            request.table = [self.free.pop() for _ in range(blocks_of(prompt.tokens))]
            self.owner.update(dict.fromkeys(request.table, prompt.key))
            source, hashed, ends = f"{self.name}:1", "h", ["ipc:///d"]
            ready = wire.Ready(
                prompt.key, "p0", source, list(request.table), prompt.cached_at_d, prompt.tokens, hashed, ends
            )
            self.desk.reserved(request.p, ready, now)
        return not self.waiting

    def _report(self, key: TransferKey, request: AtD, now: float) -> None:
        assert key not in self.outcomes, "reported twice"
        self.outcomes[key] = "received" if request.done else "failed"
        self.desk.closed(key)
        self.free += request.table
        for block in request.table:
            del self.owner[block]
        del self.requests[key]
        if not request.left:
            self.desk.gone(key, now)

    def abort(self, key: TransferKey, now: float) -> None:
        request = self.requests.get(key)
        if request is not None and not request.left:
            request.left = True
            self.desk.gone(key, now)
            if request in self.waiting:
                self.waiting.remove(request)
                del self.requests[key]
                self.outcomes[key] = "left"

    def take(self, job: Job, source: dict[tuple[int, int], Cell]) -> None:
        """A packet arrives, read from P's memory now."""
        request = self.requests.get(job.key)
        assert request is not None, "written after the blocks were given back"
        if request.run != job.run:
            request.run, request.writes = job.run, Counter()
        assert job.layers is not None
        for layer in range(*job.layers):
            for run in job.runs:
                for number in range(run.count):
                    block = run.dst + number
                    assert self.owner.get(block) == job.key, "written to somebody else's block"
                    self.memory[layer, block] = source[layer, run.src + number]
                    request.writes[layer, request.table.index(block)] += 1

    def take_done(self, key: TransferKey, *, ok: bool) -> None:
        request = self.requests.get(key)
        if request is None or request.done is not None:
            return
        request.done = ok
        if ok:
            missing = range(request.prompt.cached_at_d // BLOCK, len(request.table))
            wanted = {(layer, index) for layer in range(LAYERS) for index in missing}
            assert request.writes == Counter(wanted), "every block of every layer exactly once"
            for layer, index in wanted:
                assert self.memory[layer, request.table[index]] == cell(key, layer, index, request.prompt.tokens)
