"""`epd-serve`: its commands. Reads flags, calls the part, says what failed.

Imports are late: `epd-serve layout` answers in a blink.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from deploy.cli import changing, end, key, parts, render, top, trace, why
from deploy.cli.standard_output import until_the_reader_leaves
from deploy.cli.which import Arguments, add_which
from deploy.options.config import DeployConfig
from deploy.options.flags import Parser, split, subparser
from deploy.planner import command as planner
from deploy.planner import profile_command as profiler
from epd_serve import __version__
from epd_serve.errors import ConfigError, EpdError
from epd_serve.suggestions import unknown

BAD_INPUT = 2
FAILED = 1


class Command(NamedTuple):
    """Attributes:
    run: carries it out, and returns the exit code. None where its flags name a command of its own.
    running: it asks a running deployment, and has the flags that say which one. json: it may print JSON.
    """

    help: str
    run: Callable[[Arguments], int] | None
    flags: Callable[[Parser], None] = lambda parser: None
    running: bool = False
    json: bool = False


COMMANDS = {
    "serve": Command("start stages and proxy as a layout says, until Ctrl-C", parts.serve, parts.serve_flags),
    "layout": Command(
        "show what a layout means: canonical form, instances, devices, memory",
        parts.layout,
        parts.layout_flags,
        json=True,
    ),
    "node": Command("run one host of a deployment on several, as its controller says", parts.node, parts.node_flags),
    "stage": Command("run one stage alone, to debug it (vLLM flags after --)", parts.stage, parts.stage_flags),
    "proxy": Command("run front doors alone, before stages that somebody else runs", parts.proxy, parts.proxy_flags),
    "store": Command("look into the features that a running launch keeps", parts.store, parts.store_flags, json=True),
    "doctor": Command(
        "say what would keep this machine from serving, and what to do about it",
        parts.doctor,
        parts.doctor_flags,
        json=True,
    ),
    "demo-model": Command("write a small model directory to try things with", parts.demo_model, parts.demo_model_flags),
    "key": Command("make, list or revoke the API keys of clients", None, key.key_flags),
    "render": Command("write what somebody else's cluster runs a deployment by", None, render.render_flags),
    "plan": Command(
        "which layout suits your traffic on your devices, by simulation", planner.run_plan, planner.plan_flags
    ),
    "status": Command(
        "what a running deployment is, and what is being done about it",
        changing.status,
        changing.status_flags,
        running=True,
        json=True,
    ),
    "relayout": Command(
        "give a running deployment another layout", changing.relayout, changing.relayout_flags, running=True, json=True
    ),
    "scale": Command(
        "run more or fewer instances of a role", changing.scale, changing.scale_flags, running=True, json=True
    ),
    "drain": Command(
        "take an instance out once its requests have ended",
        changing.drain,
        changing.drain_flags,
        running=True,
        json=True,
    ),
    "restart": Command(
        "replace an instance, all of them in turn, or the front doors",
        changing.restart,
        changing.restart_flags,
        running=True,
        json=True,
    ),
    "undo": Command(
        "go back to the layout before, also from the middle of a change",
        changing.undo,
        changing.undo_flags,
        running=True,
        json=True,
    ),
    "follow": Command(
        "have instances where the load is, only say what would be changed, or neither",
        changing.follow,
        changing.follow_flags,
        running=True,
        json=True,
    ),
    "logs": Command("what the stages of a running deployment say", end.logs, end.logs_flags, running=True),
    "down": Command("end a running deployment once its requests have ended", end.down, end.down_flags, running=True),
    "why": Command(
        "where a request went and why, what it waited for, why it was refused",
        why.why,
        why.why_flags,
        running=True,
        json=True,
    ),
    "trace": Command(
        "requests as a timeline for Perfetto, with what stages stamp (--trace-dir)",
        trace.trace,
        trace.trace_flags,
        running=True,
    ),
    "top": Command(
        "watch a running deployment: instances, load, rates, actions (q quits)", top.top, top.top_flags, running=True
    ),
    "profile": Command(
        "measure what a model does on this machine's devices, for plan", profiler.profile, profiler.profile_flags
    ),
}


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
    found = {}
    for name, command in COMMANDS.items():
        found[name] = one = subparser(commands, name, command.help)
        one.set_defaults(command=command.run)
        command.flags(one)
        if command.json:
            one.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
        if command.running:
            add_which(one)
    return made, found


def parse_words(argv: list[str]) -> Arguments:
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


def serve_config(words: Sequence[str]) -> DeployConfig:
    """What `epd-serve serve WORDS…` would serve. Raises ConfigError as it would."""
    arguments = parse_words(["serve", *words])
    del arguments["command"], arguments["detach"]
    return parts.config_of(arguments)
