"""The dashboard and the alerts of `docs/examples/monitoring`: what they ask for is what a deployment says."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from deploy.host.ports import free_ports
from tests.deploy.client_keys import client_keys
from tests.deploy.launch.test_sim_launch import launched
from tests.deploy.sim_load import CHAT, TEXT, load, more, picture
from tests.docs.documents import ROOT
from tests.waiting import PATIENCE_S, wait_for

FOLDER = ROOT / "docs/examples/monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))
VLLM_LABELS = {"instance", "model_name"}
"""That simulated stages have, too. vLLM's own have `engine` beside them."""

WINDOW = "10s"
"""In place of Grafana's `$__rate_interval`, for scrapes every second."""


class Asked(NamedTuple):
    """One expression. `shown`: labels that its legend, or its words, show."""

    where: str
    expression: str
    shown: frozenset[str]


def dashboard() -> Iterator[Asked]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            shown = frozenset(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            yield Asked(panel["title"], plain(target["expr"]), shown)


def alerts() -> Iterator[Asked]:
    for rule in (rule for group in ALERTS["groups"] for rule in group["rules"]):
        words = " ".join(rule["annotations"].values())
        yield Asked(rule["alert"], rule["expr"], frozenset(re.findall(r"\$labels\.(\w+)", words)))


def plain(expression: str) -> str:
    """Without Grafana's variables."""
    known = {"$__rate_interval": WINDOW, "$modality": ".*", "$path": ".*", "$instance": ".*"}
    for name, value in known.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


EVERY = [*dashboard(), *alerts()]


def selectors(node: Any, wanted: frozenset[str] = frozenset()) -> Iterator[tuple[str, frozenset[str]]]:
    """Each metric below, with the labels that it has to have."""
    match node:
        case promql.VectorSelector():
            yield node.name, wanted | {one.name for one in node.matchers.matchers}
        case promql.MatrixSelector():
            yield from selectors(node.vector_selector, wanted)
        case promql.AggregateExpr():
            by = frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
            yield from selectors(node.expr, wanted | by)
        case promql.BinaryExpr():
            on = node.modifier.matching if node.modifier is not None else None
            both = wanted | frozenset(on.labels if on is not None else ())
            yield from selectors(node.lhs, both)
            yield from selectors(node.rhs, both)
        case promql.Call():
            for one in node.args:
                yield from selectors(one, wanted)
        case promql.ParenExpr() | promql.SubqueryExpr():
            yield from selectors(node.expr, wanted)
        case _:
            assert isinstance(node, promql.NumberLiteral), type(node)


def labels_of(node: Any, metrics: dict[str, set[str]]) -> set[str]:
    """Of what an expression comes to."""
    match node:
        case promql.VectorSelector():
            return metrics[node.name]
        case promql.MatrixSelector():
            return labels_of(node.vector_selector, metrics)
        case promql.AggregateExpr():
            return set(node.modifier.labels) if node.modifier is not None else set()
        case promql.BinaryExpr():
            return labels_of(node.lhs, metrics)
        case promql.Call():
            return labels_of(node.args[-1], metrics) - {"le"}
        case _:
            return labels_of(node.expr, metrics)


def named_in_the_reference() -> dict[str, set[str]]:
    """Each series that a deployment may have, with its labels."""
    found: dict[str, set[str]] = {}
    generated = runpy.run_path(str(ROOT / "docs/generate.py"))["pages"]()["metrics.md"]
    for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", generated, re.MULTILINE):
        own = set(re.findall(r"`(\w+)`", labels))
        if kind == "histogram":
            found |= {f"{name}_bucket": own | {"le"}, f"{name}_count": own, f"{name}_sum": own}
        else:
            found[name] = own
    vllm = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
    return found | {f"vllm:{name}": VLLM_LABELS for name in vllm}


@pytest.mark.parametrize("asked", EVERY, ids=[one.where for one in EVERY])
def test_every_metric_and_label_that_is_asked_for_is_in_the_reference(asked: Asked) -> None:
    metrics, parsed = named_in_the_reference(), promql.parse(asked.expression)
    for name, labels in selectors(parsed):
        assert name in metrics and labels <= metrics[name], (name, labels)
    assert asked.shown <= labels_of(parsed, metrics)


def test_dashboards_and_rules_have_distinct_names_and_places() -> None:
    panels = DASHBOARD["panels"]
    places = {(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels}
    assert len(places) == len({one["id"] for one in panels}) == len(panels) > 40
    assert len({one.where for one in alerts()}) == len(list(alerts())) > 15


def samples(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels


def families(text: str) -> dict[str, Metric]:
    every = list(text_string_to_metric_families(text))
    assert len(every) == len({one.name for one in every}), "each family once"
    return {one.name: one for one in every}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: sockets lie below it."""
    with TemporaryDirectory(prefix="epd-", dir="/tmp") as path:
        yield Path(path)


def traffic(client: httpx.Client) -> None:
    """Of all kinds, with some that fails."""
    for number in range(6):
        for body in (picture(56 + 4 * number), TEXT):
            assert client.post(CHAT, json={**body, "stream": True}).status_code == 200
    assert client.post(CHAT, content=b"{").status_code == 400


@pytest.mark.slow
def test_a_running_deployment_says_everything_that_is_asked_for(folder: Path) -> None:
    keys = client_keys(folder / "keys", "one")
    with launched(folder, "2E-P-D", "--workers", "2", "--api-key-file", keys, key="one") as (client, _):
        traffic(client)
        text = client.get("/metrics").text
    known = families(text)
    asked = {name for one in EVERY for name, _ in selectors(promql.parse(one.expression))}
    assert asked - {name for one in known.values() for name in names_of(one)} == set()
    stages = {labels["instance"] for name, labels in samples(text) if name == "vllm:num_requests_running"}
    assert stages == {"E0", "E1", "P0", "D0"}
    assert {"path": "E-P-D", "modality": "image"} in [
        labels for name, labels in samples(text) if name == "epd_proxy_ttft_seconds_count"
    ]
    assert known["epd_control_actions"].type == "counter" and known["vllm:num_preemptions"].type == "counter"


def names_of(family: Metric) -> Iterable[str]:
    if family.type == "histogram":
        return [f"{family.name}_{what}" for what in ("bucket", "count", "sum")]
    return [f"{family.name}_total" if family.type == "counter" else family.name]


@pytest.mark.slow
def test_a_real_prometheus_answers_every_query_and_takes_every_rule(folder: Path) -> None:
    prometheus, promtool = shutil.which("prometheus"), shutil.which("promtool")
    if prometheus is None or promtool is None:
        pytest.skip("Prometheus is not installed: apt-get install prometheus")
    (admin,) = free_ports(1)
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    job["static_configs"][0]["targets"] = [f"127.0.0.1:{admin}"]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "alerts.yaml", folder)
    subprocess.run([promtool, "check", "config", folder / "prometheus.yaml"], check=True, capture_output=True)
    with launched(folder, "2E-P-D", "--admin-port", str(admin), table=f"http://127.0.0.1:{admin}/instances") as (
        client,
        _,
    ):
        with running_prometheus(prometheus, folder) as asks, load(str(client.base_url)) as found:
            traffic(client)
            more(found)
            wait_for(lambda: asks("query", query="epd_proxy_ttft_seconds_count offset 5s")["result"], "some scrapes")
            text = httpx.get(f"http://127.0.0.1:{admin}/metrics", trust_env=False).text
            there = {name for name, _ in samples(text)}
            empty = [one for one in dashboard() if not asks("query", query=one.expression)["result"]]
            lacking = [one.where for one in empty if may_not_be_empty(one, there)]
            assert not lacking
            rules = [rule for group in asks("rules")["groups"] for rule in group["rules"]]
            assert {rule["name"] for rule in rules} == {one.where for one in alerts()}
            wait_for(
                lambda: all(rule["health"] == "ok" for group in asks("rules")["groups"] for rule in group["rules"]),
                "every rule to be evaluated",
            )
            (target,) = asks("targets")["activeTargets"]
            assert target["health"] == "up", target["lastError"]


@contextmanager
def running_prometheus(program: str, folder: Path) -> Iterator[Callable[..., Any]]:
    """What asks its API."""
    (port,) = free_ports(1)
    flags = ["--config.file", "prometheus.yaml", "--storage.tsdb.path", "tsdb", "--log.level", "warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *flags, f"--web.listen-address=127.0.0.1:{port}"], cwd=folder, stdout=log, stderr=log
        )

    def ready() -> bool:
        try:
            return http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def asks(path: str, **params: str) -> Any:
        answer = http.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False) as http:
            wait_for(ready, "Prometheus")
            yield asks
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def may_not_be_empty(asked: Asked, there: set[str]) -> bool:
    """It only picks what there is."""
    parsed = promql.parse(asked.expression)
    picks = any(sign in asked.expression for sign in (" > ", " < ", '{event=~"recomputed'))
    return not picks and all(name in there for name, _ in selectors(parsed))
