"""`epd-serve status|relayout|scale|drain|restart|undo`: asks a running deployment, and waits until it is done."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from deploy.cli.which import add_which, client
from deploy.memory.placement_table import short_node, table
from deploy.options.flags import Parser, subparser
from epd_serve.errors import ConfigError, EpdError
from epd_serve.roles import Role

if TYPE_CHECKING:
    import httpx

DONE, FAILED, REFUSED = 0, 1, 2
LOOK_S = 0.2
Call = tuple[str, dict[str, Any]]


def add_change(commands: Any) -> dict[str, Parser]:
    """The parsers, by name."""
    made = {
        "status": _add(commands, "status", "what a running deployment is, and what is being done about it", _status),
        "relayout": _add(commands, "relayout", "give a running deployment another layout", _relayout),
        "scale": _add(commands, "scale", "run more or fewer instances of a role", _scale),
        "drain": _add(commands, "drain", "take an instance out once its requests have ended", _drain),
        "restart": _add(commands, "restart", "replace an instance, all of them in turn, or the front doors", _restart),
        "undo": _add(commands, "undo", "go back to the layout before, also from the middle of a change", _undo),
    }
    made["relayout"].add_argument("layout", metavar="SPEC", help="for example 2E-P-D")
    made["scale"].add_argument("counts", nargs="+", metavar="ROLE=NUMBER", help="for example E=3, or P=1,D=3")
    made["drain"].add_argument("instance", metavar="INSTANCE", help="for example E1")
    made["restart"].add_argument("instance", metavar="INSTANCE|all|front", help="for example P0")
    made["restart"].add_argument(
        "--proxy",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with front: an option of the front doors from now on, as of serve",
    )
    for name in ("relayout", "scale", "drain"):
        made[name].add_argument("--dry-run", action="store_true", help="only say what would be done, or what is short")
    for name in ("relayout", "scale", "restart", "undo"):
        made[name].add_argument(
            "--pause",
            type=float,
            default=0.0,
            metavar="S",
            help="let new requests wait for up to S seconds where nothing else helps",
        )
    for name in ("relayout", "scale", "drain", "restart", "undo"):
        made[name].add_argument(
            "--wait",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="wait for the end (default), or return when it has begun",
        )
    return made


def _add(commands: Any, name: str, help: str, call: Callable[[dict[str, Any]], Call]) -> Parser:
    parser = subparser(commands, name, help)
    parser.set_defaults(command=_status_command if call is _status else lambda arguments: _change(call, arguments))
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    add_which(parser)
    return parser


def _status(arguments: dict[str, Any]) -> Call:
    return "/deployment", {}


def _relayout(arguments: dict[str, Any]) -> Call:
    return "/deployment/layout", {"layout": arguments["layout"], **_options(arguments)}


def _scale(arguments: dict[str, Any]) -> Call:
    return "/deployment/scale", {"counts": parse_counts(arguments["counts"]), **_options(arguments)}


def _drain(arguments: dict[str, Any]) -> Call:
    return f"/deployment/instances/{arguments['instance']}/drain", {"dry_run": arguments["dry_run"]}


def _restart(arguments: dict[str, Any]) -> Call:
    if arguments["instance"] == "front":
        return "/deployment/front/restart", {"proxy": arguments["proxy"]}
    if arguments["proxy"]:
        raise ConfigError("--proxy is for front doors: epd-serve restart front --proxy KEY=VALUE", param="--proxy")
    where = "" if arguments["instance"] == "all" else f"/instances/{arguments['instance']}"
    return f"/deployment{where}/restart", {"pause_s": arguments["pause"]}


def _undo(arguments: dict[str, Any]) -> Call:
    return "/deployment/undo", {"pause_s": arguments["pause"]}


def _options(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"dry_run": arguments["dry_run"], "pause_s": arguments["pause"]}


def parse_counts(words: list[str]) -> dict[str, int]:
    """`E=3` or `P=1,D=3` as numbers by role. Raises ConfigError."""
    counts = {}
    for word in ",".join(words).split(","):
        role, _, number = word.strip().partition("=")
        if role not in set(Role) or not number.isdecimal():
            raise ConfigError(f"scale: {word.strip()!r} is not ROLE=NUMBER, for example E=3 or P=1,D=3", param="counts")
        counts[role] = int(number)
    return counts


def _status_command(arguments: dict[str, Any]) -> int:
    with client(arguments) as http:
        status = get(http, "/deployment")
        try:
            plan = get(http, "/rates")["planned"]
            lines = ["", *(line for line, _ in planned_lines(plan))] if plan else []
        except EpdError as error:  # no front door may be up: the status says so itself
            plan, lines = None, ["", f"whether it goes as planned is not known: {error}"]
    print(
        json.dumps(status | {"planned": plan}, indent=2)
        if arguments["as_json"]
        else "\n".join([status_text(status), *lines])
    )
    return DONE


def _change(call: Callable[[dict[str, Any]], Call], arguments: dict[str, Any]) -> int:
    as_json = arguments["as_json"]
    path, body = call(arguments)
    with client(arguments) as http:
        answer = http.post(path, json=body)
        if answer.status_code >= 400:
            return _refused(answer, as_json)
        told = answer.json()
        if arguments.get("instance") == "front":
            return _front_restarted(http, wait=arguments["wait"], as_json=as_json)
        change = told.get("change")
        if change is None or not arguments["wait"]:
            print(json.dumps(told, indent=2) if as_json else begun_text(told))
            return DONE
        if not as_json:
            print(begun_text(told), flush=True)
        change = _until_over(http, change, (lambda line: None) if as_json else _say)
    print(json.dumps({**told, "change": change}, indent=2) if as_json else change_text(change))
    return DONE if change["state"] == "done" else FAILED


def _front_restarted(http: httpx.Client, *, wait: bool, as_json: bool) -> int:
    status = get(http, "/deployment")
    while wait and status["front"]["restarting"]:
        time.sleep(LOOK_S)
        status = get(http, "/deployment")
    front, parts = status["front"], {name: one for name, one in status["parts"].items() if name.startswith("front.")}
    if as_json:
        print(json.dumps({"front": front, "parts": parts}, indent=2))
    elif front["trouble"]:
        print(f"epd-serve: {front['trouble']}", file=sys.stderr)
    else:
        print("begun" if front["restarting"] else f"restarted: {', '.join(sorted(parts))}")
    return FAILED if front["trouble"] else DONE


def _until_over(http: httpx.Client, change: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    told: set[tuple[int, bool]] = set()
    while True:
        for number, step in enumerate(change["steps"]):
            over = step["seconds"] is not None
            if (number, over) not in told:
                told.add((number, over))
                say(step_text(step))
        if change["over"]:
            return change
        time.sleep(LOOK_S)
        change = get(http, f"/deployment/changes/{change['number']}")


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def get(http: httpx.Client, path: str, **params: Any) -> dict[str, Any]:
    """Of whoever answers: where the controller dies meanwhile another one follows, as long as there is a launch."""
    import httpx

    while True:
        try:
            answer = http.get(path, params=params)
            break
        except (httpx.ReadError, httpx.RemoteProtocolError):
            time.sleep(LOOK_S)
    if answer.status_code >= 400:
        raise EpdError(_message(answer))
    told: dict[str, Any] = answer.json()
    return told


def _refused(answer: httpx.Response, as_json: bool) -> int:
    if as_json:
        print(answer.text)
    else:
        print(f"epd-serve: {_message(answer)}", file=sys.stderr)
    return REFUSED if answer.status_code < 500 else FAILED


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}: {answer.text[:200]}"


def status_text(status: dict[str, Any]) -> str:
    """For people."""
    several = len(status["nodes"]) > 1
    rows = [("instance", "role", "devices", "state", "in flight", "restarts")]
    for one in status["instances"]:
        state = f"{one['phase']}: {one['reason']}" if one["reason"] else str(one["phase"])
        role = f"{one['role']} (P|D)" if one["both"] else str(one["role"])
        devices = f"{short_node(one['node'])}:" * several + ",".join(map(str, one["devices"]))
        rows.append((str(one["id"]), role, devices, state, str(one["in_flight"]), str(one["restarts"])))
    lines = [f"launch {status['launch']}: {status['layout']}, {status['state']}"]
    if status["trouble"]:
        lines.append(f"not reached: {status['trouble']}")
    if status["paused_s"]:
        lines.append(f"new requests wait, for {status['paused_s']:.0f} s more")
    parts = [
        (_short_name(name), str(part["pid"] or "-"), str(part["restarts"] or 0))
        for name, part in status["parts"].items()
    ]
    lines += ["", table(rows), "", table([("process", "pid", "restarts"), *parts])]
    if status["change"] is not None:
        change = status["change"]
        lines += ["", f"{change['what']}: {change['from']} → {change['to']}, {change['state']}"]
        lines += [f"  {step_text(step)}" for step in change["steps"]]
    return "\n".join(lines)


def planned_lines(plan: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """What was planned, and each way in which it has come otherwise (True)."""
    yield (
        f"planned: {plan['rate_rps']:g} requests/s, TTFT p50 {plan['ttft_ms']:g} ms, TPOT p50 {plan['tpot_ms']:g} ms, "
        f"{plan['attainment']:.0%} within the SLO",
        False,
    )
    yield from ((f"not as planned: {one}", True) for one in plan["apart"])


def _short_name(name: str) -> str:
    """Of a process on one of several nodes."""
    node, slash, own = name.rpartition("/")
    return f"{short_node(node)}{slash}{own}"


def begun_text(told: dict[str, Any]) -> str:
    """What will be done."""
    plan = told["plan"]
    lines = [f"→ {told['layout']}" + ("" if plan["waves"] else ": nothing is to be done")]
    if told["change"] is None:
        lines += [f"  {number}. {', '.join(map(_words, wave))}" for number, wave in enumerate(plan["waves"], 1)]
    if plan["expected_s"]:
        lines.append(f"  takes about {plan['expected_s']:.0f} s")
    if plan["pauses"]:
        pause_s = plan["expected_pause_s"]
        lines.append("  new requests wait" + (f" for about {pause_s:.0f} s of it" if pause_s is not None else ""))
    return "\n".join([*lines, *(f"  note: {note}" for note in told["notes"])])


def change_text(change: dict[str, Any]) -> str:
    """How it ended."""
    text = f"{change['state']} in {change['seconds']:.1f} s"
    if change["paused_s"]:
        text += f"; new requests waited for {change['paused_s']:.1f} s"
    if change["cut_requests"]:
        text += f"; {change['cut_requests']} requests were cut off"
    if change["state"] == "failed":
        text += f" and reverted to {change['from']}: {change['reason']}"
    return text


def step_text(step: dict[str, Any]) -> str:
    """One step, and how long it took."""
    took = f": {step['seconds']:.1f} s" if step["seconds"] is not None else " …"
    return _words(step) + took + (f" ({step['note']})" if step.get("note") else "")


def _words(step: dict[str, Any]) -> str:
    text = " ".join(str(word) for word in (step["action"], step.get("instance")) if word)
    return f"{text} to {step['role']}" if step["action"] == "flip" else text
