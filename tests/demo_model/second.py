"""A second process that works out the first part of every step while this one works out the others.

Owns the process, and what goes between the two. The weights lie in memory that both see, and only the first process
changes them. Its part's gradients are added last, as they are without it: not a bit of the sum is another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
from torch import multiprocessing

from epd_serve.errors import EpdError
from tests.demo_model.parts import Outcome, work_out
from tests.demo_model.plan import Plan
from tests.demo_model.tokenizer import Encoder, build


class Second:
    """The process; ends with the `with` block, or with the process that began it."""

    def __init__(self, modules: torch.nn.ModuleDict, plan: Plan) -> None:
        self._modules = modules.share_memory()
        self._gradients = [torch.zeros_like(it).share_memory_() for it in modules.parameters()]
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, modules, self._gradients, plan))
        self._process.start()
        other.close()
        self.cpu_s = 0.0

    def begin(self, step: int) -> None:
        """Ask for the first part of a step."""
        with contextlib.suppress(BrokenPipeError):  # `end` says so
            self._pipe.send(step)

    def end(self) -> Outcome:
        """Add the gradients that were asked for to those of the modules."""
        try:
            outcome, has_gradient, self.cpu_s = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise EpdError("the second process of the training ended, and nobody told it to") from error
        for parameter, theirs, has in zip(self._modules.parameters(), self._gradients, has_gradient, strict=True):
            if has:
                parameter.grad = theirs.clone() if parameter.grad is None else parameter.grad.add_(theirs)
        assert isinstance(outcome, Outcome)
        return outcome

    def __enter__(self) -> Second:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, modules: Any, gradients: list[torch.Tensor], plan: Plan) -> None:
    """What the process does, until nobody holds the pipe's other end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the first process ends after a whole step
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    encoder = Encoder(build())
    while True:
        try:
            step = pipe.recv()
        except (EOFError, ConnectionError):
            return
        modules.zero_grad()
        outcome = work_out(modules, encoder, plan, step, 0)
        has_gradient = []
        for parameter, mine in zip(modules.parameters(), gradients, strict=True):
            has_gradient.append(parameter.grad is not None)
            if parameter.grad is not None:
                mine.copy_(parameter.grad)
        try:
            pipe.send((outcome, has_gradient, time.process_time()))
        except ConnectionError:
            return


def useful() -> bool:
    """Whether this process may run on more than one processor."""
    return len(os.sched_getaffinity(0)) > 1
