"""`epd-serve profile MODEL`: measure what a model does on the devices at hand, or correct that by what was served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deploy.options.config import DeployConfig
from deploy.options.flags import Parser, add_settings
from epd_serve.errors import ConfigError


def profile_flags(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", default="", help="as for serve (default: the built-in demo model)")
    parser.add_argument(
        "--out", type=Path, default=Path("profile.json"), metavar="FILE", help="where to (default: profile.json)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="a picture of it")
    parser.add_argument(
        "--tp", type=_sizes, default=(1,), metavar="1,2", help="sizes of tensor parallelism (default: 1)"
    )
    add_settings(parser, DeployConfig, ("device", "stage_args", "engine", "sim_profile"))
    parser.add_argument(
        "--devices", type=int, metavar="N",
        help="that are used; on CPU, that the cores are divided into (default: 2, or the largest --tp)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions, for a first look")
    parser.add_argument(
        "--parts", type=_names, default=(), metavar="A,B", help="of what is measured (alone, encode+prefill, …)"
    )
    parser.add_argument(
        "--interference", type=Path, metavar="FILE",
        help="what epd-bench interference has measured: for pairs of stages that no part measures",
    )  # fmt: skip
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="a profile to correct; nothing is started")
    parser.add_argument(
        "--from", dest="served", type=Path, metavar="PATH",
        help="with --calibrate: a deployment's --trace-dir, or what it recorded (--proxy recording=FILE)",
    )  # fmt: skip
    parser.add_argument("--layout", metavar="SPEC", help="with --calibrate and a recording: what served it")


def _sizes(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 1,2")
    return tuple(sorted({int(word) for word in words}))


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def profile(arguments: dict[str, Any]) -> int:
    from deploy.planner.plot import picture_of_profile
    from deploy.planner.profile import write_device_profile

    if bool(arguments["calibrate"]) != bool(arguments["served"]):
        raise ConfigError("--calibrate FILE and --from PATH go together", param="--calibrate")
    made = _calibrated(arguments) if arguments["calibrate"] else _measured(arguments)
    out: Path = arguments["out"]
    write_device_profile(out, made)
    if not arguments["calibrate"]:
        _parts_file(out).unlink(missing_ok=True)
    print(f"wrote {out}: {made.model} on {made.device}")
    if plot := arguments["plot"]:
        try:
            plot.write_text(picture_of_profile(made), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--plot {plot}: {error.strerror}", param="--plot") from error
    return 0


def _parts_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.part")


def _calibrated(arguments: dict[str, Any]) -> Any:
    from deploy.planner.calibrate import by_clients, by_steps
    from deploy.planner.profile import read_device_profile
    from deploy.planner.steps import read_steps
    from epd_serve.layout_parser import parse
    from epd_serve.traffic import read_traffic

    profile, served, layout = read_device_profile(arguments["calibrate"]), arguments["served"], arguments["layout"]
    if served.is_dir():
        return by_steps(profile, read_steps(served))
    if not layout:
        raise ConfigError(
            f"--from {served} is no folder of traces (epd-serve serve --trace-dir), and a recording needs --layout",
            param="--from",
        )
    return by_clients(profile, parse(layout), read_traffic(served))


def _measured(arguments: dict[str, Any]) -> Any:
    import os

    from rich.console import Console

    from deploy.host.environment import is_terminal
    from deploy.plan.blueprint import DEMO_NAME
    from deploy.planner.about import about
    from deploy.planner.assemble import assembled
    from deploy.planner.measure import measure_part, measured, progress_bar
    from deploy.planner.sweep import QUICK, Extent, launches
    from epd_serve.demo.presets import builtin_model_dir
    from epd_serve.model_facts import read_model_facts
    from npu_ops.discovery import DiscoveryError, discover

    model = arguments["model"] or str(builtin_model_dir())
    facts = read_model_facts(model)
    multimodal = facts is None or (facts.multimodal and "image" in (facts.towers or {"image"}))
    try:
        inventory = discover("cpu" if arguments["engine"] == "sim" else arguments["device"])
    except DiscoveryError as error:
        raise ConfigError(str(error), param="--device") from error
    there = len(os.sched_getaffinity(0)) if inventory.kind == "cpu" else len(inventory.ids)
    sizes, wanted = arguments["tp"], arguments["devices"]
    devices = min(there, max(2, *sizes)) if wanted is None else wanted
    if not 1 <= devices <= there:
        raise ConfigError(f"--devices {devices}: this machine has {there} ({inventory.kind})", param="--devices")
    plans = launches(devices, sizes, multimodal=multimodal, only=arguments["parts"])
    bare, unknown = about(
        Path(arguments["model"]).name or DEMO_NAME,
        model,
        inventory,
        devices,
        sizes,
        arguments["stage_args"],
        multimodal=multimodal,
        interference=arguments["interference"],
    )
    screen = Console(stderr=True, force_terminal=is_terminal(), soft_wrap=True, markup=False, highlight=False)
    progress = progress_bar(screen)
    if unknown:
        progress.print(f"memory is unknown: {unknown}")
    flags = [*filter(None, (arguments["model"],)), "--device", inventory.kind, "--engine", arguments["engine"]]
    flags += ["--sim-profile", arguments["sim_profile"]] if arguments["sim_profile"] else []
    flags += [word for text in arguments["stage_args"] for word in ("--stage-args", text)]
    extent = QUICK if arguments["quick"] else Extent()
    identity = {
        "model": model,
        "device": bare.device,
        "devices": devices,
        "quick": arguments["quick"],
        "flags": flags,
        "versions": bare.versions,
    }
    parts = measured(
        _parts_file(arguments["out"]),
        identity,
        plans,
        lambda one, report: measure_part(one, extent, flags, report, multimodal=multimodal),
        progress,
    )
    return assembled(bare, parts, cpu=inventory.kind == "cpu")
