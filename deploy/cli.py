"""`epd-serve`: serve, layout, stage, proxy, store, demo-model. Reads flags, calls the part, says failures in one line.

Imports are late: `epd-serve layout` answers in a blink.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

from deploy.config import DeployConfig, build_config
from deploy.nearest import unknown
from epd_serve import __version__
from epd_serve.errors import ConfigError, EpdError
from epd_serve.roles import Role

BAD_INPUT = 2
FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Returns:
        0, or 1 when a part failed, or 2 when the input is wrong. Errors go to stderr, never as a traceback.
    """
    try:
        arguments = _parse(list(sys.argv[1:] if argv is None else argv))
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


class _Parser(argparse.ArgumentParser):
    """argparse that raises our errors and names the nearest valid word."""

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is not None:
            what, word, valid = choice.groups()
            raise ConfigError(unknown(what, word, re.findall(r"[\w.:-]+", valid.replace("'", " "))))
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def _parse(argv: list[str]) -> dict[str, Any]:
    parser = _Parser(prog="epd-serve", description="Serve multimodal models, encode, prefill and decode apart.")
    parser.add_argument("--version", action="version", version=f"epd-serve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    subparsers = {
        "serve": _add_serve(commands),
        "layout": _add_layout(commands),
        "stage": _add_stage(commands),
        "proxy": _add_proxy(commands),
        "store": _add_store(commands),
        "demo-model": _add_demo_model(commands),
    }
    own, passed = _split(argv)
    known, extra = parser.parse_known_args(own)
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


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what stands after `--`."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _subparser(commands: Any, name: str, help: str) -> _Parser:
    made = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    assert isinstance(made, _Parser)
    return made


def _add_serve(commands: Any) -> _Parser:
    parser = _subparser(commands, "serve", "start stages and proxy as a layout says, until Ctrl-C")
    parser.set_defaults(command=_serve)
    parser.add_argument("--config", metavar="FILE.yaml", help="options from a file; flags win")
    for option in fields(DeployConfig):
        if option.metadata.get("positional"):
            parser.add_argument(option.name, nargs="?", default=argparse.SUPPRESS, help=option.metadata["help"])
        else:
            _add_option(parser, option)
    return parser


def _add_option(parser: Any, option: Field[Any]) -> None:
    """The flag of a field of `DeployConfig`; absent from the result when it is not given."""
    flag = option.metadata.get("flag", "--" + option.name.replace("_", "-"))
    kind = type(option.default)
    text = argparse.SUPPRESS if option.metadata.get("hidden") else option.metadata["help"]
    shared: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        parser.add_argument(flag, action="store_true", **shared)
    elif option.metadata.get("many"):
        parser.add_argument(flag, action="append", metavar="TEXT", **shared)
    elif option.metadata.get("choices"):
        parser.add_argument(flag, choices=option.metadata["choices"], **shared)
    else:
        parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), **shared)


def _serve(arguments: dict[str, Any]) -> int:
    config_file = arguments.pop("config", None)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    config = build_config(given, config_file)
    from deploy.blueprint import draw

    blueprint = draw(config)
    from deploy.launcher import Launch

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return Launch(blueprint).run()


