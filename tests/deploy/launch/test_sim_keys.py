"""Clients' keys while a deployment runs: every front door goes by a change within seconds, and by nothing broken."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.deploy.client_keys import client_keys
from tests.deploy.control.test_sim_kills import commanded
from tests.deploy.launch.test_sim_launch import launched
from tests.waiting import wait_for

CONNECTIONS = 12
"""New ones, of which both front doors take some."""

STALE = "epd_api_key_file_broken"


def statuses(url: str, key: str) -> set[int]:
    """What several front doors say to a key."""
    headers = {"authorization": f"Bearer {key}"}
    return {httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).status_code for _ in range(CONNECTIONS)}


def metric(url: str, key: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {key}"}, trust_env=False).text
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


@pytest.mark.slow
def test_keys_change_under_a_launch_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    flags = ("--workers", "2", "--api-key-file", client_keys(file, "one"))
    with launched(tmp_path, "PD", *flags, key="one") as (client, _), commanded(tmp_path) as operator:
        url = str(client.base_url).rstrip("/")
        assert (statuses(url, "one"), statuses(url, "two")) == ({200}, {401})
        client_keys(file, "two")
        wait_for(lambda: statuses(url, "two") == {200}, "the new key at all front doors")
        assert statuses(url, "one") == {401}

        file.write_text("two\nthree\n")
        wait_for(lambda: metric(url, "two", STALE) == 1, "a metric")
        operator.kill("control", "front.0")
        operator.whole()
        wait_for(lambda: metric(url, "two", STALE) == 1, "a metric of the next controller")
        wait_for(lambda: operator.status()["parts"].get("front.0"), "another front door")
        assert (statuses(url, "two"), statuses(url, "one")) == ({200}, {401}), "what was known before the kill"

        client_keys(file, "three")
        wait_for(lambda: statuses(url, "three") == {200}, "the next key")
        assert statuses(url, "two") == {401} and metric(url, "three", STALE) == 0
    said = (tmp_path / "launch.log").read_text()
    assert said.count("the API keys stay as they are") == 2 and "two\n" not in said, "once for each controller"
