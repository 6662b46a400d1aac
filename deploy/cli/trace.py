"""`epd-serve trace REQUEST_ID --out trace.json`: a request, or the last ones, as a file that Perfetto opens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from urllib.parse import quote

from deploy.cli.changing import DONE, get
from deploy.cli.which import Arguments, client
from deploy.cli.why import ORDERS
from deploy.options.flags import Parser
from epd_serve.errors import ConfigError, EpdError

MOST = 200
VIEWER = "https://ui.perfetto.dev"


def trace_flags(parser: Parser) -> None:
    parser.add_argument(
        "request", nargs="?", default="", metavar="REQUEST_ID",
        help="x-request-id of its answer, or the client's own",
    )  # fmt: skip
    parser.add_argument("--last", type=_count, default=0, metavar="N", help=f"N of those remembered, up to {MOST}")
    parser.add_argument("--order", choices=ORDERS, default=ORDERS[0], help="of --last: which (default: newest)")
    parser.add_argument(
        "--out", type=Path, default=Path("trace.json"), metavar="FILE", help="where to (default: trace.json)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 to {MOST}")
    return int(text)


def trace(arguments: Arguments) -> int:
    import msgspec

    from deploy.cli.trace_file import trace_file
    from deploy.front.traced import NodeTrace

    name, last, out = arguments["request"], arguments["last"], arguments["out"]
    if bool(name) == bool(last):
        raise ConfigError("trace wants either a request's id or --last N")
    with client(arguments) as http:
        names = [name]
        if last:
            names = [one["id"] for one in get(http, "/requests", order=arguments["order"], limit=last)["requests"]]
        if not names:
            raise EpdError("no request is remembered")
        requests = [get(http, f"/requests/{quote(one, safe='')}")["request"] for one in names]
        nodes = get(http, "/traces", request=[one["id"] for one in requests])["nodes"]
    made = trace_file(requests, msgspec.convert(nodes, list[NodeTrace]))
    try:
        out.write_text(json.dumps(made), encoding="utf-8")
    except OSError as error:
        raise EpdError(f"{out} cannot be written: {error.strerror}") from None
    stamped = "" if any(node["stamps"] for node in nodes) else "; what happened within the stages: with --trace-dir"
    print(f"{out}: {len(requests)} requests, {len(made['traceEvents'])} events; {VIEWER} opens it{stamped}")
    return DONE
