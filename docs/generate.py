"""Writes the reference pages from the code: `make reference`.

The command line is read from its parsers, the configuration from its dataclasses, the metrics from what is registered,
the HTTP API from the proxy's OpenAPI document. The pages are committed; `tests/docs` holds them to what this writes.
"""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from bench.cli import parser as bench_parser
from deploy.cli.command import parser as serve_parser
from deploy.control.metrics import ControlMetrics
from deploy.control.progress import Change, Changes, State
from deploy.control.reconciler import Reconciler
from deploy.front.key_watch import KeyMetrics
from deploy.options.config import DeployConfig
from deploy.options.proxy_overrides import OWN_FLAGS, setting_keys
from proxy.background import Background
from proxy.config.settings import ModelIdentity, ProxySettings
from proxy.http.openapi import document
from proxy.http.unserved import UNSERVED
from proxy.metrics import Metrics
from proxy.records.request_metrics import RequestMetrics
from proxy.registry.stage_metrics import KvMetrics, StageMetrics, StoreMetrics
from proxy.registry.table import InstanceTable
from proxy.request.client_deadline import HEADER
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
    """The default that holds: that of `DeployConfig` where the parser leaves it to the configuration."""
    if action.default is not argparse.SUPPRESS:
        return action.default
    return {option.name: option.default for option in fields(DeployConfig)}.get(action.dest)


# --- configuration --------------------------------------------------------------------------------------------------


def configuration() -> str:
    options = [option for option in fields(DeployConfig) if not option.metadata.get("hidden")]
    rows = [(f"`{option.name}`", f"`{_flag(option)}`", *_default_and_meaning(option)) for option in options]
    settings = [
        (f"`{key}`", "`false`" if default is False else _default(default), _sentence(text))
        for key, default, text in proxy_settings()
    ]
    return _page(
        "Configuration",
        "A deployment is configured by flags of `epd-serve serve`, or by the same names in a YAML file "
        "(`--config FILE.yaml`). Flags win over the file. Unknown keys are refused, with the nearest valid one.",
        "## A complete file",
        f"```yaml\n{EXAMPLE.read_text(encoding='utf-8').strip()}\n```",
        "## Options",
        "Sizes in MiB or KiB and times in seconds, as the names say. A key has the same meaning as its flag.",
        _table(("key", "flag", "default", "meaning"), rows),
        "## Settings of the proxy",
        "Given as `--proxy KEY=VALUE` (repeatable), or under `proxy:` in the file. Where a flag or the model says the "
        "same (`media.allowed_local_root`, `trace_path`, `max_model_len`, `stage_priorities`), the setting wins.",
        _table(("key", "default", "meaning"), settings),
    )


def _flag(option: Field[Any]) -> str:
    if option.metadata.get("positional"):
        return option.name.upper()
    return str(option.metadata.get("flag", "--" + option.name.replace("_", "-")))


def _default_and_meaning(option: Field[Any]) -> tuple[str, str]:
    text, default = _split_default(str(option.metadata["help"]))
    if choices := option.metadata.get("choices"):
        text += f" ({', '.join(f'`{choice}`' for choice in choices)})"
    return _default(option.default) or default, _linked(text)


def proxy_settings() -> Iterator[tuple[str, Any, str]]:
    """Yields key, default and meaning of every setting that `--proxy` takes. The meaning is the class's docstring's."""
    taken = set(setting_keys(ProxySettings)) - set(OWN_FLAGS)
    for key, field, text in _settings(ProxySettings):
        if key in taken:
            yield key, field.default if field.default is not MISSING else None, text


def _settings(owner: type[Any], prefix: str = "") -> Iterator[tuple[str, Field[Any], str]]:
    hints, said = typing.get_type_hints(owner), attributes(owner)
    for field in fields(owner):
        if is_dataclass(hints[field.name]):
            yield from _settings(typing.cast("type[Any]", hints[field.name]), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, said.get(field.name, "")


def attributes(owner: type[Any]) -> dict[str, str]:
    """Returns what the `Attributes:` of a dataclass's docstring say of each field: `one: …` or `one, other: …`."""
    _, _, listed = (owner.__doc__ or "").partition("Attributes:")
    names = "|".join(sorted((field.name for field in fields(owner)), key=len, reverse=True))
    name = rf"`?(?:{names})`?"
    text = " ".join(listed.split())
    found = list(re.finditer(rf"(?:^|(?<=[.;] ))({name}(?:, {name})*): ", text))
    said = {}
    for match, end in zip(found, [*(match.start() for match in found[1:]), len(text)], strict=False):
        for each in match[1].replace("`", "").split(", "):
            said[each] = text[match.end() : end].strip()
    return said


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
                *_families(RequestMetrics().collect()),
                *_own(vars(Background()).values()),
                *((Metric(one.name, one.help, one.kind), ()) for one in worker_metrics(0, 0)),
            ],
        ),
        (
            "Stages",
            "From the status table and each instance's scheduler, at every scrape.",
            [
                *_families(StageMetrics(table).collect()),
                *_own(vars(StageScrape(table, CollectorRegistry())).values()),
            ],
        ),
        ("The feature store", "From each instance that has reported.", _families(StoreMetrics(table).collect())),
        ("KV links", "From the sending worker of each link.", _families(KvMetrics(table).collect())),
        (
            "The controller",
            "Counted in its present life. Not of `epd-serve proxy`; on several hosts at the admin listener only.",
            [
                *_families(ControlMetrics(_idle_reconciler()).collect()),
                *_own(vars(KeyMetrics(CollectorRegistry())).values()),
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
    idle = SimpleNamespace(instances=(), changes=changes, paused_s=0.0, trouble=SimpleNamespace(reason=""))
    idle.wanted = SimpleNamespace(waits="")
    return cast(Reconciler, idle)


def _own(values: Iterable[object]) -> list[tuple[Metric, Sequence[str]]]:
    return [(next(iter(one.describe())), one._labelnames) for one in values if isinstance(one, MetricWrapperBase)]


def _families(collected: Iterable[Metric]) -> list[tuple[Metric, Sequence[str]]]:
    return [(family, getattr(family, "_labelnames", ())) for family in collected]


def _labels(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- HTTP API -------------------------------------------------------------------------------------------------------


def http_api() -> str:
    settings = ProxySettings(served_models=("MODEL",), identity=ModelIdentity("MODEL"))
    api = document(settings, "")
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
        "the probes wants `Authorization: Bearer KEY` and answers 401 (`invalid_api_key`) without. Requests for an "
        f"answer may carry `{HEADER}`, the milliseconds from arrival within which they want all of it "
        "([deadlines](../guides/failures.md#deadlines)).",
        *sections,
    )


def _operation(operation: Mapping[str, Any]) -> Iterator[str]:
    if "summary" in operation:
        yield operation["summary"]
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


if __name__ == "__main__":
    main()
