"""Joining the stamps of one request across processes."""

from __future__ import annotations

import json
from typing import Any

from epd_serve.phases.stamps import Timeline, read_stamps, stamps_about


def write(path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def line(t: float, instance: str, subject: str, event: str, **more: object) -> dict[str, Any]:
    return {"t": t, "instance": instance, "subject": subject, "event": event, **more}


def test_a_request_is_joined_by_its_keys_and_transfers(tmp_path):
    write(
        tmp_path / "proxy.jsonl",
        line(1.0, "proxy", "r1", "arrived"),
        line(1.1, "proxy", "r1", "media", keys=["k1"]),
        line(1.5, "proxy", "r1", "dispatched", path="E_P_D", transfer="t1"),
        line(2.0, "proxy", "r1", "done", outcome="200"),
    )
    write(tmp_path / "E0.jsonl", line(1.3, "E0", "k1", "encoded"), line(1.3, "E0", "other", "encoded"))
    write(tmp_path / "P0.jsonl", line(1.7, "P0", "t1", "prefill_end"))

    events = Timeline(read_stamps(tmp_path)).of("r1")

    assert events == {
        "arrived": 1.0,
        "media": 1.1,
        "encoded": 1.3,
        "dispatched": 1.5,
        "prefill_end": 1.7,
        "done": 2.0,
    }


def test_stamps_of_another_request_with_the_same_picture_do_not_count(tmp_path):
    write(
        tmp_path / "proxy.jsonl",
        line(1.0, "proxy", "r1", "arrived"),
        line(1.1, "proxy", "r1", "media", keys=["k"]),
        line(2.0, "proxy", "r1", "done"),
    )
    write(tmp_path / "E0.jsonl", line(0.5, "E0", "k", "encoded"), line(2.5, "E0", "k", "feature_put"))

    events = Timeline(read_stamps(tmp_path)).of("r1")

    assert set(events) == {"arrived", "media", "done"}


def test_what_becomes_of_a_part_is_told_of_its_picture(tmp_path):
    write(
        tmp_path / "proxy.jsonl",
        line(1.0, "proxy", "r", "arrived"),
        line(1.1, "proxy", "r", "media", keys=["k"]),
        line(2.0, "proxy", "r", "done"),
    )
    write(tmp_path / "E0.jsonl", line(1.2, "E0", "k/0-2", "encoded"), line(1.2, "E0", "kk/0-2", "encoded"))
    write(tmp_path / "E1.jsonl", line(1.4, "E1", "k/1-2", "encoded"))

    encoded = [stamp for stamp in Timeline(read_stamps(tmp_path)).stamps("r") if stamp.event == "encoded"]

    assert [(stamp.instance, stamp.subject) for stamp in encoded] == [("E0", "k/0-2"), ("E1", "k/1-2")]


def test_the_last_picture_ends_a_phase_and_the_first_begins_one(tmp_path):
    write(
        tmp_path / "proxy.jsonl",
        line(1.0, "proxy", "r", "arrived"),
        line(1.1, "proxy", "r", "media", keys=["a", "b"]),
        line(2.0, "proxy", "r", "done"),
    )
    write(
        tmp_path / "E0.jsonl",
        line(1.2, "E0", "a", "encode_start"),
        line(1.3, "E0", "b", "encode_start"),
        line(1.4, "E0", "a", "encoded"),
        line(1.5, "E0", "b", "encoded"),
    )

    events = Timeline(read_stamps(tmp_path)).of("r")

    assert (events["encode_start"], events["encoded"]) == (1.2, 1.5)


def test_a_line_cut_short_is_skipped(tmp_path):
    (tmp_path / "P0.jsonl").write_text(json.dumps(line(1.0, "P0", "k", "feature_event")) + '\n{"t": 2.0, "ins')

    assert [stamp.event for stamp in read_stamps(tmp_path)] == ["feature_event"]


def test_an_unknown_request_has_no_events():
    assert Timeline([]).of("nobody") == {}


def test_a_request_is_found_by_the_name_its_client_gave(tmp_path):
    write(
        tmp_path / "proxy.jsonl",
        line(1.0, "proxy", "r1", "arrived", client_id="mine"),
        line(1.5, "proxy", "r1", "first_byte"),
        line(1.2, "proxy", "r2", "arrived", client_id="yours"),
    )
    timeline = Timeline(read_stamps(tmp_path))

    assert [stamp.event for stamp in timeline.named("mine")] == ["arrived", "first_byte"]
    assert [stamp.event for stamp in timeline.named("yours")] == ["arrived"]
    assert timeline.named("nobody") == []


def test_a_stage_asked_past_the_proxy_knows_the_request_by_its_clients_name(tmp_path):
    write(tmp_path / "EPD0.jsonl", line(1.0, "EPD0", "mine", "received"), line(1.2, "EPD0", "mine", "answering"))

    assert [stamp.event for stamp in Timeline(read_stamps(tmp_path)).named("mine")] == ["received", "answering"]


def test_a_packet_is_a_stamp_of_every_transfer_that_it_carries(tmp_path):
    write(
        tmp_path / "all.jsonl",
        *(line(1.0, "proxy", name, "dispatched", transfer=f"t-{name}") for name in ("a", "b")),
        line(1.5, "P0", "link:D0", "kv_packet", transfers=["t-a", "t-b"]),
        *(line(2.0, "proxy", name, "done") for name in ("a", "b")),
    )
    timeline = Timeline(read_stamps(tmp_path))

    assert all("kv_packet" in timeline.of(name) for name in ("a", "b"))


def test_stamps_about_some_subjects_are_those_of_this_host_s_clock(tmp_path):
    write(
        tmp_path / "shared.jsonl",
        line(1.0, "E0", "k1", "encoded", clock="here"),
        line(9.0, "E1", "k1", "encoded", clock="there"),
        line(2.0, "P0", "p", "kv_packet", transfers=["t1", "t2"], clock="here"),
        line(3.0, "P0", "other", "queued", clock="here"),
        line(0.5, "P0", "t1", "prefill_end"),
    )

    found = stamps_about(tmp_path, ["k1", "t1"], "here")

    assert [(stamp.instance, stamp.event) for stamp in found] == [
        ("P0", "prefill_end"), ("E0", "encoded"), ("P0", "kv_packet"),
    ]  # fmt: skip
    assert "clock" not in found[1].more
