"""One of the two processes of `epd-bench interference`: prepares operators and runs them when it is told to.

Owns the words between measurement and process; the operators are `npu_ops`'s.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.children import Child, Message, answering, commands
from npu_ops.interference import Sizes
from npu_ops.interference_run import Runner, Span

PREPARE_S = 180.0
"""Loading a framework, joining a ring and compiling a kernel may take minutes on a busy machine."""


class OperatorProcess:
    """The measurement's end. `share`: of the device's cores, or None for all of them; `cores`: those, on CPU."""

    def __init__(self, kind: str, index: int, sizes: Sizes, cores: tuple[int, ...], share: float | None) -> None:
        config = {"kind": kind, "index": index, "sizes": asdict(sizes), "cores": cores, "share": share}
        self._child = Child("bench.interference_process", config)

    def ready(self) -> Message:
        """Wait until it has the device; what it found there."""
        return self._child.hear(PREPARE_S)

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
    answer = answering()
    lines = commands()
    config: dict[str, Any] = next(lines)
    runner = Runner(config["kind"], config["index"], Sizes(**config["sizes"]), config["cores"])
    answer(ready=True)
    try:
        for order in lines:
            if "prepare" in order:
                answer(repeats=runner.prepare(order["prepare"]).repeats)
            else:
                answer(spans=runner.run(order["run"], order["begin"], order["end"]))
    finally:
        runner.close()


if __name__ == "__main__":
    main()
