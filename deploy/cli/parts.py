"""`epd-serve stage` and `epd-serve proxy`: the parts alone, or as members and head of a cluster. Flags and dispatch."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields
from typing import Any

from deploy.options.config import LAME_DUCK_S, DeployConfig
from deploy.options.engines import ENGINES
from deploy.options.flags import Parser, add_option, port, subparser
from epd_serve.errors import ConfigError
from epd_serve.roles import Role


def add_stage(commands: Any) -> Parser:
    parser = subparser(commands, "stage", "run one stage, alone or as a member of a cluster (vLLM flags after --)")
    parser.set_defaults(command=_stage, passes=True)
    parser.add_argument("model", nargs="?", default="", help="model directory or hub name (default: the demo model)")
    parser.add_argument("--wiring", metavar="FILE.json", help="addresses of the launch it belongs to (StageWiring)")
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        help="stages to run; ED is refused, run E and D apart (default: of --wiring)",
    )
    parser.add_argument("--instance", default="", help="name (default: role and 0)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind; without --join nothing guards it: keep it private"
    )
    parser.add_argument(
        "--port", type=port, default=8001, help="port of its HTTP server; with --join P and D take those after it, too"
    )
    parser.add_argument(
        "--stage-key-file", default="", metavar="FILE", help="the key that its server wants, without --join"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "npu", "cuda", "cpu"))
    parser.add_argument("--device-ids", default="", metavar="0,1", help="devices, one per tensor-parallel rank")
    parser.add_argument(
        "--served-model-name", default="", help="name in requests (default: the model directory's name)"
    )
    parser.add_argument("--engine", default="vllm", choices=ENGINES, help="what runs it (default: vllm)")
    parser.add_argument("--sim-profile", default="", metavar="FILE", help="latencies and capacity with --engine sim")
    parser.add_argument("--print", action="store_true", help="print the command instead of running it")
    cluster = parser.add_argument_group("as a member of a cluster")
    cluster.add_argument(
        "--join", metavar="http://HEAD:PORT", help="the head's admin port; --host is then this machine's"
    )
    for flag, default, text in (
        ("--cluster-key-file", "", "the same key as the head's"),
        ("--run-root", "", argparse.SUPPRESS),
        ("--kv-faults", "", argparse.SUPPRESS),
        ("--core-share", "", "its part of its devices' cores, such as 0.3 (NPU; CUDA with MPS)"),
    ):
        cluster.add_argument(flag, default=default, metavar="SHARE" if flag == "--core-share" else "FILE", help=text)
    for flag, kind, number, text in (
        ("--arena-mib", int, 256, "shared memory for features on this machine"),
        ("--mooncake-segment-mib", int, 512, "memory that an encoder gives to the feature store of the cluster"),
        ("--drain-s", float, 30.0, "how long requests in flight may go on at the end"),
        ("--startup-timeout-s", float, 900.0, "deadline for vLLM to become ready"),
    ):
        cluster.add_argument(flag, type=kind, default=number, help=text)
    template = DeployConfig.__dataclass_fields__["stage_template"].metadata
    cluster.add_argument("--stage-template", choices=template["choices"], default="auto", help=template["help"])
    return parser


_MEMBERS_OWN = (
    *("cluster_key_file", "run_root", "kv_faults", "core_share"),
    *("arena_mib", "mooncake_segment_mib", "drain_s", "startup_timeout_s", "stage_template"),
)


def _stage(arguments: dict[str, Any]) -> int:
    join = arguments.pop("join")
    own = {name: arguments.pop(name) for name in _MEMBERS_OWN}
    if join is None:
        from deploy.alone.stage import run_stage

        for name in ("cluster_key_file", "core_share"):
            if own[name]:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} needs --join http://HEAD:PORT", param="--join")
        return run_stage(**arguments)
    for name in ("wiring", "print", "served_model_name", "stage_key_file"):
        if arguments.pop(name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is not for --join: the head decides it", param=flag)
    from deploy.cluster.join import run_joined

    return run_joined(join=join, **own, **arguments)


def add_proxy(commands: Any) -> Parser:
    parser = subparser(
        commands, "proxy", "run the proxy alone: in front of stages that run already, or as the head of a cluster"
    )
    parser.set_defaults(command=_proxy)
    parser.add_argument("--stages", metavar="FILE.yaml", help="stages and model (docs/guides/several-hosts.md)")
    parser.add_argument(
        "--stage",
        action="append",
        default=[],
        metavar="[ROLE=]URL",
        help="one stage, in place of a file: PD=http://HOST:PORT, or a URL alone for a whole model; repeatable",
    )
    parser.add_argument("--stage-key-file", default="", metavar="FILE", help="the key that those stages want")
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
        if option.name in _KEYS:
            add_option(parser, option)
    head = parser.add_argument_group("as the head of a cluster that stages join (epd-serve stage --join)")
    head.add_argument("--cluster-key-file", metavar="FILE", help="the key that stages join with; makes this a head")
    head.add_argument("--model", default="", help="model directory or hub name (default: the demo model)")
    head.add_argument("--cluster-host", default="", help="address for the stages (default: --host)")
    head.add_argument(
        "--cluster-port", type=port, default=0, help="first of five for the stages (default: --port + 10)"
    )
    head.add_argument(
        "--mooncake-master", default="auto", metavar="HOST:PORT", help="use that one; auto runs one, none goes without"
    )
    for option in fields(DeployConfig):
        if option.name in _HEADS_OPTIONS:
            add_option(head, option)
    parser.set_defaults(passes=True)
    return parser


_KEYS = ("served_model_name", "api_keys", "api_key_file", "admin_port", "admin_host", "admin_key_file", "run_root")
_STAGES = ("stages", "stage", "stage_key_file")
_HEADS_OWN = ("model", "cluster_host", "cluster_port", "mooncake_master")
_HEADS_OPTIONS = (
    *("tenant_header", "shared_features", "send_pixels", "on_missing_feature", "recompute_limit"),
    *("mooncake_protocol", "kv_grouping", "kv_packet_floor_kib", "media_root", "allow_private_media"),
    *("feature_path", "first_token"),
)


def _proxy(arguments: dict[str, Any]) -> int:
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    key_file, stages = arguments.pop("cluster_key_file"), {name: arguments.pop(name) for name in _STAGES}
    if (key_file is None) == (not any(stages.values())):
        raise ConfigError("proxy needs --stages FILE.yaml or --stage URL, or --cluster-key-file FILE to be a head")
    if key_file is not None:
        from deploy.cluster.head import run_head

        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        return run_head(cluster_key_file=key_file, **arguments)
    from deploy.alone.proxy import run_proxy

    for name in (*_HEADS_OPTIONS, "passed"):
        if arguments.pop(name, None):
            raise ConfigError(f"{name} is for the head of a cluster (--cluster-key-file)", param=name)
    for name, default in zip(_HEADS_OWN, ("", "", 0, "auto"), strict=True):
        if arguments.pop(name) != default:
            raise ConfigError(f"{name} is for the head of a cluster (--cluster-key-file)", param=name)
    return run_proxy(**stages, **arguments)
