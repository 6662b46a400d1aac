"""`epd-bench workload`: what workloads there are, what one consists of, and any of them as another client's files."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.statistic import percentile
from bench.workloads.export_aisbench import export_aisbench
from bench.workloads.exports import Exported, export_aiperf, export_traffic, export_vllm
from bench.workloads.generate import Knobs, Words, requests
from bench.workloads.images import Images
from bench.workloads.profiles import PROFILES, Profile
from bench.workloads.requests import RequestSpec
from bench.workloads.workload import OWN, Workload, arrivals_of, workload
from bench.workloads.workload import add_arguments as add_workload_arguments
from deploy.memory.placement_table import table
from epd_serve.errors import ConfigError

CLIENTS = ("aisbench", "vllm", "aiperf", "traffic")
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
    specs = list(wanted.requests())
    if client == "vllm":
        return export_vllm(specs, images, directory, wanted.arrivals, wanted.knobs.seed)
    if client == "traffic":
        return export_traffic(specs, directory, wanted.arrivals)
    return {"aisbench": export_aisbench, "aiperf": export_aiperf}[client](specs, images, directory, wanted.arrivals)


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
    rate = f"{summary['rate_rps']:.2f}/s" if summary["rate_rps"] else "-"
    parts = [table([(*COLUMNS, "reuse", "rate"), (*_columns(wanted.name, summary), f"{summary['reuse']:.3f}", rate)])]
    if profile := PROFILES.get(wanted.name):
        facts: list[tuple[str, ...]] = [("statistic", "published", "this sample", "source")]
        for fact in profile.facts:
            published = f"{fact.sense} {fact.value:g}".removeprefix("== ")
            facts.append((fact.statistic, published, f"{summary[fact.statistic]:g}", fact.source))
        parts += [table(facts), f"  chosen: {profile.chosen}"]
    return "\n\n".join(parts)


def sample(profile: Profile, seed: int = 0) -> dict[str, float]:
    """Of as many requests as the profile's runs have, without a tokenizer."""
    return summarise(itertools.islice(requests(profile, Knobs(seed), Words()), profile.count))


def summarise(requests: Iterable[RequestSpec]) -> dict[str, float]:
    """The statistics of one request or more, under the names that `Fact` uses.

    Images are counted as they occur, repeats included; widths and heights of no image at all are 0. `reuse` is the
    share of occurrences whose image occurred before; `rate_rps` is between the first and the last arrival, 0 without.
    """
    sample = list(requests)
    images = [image for request in sample for image in request.images]
    counts = [len(request.images) for request in sample]
    times = [request.arrival_s for request in sample if request.arrival_s is not None]
    span_s = times[-1] - times[0] if times else 0.0
    summary: dict[str, Any] = {
        "requests": len(sample),
        "text_only_share": counts.count(0) / len(sample),
        "text_tokens_mean": np.mean([request.text_tokens for request in sample]),
        "output_tokens_mean": np.mean([request.max_tokens for request in sample]),
        "images_mean": np.mean(counts),
        "images_min": min(counts),
        "images_max": max(counts),
        "reuse": 1 - len(set(images)) / len(images) if images else 0.0,
        "rate_rps": (len(times) - 1) / span_s if span_s else 0.0,
    }
    for side in ("width", "height"):
        values = [getattr(image, side) for image in images] or [0]
        summary |= {f"{side}_mean": np.mean(values), f"{side}_median": np.median(values), f"{side}_max": max(values)}
        summary[f"{side}_p95"] = percentile(values, 95)
    return {name: float(value) for name, value in summary.items()}


def _columns(name: str, summary: Mapping[str, float]) -> tuple[str, ...]:
    size = f"{summary['width_mean']:.0f}×{summary['height_mean']:.0f}" if summary["images_max"] else "-"
    return (
        name,
        f"{summary['requests']:.0f}",
        f"{summary['text_only_share']:.0%}",
        f"{summary['text_tokens_mean']:.1f}",
        f"{summary['images_mean']:.2f} ({summary['images_max']:.0f})",
        size,
        f"{summary['output_tokens_mean']:.0f}",
    )
