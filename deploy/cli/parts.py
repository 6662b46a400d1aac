"""What `epd-serve` starts, and what it says of models, layouts and this machine: flags and dispatch of each command."""

from __future__ import annotations

import asyncio
import json
import logging
from argparse import SUPPRESS
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cli.which import Arguments, add_launch, check_ray
from deploy.host.environment import environment
from deploy.options.config import DeployConfig, ProxyConfig, build_config
from deploy.options.flags import Parser, add_settings, add_tree, port
from epd_serve.errors import ConfigError
from epd_serve.roles import Role

if TYPE_CHECKING:
    from deploy.doctor.facts import RayFacts


def serve_flags(parser: Parser) -> None:
    parser.add_argument(
        "--detach", action="store_true", help="with --runtime ray: return as soon as it is ready; it goes on"
    )
    add_tree(parser, DeployConfig)


def config_of(arguments: Arguments) -> DeployConfig:
    """Raises ConfigError."""
    return build_config(arguments, arguments.pop("config"))


def serve(arguments: Arguments) -> int:
    detach = arguments.pop("detach")
    config = config_of(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if config.runtime == "ray":
        check_ray()
        from deploy.ray.attach import serve_on_ray

        return serve_on_ray(config, detach=detach)
    if detach:
        raise ConfigError("--detach is for --runtime ray", param="--detach")
    if config.runtime == "kubernetes":
        from deploy.kubernetes.serve import serve_on_kubernetes

        return serve_on_kubernetes(config)
    from deploy.plan.blueprint import draw

    blueprint = draw(config)
    from deploy.launch.launcher import Launch

    return Launch(blueprint).run()


def node_flags(parser: Parser) -> None:
    parser.add_argument("--listen", default="", metavar="HOST:PORT", help="its API, or HOST:FIRST-LAST: a free port")
    parser.add_argument(
        "--secrets",
        default="",
        metavar="DIR",
        help="folder with tls.crt, tls.key and token, and ca.crt where another one has signed them",
    )
    parser.add_argument(
        "--advertise",
        default="",
        metavar="HOST",
        help="where other hosts reach its stages (default: of --listen)",
    )
    parser.add_argument(
        "--await-empty", action="store_true", help="ask the node that listens there, and wait until it has no instance"
    )
    parser.add_argument("--within-s", type=float, default=300.0, metavar="S", help="how long to wait for that")
    parser.add_argument("--run-root", default="", help=SUPPRESS)
    parser.add_argument("--address-file", default="", help=SUPPRESS)
    parser.add_argument("--owner", type=int, default=0, help=SUPPRESS)
    parser.add_argument("--clients", type=int, default=-1, help=SUPPRESS)


def node(arguments: Arguments) -> int:
    from deploy.node.process import Start, await_empty, run_node

    empty, within_s = arguments.pop("await_empty"), arguments.pop("within_s")
    if not arguments["listen"]:
        raise ConfigError("--listen HOST:PORT says where the controller asks this node", param="--listen")
    start = Start(**arguments)
    return asyncio.run(await_empty(start, within_s)) if empty else run_node(start)


def stage_flags(parser: Parser) -> None:
    parser.set_defaults(passes=True)
    add_settings(parser, DeployConfig, ("model", "served_model_name", "device", "engine", "sim_profile"))
    parser.add_argument(
        "--wiring", metavar="FILE.json", help="addresses of the stages that it works with (StageWiring)"
    )
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        help="stages to run; ED is refused, run E and D apart (default: of --wiring)",
    )
    parser.add_argument("--instance", default="", help="name (default: role and 0)")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=port, default=8001, help="port of its HTTP server")
    parser.add_argument("--uds", default="", metavar="PATH", help="Unix socket of its HTTP server, in place of a port")
    parser.add_argument(
        "--stage-key-file",
        default="",
        metavar="FILE",
        help="the key that its server wants on a port (default: one that is made)",
    )
    parser.add_argument("--device-ids", default="", metavar="0,1", help="devices, one per tensor-parallel rank")
    parser.add_argument("--print", action="store_true", help="print the command instead of running it")


def stage(arguments: Arguments) -> int:
    from deploy.alone.stage import run_stage

    return run_stage(**arguments)


def proxy_flags(parser: Parser) -> None:
    add_tree(parser, ProxyConfig)


def proxy(arguments: Arguments) -> int:
    from deploy.alone.proxy import run_proxy

    return run_proxy(build_config(arguments, arguments.pop("config"), ProxyConfig))


