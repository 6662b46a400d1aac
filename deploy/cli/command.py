"""`epd-serve`: serve, layout, stage, proxy, store, doctor, demo-model, and what changes a deployment (`change.py`).
Reads flags, calls the part, says what failed.

Imports are late: `epd-serve layout` answers in a blink.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.change import add_change
from deploy.cli.end import add_logs_and_down
from deploy.cli.key import add_key
from deploy.cli.parts import add_proxy, add_stage
from deploy.cli.profile import add_profile
from deploy.cli.standard_output import until_the_reader_leaves
from deploy.cli.top import add_top
from deploy.cli.trace import add_trace
from deploy.cli.which import check_ray
from deploy.cli.why import add_why
from deploy.options.config import DeployConfig, build_config
from deploy.options.flags import Parser, add_settings, add_tree, split, subparser
from deploy.planner.command import add_plan
from epd_serve import __version__
from epd_serve.errors import ConfigError, EpdError
from epd_serve.suggestions import unknown

if TYPE_CHECKING:
    from deploy.doctor.facts import RayFacts

BAD_INPUT = 2
FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Returns:
        0, or 1 when a part failed, or 2 when the input is wrong. Errors go to stderr, never as a traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    return until_the_reader_leaves(partial(_run, words))


def _run(words: list[str]) -> int:
    try:
        arguments = parse_words(words)
        command = arguments.pop("command")
        return int(command(arguments))
    except ConfigError as error:
        print(f"epd-serve: {error}", file=sys.stderr)
        return BAD_INPUT
    except EpdError as error:
        print(f"epd-serve: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130


def parser() -> Parser:
    """Returns the parser of the whole command line."""
    return _parsers()[0]


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    made = Parser(prog="epd-serve", description="Serve multimodal models, encode, prefill and decode apart.")
    made.add_argument("--version", action="version", version=f"epd-serve {__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    return made, {
        "serve": _add_serve(commands),
        "layout": _add_layout(commands),
        "stage": add_stage(commands),
        "proxy": add_proxy(commands),
        "store": _add_store(commands),
        "doctor": _add_doctor(commands),
        "demo-model": _add_demo_model(commands),
        "key": add_key(commands),
        "plan": add_plan(commands),
        **add_change(commands),
        **add_logs_and_down(commands),
        **add_why(commands),
        **add_trace(commands),
        **add_top(commands),
        **add_profile(commands),
    }


def parse_words(argv: list[str]) -> dict[str, Any]:
    """Returns what the words of `epd-serve WORDS…` say, and under `command` what carries it out.

    Raises:
        ConfigError: a word that no command takes; the message names the nearest one that it takes.
    """
    made, subparsers = _parsers()
    own, passed = split(argv)
    known, extra = made.parse_known_args(own)
    arguments = vars(known)
    if extra:
        name = next(word for word in own if word in subparsers)
        word = extra[0].split("=")[0]
        if word.startswith("-"):
            raise ConfigError(f"{name}: {unknown('flag', word, subparsers[name].flags())}")
        raise ConfigError(f"{name}: unexpected argument {word!r} (see epd-serve {name} --help)")
    if arguments.pop("passes", False):
        arguments["passed"] = passed
    elif passed:
        raise ConfigError("nothing is passed on after --; vLLM flags go in --stage-args 'P:--flag value'")
    return arguments


def _add_serve(commands: Any) -> Parser:
    parser = subparser(commands, "serve", "start stages and proxy as a layout says, until Ctrl-C")
    parser.set_defaults(command=_serve)
    parser.add_argument(
        "--detach", action="store_true", help="with --runtime ray: return as soon as it is ready; it goes on"
    )
    add_tree(parser, DeployConfig)
    return parser


def serve_config(words: Sequence[str]) -> DeployConfig:
    """What `epd-serve serve WORDS…` would serve. Raises ConfigError as it would."""
    arguments = parse_words(["serve", *words])
    del arguments["command"], arguments["detach"]
    return _config(arguments)


def _config(arguments: dict[str, Any]) -> DeployConfig:
    config_file = arguments.pop("config")
    return build_config(arguments, config_file)


def _serve(arguments: dict[str, Any]) -> int:
    detach = arguments.pop("detach")
    config = _config(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if config.runtime == "ray":
        check_ray()
        from deploy.ray.attach import serve_on_ray

        return serve_on_ray(config, detach=detach)
    if detach:
        raise ConfigError("--detach is for --runtime ray", param="--detach")
    from deploy.plan.blueprint import draw

    blueprint = draw(config)
    from deploy.launch.launcher import Launch

    return Launch(blueprint).run()


def _add_layout(commands: Any) -> Parser:
    parser = subparser(commands, "layout", "show what a layout means: canonical form, instances, devices, memory")
    parser.set_defaults(command=_layout)
    parser.add_argument("spec", metavar="SPEC", help="for example (E-P)-D")
    parser.add_argument(
        "--core-share", default="", metavar="TEXT", help="as for serve; auto takes equal work without --model"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="devices there are (default: as many as needed)")
    parser.add_argument(
        "--model", default="", metavar="DIR", help="a model: what each stage gets of its device's memory"
    )
    add_settings(parser, DeployConfig, ("device", "stage_args"))
    parser.add_argument(
        "--device-memory",
        type=float,
        metavar="GIB",
        help="plan for devices of this size, not for those of this machine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _layout(arguments: dict[str, Any]) -> int:
    from deploy.memory.placement_table import placement_json, placement_rows, table
    from epd_serve.core_shares import share_cores
    from epd_serve.layout_parser import parse
    from epd_serve.placement import check_servable, lower
    from epd_serve.stage_work import read_stage_work

    layout = parse(arguments["spec"])
    devices = arguments["devices"]
    if devices is not None and devices < 0:
        raise ConfigError(f"--devices {devices} is negative", param="--devices")
    plans = lower(layout, range(layout.device_count if devices is None else devices))
    model = arguments["model"]
    plans = share_cores(arguments["core_share"], plans, read_stage_work(Path(model)) if model else None)
    if model:
        from deploy.memory.preview import preview

        check_servable(layout)
        text, shown = preview(
            layout,
            model,
            arguments["device"],
            arguments["device_memory"],
            arguments["stage_args"],
        )
        if arguments["core_share"]:
            text += f"\n\n{table(placement_rows(plans))}"
            shown["core_shares"] = {plan.id: plan.core_share for plan in plans}
        print(json.dumps(shown, indent=2) if arguments["json"] else text)
        return 0
    if arguments["json"]:
        shown = {"layout": str(layout), "devices": layout.device_count, "instances": placement_json(plans)}
        print(json.dumps(shown, indent=2))
    else:
        print(f"{layout}: {len(plans)} instances on {layout.device_count} devices\n\n{table(placement_rows(plans))}")
    check_servable(layout)
    return 0


def _add_store(commands: Any) -> Parser:
    parser = subparser(commands, "store", "look into the features that a running launch keeps")
    parser.set_defaults(command=_store)
    parser.add_argument("action", choices=("ls", "stat", "clear"), help="list, count, or remove what is not in use")
    parser.add_argument("--launch", metavar="ID", help="which one, where several run (or the beginning of its id)")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    parser.add_argument("--run-root", dest="root", type=Path, help=argparse.SUPPRESS)
    return parser


def _store(arguments: dict[str, Any]) -> int:
    from deploy.cli.store_command import run_store

    return run_store(**arguments)


def _add_doctor(commands: Any) -> Parser:
    parser = subparser(commands, "doctor", "say what would keep this machine from serving, and what to do about it")
    parser.set_defaults(command=_doctor)
    parser.add_argument("model", nargs="?", default="", help="model directory that is to be served")
    parser.add_argument("--layout", default="", metavar="SPEC", help="layout that is to be served, for example (E-P)-D")
    parser.add_argument("--imports", action="store_true", help="import torch and vLLM, too (may take a minute)")
    parser.add_argument("--ray", action="store_true", help="ask the nodes of a Ray cluster, too (up to a minute)")
    add_settings(parser, DeployConfig, ("device", "ray_address", "node_ports"))
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON, for a bug report")
    return parser


def _doctor(arguments: dict[str, Any]) -> int:
    from deploy.doctor.command import run_doctor

    address, ports = arguments.pop("ray_address"), arguments.pop("node_ports")
    if arguments.pop("ray"):
        arguments["ask_cluster"] = partial(_ask_cluster, address, ports)
    return run_doctor(**arguments)


def _ask_cluster(address: str, ports: str, here: RayFacts) -> RayFacts:
    if not here.version:
        return replace(here, asked=True)
    from deploy.ray.doctor import ask_cluster

    return ask_cluster(address, ports, here)


def _add_demo_model(commands: Any) -> Parser:
    from epd_serve.demo.presets import PRESETS

    parser = subparser(commands, "demo-model", "write a small model directory to try things with")
    parser.set_defaults(command=_demo_model)
    parser.add_argument("directory", metavar="DIR", help="a new directory")
    parser.add_argument("--preset", default="demo", help="demo (trained), or random weights: " + ", ".join(PRESETS[1:]))
    return parser


def _demo_model(arguments: dict[str, Any]) -> int:
    from epd_serve.demo.presets import write_preset

    write_preset(Path(arguments["directory"]), arguments["preset"])
    print(f"wrote {arguments['directory']}; serve it with: epd-serve serve {arguments['directory']}")
    return 0
