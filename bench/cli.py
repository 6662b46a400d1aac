"""`epd-bench`: the command that measures. Owns the argument parsing; each measurement is a module of its own."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

import epd_serve
from bench import (
    arena,
    batches,
    colocation,
    duplicates,
    interference,
    proxy,
    selfcheck,
    startup,
    transfer,
    transfer_pd,
    ttft,
    workload,
)
from bench.ablations import command as ablations
from bench.ablations import memory_command
from bench.aisbench import command as aisbench
from bench.client import command as load
from bench.compare import command as compare
from bench.layouts import command as layouts
from bench.report import command as report
from epd_serve.errors import EpdError

MEASUREMENTS: tuple[tuple[str, ModuleType, str], ...] = (
    ("startup", startup, "time to ready per layout, and of each stage alone"),
    ("ttft", ttft, "time to first token of a picture, by layout and phase"),
    ("arena", arena, "the arena's put and get against a plain copy"),
    ("duplicates", duplicates, "encodes of one picture that many clients send at once"),
    ("load", load, "requests to any OpenAI endpoint: TTFT, TPOT, attainment of objectives, goodput"),
    ("layouts", layouts, "layouts and baselines against each other: each started, loaded at each rate, and drawn"),
    ("aisbench", aisbench, "AISBench loads an endpoint; its rows judged by the definitions of `load`"),
    ("compare", compare, "two results: the ratio of every figure, with intervals"),
    ("selfcheck", selfcheck, "how far the load generator can be trusted"),
    ("proxy", proxy, "what the proxy costs, and how it keeps its promises, over simulated stages"),
    ("interference", interference, "how much the operators of the stages slow each other down on one device"),
    ("colocation", colocation, "stages on one device against a monolith: throughput, time per output token"),
    ("batches", batches, "throughput and latency of each stage against its batch size"),
    ("ablations", ablations, "E-P-D with and without its transfer optimisations (EPD-Serve, Table 2)"),
    ("memory-tables", memory_command, "what fits on a device with and without the encoder (EPD, tables 2 to 4)"),
    ("report", report, "draw a comparison of layouts: charts, tables, one HTML page"),
    ("workload", workload, "the workloads: what they consist of, and as files of other clients"),
)
TRANSFERS: tuple[tuple[str, ModuleType, str], ...] = (
    ("ep", transfer, "features from E to P"),
    ("pd", transfer_pd, "KV from P to D, by mode of grouping"),
)
"""Name, module with `add_arguments`, and a line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C: what was started has to be stopped
    try:
        return int(arguments.run(arguments, words))
    except EpdError as error:
        print(f"epd-bench: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="epd-bench", description="Measure EPD-Serve.")
    parser.add_argument("--version", action="version", version=f"epd-bench {epd_serve.__version__}")
    commands = parser.add_subparsers(required=True, metavar="MEASUREMENT")
    for name, module, words in MEASUREMENTS:
        _add(commands, name, module, words)
    transfers = commands.add_parser("transfer", help="what of a transfer between stages a request sees")
    ways = transfers.add_subparsers(required=True, metavar="WAY")
    for name, module, words in TRANSFERS:
        _add(ways, name, module, words)
    return parser


def _add(commands: Any, name: str, module: ModuleType, words: str) -> None:
    made = commands.add_parser(
        name, help=words, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(made)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
