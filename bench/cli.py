"""`epd-bench`: the command that measures. Owns the list of commands, each a module that is imported when asked for.

A module has `add_arguments(parser)`, which sets `run`: a function of the parsed flags and of argv that returns the exit
code.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Collection, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import epd_serve
from deploy.cli.standard_output import until_the_reader_leaves
from epd_serve.errors import EpdError


class Command(NamedTuple):
    """`help`: a line of it. The module's docstring says more."""

    name: str
    module: str
    help: str


USE, MICRO, PAPERS = "compare, load, export", "measurements of one part", "tables of papers"
GROUPS: dict[str, tuple[Command, ...]] = {
    USE: (
        Command("layouts", "bench.layouts", "layouts and baselines against each other: started, loaded, drawn"),
        Command("report", "bench.analysis.page", "draw a comparison of layouts: charts, tables, one HTML page"),
        Command("load", "bench.clients.command", "requests to any OpenAI endpoint: TTFT, TPOT, attainment, goodput"),
        Command("plan", "bench.planner.planned", "what the planner predicts, beside what real stages do"),
        Command("aisbench", "bench.aisbench.command", "AISBench loads an endpoint, judged by the terms of `load`"),
        Command("workload", "bench.workloads.command", "what the workloads consist of, and as files of other clients"),
        Command(
            "model-check", "bench.model_check.command", "a model through EPD-Serve against plain vLLM, in one file"
        ),
        Command("compare", "bench.analysis.compare", "two results: the ratio of every figure, with intervals"),
    ),
    MICRO: (
        Command(
            "latency",
            "bench.micro.latency",
            "starts, restarts, TP1 over plain vLLM, where a request's time goes",
        ),
        Command("transfer ep", "bench.micro.ep.command", "features from E to P, as a request sees them"),
        Command("transfer pd", "bench.micro.pd.command", "KV from P to D, by mode of grouping"),
        Command("interference", "bench.micro.interference.command", "how much operators of the stages slow each other"),
        Command("follow", "bench.follow.command", "a simulated deployment whose layout follows the load"),
        Command("change", "bench.change.command", "what clients notice of changes, flips and kills"),
        Command("proxy", "bench.proxy.command", "what the proxy costs, over simulated stages"),
    ),
    PAPERS: (
        Command("ablations", "bench.papers.ablations", "what parts of the transfers are worth (EPD-Serve, Table 2)"),
        Command("memory-tables", "bench.papers.memory_tables", "what fits with and without the encoder (EPD, 2 to 4)"),
        Command("papers", "bench.planner.presets", "figures of papers, simulated, beside what they print"),
    ),
}
"""What a user needs comes first."""
COMMANDS = {command.name: command for commands in GROUPS.values() for command in commands}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    return until_the_reader_leaves(partial(_run, argv))


def _run(argv: list[str]) -> int:
    named = [name for name in (" ".join(argv[:2]), *argv[:1]) if name in COMMANDS]
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C: what was started has to be stopped
    try:
        arguments = parser(named).parse_args(argv)
        return int(arguments.run(arguments, argv))
    except EpdError as error:
        print(f"epd-bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("epd-bench: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def parser(imported: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Returns the parser of the whole command line.

    Args:
        imported: the commands whose flags are in it; of the others, whose modules are not imported, the names alone.
    """
    lines = ["commands (epd-bench COMMAND --help says more):"]
    for group, commands in GROUPS.items():
        lines += ["", f"  {group}", *(f"    {command.name:15}{command.help}" for command in commands)]
    raw: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    whole = argparse.ArgumentParser("epd-bench", description="Measure EPD-Serve.", epilog="\n".join(lines), **raw)
    whole.add_argument("--version", action="version", version=f"epd-bench {epd_serve.__version__}")
    levels = {"": whole.add_subparsers(required=True, metavar="COMMAND", help="one of those below")}
    for command in COMMANDS.values():
        first, _, name = command.name.rpartition(" ")
        if first not in levels:
            levels[first] = levels[""].add_parser(first).add_subparsers(required=True, metavar="WAY")
        shown: Any = {"help": command.help} if first else {}  # the epilog has those of the first level, by group
        leaf = levels[first].add_parser(name, **raw, **shown)
        if command.name in imported:
            module = importlib.import_module(command.module)
            leaf.description = module.__doc__
            module.add_arguments(leaf)
    return whole


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
