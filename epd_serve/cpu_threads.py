"""How many OpenMP threads a stage on CPU computes with, and where they run.

A second thread halves the work of an operator and adds a meeting of both to it: dozens of meetings a layer, each of
which waits for a core that API server, EngineCore and other stages want too. So a stage has a thread per `THREAD_FLOP`
of its smallest step (a token decoded, else a prompt, else a picture), and never more than it has cores.

What a server does for each token falls into the step after it, and where all cores are busy the kernel runs it on the
one it was woken from: the decoder's. So the server of a stage that only decodes keeps off the cores it computes on.

Workers carry it out (`epd_serve.engine.worker_threads`). Pure.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from epd_serve.roles import Role
from epd_serve.stage_work import OUTPUT_TOKENS, StageWork

CPU_THREADS_ENV = "EPD_SERVE_CPU_THREADS"
"""A worker's `CpuThreads` as JSON."""

BIND_ENV, COUNT_ENV, WAIT_ENV = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
OPERATORS_ENV = (COUNT_ENV, WAIT_ENV)
"""What an operator sets of these in the environment of the launcher wins over what we would set."""

NOT_BY_VLLM = "nobind"
THREAD_FLOP = 30e6


@dataclass(frozen=True)
class CpuThreads:
    """Of one worker: `count` threads on any of `cores`, which may become others while it runs.

    Attributes:
        worth: more threads would gain nothing; None where nobody knows.
        tp: workers of the stage. decodes_only: nothing else is done there.
    """

    cores: tuple[int, ...]
    worth: int | None = None
    tp: int = 1
    decodes_only: bool = False

    @property
    def count(self) -> int:
        most = max(1, len(self.cores) // self.tp)
        return most if self.worth is None else min(most, max(1, self.worth))

    @property
    def apart(self) -> bool:
        """The stage's server keeps off the cores, where it has others."""
        return self.decodes_only and self.count * self.tp >= len(self.cores)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def cpu_threads(work: StageWork | None, role: Role, cores: tuple[int, ...], tp: int) -> CpuThreads:
    """For each of the `tp` workers of a stage. Where the model says too little of its work, all cores that it has."""
    worth = None if work is None else round(smallest_step_flop(work, role) / THREAD_FLOP)
    return CpuThreads(cores, worth, tp, decodes_only=role is Role.D)


def smallest_step_flop(work: StageWork, role: Role) -> float:
    """FLOP of the least work that this stage is woken for."""
    if role.decodes:
        return work.decode / OUTPUT_TOKENS
    return work.prefill if role.prefills else work.encode
