"""`epd-bench workload`: what workloads there are, after what, and any of them as another client's files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.workloads.export_aisbench import export_aisbench
from bench.workloads.exports import Exported, export_aiperf, export_traffic, export_vllm
from bench.workloads.images import Images
from bench.workloads.profiles import PROFILES, Profile
from bench.workloads.workload import RECORDED, Workload, arrivals_of, workload
from bench.workloads.workload import add_arguments as add_workload_arguments
from deploy.memory.placement_table import table
from epd_serve.errors import ConfigError

CLIENTS = ("aisbench", "vllm", "aiperf", "traffic")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"a workload of --list, or {RECORDED}FILE")
    parser.add_argument("--list", action="store_true", help="show all workloads")
    parser.add_argument(
        "--export", nargs=2, metavar=("CLIENT", "DIR"), help=f"write it for another client: {', '.join(CLIENTS)}"
    )
    add_workload_arguments(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if arguments.list:
        rows = [(one.name, str(one.count), str(one.max_tokens), one.source) for one in PROFILES.values()]
        print(table([("workload", "requests", "answer", "after"), *rows]))
        return 0
    if arguments.name is None:
        raise ConfigError("which workload? NAME is missing (--list shows all)", param="NAME")
    wanted = workload(arguments.name, arguments, arrivals_of(arguments))
    if arguments.export is None:
        print(described(PROFILES[wanted.name]) if wanted.name in PROFILES else f"{wanted.count} requests of yours")
        return 0
    client, directory = arguments.export
    if client not in CLIENTS:
        raise ConfigError(f"no client is called {client!r}: one of {', '.join(CLIENTS)}", param="--export")
    done = export(wanted, client, Path(directory), Images(arguments.cache))
    files = ", ".join(f"{path} ({path.stat().st_size / 1e6:.1f} MB)" for path in done.files)
    print(f"{done.requests} requests of {wanted.name}: {files}")
    for note in done.notes:
        print(f"note: {note}")
    print(f"run:  {done.command}")
    return 0


def export(wanted: Workload, client: str, directory: Path, images: Images) -> Exported:
    """The workload as files of a client.

    Args:
        client: one of `CLIENTS`.

    Raises:
        ConfigError: the directory or the image cache cannot be written.
    """
    specs = list(wanted.requests())
    if client == "vllm":
        return export_vllm(specs, images, directory, wanted.arrivals, wanted.knobs.seed)
    if client == "traffic":
        return export_traffic(specs, directory, wanted.arrivals)
    return {"aisbench": export_aisbench, "aiperf": export_aiperf}[client](specs, images, directory, wanted.arrivals)


def described(one: Profile) -> str:
    """Each number that its source prints, and what is our choice."""
    facts = [(fact.statistic, f"{fact.sense} {fact.value:g}", fact.source) for fact in one.facts]
    shown = table([("statistic", "published", "source"), *facts])
    return f"{one.name}, after {one.source}: {one.count} requests\n\n{shown}\n\n  chosen: {one.chosen}"
