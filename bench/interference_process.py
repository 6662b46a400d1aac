"""One of the two processes of `epd-bench interference`: prepares operators and runs them when it is told to.

Owns the words between measurement and process; the operators are `npu_ops`'s.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench.children import Child, answering, commands
from npu_ops.core_grants import CoreOrder
from npu_ops.interference import Sizes
from npu_ops.mps import PERCENTAGE_ENV, percentage

if TYPE_CHECKING:
    from npu_ops.interference_run import Span

PREPARE_S = 180.0
"""Loading a framework, joining a ring and compiling a kernel may take minutes on a busy machine."""


class OperatorProcess:
    """The measurement's end. `order`: its share of the device's cores, or None for all of them."""

    def __init__(self, kind: str, index: int, sizes: Sizes, order: CoreOrder | None = None) -> None:
        config = {"kind": kind, "index": index, "sizes": asdict(sizes), "order": order and order.to_json()}
        # MPS reads a process's share when it starts.
        mps = {PERCENTAGE_ENV: percentage(order.share)} if order is not None and kind == "cuda" else {}
        self._child = Child("bench.interference_process", config, mps)

    def ready(self) -> str:
        """Wait until it has the device; what of the cores it has, in words, "" without a share.

        Raises:
            StageError: it cannot have the device, or not its share.
        """
        return str(self._child.hear(PREPARE_S)["granted"])

    def prepare(self, name: str) -> int:
        """How many calls a sample of it has. Raises StageError where the device cannot run it."""
        return int(self._child.ask(PREPARE_S, prepare=name)["repeats"])

    def begin(self, name: str, begin: float, end: float) -> None:
        """Run a prepared operator from `begin` to `end` on CLOCK_MONOTONIC."""
        self._child.tell(run=name, begin=begin, end=end)

    def spans(self, timeout_s: float) -> list[Span]:
        """When each sample of the last run began and ended."""
        found = self._child.hear(timeout_s)
        return [(begun, ended) for begun, ended in found["spans"]]

    def stop(self) -> None:
        self._child.stop()


def main() -> None:
    from npu_ops.interference_run import Runner  # brings torch, which only this process needs

    answer = answering()
    lines = commands()
    config: dict[str, Any] = next(lines)
    order = CoreOrder.from_json(config["order"]) if config["order"] else None
    runner = Runner(config["kind"], config["index"], Sizes(**config["sizes"]), order)
    answer(granted=runner.grant.summary() if runner.grant is not None else "")
    try:
        for told in lines:
            if "prepare" in told:
                answer(repeats=runner.prepare(told["prepare"]).repeats)
            else:
                answer(spans=runner.run(told["run"], told["begin"], told["end"]))
    finally:
        runner.close()


if __name__ == "__main__":
    main()
