"""Real stages, shared: one plain vLLM for the whole session, one launch per layout for all tests of a layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.bodies import Body, ask
from tests.e2e.serving import Endpoint, Serving, plain_vllm, serving


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


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """The launch named by the test's parameter: a layout, or (layout, flags). Its end is checked, too."""
    layout, *flags = request.param if isinstance(request.param, tuple) else (request.param,)
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(serving(layout, *flags))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
