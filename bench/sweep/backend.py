"""What measures the runs of a deployment: real or simulated stages, or an emulated device, in virtual time.

An emulated device is named here and imported only when it is asked for: it is built on the types of the sweep.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from bench.sweep.experiment import Experiment
from bench.sweep.store import ResultStore

EMULATED = {"910b": "bench.papers.emulation.backend"}
"""By the name that `--emulate` takes, the module whose `emulated(name, arguments, argv)` makes the backend."""


class Backend(Protocol):
    """One way of measuring. What it leaves in a store is the same for all (`bench/sweep/store.py`)."""

    @property
    def kind(self) -> str:
        """Of its figures: `real`, `simulated` or `emulated …`."""

    @property
    def served(self) -> Mapping[str, Any]:
        """What serves, as the experiment keeps it: engine, device, model."""

    def check(self, experiment: Experiment) -> None:
        """Raises ConfigError where a deployment cannot be measured this way; asked before anything starts."""

    def measure(self, experiment: Experiment, store: ResultStore) -> None:
        """The missing runs of the store's deployment, each kept as it ends.

        Raises:
            StageError: the deployment cannot be measured (any more); the others can.
            ConfigError: nothing more can be kept.
        """

    def against_paper(self, *, quick: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """(figures, rows) that hold an emulated device against the paper it is made from; none of real stages."""


def emulated(name: str, *given: Any) -> Backend:
    """The backend of an emulated device."""
    return cast(Backend, importlib.import_module(EMULATED[name]).emulated(name, *given))
