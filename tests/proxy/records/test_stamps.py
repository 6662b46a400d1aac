"""The proxy's phase stamps: made of the record when a request ends, and joined with those of stages."""

from __future__ import annotations

import asyncio
from pathlib import Path

from epd_serve.phases.join import spans_of_stamps
from epd_serve.phases.phase import Phase
from epd_serve.phases.stamps import Timeline, read_stamps
from tests.proxy.fakes import cluster, encodes, image_body, settings, text_body

CHAT = "/v1/chat/completions"


async def test_a_request_is_stamped_from_its_arrival_to_its_end_with_what_joins_the_stages(tmp_path: Path) -> None:
    async with cluster("E0", "P0", "D0", config=settings(trace_path=str(tmp_path / "proxy.jsonl"))) as c:
        c["E0"].usual = encodes()
        await c.client.post(CHAT, json=image_body(stream=True), headers={"x-request-id": "mine"})
        await c.idle()
        [[key]] = c["E0"].keys
        [told] = c["P0"].calls
    stamps = Timeline(read_stamps(tmp_path)).named("mine")
    events = {stamp.event: stamp for stamp in stamps}
    assert [stamp.t for stamp in stamps] == sorted(stamp.t for stamp in stamps)
    assert stamps[0].event == "arrived" and stamps[-1].event == "done" and stamps[-1].more == {"outcome": "200"}
    assert {"received", "media", "encode_sent", "encode_done", "encoded", "admitted", "dispatched", "first_byte"} <= {
        *events
    }
    assert events["media"].more == {"keys": [key]}
    assert events["encode_sent"].more == {"to": "E0"}
    assert events["encode_done"].more == {"by": "E0", "outcome": "ok"}
    assert events["dispatched"].more == {
        "path": "E-P-D",
        "transfer": told.body["kv_transfer_params"]["transfer_id"],
    }
    assert events["prefilled"].more == {"outcome": "ok"}
    assert events["encoded"].more["t0"] <= events["encode_sent"].t < events["encode_done"].t <= events["encoded"].t
    assert {"P0", "D0"} >= {events["first_byte"].more["stage"]}
    assert {span.phase for span in spans_of_stamps(stamps)} >= {Phase.PROXY, Phase.STAGES}


async def test_the_wait_for_the_stages_is_told_by_the_stamp_of_its_end(tmp_path: Path) -> None:
    async with cluster("PD0", config=settings(trace_path=str(tmp_path / "proxy.jsonl"))) as c:
        c.table.pause_for(0.2)
        await c.client.post(CHAT, json=text_body(), headers={"x-request-id": "waits"})
        await asyncio.sleep(0)
        await c.idle()
    [admitted] = [one for one in Timeline(read_stamps(tmp_path)).named("waits") if one.event == "admitted"]
    assert admitted.t - admitted.more["t0"] > 0.1
