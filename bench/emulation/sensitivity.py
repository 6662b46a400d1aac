"""What the order of Table 5 hangs on: every constant 30 % less and more, and what the sources can mean otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.devices.serving import CONSTANTS, Serving
from bench.emulation.agreement import Agreement, Table, agreement, emulated_table
from bench.emulation.loads import Loads
from bench.emulation.ranks import flipped

SHARE = 0.3
AVERAGE_PICTURE = (802, 652)
"""EPD-Serve §4.1; how sizes spread around it is our choice."""


@dataclass(frozen=True)
class Variation:
    """`constant`: that is varied, "" of a reading."""

    name: str
    device: Serving
    constant: str = ""
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Varied:
    """What a variation did to the table. `turned`: pairs of layouts whose effective throughput per device stands in the
    other order than with the sourced constants."""

    variation: Variation
    table: Table
    agreement: Agreement
    turned: Sequence[tuple[str, str]]

    @property
    def correlation(self) -> float:
        return self.agreement.spearman["per_device"]


def variations(device: Serving, readings: Mapping[str, Serving]) -> Iterator[Variation]:
    for constant in CONSTANTS:
        for factor, sign in ((1 - SHARE, "-"), (1 + SHARE, "+")):
            yield Variation(f"{constant} {sign}{SHARE:.0%}", device.scaled(constant, factor), constant)
    for name, one in readings.items():
        yield Variation(name, one)
    yield Variation("every picture 802x652", device, size=AVERAGE_PICTURE)


def sensitivity(
    sourced: Table,
    several: Iterator[Variation] | Sequence[Variation],
    rates: Mapping[str, float],
    seeds: Sequence[int],
    count: int,
) -> Iterator[Varied]:
    """Each variation, as it is emulated. `sourced`: the table of the same seeds without any."""
    usual, sized = Loads(count), {size: Loads(count, size=size) for size in (AVERAGE_PICTURE,)}
    before = _throughput(sourced)
    for one in several:
        table = emulated_table(one.device, usual if one.size is None else sized[one.size], rates, seeds)
        yield Varied(one, table, agreement(table), flipped(before, _throughput(table)))


def _throughput(table: Table) -> dict[str, float]:
    return {name: row.per_device for name, row in table.items()}
