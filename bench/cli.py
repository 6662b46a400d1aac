"""`epd-bench`: the command that measures. Owns the argument parsing; each measurement is a module of its own."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import epd_serve
from bench import (
    arena,
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
from bench.client import command as load
from epd_serve.errors import EpdError


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
    startup.add_arguments(commands.add_parser("startup", help="time to ready per layout, and of each stage alone"))
    ttft.add_arguments(commands.add_parser("ttft", help="time to first token of a picture, by layout and phase"))
    arena.add_arguments(commands.add_parser("arena", help="the arena's put and get against a plain copy"))
    duplicates.add_arguments(
        commands.add_parser("duplicates", help="encodes of one picture that many clients send at once")
    )
    load.add_arguments(
        commands.add_parser(
            "load",
            help="requests to any OpenAI endpoint: TTFT, TPOT, attainment of objectives, goodput",
            description=load.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    selfcheck.add_arguments(
        commands.add_parser(
            "selfcheck",
            help="how far the load generator can be trusted",
            description=selfcheck.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    proxy.add_arguments(
        commands.add_parser(
            "proxy",
            help="what the proxy costs, and how it keeps its promises, over simulated stages",
            description=proxy.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    interference.add_arguments(
        commands.add_parser(
            "interference",
            help="how much the operators of the stages slow each other down on one device",
            description=interference.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    colocation.add_arguments(
        commands.add_parser(
            "colocation",
            help="stages on one device against a monolith: throughput, time per output token",
            description=colocation.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    workload.add_arguments(
        commands.add_parser("workload", help="the workloads: what they consist of, and as files of other clients")
    )
    transfers = commands.add_parser("transfer", help="what of a transfer between stages a request sees")
    ways = transfers.add_subparsers(required=True, metavar="WAY")
    transfer.add_arguments(
        ways.add_parser(
            "ep",
            help="features from E to P",
            description=transfer.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    transfer_pd.add_arguments(
        ways.add_parser(
            "pd",
            help="KV from P to D, by mode of grouping",
            description=transfer_pd.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    return parser


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
