"""The way to a node process: wherever it is now, told its deployment where it has none, to members alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.runtime.node_api import NOT_SET_UP
from deploy.runtime.node_client import NodeHttp, NodeTransport
from deploy.runtime.secrets import NAME, NodeSecrets
from epd_serve.errors import ConfigError, EpdError
from tests.deploy.node_secrets import node_secrets


class World:
    """Attributes: addresses: where the node process is, one for each time that is asked. seen: requests."""

    def __init__(self, folder: Path, *addresses: str) -> None:
        self.members = NodeSecrets(str(node_secrets(folder)), "--node-secrets")
        self.addresses = [*addresses]
        self.seen: list[httpx.Request] = []
        self.told = 0
        self.dead: set[str] = set()
        self.transport = NodeTransport(self.members, self.reach, self.set_up)
        self.transport._inner = httpx.MockTransport(self.answer)  # type: ignore[assignment]
        self.http = NodeHttp("/node", self.transport, 7)

    async def reach(self) -> str:
        address = self.addresses.pop(0)
        if address == "nowhere":
            raise EpdError("it does not run")
        if address == "never":
            raise ConfigError("port 8000 is in use", param="--port")
        return address

    async def set_up(self) -> None:
        self.told += 1

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        if request.url.host in self.dead:
            raise httpx.ConnectError("refused")
        if request.url.host == "anew" and not self.told:
            return httpx.Response(NOT_SET_UP, json={"message": "?"})
        return httpx.Response(200, json=1)

    async def call(self) -> Any:
        return await self.http.call("some", int)


async def test_every_request_shows_the_token_and_wants_the_name_of_a_member(tmp_path: Path) -> None:
    world = World(tmp_path, "a:1")
    assert await world.call() == await world.call() == 1
    for request in world.seen:
        assert str(request.url) == "https://a:1/node/some" and request.headers["epd-epoch"] == "7"
        assert request.headers["authorization"] == f"Bearer {world.members.token}"
        assert request.extensions["sni_hostname"] == NAME


async def test_it_is_looked_for_again_where_it_does_not_answer(tmp_path: Path) -> None:
    world = World(tmp_path, "nowhere", "a:1", "nowhere", "b:1")
    assert await world.call() == 1
    world.dead.add("a")
    assert await world.call() == 1 and world.seen[-1].url.host == "b"


async def test_one_that_has_begun_again_is_told_its_deployment_before_it_is_asked(tmp_path: Path) -> None:
    world = World(tmp_path, "anew:1", "anew:1")
    assert await world.call() == 1 and world.told == 1


async def test_what_will_never_be_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use"):
        await World(tmp_path, "never").call()


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (lambda folder: (folder / "tls.key").chmod(0o604), "chmod 600"),
        (lambda folder: (folder / "token").write_text("short"), "openssl rand"),
        (lambda folder: (folder / "token").unlink(), "token"),
        (lambda folder: (folder / "tls.crt").write_text("no certificate"), "tls.crt"),
        (lambda folder: (folder / "ca.crt").write_text("no certificate"), "--node-secrets"),
    ],
    ids=["open to others", "no secret", "no token", "no certificate", "no authority"],
)
def test_what_makes_no_member_is_refused(tmp_path: Path, breaks: Any, said: str) -> None:
    folder = node_secrets(tmp_path)
    NodeSecrets(str(folder), "--node-secrets")
    breaks(folder)
    with pytest.raises(ConfigError, match=said):
        NodeSecrets(str(folder), "--node-secrets")


def test_without_a_folder_it_is_said_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match="openssl req -x509"):
        NodeSecrets("", "--node-secrets")


def test_a_member_is_told_by_the_name_in_its_certificate_and_members_have_equal_marks(tmp_path: Path) -> None:
    folder = node_secrets(tmp_path)
    members = NodeSecrets(str(folder), "--node-secrets")
    members.check()
    assert members.marks() == NodeSecrets(str(folder), "--node-secrets").marks()
    assert members.marks().keys() == {"token", "tls.crt"} and members.token not in str(members.marks())
    (tmp_path / "others").mkdir()
    others = node_secrets(tmp_path / "others")
    assert all(mark != members.marks()[name] for name, mark in NodeSecrets(str(others), "").marks().items())
    (folder / "ca.crt").write_bytes((others / "tls.crt").read_bytes())
    with pytest.raises(ConfigError, match=r"tls.crt is no certificate of epd-serve-node"):
        NodeSecrets(str(folder), "--node-secrets").check()
