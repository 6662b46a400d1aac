"""Notes in the head of a cluster."""

from __future__ import annotations

import pytest

from bench.ray.nodes import RayNodes
from deploy.ray.notes import GcsNotes

pytestmark = pytest.mark.asyncio


async def test_the_newest_of_several_writes_is_found_by_the_next_controller(connected: RayNodes) -> None:
    notes = GcsNotes("notes")
    for number in range(20):
        notes.write("a", str(number).encode())
    notes.write("b", b"\0\xff")
    assert notes.read("a") == b"19"  # by the one that has written it at once
    await notes.kept()
    after = GcsNotes("notes")
    assert (after.read("a"), after.read("b"), after.read("c")) == (b"19", b"\0\xff", None)
    await after.forget()
    assert GcsNotes("notes").read("a") is None


async def test_deployments_have_notes_of_their_own(connected: RayNodes) -> None:
    one, other = GcsNotes("one"), GcsNotes("one-more")
    one.write("a", b"1")
    other.write("a", b"2")
    await one.kept()
    await other.kept()
    await one.forget()
    assert (GcsNotes("one").read("a"), GcsNotes("one-more").read("a")) == (None, b"2")
    await other.forget()


async def test_each_controller_has_an_epoch_above_the_last(connected: RayNodes) -> None:
    notes = GcsNotes("epochs")
    assert [notes.next_epoch(), GcsNotes("epochs").next_epoch(), notes.next_epoch()] == [1, 2, 3]
    await notes.forget()
