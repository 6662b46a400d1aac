"""`epd-serve why REQUEST_ID`: where a request went and why, what it waited for, what failed, why it was refused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from deploy.cli.changing import DONE, get
from deploy.cli.which import Arguments, client
from deploy.memory.placement_table import table
from deploy.options.flags import Parser

ORDERS = ("newest", "slowest", "failed")
WIDEST, BAR_LEAST = 140, 16
ELSEWHERE = ("at_s", "event", "s", "span")
"""Of an event, what is shown in another way, or by another tool."""

TIMES = 22
"""Characters before the words: when it happened, and how long it took."""

BAR, MARK, REST = "█", "│", "·"
"""What took from here to there, what happened here, and the time of the request."""

Json = Mapping[str, Any]


def why_flags(parser: Parser) -> None:
    parser.add_argument(
        "request", nargs="?", default="", metavar="REQUEST_ID",
        help="x-request-id of its answer, or the client's own; without one the requests that are remembered are listed",
    )  # fmt: skip
    parser.add_argument("--order", choices=ORDERS, default=ORDERS[0], help="of the list (default: newest)")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="lines of the list, up to 200")


def why(arguments: Arguments) -> int:
    name = arguments["request"]
    with client(arguments) as http:
        if name:
            answer = get(http, f"/requests/{quote(name, safe='')}")
        else:
            answer = get(http, "/requests", order=arguments["order"], limit=arguments["limit"])
    if arguments["as_json"]:
        print(json.dumps(answer, indent=2))
    elif name:
        print(request_text(answer["request"], answer["others"], min(WIDEST, shutil.get_terminal_size().columns)))
    else:
        print(list_text(answer["requests"], time.time()))
    return DONE


def list_text(requests: list[Json], now: float) -> str:
    """For people."""
    if not requests:
        return "no request is remembered"
    rows = [("request", "client's id", "ago", "path", "ended", "code", "attempts", "first byte", "total")]
    for one in requests:
        rows.append((
            one["id"], one["client_id"] or "-", _seconds(now - one["began"]), one["path"] or "-", one["outcome"],
            one["code"] or "-", str(one["attempts"]), _seconds(one["first_byte_s"]), _seconds(one["total_s"]),
        ))  # fmt: skip
    return table(rows)


def request_text(request: Json, others: list[str], width: int) -> str:
    """For people: what became of it, why these instances, and its time as bars."""
    lines = [*_head(request), *map(_wait, request["waits"]), ""]
    for choice in request["choices"]:
        lines += [*_choice(choice), ""]
    lines += _timeline(request, width)
    if request["left_out"]:
        lines.append(f"({request['left_out']} more are not remembered)")
    if others:
        lines += ["", f"the client has named {len(others)} more requests so: {', '.join(others)}"]
    return "\n".join(lines)


def _head(request: Json) -> Iterator[str]:
    mine = f" ({request['client_id']})" if request["client_id"] else ""
    items = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in request["items"].items()) or "text"
    yield f"request {request['id']}{mine}: {request['endpoint']}, {items}"
    outcomes = {"running": "is running, for", "cancelled": "cancelled after", "broken": "broken off after"}
    ended = outcomes.get(request["outcome"], f"{request['outcome']} in")
    attempts = f", {request['attempts']} attempts" if request["attempts"] > 1 else ""
    yield f"  {ended} {_seconds(request['total_s'])}{_way(request)}{attempts}"
    if request["code"]:
        because = (
            f": {request['message']}" if request["message"] else f" at {request['param']}" if request["param"] else ""
        )
        yield f"  {request['code']}{because}"
    tokens, finish = request["tokens"], f", finish {request['finish']}" if request["finish"] else ""
    if request["attempts"]:
        said = [f"{tokens[name]} {name} tokens" for name in ("prompt", "completion") if tokens[name] is not None]
        if tokens["completion"] is None and tokens["counted"] is not None:
            said.append(f"{tokens['counted']} tokens by its events")
        cached = tokens["cached"]
        said.append("prefix cache not told" if cached is None else f"{cached} tokens from the prefix cache")
        yield f"  {', '.join(said)}{finish}"
    if (gaps := request["gaps"])["count"]:
        share = gaps["within"] / gaps["count"]
        yield f"  {gaps['within']} of {gaps['count']} token gaps within {_seconds(gaps['limit_s'])} ({share:.1%})"


def _way(request: Json) -> str:
    stages = (("encode", "+".join(request["encode"])), ("prefill", request["prefill"]), ("decode", request["decode"]))
    way = ", ".join(f"{stage} {instance}" for stage, instance in stages if instance)
    return f" by {request['path']}: {way}" if request["path"] else ""


def _wait(wait: Json) -> str:
    waited = "is waiting" if wait["s"] is None else f"waited {_seconds(wait['s'])}"
    return f"  {waited} for {wait['for']}: {wait['why']}"


def _choice(choice: Json) -> Iterator[str]:
    what = {"prompt": "takes the prompt", "decode": "decodes", "encode": "encodes"}[choice["work"]]
    plan = f"plan {choice['plan']} ({choice['because']}): " if choice["plan"] else ""
    skipped = f"; nobody else encodes: {choice['skipped']}" if choice["skipped"] not in ("", "no items") else ""
    yield f"{plan}{', '.join(choice['chosen'])} {what}, at {_seconds(choice['at_s'])}: {choice['why']}{skipped}"
    if len(choice["candidates"]) < 2:
        return
    by = f" ({choice['policy']})" if choice["work"] != "encode" else ""
    rows = [("", f"candidate{by}", "load", "per second", "predicted", "")]
    for one in choice["candidates"]:
        per_s = f"{one['per_s']:.0f}" if one["per_s"] else "-"
        predicted = _seconds(one["predicted_s"]) if not one["why_not"] else "-"
        chosen = "→" if one["chosen"] else ""
        rows.append((chosen, one["id"], f"{one['load']:.0f}", per_s, predicted, one["why_not"]))
    yield from (f"  {line}".rstrip() for line in table(rows).splitlines())


def _timeline(request: Json, width: int) -> Iterator[str]:
    total_s = max(request["total_s"], 1e-6)
    described = [(one["at_s"], one.get("s"), _words(one)) for one in request["events"]]
    longest = max((len(words) for _, _, words in described), default=0)
    room = max(20, min(longest + 1, width - TIMES - BAR_LEAST))
    bar = max(BAR_LEAST, width - TIMES - room)
    yield f"{'at':>9}  {'took':>9}  "
    for at_s, took_s, words in described:
        took = _seconds(took_s) if took_s is not None else ""
        drawn = _bar((at_s - (took_s or 0.0)) / total_s, at_s / total_s, bar, lasts=took_s is not None)
        yield f"{_seconds(at_s):>9}  {took:>9}  {words[: room - 1]:{room}}{drawn}".rstrip()


def _bar(begin: float, end: float, width: int, *, lasts: bool) -> str:
    """Of a part of the whole time, which is from 0 to 1."""
    first, last = (min(width - 1, max(0, int(part * width))) for part in (begin, end))
    drawn = (BAR if lasts else MARK) * (last - first + 1 if lasts else 1)
    return REST * (first if lasts else last) + drawn + REST * (width - 1 - last)


def _words(event: Json) -> str:
    """An event in a few words: its name, whom it is about, and the rest as it stands."""
    name = event["event"].replace("_", " ")
    rest = {key: value for key, value in event.items() if key not in ELSEWHERE and value not in ("", None)}
    stage = rest.pop("stage", "")
    details = " ".join(f"{key}={value}" if not isinstance(value, str) else value for key, value in rest.items())
    return " ".join(filter(None, (name, stage, details)))


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
