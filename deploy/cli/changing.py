"""`epd-serve status|relayout|scale|drain|restart|undo|follow`: asks a running deployment, and waits for its end."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deploy.cli.which import Arguments, client
from deploy.memory.placement_table import short_node, table
from deploy.options.flags import Parser
from epd_serve.errors import ConfigError, EpdError
from epd_serve.roles import Role

if TYPE_CHECKING:
    import httpx

DONE, FAILED, REFUSED = 0, 1, 2
LOOK_S = 0.2
Json = dict[str, Any]


def relayout_flags(parser: Parser) -> None:
    parser.add_argument("layout", metavar="SPEC", help="for example 2E-P-D")
    _dry_run(parser)
    _pause(parser)
    _wait(parser)


def scale_flags(parser: Parser) -> None:
    parser.add_argument("counts", nargs="+", metavar="ROLE=NUMBER", help="for example E=3, or P=1,D=3")
    _dry_run(parser)
    _pause(parser)
    _wait(parser)


def drain_flags(parser: Parser) -> None:
    parser.add_argument("instance", metavar="INSTANCE", help="for example E1")
    _dry_run(parser)
    _wait(parser)


def restart_flags(parser: Parser) -> None:
    parser.add_argument("instance", metavar="INSTANCE|all|front", help="for example P0")
    parser.add_argument(
        "--proxy",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with front: an option of the front doors from now on, as of serve",
    )
    _pause(parser)
    _wait(parser)


def undo_flags(parser: Parser) -> None:
    _pause(parser)
    _wait(parser)


def follow_flags(parser: Parser) -> None:
    parser.add_argument("mode", choices=("off", "advise", "act"), metavar="off|advise|act", help="from now on")


def _dry_run(parser: Parser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done, or what is short")


def _pause(parser: Parser) -> None:
    parser.add_argument(
        "--pause",
        dest="pause_s",
        type=float,
        default=0.0,
        metavar="S",
        help="let new requests wait for up to S seconds where nothing else helps",
    )


def _wait(parser: Parser) -> None:
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait for the end (default), or return when it has begun",
    )


def relayout(arguments: Arguments) -> int:
    return _change(arguments, "layout", layout=arguments["layout"])


def scale(arguments: Arguments) -> int:
    return _change(arguments, "scale", counts=parse_counts(arguments["counts"]))


def drain(arguments: Arguments) -> int:
    return _change(arguments, f"instances/{arguments['instance']}/drain")


def restart(arguments: Arguments) -> int:
    name, options = arguments["instance"], arguments["proxy"]
    if name == "front":
        return _restart_front(arguments, options)
    if options:
        raise ConfigError("--proxy is for front doors: epd-serve restart front --proxy KEY=VALUE", param="--proxy")
    return _change(arguments, "restart" if name == "all" else f"instances/{name}/restart")


def undo(arguments: Arguments) -> int:
    return _change(arguments, "undo")


def follow(arguments: Arguments) -> int:
    with client(arguments) as http:
        answer = http.post("/deployment/follow", json={"mode": arguments["mode"]})
        if answer.status_code >= 400:
            return _refused(answer, arguments["as_json"])
    print(answer.text if arguments["as_json"] else f"follow: {arguments['mode']}")
    return DONE


def parse_counts(words: list[str]) -> dict[str, int]:
    """`E=3` or `P=1,D=3` as numbers by role. Raises ConfigError."""
    counts = {}
    for word in ",".join(words).split(","):
        role, _, number = word.strip().partition("=")
        if role not in set(Role) or not number.isdecimal():
            raise ConfigError(f"scale: {word.strip()!r} is not ROLE=NUMBER, for example E=3 or P=1,D=3", param="counts")
        counts[role] = int(number)
    return counts


def status_flags(parser: Parser) -> None:
    parser.add_argument(
        "--why",
        action="store_true",
        help="what the follower of the load has decided lately, and by what",
    )


def status(arguments: Arguments) -> int:
    if arguments["why"]:
        with client(arguments) as http:
            decisions = get(http, "/deployment/decisions")
        print(json.dumps(decisions, indent=2) if arguments["as_json"] else decisions_text(decisions))
        return DONE
    with client(arguments) as http:
        told = get(http, "/deployment")
        try:
            plan = get(http, "/rates")["planned"]
            lines = ["", *(line for line, _ in planned_lines(plan))] if plan else []
        except EpdError as error:  # no front door may be up: the status says so itself
            plan, lines = None, ["", f"whether it goes as planned is not known: {error}"]
    if arguments["as_json"]:
        print(json.dumps(told | {"planned": plan}, indent=2))
    else:
        print("\n".join([status_text(told), *lines]))
    return DONE


def _change(arguments: Arguments, what: str, **body: Any) -> int:
    """Have it begun, and wait for its end. `body`: beside the flags that commands have in common."""
    as_json = arguments["as_json"]
    body |= {name: arguments[name] for name in ("dry_run", "pause_s") if name in arguments}
    with client(arguments) as http:
        answer = http.post(f"/deployment/{what}", json=body)
        if answer.status_code >= 400:
            return _refused(answer, as_json)
        told = answer.json()
        waits = arguments["wait"] and told["change"] is not None
        if not as_json:
            print(begun_text(told), flush=True)
        if waits:
            told["change"] = _until_over(http, told["change"], silent=as_json)
    if as_json:
        print(json.dumps(told, indent=2))
    elif waits:
        print(change_text(told["change"]))
    return FAILED if waits and told["change"]["state"] != "done" else DONE


def _restart_front(arguments: Arguments, options: list[str]) -> int:
    with client(arguments) as http:
        answer = http.post("/deployment/front/restart", json={"proxy": options})
        if answer.status_code >= 400:
            return _refused(answer, arguments["as_json"])
        told = get(http, "/deployment")
        while arguments["wait"] and told["front"]["restarting"]:
            time.sleep(LOOK_S)
            told = get(http, "/deployment")
    front, parts = told["front"], {name: one for name, one in told["parts"].items() if name.startswith("front.")}
    if arguments["as_json"]:
        print(json.dumps({"front": front, "parts": parts}, indent=2))
    elif front["trouble"]:
        print(f"epd-serve: {front['trouble']}", file=sys.stderr)
    else:
        print("begun" if front["restarting"] else f"restarted: {', '.join(sorted(parts))}")
    return FAILED if front["trouble"] else DONE


def _until_over(http: httpx.Client, change: Json, *, silent: bool) -> Json:
    told: set[tuple[int, bool]] = set()
    while True:
        for number, step in enumerate(change["steps"]):
            now = (number, step["seconds"] is not None)
            if now not in told and not silent:
                print(f"  {step_text(step)}", flush=True)
            told.add(now)
        if change["over"]:
            return change
        time.sleep(LOOK_S)
        change = get(http, f"/deployment/changes/{change['number']}")


def get(http: httpx.Client, path: str, **params: Any) -> Json:
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
    told: Json = answer.json()
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


def status_text(status: Json) -> str:
    """For people."""
    several = len(status["nodes"]) > 1
    rows = [("instance", "role", "devices", "state", "in flight", "restarts")]
    for one in status["instances"]:
        state = f"{one['phase']}: {one['reason']}" if one["reason"] else str(one["phase"])
        role = f"{one['role']} (P|D)" if one["both"] else str(one["role"])
        devices = f"{short_node(one['node'])}:" * several + ",".join(map(str, one["devices"]))
        rows.append((str(one["id"]), role, devices, state, str(one["in_flight"]), str(one["restarts"])))
    lines = [f"launch {status['launch']}: {status['layout']}, {status['state']}"]
    if (mode := status["follow"]["mode"]) != "off":
        lines.append(f"follow: {mode} (status --why: what was decided, and by what)")
    if status["trouble"]:
        lines.append(f"not reached: {status['trouble']}")
    if status["paused_s"]:
        lines.append(f"new requests wait, for {status['paused_s']:.0f} s more")
    parts = [
        (_short_name(name), str(part["pid"] or "-"), "-" if part["restarts"] is None else str(part["restarts"]))
        for name, part in status["parts"].items()
    ]
    lines += ["", table(rows), "", table([("process", "pid", "restarts"), *parts])]
    if status["change"] is not None:
        change = status["change"]
        lines += ["", f"{change['what']}: {change['from']} → {change['to']}, {change['state']}"]
        lines += [f"  {step_text(step)}" for step in change["steps"]]
    return "\n".join(lines)


def decisions_text(following: Json) -> str:
    """For people, the newest first."""
    if following["mode"] == "off":
        lines = ["the load is not followed: epd-serve follow advise, or act"]
    else:
        lines = [
            f"follow: {following['mode']}, every {following['every_s']:g} s; a group may be busy {following['use']:.0%}"
        ]
    for one in following["budgets"]:
        beside = f" beside {', '.join(one['neighbours'])}" if one["neighbours"] else ""
        lines.append(
            f"{one['instance']}{beside}: {one['item_tokens']} item tokens a step, {one['held_steps']} steps held back"
        )
    for one in following["decisions"]:
        again = f", {one['times']} times alike" if one["times"] > 1 else ""
        rates = ", ".join(f"{rate:.2f} {kind} requests/s" for kind, rate in one["rates_rps"].items())
        lines += [
            "",
            f"{one['ago_s']:.0f} s ago{again}: {one['layout']}: {one['outcome']}",
            f"  reckoned with: {rates}",
        ]
        groups = [
            (each["group"], *(f"{each[of]:.2f}" for of in ("needed", "peak")), str(each["there"]), str(each["wanted"]))
            for each in one["groups"]
        ]
        lines += [f"  {line}" for line in table([("group", "busy", "peak", "there", "wanted"), *groups]).splitlines()]
        if (chosen := one["chosen"]) is not None:
            lines.append(f"  {chosen['what']} to {_target(chosen)}: {chosen['why']}")
        if (gain := one["gain"]) is not None:
            said = f"{gain['measured']:.0%} of its time, {gain['predicted']:.0%} was predicted"
            lines.append(f"  {gain['group']} is then busy for {said}")
        lines += [f"  not {_target(move)}: {move['reason']}" for move in one["refused"]]
        lines.append(f"  {one['plan']}")
    return "\n".join(lines)


def _target(move: Json) -> str:
    return str(move["core_share"] or move["layout"])


def planned_lines(plan: Json) -> Iterator[tuple[str, bool]]:
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


def begun_text(told: Json) -> str:
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


def change_text(change: Json) -> str:
    """How it ended."""
    text = f"{change['state']} in {change['seconds']:.1f} s"
    if change["paused_s"]:
        text += f"; new requests waited for {change['paused_s']:.1f} s"
    if change["cut_requests"]:
        text += f"; {change['cut_requests']} requests were cut off"
    if change["state"] == "failed":
        text += f" and reverted to {change['from']}: {change['reason']}"
    return text


def step_text(step: Json) -> str:
    """One step, and how long it took."""
    took = f": {step['seconds']:.1f} s" if step["seconds"] is not None else " …"
    return _words(step) + took + (f" ({step['note']})" if step.get("note") else "")


def _words(step: Json) -> str:
    text = " ".join(str(word) for word in (step["action"], step.get("instance")) if word)
    if step["action"] == "share":
        return f"{text}: cores {', '.join(map(str, step['cores']))}"
    return f"{text} to {step['role']}" if step["action"] == "flip" else text
