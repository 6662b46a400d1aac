"""What every test may rely on: markers that skip themselves where their need is not met, and the report of promises."""

from __future__ import annotations

import importlib.util
import signal
from collections import Counter, defaultdict
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes examples slow, which says nothing about them. `make test` draws the same ones every time: when it
# fails, the change has done it. `make test-all` looks for others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")

# A shell that starts tests in the background has them ignore Ctrl-C, and so all that they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A command that a test runs in this process takes its signals, and may keep them, as uvloop's loops and Ray do."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    try:
        return (yield)
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _mooncake_problem() -> str | None:
    """Why Mooncake cannot be used here, or None."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install '.[mooncake]'"
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        return f"Mooncake does not load ({error}): apt-get install libibverbs1"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("mooncake")]
    if needing and (problem := _mooncake_problem()):
        for item in needing:
            item.add_marker(pytest.mark.skip(reason=problem))
    for item in items:
        for mark in item.iter_markers("promise"):
            item.user_properties.append(("promise", mark.args[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which tests held which promise, and what they took; launches that tests share count where they began and end."""
    outcomes: dict[str, dict[str, str]] = defaultdict(dict)  # promise → test → how it ended
    seconds: dict[str, float] = defaultdict(float)
    for outcome, reports in terminalreporter.stats.items():
        for report in (one for one in reports if isinstance(one, pytest.TestReport)):
            for name, promise in report.user_properties:
                if name == "promise":
                    outcomes[promise].setdefault(report.nodeid, "passed")
                    seconds[promise] += report.duration
                    if outcome not in ("", "passed"):
                        outcomes[promise][report.nodeid] = outcome
    if not outcomes:
        return
    terminalreporter.section("promises of README.md")
    for promise, tests in sorted(outcomes.items()):
        counts = Counter(tests.values())
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        terminalreporter.write_line(f"{promise:16} {ended:24} {seconds[promise]:5.0f} s")
        for test, outcome in tests.items():
            terminalreporter.write_line(f"    {outcome:8} {test}")
