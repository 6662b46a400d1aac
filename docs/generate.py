"""Writes the reference pages from the code: `make reference`.

The command line is read from its parsers, the configuration from its tree of settings, the metrics from what is
registered, the HTTP API from the proxy's OpenAPI document. What is written is committed; `tests/docs` holds it to this.
"""

from __future__ import annotations

import argparse
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from bench.cli import parser as bench_parser
from deploy.cli.command import parser as serve_parser
from deploy.control.changes import Change, Changes, State
from deploy.control.metrics import ControlMetrics
from deploy.control.reconciler import Reconciler
from deploy.follow.live import Follower
from deploy.follow.report import FollowMetrics
from deploy.front.key_watch import KeyMetrics
from deploy.kubernetes.hosts import KubernetesHosts
from deploy.kubernetes.scale import PodScale
from deploy.options.config import DeployConfig, ProxyConfig
from proxy.background import Background
from proxy.config.settings import ModelIdentity, ProxySettings
from proxy.config.tree import Setting, settings_of
from proxy.http.app import create_app
from proxy.http.openapi import UNSERVED
from proxy.metrics import LabelledCounter, Metrics
from proxy.records.counts import RequestCounts
from proxy.registry.stage_metrics import StageMetrics, kv_metrics, stage_metrics, store_metrics
from proxy.registry.table import InstanceTable
from proxy.request.client import HEADER, SLO_TPOT, SLO_TTFT
from proxy.workers.hub import worker_metrics
from proxy.workers.stage_scrape import StageScrape

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
EXAMPLE = ROOT / "docs" / "examples" / "deployment.yaml"
NOTE = "<!-- Written by `make reference` from the code; a test holds it to that. Do not edit. -->"
MIB = 1 << 20


def pages() -> dict[str, str]:
    """Returns the text of each page by its name under `docs/reference/`."""
    return {
        "cli.md": command_line(),
        "configuration.md": configuration(),
        "metrics.md": metrics(),
        "http-api.md": http_api(),
    }


# --- command line ---------------------------------------------------------------------------------------------------


def command_line() -> str:
    serve, bench = serve_parser(), bench_parser()
    return _page(
        "Command line",
        "`make help` lists the make targets. Every command here has `--help`, which says the same.",
        *_commands(serve),
        *_commands(bench),
    )


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """One section for each leaf of a parser's commands, in the order of its help."""
    choices = _subparsers(parser)
    if choices is None:
        yield _command(parser)
        return
    if " " not in parser.prog:
        yield f"## {parser.prog}\n\n`{parser.prog} --version` tells the version."
    for one in choices.values():
        yield from _commands(one)


def _subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser] | None:
    for action in parser._actions:  # argparse has no public way to ask
        if isinstance(action, argparse._SubParsersAction):
            return typing.cast("Mapping[str, argparse.ArgumentParser]", action.choices)
    return None


