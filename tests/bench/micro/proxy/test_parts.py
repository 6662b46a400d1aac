"""`epd-bench proxy`: its parts, and what becomes of their numbers."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from bench import cli
from bench.clients.process import SenderProcess
from bench.example_proxies import ASCEND, VLLM, running, source
from bench.micro.measurement import Measurement, Row
from bench.micro.proxy import command, rivals, speed
from bench.micro.proxy.rivals import bare_relay, closed_loop
from epd_serve.errors import StageError
from epd_serve.roles import Role
from tests.proxy.fakes import DONE, FakeStage, chunk, served, streams


def part(value: float, asked: list[bool], fetch: Callable[[argparse.Namespace], None] = lambda _: None) -> Measurement:
    def measure(arguments: argparse.Namespace) -> Iterator[Row]:
        asked.append(arguments.quick)
        yield {"x": value}

    return Measurement(
        what="what it is",
        measure=measure,
        figures=lambda rows: {f"figure_{value:g}": sum(row["x"] for row in rows)},
        tables=lambda rows: [f"table of {value:g}"],
        fetch=fetch,
    )


def failing() -> Measurement:
    def measure(arguments: argparse.Namespace) -> Iterator[Row]:
        yield {"x": 1}
        raise StageError("it fell over", stage="third")

    def no_result(rows: Sequence[Row]) -> NoReturn:
        pytest.fail("half a part has neither figures nor a table")

    return Measurement(measure=measure, figures=no_result, tables=no_result)


def test_parts_run_one_by_one_and_their_figures_come_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(command, "PARTS", {"speed": part(1.0, asked), "burst": part(2.0, asked)})
    out = tmp_path / "out.json"
    assert cli.main(["proxy", "--quick", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["figures"] == {"figure_1": 1.0, "figure_2": 2.0, "failed_parts": 0}
    assert result["rows"] == [{"x": 1.0, "part": "speed"}, {"x": 2.0, "part": "burst"}]
    assert "table of 2" in capsys.readouterr().out
    assert cli.main(["proxy", "--only", "burst"]) == 0
    assert asked == [True, True, False]


def test_a_part_that_lacks_a_download_says_so_before_anything_is_measured_and_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(arguments: argparse.Namespace) -> None:
        assert not asked, "before anything is measured"
        raise StageError("no network: give a copy by --peer-vllm", stage="peers")

    asked: list[bool] = []
    monkeypatch.setattr(command, "PARTS", {"speed": part(1.0, asked), "peers": part(2.0, asked, fetch)})
    assert cli.main(["proxy", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("peers is left out: no network") and "not measured: peers: no network" in printed
    assert asked == [True]
    asked.clear()
    assert cli.main(["proxy", "--only", "speed", "--only", "peers"]) == 1
    assert asked == [], "what was asked for by name is refused at once"
    assert "--peer-vllm" in capsys.readouterr().err


def test_what_was_measured_is_kept_when_another_part_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"speed": part(1.0, []), "burst": failing(), "irp": part(2.0, [])}
    monkeypatch.setattr(command, "PARTS", parts)
    out = tmp_path / "out.json"
    assert cli.main(["proxy", "--json", str(out)]) == 1
    assert json.loads(out.read_text())["figures"] == {"figure_1": 1.0, "figure_2": 2.0, "failed_parts": 1}
    assert "not measured: burst: it fell over" in capsys.readouterr().out


def test_no_two_parts_set_one_goal() -> None:
    goals = [goal.figure for part in command.PARTS.values() for goal in part.goals]
    assert len(set(goals)) == len(goals)


def test_ratios_are_taken_within_a_round() -> None:
    rows = [
        {"kind": "whole", "to": name, "round": turn, "rps": rps}
        for turn, pair in enumerate([(60, 100), (30, 60), (8, 10)])
        for name, rps in zip(("proxy", "relay"), pair, strict=True)
    ]
    assert rivals.ratio(rows, "whole", "proxy", "relay") == 0.6


def test_images_have_the_size_they_should_and_differ() -> None:
    first, second = (rivals.image_request("m", seed).body for seed in (1, 2))
    assert first != second and 190_000 < len(first) * 3 / 4 < 215_000


async def test_the_bare_relay_passes_answers_on() -> None:
    fake = FakeStage("PD0", Role.PD)
    fake.usual = streams(chunk("a"), DONE)
    async with served(fake) as url:

        def through() -> dict[str, float]:
            with bare_relay(url) as relay, SenderProcess() as sender:
                return closed_loop(sender, relay, [rivals.text_request("m", stream=True)], 0.2)

        row = await asyncio.to_thread(through)
    assert row["requests"] and not row["errors"] and row["cpu_us_per_request"] > 0


def test_a_rival_that_does_not_start_shows_its_log() -> None:
    with pytest.raises(StageError, match="no such luck"), running("it", 1, ["sh", "-c", "echo no such luck; exit 1"]):
        pass


def test_the_peers_are_pinned_and_taken_from_a_file_where_one_is_given(tmp_path: Path) -> None:
    for peer in (VLLM, ASCEND):
        assert any(len(part) == 40 for part in peer.url.split("/"))
    copy = tmp_path / "copy.py"
    copy.write_text("print()")
    assert source(VLLM, copy) == b"print()"
    with pytest.raises(StageError, match="--peer-ascend"):
        speed.PEERS.fetch(argparse.Namespace(peer_vllm=copy, peer_ascend=tmp_path / "missing.py"))
    argv = VLLM.argv(copy, 8000, ["http://127.0.0.1:1"], ["http://127.0.0.1:2"])
    assert argv[2:] == [
        *("--host", "127.0.0.1", "--port", "8000", "--encode-servers-urls", "http://127.0.0.1:1"),
        *("--prefill-servers-urls", "disable", "--decode-servers-urls", "http://127.0.0.1:2"),
    ]
    argv = ASCEND.argv(copy, 8000, ["http://127.0.0.1:1"], ["http://127.0.0.1:2"])
    assert argv[2:] == [
        *("--host", "127.0.0.1", "--port", "8000", "--encoder-hosts", "127.0.0.1", "--encoder-ports", "1"),
        *("--pd-hosts", "127.0.0.1", "--pd-ports", "2"),
    ]
