"""`epd-serve stage` and `epd-serve proxy`: one stage, or front doors before stages of your own. Flags and dispatch."""

from __future__ import annotations

from typing import Any

from deploy.options.config import DeployConfig, ProxyConfig, build_config
from deploy.options.flags import Parser, add_settings, add_tree, port, subparser
from epd_serve.roles import Role


def add_stage(commands: Any) -> Parser:
    parser = subparser(commands, "stage", "run one stage alone, to debug it (vLLM flags after --)")
    parser.set_defaults(command=_stage, passes=True)
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
    return parser


def _stage(arguments: dict[str, Any]) -> int:
    from deploy.alone.stage import run_stage

    return run_stage(**arguments)


def add_proxy(commands: Any) -> Parser:
    parser = subparser(commands, "proxy", "run front doors alone, before stages that somebody else runs")
    parser.set_defaults(command=_proxy)
    add_tree(parser, ProxyConfig)
    return parser


def _proxy(arguments: dict[str, Any]) -> int:
    from deploy.alone.proxy import run_proxy

    config_file = arguments.pop("config")
    return run_proxy(build_config(arguments, config_file, ProxyConfig))
