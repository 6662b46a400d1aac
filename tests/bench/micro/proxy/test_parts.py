"""`epd-bench proxy`: its parts, and what becomes of their numbers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench import cli
from bench.clients.process import SenderProcess
from bench.example_proxies import ASCEND, VLLM, running, source
from bench.goals import Goal
from bench.micro.proxy import command, peers, rivals
from bench.micro.proxy.breakdown import part_of, shares
from bench.micro.proxy.part import Options, Part, PartResult
from bench.micro.proxy.rivals import bare_relay, closed_loop
from epd_serve.errors import StageError
from epd_serve.roles import Role
from tests.proxy.fakes import DONE, FakeStage, chunk, served, streams

SITE = "/lib/python3.11/site-packages"


def test_parts_run_one_by_one_and_their_figures_come_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, Options]] = []

    def part(name: str, value: float) -> Part:
        def measure(options: Options) -> PartResult:
            asked.append((name, options))
            return PartResult({name: value}, [{"x": value}], f"table of {name}")

        return Part(name, f"what {name} is", measure, (Goal(name, "<=", 1.5),))

    monkeypatch.setattr(command, "PARTS", (part("one", 1.0), part("two", 2.0)))
    out = tmp_path / "out.json"
    assert cli.main(["proxy", "--quick", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["figures"] == {"one": 1.0, "two": 2.0}
    assert result["rows"] == [{"x": 1.0, "part": "one"}, {"x": 2.0, "part": "two"}]
    printed = capsys.readouterr().out
    assert "table of two" in printed and "MISSED" in printed
    assert cli.main(["proxy", "--only", "two"]) == 0
    assert [(name, options.quick) for name, options in asked] == [("one", True), ("two", True), ("two", False)]


def _parts(asked: list[str], tmp_path: Path) -> tuple[Part, ...]:
    """One that measures, one that needs what is not there, one that fails, one that measures."""

    def measure(options: Options) -> PartResult:
        asked.append("measured")
        return PartResult({f"figure{len(asked)}": 1.0}, [{"x": 1}], "table")

    def fails(options: Options) -> PartResult:
        raise StageError("it fell over", stage="third")

    def fetch(options: Options) -> None:
        asked.append("fetched")
        raise StageError("no network: give a copy by --peer-vllm", stage="second")

    return (
        Part("first", "", measure),
        Part("second", "", measure, (Goal("never", ">=", 1),), fetch),
        Part("third", "", fails),
        Part("fourth", "", measure),
    )


def test_a_part_that_lacks_a_download_says_so_before_anything_is_measured_and_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    parts = _parts(asked, tmp_path)
    monkeypatch.setattr(command, "PARTS", (parts[0], parts[1]))
    assert cli.main(["proxy", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert asked == ["fetched", "measured"]
    assert printed.startswith("second is left out: no network") and "not measured: second: no network" in printed
    asked.clear()
    assert cli.main(["proxy", "--only", "first", "--only", "second"]) == 1
    assert asked == ["fetched"], "what was asked for by name is refused at once"
    assert "--peer-vllm" in capsys.readouterr().err


def test_what_was_measured_is_kept_when_another_part_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = _parts([], tmp_path)
    monkeypatch.setattr(command, "PARTS", (parts[0], parts[2], parts[3]))
    out = tmp_path / "out.json"
    assert cli.main(["proxy", "--json", str(out)]) == 1
    assert set(json.loads(out.read_text())["figures"]) == {"figure1", "figure2"}
    assert "not measured: third: it fell over" in capsys.readouterr().out


def test_every_part_has_a_name_of_its_own_and_no_two_set_one_goal() -> None:
    names = [part.name for part in command.PARTS]
    goals = [goal.figure for part in command.PARTS for goal in part.goals]
    assert len(set(names)) == len(names) and len(set(goals)) == len(goals)


def test_a_sample_counts_for_the_innermost_file_that_is_known() -> None:
    assert part_of([f"{SITE}/aiohttp/client.py", "/x/proxy/stages/client.py"]) == "client: aiohttp"
    assert part_of(["/usr/lib/python3.11/contextlib.py", "/x/proxy/http/exchange.py"]) == "exchange, admission"
    assert part_of(["/x/proxy/routing/policy.py"]) == "routing: table, policies"
    assert part_of([f"{SITE}/uvloop/__init__.py"]) == "event loop, tasks, timers"
    assert part_of(["<string>"]) == "other"
    found = shares([(["/x/proxy/stages/sse.py"], 3), ([f"{SITE}/uvicorn/server.py"], 1)])
    assert found == {"relay: HTTP to stages, events": 0.75, "server: uvicorn": 0.25}


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
        peers.PART.fetch(Options(peer_vllm=copy, peer_ascend=tmp_path / "missing.py"))
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
