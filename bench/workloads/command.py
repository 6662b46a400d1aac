"""`epd-bench workload`: what workloads there are, what one consists of, and any of them as another client's files."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.workloads.custom_dataset import NAME as OWN
from bench.workloads.export_aisbench import export_aisbench
from bench.workloads.exports import Exported, export_aiperf, export_vllm
from bench.workloads.generate import Knobs, requests
from bench.workloads.images import Images
from bench.workloads.profiles import PROFILES, Profile
from bench.workloads.spec import RequestSpec
from bench.workloads.summary import Summary, summarise
from bench.workloads.text import PlainWords
from bench.workloads.workload import Workload, arrivals_of, workload
from bench.workloads.workload import add_arguments as add_workload_arguments
from deploy.placement_table import table
from epd_serve.errors import ConfigError

CLIENTS = ("aisbench", "vllm", "aiperf")
TELL_S = 5.0
COLUMNS = ("workload", "requests", "text only", "text tokens", "images", "size", "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"a workload of --list, or {OWN!r}")
    parser.add_argument("--list", action="store_true", help="show all workloads with their statistics")
    parser.add_argument(
        "--export", nargs=2, metavar=("CLIENT", "DIR"), help=f"write it for another client: {', '.join(CLIENTS)}"
    )
    add_workload_arguments(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if arguments.list:
        print(overview())
        return 0
    if arguments.name is None:
        raise ConfigError("which workload? NAME is missing (--list shows all)", param="NAME")
    wanted = workload(arguments.name, arguments, arrivals_of(arguments))
    if arguments.export is None:
        print(described(wanted))
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
    requests = _with_progress(wanted.requests(), wanted.count)
    if client == "vllm":
        return export_vllm(requests, images, directory, wanted.arrivals, wanted.knobs.seed)
    return {"aisbench": export_aisbench, "aiperf": export_aiperf}[client](requests, images, directory, wanted.arrivals)


def _with_progress(requests: Iterable[RequestSpec], count: int) -> Iterator[RequestSpec]:
    """The same requests; how far they are is told now and then, since drawing large images takes minutes."""
    shown_s = time.monotonic()
    for number, request in enumerate(requests):
        if time.monotonic() - shown_s > TELL_S:
            shown_s = time.monotonic()
            print(f"{number} of {count} requests …", file=sys.stderr)
        yield request


def overview() -> str:
    """One row per workload, of a sample of its own size."""
    rows: list[tuple[str, ...]] = [(*COLUMNS, "modelled on")]
    rows += [(*_columns(one.name, sample(one)), one.source) for one in PROFILES.values()]
    return (
        f"{table(rows)}\n  {OWN}  your images and requests: --pictures DIR --prompts FILE\n"
        "Means of a sample with seed 0; images per request with the largest number behind it. "
        "`epd-bench workload NAME` shows where each number is from."
    )


def described(wanted: Workload) -> str:
    """What the workload consists of; of a profile also each published number beside the sample's."""
    summary = summarise(wanted.requests())
    rate = f"{summary.rate_rps:.2f}/s" if summary.rate_rps else "-"
    parts = [table([(*COLUMNS, "reuse", "rate"), (*_columns(wanted.name, summary), f"{summary.reuse:.3f}", rate)])]
    if profile := PROFILES.get(wanted.name):
        facts: list[tuple[str, ...]] = [("statistic", "published", "this sample", "source")]
        for fact in profile.facts:
            published = f"{fact.sense} {fact.value:g}".removeprefix("== ")
            facts.append((fact.statistic, published, f"{getattr(summary, fact.statistic):g}", fact.source))
        parts += [table(facts), f"  chosen: {profile.chosen}"]
    return "\n\n".join(parts)


def sample(profile: Profile, seed: int = 0) -> Summary:
    """Of as many requests as the profile's runs have, without a tokenizer."""
    return summarise(itertools.islice(requests(profile, Knobs(seed), PlainWords()), profile.count))


def _columns(name: str, summary: Summary) -> tuple[str, ...]:
    return (
        name,
        str(summary.requests),
        f"{summary.text_only_share:.0%}",
        f"{summary.text_tokens_mean:.1f}",
        f"{summary.images_mean:.2f} ({summary.images_max})",
        f"{summary.width_mean:.0f}×{summary.height_mean:.0f}" if summary.images_max else "-",
        f"{summary.output_tokens_mean:.0f}",
    )
