"""What a controller has written is kept by every node that answers, and found by the next controller."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from deploy.cluster import notes as cluster_notes
from deploy.cluster.notes import NodeNotes
from deploy.node.setup import Notes
from deploy.runtime.node_client import NodeHttp
from tests.waiting import until


class Keeper:
    """A node that keeps notes. Attributes: kept; told: how often. silent: it does not answer."""

    def __init__(self, kept: Notes = Notes()) -> None:
        self.kept = kept
        self.told: list[Notes] = []
        self.silent = False

    def http(self) -> NodeHttp:
        return NodeHttp("/node", httpx.MockTransport(self._answer), 1)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.silent:
            raise httpx.ConnectError("nobody is there")
        (said,) = msgspec.json.decode(request.content, type=tuple[Notes])
        self.told.append(said)
        self.kept = self.kept.merged(said)
        return httpx.Response(200, content=b"null", headers={"content-type": "application/json"})


def test_the_newest_counts_and_what_it_does_not_name_stays() -> None:
    one = Notes(1, 5, {"a": b"1", "b": b"2"})
    assert one.merged(Notes(1, 5, {"a": b"x"})) is one and one.merged(Notes(0, 9, {"a": b"x"})) is one
    assert one.merged(Notes(1, 6, {"a": b"\0\xff"})) == Notes(1, 6, {"a": b"\0\xff", "b": b"2"})
    assert one.merged(Notes(2, 0, {})) == Notes(2, 0, one.sections)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Notes) == one


async def test_what_is_written_is_read_at_once_and_kept_by_every_node() -> None:
    notes, one, other = NodeNotes(Notes(3, 7, {"before": b"0"}), 4), Keeper(), Keeper()
    assert not notes.empty and notes.read("before") == b"0"
    notes.join("one", one.http())
    for number in range(20):
        notes.write("a", str(number).encode())
    assert (notes.read("a"), notes.read("b")) == (b"19", None)
    await notes.kept()
    assert one.kept == Notes(4, 20, {"before": b"0", "a": b"19"})
    notes.join("other", other.http())
    notes.write("b", b"1")
    await notes.kept()
    assert one.kept.sections == other.kept.sections == {"before": b"0", "a": b"19", "b": b"1"}
    assert one.told[-1].sections == {"b": b"1"}, "what it knows is not told again"
    for node in ("one", "other"):
        notes.lose(node)


async def test_a_node_that_is_told_with_its_deployment_is_told_the_rest_alone() -> None:
    notes, one = NodeNotes(Notes(), 1), Keeper()
    notes.write("a", b"1")
    one.kept = notes.given("one")
    notes.join("one", one.http())
    notes.write("b", b"2")
    await notes.kept()
    assert [said.sections for said in one.told] == [{"b": b"2"}]
    notes.lose("one")


async def test_a_node_that_does_not_answer_is_not_waited_for_long_and_told_once_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_notes, "KEPT_S", 0.2)
    notes, one, silent = NodeNotes(Notes(), 1), Keeper(), Keeper()
    silent.silent = True
    notes.join("one", one.http())
    notes.join("silent", silent.http())
    notes.write("a", b"1")
    await notes.kept()
    assert one.kept.sections == {"a": b"1"} and not silent.told
    silent.silent = False
    await until(lambda: silent.kept.sections == {"a": b"1"}, "the note")
    for node in ("one", "silent"):
        notes.lose(node)


async def test_nobody_is_told_by_a_controller_that_another_has_followed() -> None:
    answers: list[Any] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        answers.append(request)
        return httpx.Response(
            409, content=msgspec.json.encode({"message": "over"}), headers={"content-type": "application/json"}
        )

    notes = NodeNotes(Notes(), 1)
    notes.join("one", NodeHttp("/node", httpx.MockTransport(refuse), 1))
    notes.write("a", b"1")
    await until(lambda: answers, "the refusal")
    notes.write("a", b"2")
    await asyncio.sleep(0.05)
    assert len(answers) == 1
    notes.lose("one")
