"""`epd-serve stage` and `epd-serve proxy`: one stage, or front doors before stages of your own. Flags and dispatch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from deploy.options.config import LAME_DUCK_S, DeployConfig
from deploy.options.engines import ENGINES
from deploy.options.flags import Parser, add_option, port, subparser
from epd_serve.roles import Role

_LISTENERS = ("api_key_file", "tls_cert_file", "tls_key_file", "admin_port", "admin_host", "admin_key_file", "run_root")


def add_stage(commands: Any) -> Parser:
    parser = subparser(commands, "stage", "run one stage alone, to debug it (vLLM flags after --)")
    parser.set_defaults(command=_stage, passes=True)
    parser.add_argument("model", nargs="?", default="", help="model directory or hub name (default: the demo model)")
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
    parser.add_argument("--device", default="auto", choices=("auto", "npu", "cuda", "cpu"))
    parser.add_argument("--device-ids", default="", metavar="0,1", help="devices, one per tensor-parallel rank")
    parser.add_argument(
        "--served-model-name", default="", help="name in requests (default: the model directory's name)"
    )
    parser.add_argument("--engine", default="vllm", choices=ENGINES, help="what runs it (default: vllm)")
    parser.add_argument("--sim-profile", default="", metavar="FILE", help="latencies and capacity with --engine sim")
    parser.add_argument("--print", action="store_true", help="print the command instead of running it")
    return parser


def _stage(arguments: dict[str, Any]) -> int:
    from deploy.alone.stage import run_stage

    return run_stage(**arguments)


def add_proxy(commands: Any) -> Parser:
    parser = subparser(commands, "proxy", "run front doors alone, before stages that somebody else runs")
    parser.set_defaults(command=_proxy)
    parser.add_argument("--stages", metavar="FILE.yaml", help="stages and model (docs/guides/proxy.md)")
    parser.add_argument(
        "--stage",
        action="append",
        default=[],
        metavar="[ROLE=]URL",
        help="one stage, in place of a file: PD=http://HOST:PORT or PD=unix:/PATH, or a URL alone for a whole model; "
        "repeatable",
    )
    parser.add_argument("--served-model-name", default="", help="with --stage: the name that clients use")
    parser.add_argument("--stage-key-file", default="", metavar="FILE", help="the key that the stages want")
    parser.add_argument("--host", default="127.0.0.1", help="address of the OpenAI endpoint")
    parser.add_argument("--port", type=port, default=8000, help="port of the OpenAI endpoint")
    parser.add_argument("--workers", type=int, default=1, help="proxy processes on one port (default: 1)")
    parser.add_argument("--proxy", action="append", default=[], metavar="KEY=VALUE", help="a proxy setting; repeatable")
    parser.add_argument(
        "--lame-duck-s",
        type=float,
        default=LAME_DUCK_S,
        help="how long requests are still accepted after SIGTERM, while /ready says no",
    )
    parser.add_argument("--drain-s", type=float, default=30.0, help="how long requests in flight may go on after that")
    for option in fields(DeployConfig):
        if option.name in _LISTENERS:
            add_option(parser, option)
    return parser


def _proxy(arguments: dict[str, Any]) -> int:
    from deploy.alone.proxy import run_proxy

    return run_proxy(**arguments)
