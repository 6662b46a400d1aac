"""`epd-serve render`: the objects by which somebody else's cluster runs a deployment, as text."""

from __future__ import annotations

import sys

from deploy.cli.which import Arguments
from deploy.kubernetes.render_values import Values
from deploy.options.config import DeployConfig, build_config, flag_of, proxy_values
from deploy.options.flags import Parser, add_settings, subparser
from proxy.config.tree import settings_of


def render_flags(parser: Parser) -> None:
    where = parser.add_subparsers(required=True, metavar="WHERE", parser_class=Parser)
    one = subparser(where, "kubernetes", "manifests for kubectl apply, on standard output")
    one.set_defaults(command=_kubernetes)
    one.add_argument("what", metavar="SPEC|FILE.yaml", help="a layout, for example (E-P)-D, or settings from a file")
    one.add_argument("--model", help="directory in the pods (--mount brings it), or hub name")
    one.add_argument("--device", choices=("npu", "cuda", "cpu"), help="kind of the pods' devices")
    one.add_argument("--name", help="of the deployment; names of its objects begin with it (default: epd)")
    one.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another setting of serve, for example follow=act or stage_args='P:--max-num-seqs 8'; repeatable",
    )
    add_settings(one, Values)


def _kubernetes(arguments: Arguments) -> int:
    from deploy.kubernetes.render import manifests, text_of

    what: str = arguments["what"]
    file = what if what.endswith((".yaml", ".yml")) else None
    given = {key: arguments[key] for key in ("model", "device", "name") if arguments[key] is not None}
    given |= {} if file else {"layout": what}
    given |= proxy_values(arguments["set"], DeployConfig, "set entry")
    config: DeployConfig = build_config(given | {"runtime": "kubernetes"}, file)
    known = settings_of(Values)
    asked = {key: known[key].typed(value, flag_of(key)) for key, value in arguments.items() if key in known}
    values = Values(**asked, given=config)
    text = text_of(manifests(values))
    for warning in values.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    print(text, end="")
    return 0
