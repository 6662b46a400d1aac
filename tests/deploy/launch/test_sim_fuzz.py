"""The fuzz of the API once more, with processes behind it: two proxy workers in front of simulated stages. What a stage
does not expect shows here as a 5xx."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.request.parse import Endpoint
from tests.deploy.client_keys import client_keys
from tests.deploy.launch.test_sim_launch import launched
from tests.deploy.sim_load import in_flight
from tests.proxy.fuzzing import GOOD, KEY, OPERATIONS, fuzz_by_damage, fuzz_by_document
from tests.waiting import wait_for

FLAGS = ("--workers", "2", "--served-model-name", "demo", "--proxy", "media.max_items=4")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="epd-", dir="/tmp"))
    keys = client_keys(folder / "keys", "fuzz-key")
    with launched(folder, "E-P-D-PD", *FLAGS, "--api-key-file", keys, key="fuzz-key") as (client, _):
        yield str(client.base_url).rstrip("/")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_requests_made_from_the_document(url: str, name: str) -> None:
    fuzz_by_document(url, name, examples=60)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", list(GOOD))
def test_many_damaged_bodies(url: str, endpoint: Endpoint) -> None:
    fuzz_by_damage(url, endpoint, examples=200)
    wait_for(lambda: not in_flight(url, KEY), "nothing in flight")