def _command(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if argparse.SUPPRESS in (action.help, action.dest) or isinstance(action, argparse._HelpAction):
            continue
        text, said = _split_default((action.help or "") % {**vars(action), "prog": parser.prog})
        value = _default_of(action)
        default = said if said and value == 0 else _default(value) or said  # 0 that stands for what is said
        if action.choices is not None:
            text = f"{text} ({', '.join(f'`{choice}`' for choice in action.choices)})".strip()
        rows.append((_argument(action), _of_any_user(default), _linked(_of_any_user(text))))
    description = " ".join((parser.description or "").split("\n\n")[0].split())
    return f"### `{parser.prog}`\n\n{_sentence(description)}\n\n{_table(('argument', 'default', ''), rows)}"


def _split_default(text: str) -> tuple[str, str]:
    """A help's text, and what it says of the default in its parentheses: a column of its own has that."""
    found = re.search(r" \(default:? (.+)\)$", text)
    return (text[: found.start()], found[1]) if found else (text, "")


def _of_any_user(text: str) -> str:
    return text.replace(str(Path.home()), "~")


def _linked(text: str) -> str:
    """Names of our pages as links to them."""
    return re.sub(r"\bdocs/([\w/-]+\.md)", r"[\1](../\1)", text)


def _argument(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return f"`[{metavar}]`" if action.nargs in ("?", "*") else f"`{metavar}`"
    value = "" if action.nargs == 0 or action.choices is not None else f" {metavar}"
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings)


def _default_of(action: argparse.Action) -> Any:
    """The default that holds: that of the setting where the parser leaves it to the configuration."""
    if action.default is not argparse.SUPPRESS:
        return action.default
    setting = {**settings_of(ProxyConfig), **settings_of(DeployConfig)}.get(action.dest)
    return setting.default if setting else None


# --- configuration --------------------------------------------------------------------------------------------------


def configuration() -> str:
    rows = [
        (f"`{one.key}`", "`false`" if one.default is False else _default(one.default), *_meaning(one))
        for one in settings()
    ]
    return _page(
        "Configuration",
        "Settings of `epd-serve serve`. Each has one name, and a value that is taken from the first of these that has "
        "one:",
        "1. its flag: `media.max_bytes` is `--media.max-bytes`; `--proxy media.max_bytes=…` says the same\n"
        "2. its variable in the environment: `EPD_MEDIA_MAX_BYTES`, if it is not empty\n"
        "3. the YAML file of `--config`: `media.max_bytes:`, or `max_bytes:` under `media:`, each also under `proxy:`\n"
        "4. its default",
        "A file that names all: [deployment.yaml](../examples/deployment.yaml). Sizes in MiB or KiB and times in "
        "seconds, as the names say. `model` stands without a flag. An unknown flag or key is refused with the nearest "
        "that there is; other variables that begin with `EPD_` are not looked at (Kubernetes sets `EPD_PORT` where a "
        "service is called `epd`: give `--port`). `epd-serve proxy` takes the settings from `served_model_name` on, "
        "[and a few of its own](cli.md#epd-serve-proxy).",
        _table(("setting", "default", "meaning"), rows),
    )


def settings() -> list[Setting]:
    """All of `epd-serve serve` that are not hidden: those without a section first."""
    shown = [one for one in settings_of(DeployConfig).values() if not one.notes.get("hidden")]
    return sorted(shown, key=lambda one: "." in one.key)


def _meaning(setting: Setting) -> tuple[str]:
    text, default = _split_default(setting.meaning.rstrip("."))
    text += f" ({', '.join(f'`{choice}`' for choice in setting.choices)})" if setting.choices else ""
    return (_sentence(_linked(text)) + (f" Default: {default}." if default else ""),)


def complete_file() -> str:
    """A file for `--config` that names each setting, with its default."""
    lines, section = (
        ["# Every setting of `epd-serve serve`, with its default. Keep what you change and drop the rest."],
        "",
    )
    for one in settings():
        before, _, name = one.key.rpartition(".")
        if before != section:
            lines += ["", f"{before}:"]
            section = before
        indent = "  " * bool(section)
        lines += [
            "",
            *textwrap.wrap(_sentence(one.meaning), 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "),
        ]
        value = ",".join(one.default) if isinstance(one.default, tuple) else one.default
        lines.append(indent + yaml.safe_dump({name: value}).strip())
    return "\n".join(lines) + "\n"


# --- metrics --------------------------------------------------------------------------------------------------------


def metrics() -> str:
    """All families, in groups by who counts."""
    table = InstanceTable()
    groups: list[tuple[str, str, list[tuple[Metric, Sequence[str]]]]] = [
        (
            "The proxy's own",
            "Counted by the proxy. With `--workers` they are sums over its processes.",
            [
                *_own(vars(Metrics()).values()),
                *_families(RequestCounts(0.0).collect()),
                *_own(vars(Background()).values()),
                *((Metric(one.name, one.help, one.kind), ()) for one in worker_metrics(0, 0)),
            ],
        ),
        (
            "Stages",
            "From the status table and each instance's scheduler, at every scrape.",
            [
                *_families(StageMetrics(table, stage_metrics).collect()),
                *_own(vars(StageScrape(table, CollectorRegistry())).values()),
            ],
        ),
        (
            "The feature store",
            "From each instance that has reported.",
            _families(StageMetrics(table, store_metrics).collect()),
        ),
        ("KV links", "From the sending worker of each link.", _families(StageMetrics(table, kv_metrics).collect())),
        (
            "The controller",
            "Counted in its present life. Not of `epd-serve proxy`; on several hosts at the admin listener only.",
            [
                *_families(ControlMetrics(_idle_reconciler()).collect()),
                *_families(PodScale(cast(KubernetesHosts, SimpleNamespace(there=()))).collect()),
                *_own(vars(KeyMetrics(CollectorRegistry())).values()),
                *_families(
                    FollowMetrics(
                        cast(Follower, SimpleNamespace(entries=(), moves={}, gains=(), mode="off", lacking=()))
                    ).collect()
                ),
            ],
        ),
    ]
    sections = []
    for title, text, families in groups:
        rows = [
            (f"`{family.name}{'_total' if family.type == 'counter' else ''}`", family.type, _labels(labels), help)
            for family, labels in families
            for help in [family.documentation]
        ]
        sections += [f"## {title}", text, _table(("metric", "type", "labels", "meaning"), rows)]
    return _page(
        "Metrics",
        "Prometheus metrics at `/metrics`: of the admin listener where there is one (`--admin-port`), else of the "
        "clients' port. [Monitoring](../guides/monitoring.md) says which to watch, and what they mean together. "
        "The stages' own metrics, vLLM's (`vllm:…`), are in the same answer, with the label `instance`.",
        *sections,
    )


def _idle_reconciler() -> Reconciler:
    """What is asked of one for metrics, where nothing runs."""
    changes = Changes(Change(0, "start", "", "", state=State.DONE))
    idle = SimpleNamespace(instances=(), changes=changes, paused_s=0.0, trouble="")
    idle.wanted = SimpleNamespace(waits="")
    return cast(Reconciler, idle)


def _own(values: Iterable[object]) -> list[tuple[Metric, Sequence[str]]]:
    found = list[tuple[Metric, Sequence[str]]]()
    for one in values:
        if isinstance(one, MetricWrapperBase):
            found.append((next(iter(one.describe())), one._labelnames))
        elif isinstance(one, LabelledCounter):
            found += _families(one.collect())
    return found


def _families(collected: Iterable[Metric]) -> list[tuple[Metric, Sequence[str]]]:
    return [(family, getattr(family, "_labelnames", ())) for family in collected]


def _labels(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- HTTP API -------------------------------------------------------------------------------------------------------


def http_api() -> str:
    settings = ProxySettings(served_models=("MODEL",), identity=ModelIdentity("MODEL"))
    api = create_app(settings, InstanceTable()).openapi()
    sections = []
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            sections += [f"## `{method.upper()} {path}`", *_operation(operation)]
    schemas = api["components"]["schemas"]
    rows = [
        (", ".join(f"`{path}`" for path in group.paths), group.why, group.instead.replace("|", "\\|"))
        for group in UNSERVED
    ]
    sections += [
        "## What vLLM has and this server has not",
        "Answered with 404 `not_served`, which says the same. Every layout serves all that is above; `echo`, "
        "`prompt_logprobs` and beam search are answered by what prefills and decodes, or by P or EP alone.",
        _table(("path", "why not", "what serves it"), rows),
    ]
    sections += ["## Schemas", *(_schema(name, schema) for name, schema in schemas.items())]
    return _page(
        "HTTP API",
        "What clients may call, from the document that a running server has at `/openapi.json`. Bodies show the fields "
        "that the proxy itself judges; other fields that the stages' vLLM documents are passed on, unknown ones are "
        "left out and counted. See [Sending requests](../guides/sending-requests.md). With API keys, every path but "
        "the probes wants `Authorization: Bearer KEY` or `x-api-key: KEY` and answers 401 (`invalid_api_key`) without. "
        f"Requests for an answer may carry `{HEADER}`, the milliseconds from arrival within which they want all of it "
        f"([deadlines](../guides/failures.md#deadlines)), and `{SLO_TTFT}` and `{SLO_TPOT}`, those within which the "
        "first token, and each one after it, is to come ([whose turn](../guides/overload.md#who-waits-and-where)).",
        *sections,
    )


def _operation(operation: Mapping[str, Any]) -> Iterator[str]:
    if "description" in operation:
        yield operation["description"]
    body = operation.get("requestBody")
    if body is not None:
        yield f"Body: {_type(body['content']['application/json']['schema'])}."
    parameters = [
        (f"`{one['name']}`", one["in"], _type(one["schema"]), one.get("description", ""))
        for one in operation.get("parameters", ())
    ]
    if parameters:
        yield _table(("parameter", "in", "type", ""), parameters)
    answers = []
    for status, answer in operation["responses"].items():
        kinds = [f"{kind}: {_type(one['schema'])}" for kind, one in answer["content"].items()]
        answers.append((status, answer["description"], "; ".join(kinds)))
    yield _table(("status", "", "content"), answers)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    head = f"### {name}\n\n" + (f"{schema['description']}\n\n" if "description" in schema else "")
    if "properties" not in schema:
        return head + f"{_type({key: value for key, value in schema.items() if key != 'description'})}."
    required = schema.get("required", ())
    rows = [
        (f"`{field}`", "yes" if field in required else "", _type(one), one.get("description", ""))
        for field, one in schema["properties"].items()
    ]
    return head + _table(("field", "required", "type", ""), rows)


def _type(schema: Mapping[str, Any]) -> str:
    """A schema as a phrase."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{'null' if one is None else one}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kinds = schema.get("type", "any")
    text = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    if text == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if text == "object" and schema.get("properties"):
        inner = ", ".join(f"`{field}`: {_type(one)}" for field, one in schema["properties"].items())
        return f"object with {inner}"
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    limits = [f"{word} {schema[key]}" for key, word in bounds.items() if key in schema]
    return f"{text} ({', '.join(limits)})" if limits else text


# --- Markdown -------------------------------------------------------------------------------------------------------


def _page(title: str, *blocks: str) -> str:
    return "\n\n".join((f"# {title}", NOTE, *blocks)) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(" ".join(cell.split()) for cell in line) + " |" for line in lines)


def _default(value: Any) -> str:
    if value is None or value is argparse.SUPPRESS or value is False or value in ("", (), []):
        return ""
    if isinstance(value, int) and not isinstance(value, bool) and value >= MIB and value % MIB == 0:
        return f"`{value}` ({value // MIB} MiB)"
    if isinstance(value, list | tuple):
        return f"`{','.join(map(str, value))}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{str(value).lower() if value is True else value}`"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", ":")) or not text else ".")


def main() -> None:
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
    EXAMPLE.write_text(complete_file(), encoding="utf-8")


if __name__ == "__main__":
    main()
