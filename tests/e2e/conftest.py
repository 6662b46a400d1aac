"""Real stages, shared: one plain vLLM for the session, one launch for all tests that name the same layout and flags.

Only one launch is up at a time. Tests that share one run one after the other, from whichever module they are; what a
test leaves behind that does not serve is ended with that test, and the next one gets a new launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator

import pytest

from tests.e2e.bodies import Body, ask
from tests.e2e.serving import Endpoint, Serving, plain_vllm, serving
from tests.waiting import wait_for

RECOVERY_S = 240.0  # a stage that was killed last, on a machine with other things to do
_next_item = pytest.StashKey["pytest.Item | None"]()
_failed = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def monolith() -> Iterator[Endpoint]:
    """Plain vLLM: what every layout is held against."""
    with plain_vllm() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def solo_answer(monolith: Endpoint) -> Callable[[Body], list[list[int]]]:
    """Tokens of the monolith for a request that it serves alone. Asked once per request."""
    known: dict[str, list[list[int]]] = {}

    def answer(body: Body) -> list[list[int]]:
        key = repr(body)
        if key not in known:
            known[key] = ask(monolith, body)
        return known[key]

    return answer


class Launches:
    """The launch that is up, if one is."""

    def __init__(self) -> None:
        self._key: tuple[str, ...] | None = None
        self._launch: Serving | None = None
        self._stack = contextlib.ExitStack()

    def get(self, key: tuple[str, ...]) -> Serving:
        """A launch of this layout and these flags, every stage of it ready."""
        if self._launch is None or key != self._key:
            self.end()
            self._launch, self._key = self._stack.enter_context(serving(*key)), key
        return self._launch

    def end(self) -> None:
        """Ctrl-C, with the promise that nothing remains."""
        self._launch = None
        self._stack.close()

    def drop(self) -> None:
        """Whatever state it is in: nothing is asked of how it ends."""
        if self._launch is not None:
            self._launch.destroy()
        self.end()


@pytest.fixture(scope="session")
def launches() -> Iterator[Launches]:
    made = Launches()
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def launch(request: pytest.FixtureRequest, launches: Launches) -> Iterator[Serving]:
    """The launch named by the test's parameter: a layout, or (layout, flags). Its end is checked with its last test."""
    key = launch_key(request.node)
    assert key is not None, "the test names no layout"
    found = launches.get(key)
    yield found
    if request.node.stash.get(_failed, False):
        launches.drop()
        return
    try:
        wait_for(found.healthy, f"{key[0]} to serve after this test", RECOVERY_S)
    except AssertionError:
        launches.drop()
        raise
    following = request.node.stash[_next_item]
    if following is None or launch_key(following) != key:
        launches.end()


def launch_key(item: pytest.Item) -> tuple[str, ...] | None:
    """Layout and flags of the launch that a test shares; None for a test that shares none."""
    callspec = getattr(item, "callspec", None)
    named = callspec.params.get("launch") if callspec is not None else None
    return (named,) if isinstance(named, str) else named


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    item.stash[_next_item] = nextitem
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.e2e)


@pytest.hookimpl(trylast=True)  # after pytest's own order, which knows nothing of launches
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("e2e"):
            groups.setdefault(launch_key(item) or item.path, []).append(item)
    in_order = iter([item for group in groups.values() for item in group])
    items[:] = [next(in_order) if item.get_closest_marker("e2e") else item for item in items]
