"""What the proxy believes about features, and for how long."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from epd_serve.wire import FeatureExpected, FeatureReady
from proxy.encode.step import HostArena
from proxy.registry.feature_directory import PROMISE_S, TRUST_S, FeatureDirectory, placeholder_metadata
from store.arena import Arena
from store.keys import part_keys

GRID = {"image_grid_thw": [1, 4, 4]}


def ready(key: str = "k", *, pooled: bool = False, **more: object) -> FeatureReady:
    return FeatureReady(key, 100, "E0-life1", pooled=pooled, **more)  # type: ignore[arg-type]


def test_an_announced_feature_is_known_for_a_while_and_its_metadata_for_ever() -> None:
    directory = FeatureDirectory(8)
    assert not directory.knows("k", 0)
    directory.announced(ready(metadata=GRID), 0)
    assert directory.knows("k", TRUST_S - 1) and not directory.knows("k", TRUST_S + 1)
    assert directory.metadata("k") == GRID and directory.makers(["k", "other"]) == {"E0-life1"}


def test_an_encoders_answer_is_a_promise_that_lapses_unless_the_feature_is_announced() -> None:
    directory = FeatureDirectory(8)
    directory.promised("k", GRID, maker="E0-life1", now=0)
    assert directory.knows("k", PROMISE_S - 0.1) and not directory.knows("k", PROMISE_S + 0.1)
    directory.announced(ready(), 1)
    assert directory.knows("k", PROMISE_S + 1) and directory.metadata("k") == GRID


def test_what_got_lost_is_not_known_but_its_metadata_stays() -> None:
    directory = FeatureDirectory(8)
    directory.announced(ready(metadata=GRID), 0)
    directory.lost(["k", "unheard of"])
    assert not directory.knows("k", 0) and directory.metadata("k") == GRID
    directory.distrust(["k", "unheard of"])
    assert directory.metadata("k") is None and len(directory) == 1


def test_the_arena_is_the_truth_where_there_is_one() -> None:
    held: dict[str, bool | None] = {}
    directory = FeatureDirectory(8, holds=lambda key: held.get(key, False))
    held["k"] = True
    assert directory.knows("k", 0), "never announced, but there"
    directory.announced(ready("gone"), 0)
    assert not directory.knows("gone", 0)
    directory.announced(ready("elsewhere", pooled=True), 0)
    assert directory.knows("elsewhere", 0) and not directory.knows("elsewhere", TRUST_S + 1)
    held["silent"] = None
    directory.announced(ready("silent"), 0)
    assert directory.knows("silent", 0), "no answer: announcements have to do"


def test_the_least_recently_used_are_forgotten() -> None:
    directory = FeatureDirectory(3)
    for key in ("a", "b", "c"):
        directory.announced(ready(key), 0)
    assert directory.knows("a", 0)
    directory.announced(ready("d"), 0)
    assert [directory.knows(key, 0) for key in ("a", "b", "c", "d")] == [True, False, True, True]
    assert len(directory) == 3


@pytest.mark.parametrize(
    ("raw_metadata", "sent"),
    [
        (GRID, GRID),
        ({"image_grid_thw": [[1, 4, 4]]}, GRID),
        ({"video_grid_thw": (2, 4, 4), "timestamps": [0.5]}, {"video_grid_thw": [2, 4, 4], "timestamps": [0.5]}),
        ({}, None),
        (None, None),
        ("text", None),
        ({"image_grid_thw": [[1, 4, 4], [1, 2, 2]]}, None),
        ({"image_grid_thw": "AAAA"}, None),
        ({"image_grid_thw": [True]}, None),
        ({"timestamps": [float("nan")]}, None),
    ],
)  # fmt: skip
def test_metadata_is_sent_as_flat_numeric_lists_or_not_at_all(raw_metadata: object, sent: object) -> None:
    assert placeholder_metadata(raw_metadata) == sent


def test_the_hosts_arena_is_asked_once_it_is_there_and_never_raises() -> None:
    path = Path(f"/dev/shm/epd-test-{uuid.uuid4().hex}-arena")
    host_arena = HostArena(str(path))
    assert HostArena("").holds("k" * 64) is None
    assert host_arena.holds("k" * 64) is None, "not there yet"
    arena = Arena.create(path, 16 * 4096, slots=8, owners=4)
    try:
        host_arena._ask_at = 0.0
        key = "ab" * 32
        assert host_arena.holds(key) is False
        arena.put(key, b"feature", shape=(7,), dtype="uint8")
        assert host_arena.holds(key) is True
        host_arena.close()
    finally:
        arena.close()
        Arena.unlink(path)


def test_an_arena_whose_lock_somebody_holds_keeps_no_request_waiting() -> None:
    path = Path(f"/dev/shm/epd-test-{uuid.uuid4().hex}-arena")
    arena, host_arena = Arena.create(path, 16 * 4096, slots=8, owners=4), HostArena(str(path))
    try:
        assert host_arena.holds("ab" * 32) is False
        took_s = []
        arena._lock.acquire(1.0)
        for _ in range(5):
            host_arena._ask_at = 0.0
            begun = time.monotonic()
            assert host_arena.holds("ab" * 32) is None
            took_s.append(time.monotonic() - begun)
        arena._lock.release()
        assert min(took_s) < 0.01
        host_arena._ask_at = 0.0
        assert host_arena.holds("ab" * 32) is False
        host_arena.close()
    finally:
        arena.close()
        Arena.unlink(path)


def test_an_image_in_parts_is_known_once_all_are_there_and_its_listeners_hear_of_each() -> None:
    directory, heard = FeatureDirectory(10), list[int]()
    first, second = part_keys("k", 2)
    with directory.followed(["k"], lambda: heard.append(1)):
        directory.expected(FeatureExpected({first: {}, second: {}}, "e"), 0.0)
        assert directory.is_coming("k", 0.5) and not directory.knows("k", 0.5)
        assert directory.parts("k", 0.5) == (first, second)
        directory.announced(FeatureReady(first, 1, "e"), 1.0)
        assert not directory.knows("k", 1.0)
        directory.announced(FeatureReady(second, 1, "e"), 1.0)
    assert directory.knows("k", 1.0) and directory.parts("k", 1.0) == (first, second) and len(heard) == 4


def test_an_image_that_lacks_a_part_is_not_known_and_one_that_is_there_whole_has_no_parts() -> None:
    directory = FeatureDirectory(10)
    first, second = part_keys("k", 2)
    for key in (first, second):
        directory.announced(FeatureReady(key, 1, "e"), 0.0)
    directory.lost([second])
    assert not directory.knows("k", 0.0) and directory.parts("k", 0.0) == ()
    directory.promised(second, None, maker="e", now=0.0)
    assert directory.knows("k", 0.0) and directory.parts("k", 0.0) == (first, second)
    directory.announced(FeatureReady("k", 1, "e"), 0.0)
    assert directory.knows("k", 0.0) and directory.parts("k", 0.0) == ()
    directory.lost(["k"])
    assert not directory.knows("k", 0.0) and directory.parts("k", 0.0) == (), "what a consumer lacked is not trusted"
