"""Notes in the head of a cluster."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deploy.options.config import DeployConfig
from deploy.ray import nodes, notes
from deploy.ray.cluster import RayNode
from deploy.ray.nodes import Nodes
from deploy.ray.notes import GcsNotes
from epd_serve.errors import ConfigError
from tests.deploy.ray.nodes import RayNodes
from tests.deploy.rooted_here import StateHere

pytestmark = pytest.mark.asyncio


async def test_the_newest_of_several_writes_is_found_by_the_next_controller(connected: RayNodes) -> None:
    notes = await GcsNotes("notes").load()
    for number in range(20):
        notes.write("a", str(number).encode())
    notes.write("b", b"\0\xff")
    assert notes.read("a") == b"19"  # by the one that has written it at once
    await notes.kept()
    after = await GcsNotes("notes").load()
    assert (after.read("a"), after.read("b"), after.read("c")) == (b"19", b"\0\xff", None)
    await after.forget()
    assert after.read("a") is None
    assert (await GcsNotes("notes").load()).read("a") is None


async def test_deployments_have_notes_of_their_own(connected: RayNodes) -> None:
    one, other = await GcsNotes("one").load(), await GcsNotes("one-more").load()
    one.write("a", b"1")
    other.write("a", b"2")
    await one.kept()
    await other.kept()
    await one.forget()
    assert (await GcsNotes("one").load()).read("a") is None
    assert (await GcsNotes("one-more").load()).read("a") == b"2"
    await other.forget()


async def test_each_controller_has_an_epoch_above_the_last(connected: RayNodes) -> None:
    notes = await GcsNotes("epochs").load()
    assert [notes.next_epoch(), GcsNotes("epochs").next_epoch(), notes.next_epoch()] == [1, 2, 3]
    await notes.forget()


async def test_the_event_loop_waits_for_the_head_in_no_read_and_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[bytes, bytes] = {b"a": b"1"}
    waited_in: list[threading.Thread] = []

    def asked(answer: Any) -> Any:
        def ask(key: str | bytes, *more: Any, **_: Any) -> Any:
            waited_in.append(threading.current_thread())
            return answer(key if isinstance(key, bytes) else key.encode(), *more)

        return ask

    monkeypatch.setattr(notes, "kv_get", asked(kept.get))
    monkeypatch.setattr(notes, "kv_put", asked(kept.__setitem__))
    monkeypatch.setattr(notes, "kv_list", asked(lambda _: list(kept)), raising=False)
    some = GcsNotes("fake")
    await some.load()
    some.write("b", b"2")
    assert (some.read("a"), some.read("b"), some.read("c")) == (b"1", b"2", None)
    await some.kept()
    assert kept == {b"a": b"1", b"b": b"2"}
    assert waited_in and threading.current_thread() not in waited_in


async def test_the_event_loop_waits_for_the_head_in_no_search_for_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks the head for the one there is before it makes another."""
    waited_in: list[threading.Thread] = []

    async def answer(*_: str) -> str:
        return "keys"

    def found(*_: str, **__: str) -> SimpleNamespace:
        waited_in.append(threading.current_thread())
        method = SimpleNamespace(remote=answer)
        return SimpleNamespace(api_keys=method, end=method)

    monkeypatch.setattr(nodes, "tokens", SimpleNamespace(get_raw_token=lambda: "t"))
    monkeypatch.setattr(nodes, "hire", found)
    monkeypatch.setattr(ray, "get_actor", found)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(nodes, "nodes_alive", lambda: [RayNode("a", "127.0.0.1", {})])
    assert await Nodes(DeployConfig(), "a", StateHere(), 1, print).api_keys("file") == "keys"
    await nodes.end_nodes("some")
    assert len(waited_in) == 2 and threading.current_thread() not in waited_in


async def test_the_key_of_a_deployment_follows_from_the_token_and_is_in_no_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    class Tokens:
        token = "t"

        def get_raw_token(self) -> str:
            return self.token

    monkeypatch.setattr(nodes, "tokens", Tokens())
    one, other = StateHere(), StateHere()

    def key(state: StateHere) -> str:
        return Nodes(DeployConfig(), "node", state, 1, print).key

    assert key(one) == key(one) != key(other)  # of the next controller, of another deployment
    assert not any(key(one).encode() in note for note in one.sections.values())
    of_one_token = key(one)
    monkeypatch.setattr(Tokens, "token", "another")
    assert key(one) != of_one_token
    monkeypatch.setattr(Tokens, "token", "")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        key(one)
