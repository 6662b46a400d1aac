"""Environment variables that make a deployment fail in ways that do not look like them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding, error, ok, warning
from deploy.options.ascend_schedulers import VARIABLES, schedulers_of

KEPT_VALUES = frozenset(
    {
        *("VLLM_PLUGINS", "HCCL_INTRA_ROCE_ENABLE", "ASCEND_BUFFER_POOL", "NO_PROXY", "no_proxy"),
        *("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", *VARIABLES),
        *("RAY_AUTH_MODE", "RAY_ADDRESS"),
    }
)
"""Their values are numbers, names of plugins, or hosts: no secrets. Printed only where a check says so."""

PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
WATCHED = frozenset({*PROXIES, "PYTHONPATH", "LD_PRELOAD"})
"""Only that they are set is kept."""

_LOOPBACK = ("127.0.0.1", "localhost", "*")


def environment_checks(facts: Facts) -> Iterator[Finding]:
    yield _proxies(facts)
    yield from _schedulers(facts)
    for name in ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if name in facts.environment and (name[0] == "A") == (facts.wanted.device == "npu") != (
            facts.wanted.device == "cpu"
        ):
            yield ok(name, facts.environment[name])


def _proxies(facts: Facts) -> Finding:
    """Our own requests between proxy and stages take no notice of these; clients on this machine do."""
    environment = facts.environment
    proxies = [name for name in PROXIES if name in environment]
    exempt = ",".join((environment.get("no_proxy", ""), environment.get("NO_PROXY", ""))).replace(" ", "").split(",")
    if proxies and not set(_LOOPBACK) & set(exempt):
        return warning(
            "http proxies",
            f"{', '.join(proxies)} set, and no_proxy does not name 127.0.0.1",
            "curl and OpenAI clients on this machine then ask that proxy for the endpoint (our processes do not)",
            "export no_proxy=127.0.0.1,localhost",
        )
    return ok("http proxies", f"{', '.join(proxies)}, loopback exempt" if proxies else "none")


def _schedulers(facts: Facts) -> Iterator[Finding]:
    for name, what in schedulers_of(facts.environment):
        yield error(
            name,
            f"starts vllm-ascend's {what}",
            "it takes the place of ours, which reports the load and waits for features",
            f"unset {name}",
            stops=facts.wanted.device == "npu",
        )