def _add_layout(commands: Any) -> _Parser:
    parser = _subparser(commands, "layout", "show what a layout means: canonical form, instances, devices")
    parser.set_defaults(command=_layout)
    parser.add_argument("spec", metavar="SPEC", help="for example (E-P)-D")
    parser.add_argument("--devices", type=int, metavar="N", help="devices there are (default: as many as needed)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _layout(arguments: dict[str, Any]) -> int:
    from deploy.placement_table import placement_json, placement_rows, table
    from epd_serve.layout_parser import parse
    from epd_serve.placement import check_servable, lower

    layout = parse(arguments["spec"])
    devices = arguments["devices"]
    if devices is not None and devices < 0:
        raise ConfigError(f"--devices {devices} is negative", param="--devices")
    plans = lower(layout, range(layout.device_count if devices is None else devices))
    if arguments["json"]:
        shown = {"layout": str(layout), "devices": layout.device_count, "instances": placement_json(plans)}
        print(json.dumps(shown, indent=2))
    else:
        print(f"{layout}: {len(plans)} instances on {layout.device_count} devices\n\n{table(placement_rows(plans))}")
    check_servable(layout)
    return 0


def _add_stage(commands: Any) -> _Parser:
    parser = _subparser(commands, "stage", "run one stage, alone or as a member of a cluster (vLLM flags after --)")
    parser.set_defaults(command=_stage, passes=True)
    parser.add_argument("model", nargs="?", default="", help="model directory or hub name (default: the demo model)")
    parser.add_argument("--wiring", metavar="FILE.json", help="addresses of the launch it belongs to (StageWiring)")
    parser.add_argument("--role", choices=[role.value for role in Role], help="stages to run (default: of --wiring)")
    parser.add_argument("--instance", default="", help="name (default: role and 0)")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; keep it private, it has no guard")
    parser.add_argument("--port", type=_port, default=8001)
    parser.add_argument("--device", default="auto", choices=("auto", "npu", "cuda", "cpu"))
    parser.add_argument("--device-ids", default="", metavar="0,1", help="devices, one per tensor-parallel rank")
    parser.add_argument("--served-model-name", default="")
    parser.add_argument("--print", action="store_true", help="print the command instead of running it")
    cluster = parser.add_argument_group("as a member of a cluster")
    cluster.add_argument("--join", metavar="http://HEAD:PORT", help="the head's proxy; --host is then this machine's")
    for flag, default, text in (
        ("--cluster-key-file", "", "the same key as the head's"),
        ("--run-root", "", argparse.SUPPRESS),
    ):
        cluster.add_argument(flag, default=default, metavar="FILE", help=text)
    for flag, kind, number, text in (
        ("--arena-mib", int, 256, "shared memory for features on this machine"),
        ("--mooncake-segment-mib", int, 512, "memory that an encoder gives to the feature store of the cluster"),
        ("--drain-s", float, 30.0, "how long requests in flight may go on at the end"),
        ("--startup-timeout-s", float, 900.0, "deadline for vLLM to become ready"),
    ):
        cluster.add_argument(flag, type=kind, default=number, help=text)
    return parser


def _port(text: str) -> int:
    """A port as argparse's `type`."""
    if not (re.fullmatch("[0-9]{1,5}", text) and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 and 65535")
    return int(text)


_MEMBERS_OWN = ("cluster_key_file", "run_root", "arena_mib", "mooncake_segment_mib", "drain_s", "startup_timeout_s")


def _stage(arguments: dict[str, Any]) -> int:
    join = arguments.pop("join")
    own = {name: arguments.pop(name) for name in _MEMBERS_OWN}
    if join is None:
        from deploy.alone import run_stage

        if own["cluster_key_file"]:
            raise ConfigError("--cluster-key-file needs --join http://HEAD:PORT", param="--join")

        return run_stage(**arguments)
    for name in ("wiring", "print", "served_model_name"):
        if arguments.pop(name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is not for --join: the head decides it", param=flag)
    from deploy.join import run_joined

    return run_joined(join=join, **own, **arguments)


def _add_proxy(commands: Any) -> _Parser:
    parser = _subparser(
        commands, "proxy", "run the proxy alone: in front of stages that run already, or as the head of a cluster"
    )
    parser.set_defaults(command=_proxy)
    parser.add_argument("--stages", metavar="FILE.yaml", help="stages and model (see docs)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, default=8000)
    parser.add_argument("--proxy", action="append", default=[], metavar="KEY=VALUE", help="a proxy setting; repeatable")
    parser.add_argument("--api-key", dest="api_keys", action="append", default=[], help="repeatable")
    head = parser.add_argument_group("as the head of a cluster that stages join (epd-serve stage --join)")
    head.add_argument("--cluster-key-file", metavar="FILE", help="the key that stages join with; makes this a head")
    head.add_argument("--model", default="", help="model directory or hub name (default: the demo model)")
    head.add_argument("--cluster-host", default="", help="address for the stages (default: --host)")
    head.add_argument(
        "--cluster-port", type=_port, default=0, help="first of four for the stages (default: --port + 10)"
    )
    head.add_argument("--mooncake-master", default="auto", metavar="auto|none|HOST:PORT", help="run one, or use that")
    for option in fields(DeployConfig):
        if option.name in _HEADS_OPTIONS:
            _add_option(head, option)
    parser.set_defaults(passes=True)
    return parser


_HEADS_OWN = ("model", "cluster_host", "cluster_port", "mooncake_master")
_HEADS_OPTIONS = (
    *("served_model_name", "tenant_header", "shared_features", "send_pixels", "on_missing_feature", "recompute_limit"),
    *("mooncake_protocol", "kv_group_layers", "media_root", "allow_private_media", "run_root"),
    "feature_path",
)


def _proxy(arguments: dict[str, Any]) -> int:
    key_file, stages = arguments.pop("cluster_key_file"), arguments.pop("stages")
    if (key_file is None) == (stages is None):
        raise ConfigError("proxy needs --stages FILE.yaml, or --cluster-key-file FILE to be the head of a cluster")
    if key_file is not None:
        from deploy.cluster import run_head

        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        for many in ("proxy", "api_keys"):
            arguments[many] = tuple(arguments[many])
        return run_head(cluster_key_file=key_file, **arguments)
    from deploy.alone import run_proxy

    for name in (*_HEADS_OPTIONS, "passed"):
        if arguments.pop(name, None):
            raise ConfigError(f"{name} is for the head of a cluster (--cluster-key-file)", param=name)
    for name, default in zip(_HEADS_OWN, ("", "", 0, "auto"), strict=True):
        if arguments.pop(name) != default:
            raise ConfigError(f"{name} is for the head of a cluster (--cluster-key-file)", param=name)
    return run_proxy(stages=stages, **arguments)


def _add_store(commands: Any) -> _Parser:
    parser = _subparser(commands, "store", "look into the features that a running launch keeps")
    parser.set_defaults(command=_store)
    parser.add_argument("action", choices=("ls", "stat", "clear"), help="list, count, or remove what is not in use")
    parser.add_argument("--launch", metavar="ID", help="which one, where several run (or the beginning of its id)")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    parser.add_argument("--run-root", dest="root", type=Path, help=argparse.SUPPRESS)
    return parser


def _store(arguments: dict[str, Any]) -> int:
    from deploy.store_command import run_store

    return run_store(**arguments)


def _add_demo_model(commands: Any) -> _Parser:
    from epd_serve.demo.presets import PRESETS

    parser = _subparser(commands, "demo-model", "write a small model directory to try things with")
    parser.set_defaults(command=_demo_model)
    parser.add_argument("directory", metavar="DIR", help="a new directory")
    parser.add_argument("--preset", default="demo", help="demo (trained), or random weights: " + ", ".join(PRESETS[1:]))
    return parser


def _demo_model(arguments: dict[str, Any]) -> int:
    from epd_serve.demo.presets import write_preset

    write_preset(Path(arguments["directory"]), arguments["preset"])
    print(f"wrote {arguments['directory']}; serve it with: epd-serve serve {arguments['directory']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