def layout_flags(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="for example (E-P)-D")
    parser.add_argument(
        "--core-share", default="", metavar="TEXT", help="as for serve; auto takes equal work without --model"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="devices there are (default: as many as needed)")
    parser.add_argument(
        "--model", default="", metavar="DIR", help="a model: what each stage gets of its device's memory"
    )
    add_settings(parser, DeployConfig, ("device", "stage_args", "encoder_free", "feature_slab", "feature_slab_mib"))
    parser.add_argument(
        "--device-memory",
        type=float,
        metavar="GIB",
        help="plan for devices of this size, not for those of this machine",
    )


def layout(arguments: Arguments) -> int:
    from deploy.memory.placement_table import placement_json, placement_rows, table
    from epd_serve.core_shares import share_cores
    from epd_serve.layout_parser import parse
    from epd_serve.placement import check_servable, lower
    from epd_serve.stage_work import read_stage_work

    parsed = parse(arguments["spec"])
    devices = arguments["devices"]
    if devices is not None and devices < 0:
        raise ConfigError(f"--devices {devices} is negative", param="--devices")
    plans = lower(parsed, range(parsed.device_count if devices is None else devices))
    model = arguments["model"]
    plans = share_cores(arguments["core_share"], plans, read_stage_work(Path(model)) if model else None)
    if model:
        from deploy.memory.preview import preview

        check_servable(parsed)
        text, shown = preview(
            parsed,
            model,
            arguments["device"],
            arguments["device_memory"],
            arguments["stage_args"],
            encoder_free=arguments["encoder_free"],
            slab_bytes=build_config({key: arguments[key] for key in ("feature_slab", "feature_slab_mib")}).slab_bytes,
        )
        if arguments["core_share"]:
            text += f"\n\n{table(placement_rows(plans))}"
            shown["core_shares"] = {plan.id: plan.core_share for plan in plans}
        print(json.dumps(shown, indent=2) if arguments["as_json"] else text)
        return 0
    if arguments["as_json"]:
        shown = {"layout": str(parsed), "devices": parsed.device_count, "instances": placement_json(plans)}
        print(json.dumps(shown, indent=2))
    else:
        print(f"{parsed}: {len(plans)} instances on {parsed.device_count} devices\n\n{table(placement_rows(plans))}")
    check_servable(parsed)
    return 0


def store_flags(parser: Parser) -> None:
    parser.add_argument("action", choices=("ls", "stat", "clear"), help="list, count, or remove what is not in use")
    add_launch(parser)


def store(arguments: Arguments) -> int:
    from deploy.cli.store_command import run_store

    return run_store(**arguments)


def doctor_flags(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", default="", help="model directory that is to be served")
    parser.add_argument("--layout", default="", metavar="SPEC", help="layout that is to be served, for example (E-P)-D")
    parser.add_argument("--imports", action="store_true", help="import torch and vLLM, too (may take a minute)")
    parser.add_argument("--ray", action="store_true", help="ask the nodes of a Ray cluster, too (up to a minute)")
    add_settings(parser, DeployConfig, ("device", "encoder_free", "ray_address", "node_ports", "node_secrets"))


def doctor(arguments: Arguments) -> int:
    from deploy.doctor.command import run_doctor

    address, ports, secrets = (arguments.pop(name) for name in ("ray_address", "node_ports", "node_secrets"))
    if arguments.pop("ray"):
        secrets = secrets or environment().get("EPD_NODE_SECRETS", "")
        arguments["ask_cluster"] = partial(_ask_cluster, address, ports, secrets)
    return run_doctor(**arguments)


def _ask_cluster(address: str, ports: str, secrets: str, here: RayFacts) -> RayFacts:
    if not here.version:
        return replace(here, asked=True)
    from deploy.ray.doctor import ask_cluster

    return ask_cluster(address, ports, secrets, here)


def demo_model_flags(parser: Parser) -> None:
    from epd_serve.demo.presets import PRESETS

    parser.add_argument("directory", metavar="DIR", help="a new directory")
    parser.add_argument("--preset", default="demo", help="demo (trained), or random weights: " + ", ".join(PRESETS[1:]))


def demo_model(arguments: Arguments) -> int:
    from epd_serve.demo.presets import write_preset

    write_preset(Path(arguments["directory"]), arguments["preset"])
    print(f"wrote {arguments['directory']}; serve it with: epd-serve serve {arguments['directory']}")
    return 0
