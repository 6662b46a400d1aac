"""The recording: sizes and times of what was answered, none of its content, and no more than it may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epd_serve.image_tokens import Tiled
from epd_serve.traffic import read_traffic
from proxy.records import lines
from proxy.records.lines import LinesFile
from tests.proxy.fakes import (
    DONE,
    api_keys,
    chunk,
    cluster,
    data_url,
    encodes,
    image_body,
    image_file,
    opening,
    replies,
    settings,
    streams,
    text_body,
)
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"
ANSWER = {
    "choices": [{"index": 0, "message": {"content": "answered words"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 50, "completion_tokens": 7, "total_tokens": 57},
}


async def test_what_was_answered_is_recorded_by_its_sizes_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    config = settings(recording=str(path), api_keys=api_keys("a-secret-key"))
    headers = {"authorization": "Bearer a-secret-key"}
    async with cluster("E0", "P0", "D0", config=config) as c:
        c["E0"].usual = encodes()
        c["D0"].usual = replies(200, ANSWER)
        for body in (text_body(), image_body(), image_body()):
            assert (await c.client.post(CHAT, json=body, headers=headers)).status_code == 200
        await c.client.post(CHAT, json=text_body() | {"max_tokens": -1}, headers=headers)
    text, first, again = read_traffic(path)
    assert (text.at_s, text.items, text.prompt_tokens, text.output_tokens) == (0.0, (), 50, 7)
    (item,), (same,) = first.items, again.items
    assert item == same and item.key and item.width and item.height and item.tokens >= 1
    assert first.at_s <= again.at_s < 60
    said = path.read_text()
    for secret in ("a-secret-key", "answered", "data:", "image/png", "What", "tenant"):
        assert secret not in said


async def test_an_image_is_recorded_with_its_tiles(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    rule = Tiled(8, 256, 1, 6, thumbnail=True)
    async with cluster("E0", "PD0", config=settings(recording=str(path), image_tokens=rule)) as c:
        c["E0"].usual = encodes()
        c["PD0"].usual = replies(200, ANSWER)
        assert (await c.ask(data_url(image_file(24, 8)))).status_code == 200
    (item,) = read_traffic(path)[0].items
    assert (item.tiles, item.tokens) == (4, 4 * 256)


async def test_a_stream_counts_by_its_events_where_no_stage_counts(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    async with cluster("PD0", config=settings(recording=str(path))) as c:
        c["PD0"].usual = streams(opening(0), chunk("a"), chunk("b"), DONE)
        await c.client.post(CHAT, json=text_body() | {"stream": True})
    (one,) = read_traffic(path)
    assert one.output_tokens == 2 and one.prompt_tokens >= 1


def test_a_recording_keeps_the_newest_within_its_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lines, "GATHER_S", 0.0)
    path, older = tmp_path / "t.jsonl", tmp_path / "t.jsonl.1"
    lost: list[int] = []
    several = [LinesFile(str(path), "recording", lost.append, most_bytes=4000) for _ in range(2)]

    def line(number: int) -> bytes:
        return b'{"id":"%d","at_s":%d,"prompt_tokens":9,"output_tokens":1}' % (number, number)

    for number in range(300):
        several[number % 2].write(line(number))
        if number % 10 == 9:
            wait_for(lambda number=number: line(number) in _bytes(path) + _bytes(older), "the line is written")
    for file in several:
        file.close()
    kept = [int(one.id) for one in read_traffic(path)]
    assert kept[20:] == list(range(kept[20], 300)) and 30 < len(kept) < 120 and not lost, "but where one file ended"
    assert path.stat().st_size + older.stat().st_size < 8000


def test_half_a_line_of_one_that_was_killed_takes_no_other_along(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"id":"killed","at_s"')
    file = LinesFile(str(path), "recording", lambda lines: None)
    file.write(b'{"id":"next","at_s":1,"prompt_tokens":9,"output_tokens":1}')
    file.close()
    assert [one.id for one in read_traffic(path)] == ["next"]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # between two files
        return b""


def test_a_wrong_bound_is_refused() -> None:
    wrong: dict[str, Any] = {"recording_bytes": 0}
    with pytest.raises(Exception, match="recording_bytes"):
        settings(**wrong)
