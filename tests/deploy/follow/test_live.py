"""A deployment in memory is followed: changed as an operator changes it, and left alone where one has changed it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from deploy.follow import live, moves, outcome
from deploy.follow.live import Follower
from deploy.follow.observe import Observer
from deploy.follow.plans import Answer, Plans
from deploy.follow.report import FollowMetrics
from deploy.follow.switch import Switch
from deploy.follow.types import Limits, PlanQuestion
from deploy.planner.goodput import Interval
from deploy.planner.profile import DeviceProfile
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.sim.profile import Capacity, Line, Profile
from epd_serve.slo import Slo
from npu_ops.core_grants import why_fixed
from proxy.records.counts import Counts, KindCounts
from proxy.records.records import Question, RecordsAnswer
from proxy.registry.instance_state import Work
from tests.deploy.control.test_commands import Commanded
from tests.deploy.control.world import FileState
from tests.waiting import until

PROFILE = DeviceProfile(
    "m",
    "d",
    {
        1: Profile(
            encode=Line(0.0, 0.001),
            prefill=Line(0.0, 0.0005),
            decode_step_s=((1, 0.02), (8, 0.04)),
            capacity=Capacity(max_running=8),
        )
    },
)
"""A picture of 500 tokens takes an encoder half a second."""


class Comes:
    """What front doors say: so many requests a second, of one size."""

    def __init__(self) -> None:
        self.text = self.media = 0.0
        self.answered, self.hangs, self.breaks = 2, False, False
        self.asked = 0

    async def look(self, question: Question) -> RecordsAnswer:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.breaks:
            raise ZeroDivisionError("as a defect does")
        kinds = {"text": self._of(self.text, 0), "media": self._of(self.media, 500)}
        counts = Counts(seconds=question.window_s, kinds=kinds, answered=self.answered, serving=2)
        return RecordsAnswer(counts=counts)

    def _of(self, rate: float, item_tokens: int) -> KindCounts:
        count = round(10 * rate)
        tokens = count * (item_tokens + 100)
        return KindCounts(
            count, count, count * bool(item_tokens), count * item_tokens, tokens, count, count, 50 * count
        )


def metrics_of(follower: Follower) -> str:
    registry = CollectorRegistry()
    registry.register(FollowMetrics(follower))
    return generate_latest(registry).decode()


class Followed(Commanded):
    plans: Plans | None = None

    def __init__(
        self, folder: Path, layout: str, mode: str = "act", devices: int = 16, quiet_s: float = 60.0, **options: Any
    ) -> None:
        super().__init__(folder, layout, both=True, **options)
        self.comes = Comes()
        self.mode, self.limits = mode, Limits(devices=devices, every_s=0.02, quiet_s=quiet_s, switchable=True)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[Follower]:
        async with self.serving():
            follower = self.follower = self.made()
            await self.switch.begin(lambda: follower)
            await self.switch.set(self.mode)
            task = asyncio.create_task(self.switch.run())
            try:
                yield follower
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def made(self) -> Follower:
        return Follower(
            "off",
            self.limits,
            Observer(PROFILE, 0.05),
            self.controller,
            self.reconciler,
            self.doors.table,
            self.comes.look,
            self.plans,
        )

    @property
    def layout(self) -> str:
        return self.reconciler.wanted.layout

    def outcomes(self) -> list[str]:
        return [entry.outcome for entry in self.follower.entries]


async def test_pictures_come_and_encoders_are_started_and_go_again(tmp_path: Path) -> None:
    world = Followed(tmp_path, "E-P-D", quiet_s=0.5)
    async with world.following() as follower:
        world.comes.media = 4.0
        await until(lambda: len([name for name in world.up() if name.startswith("E")]) >= 3)
        await until(lambda: "done" in world.outcomes())
        assert follower.moves["scale", "done"] >= 1
        world.comes.media = 0.0
        await until(lambda: world.layout == "E-P-D" and world.reconciler.changes.present is None)
    assert {change.what for change in world.reconciler.changes.past} == {"start", "follow"}
    assert all(change.cut == 0 for change in world.reconciler.changes.past)


async def test_who_advises_changes_nothing(tmp_path: Path) -> None:
    world = Followed(tmp_path, "E-P-D", mode="advise")
    async with world.following() as follower:
        world.comes.media = 4.0
        await until(lambda: follower.entries and follower.entries[-1].outcome == "advised")
        await until(lambda: follower.entries[-1].times > 5)
        assert world.layout == "E-P-D" and len(world.reconciler.changes.past) == 1


async def test_p_becomes_d_where_that_is_enough(tmp_path: Path) -> None:
    world = Followed(tmp_path, "E-4P-D", devices=6)
    async with world.following() as follower:
        begun = len(world.runtime.calls)
        world.comes.text = 6.0
        await until(lambda: follower.moves["flip", "done"])
        assert {call.split()[0] for call in world.runtime.calls[begun:]} == {"flip"}


def cores(world: Followed) -> dict[str, int]:
    return {name: len(one.order.spec.cores) for name, one in world.runtime.there.items() if one.order.spec.cores}


async def test_cores_go_to_the_part_that_lacks_them_and_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = Followed(tmp_path, "(E-P)x2-D", devices=3, core_share="E=0.25,P=0.75")
    async with world.following() as follower:
        begun = len(world.runtime.calls)
        assert cores(world) == {"E0": 1, "P0": 3, "E1": 1, "P1": 3}
        world.comes.media = 1.0
        await until(lambda: follower.moves["share", "done"])
        assert cores(world) == {"E0": 2, "P0": 2, "E1": 2, "P1": 2}
        assert {call.split()[0] for call in world.runtime.calls[begun:]} == {"share"}
        assert world.layout == "(E-P)x2-D" and world.reconciler.wanted.core_share == "E=0.5,P=0.5"
        record = world.journal.read()
        assert record is not None and record.core_share == "E=0.5,P=0.5", "the next life of control goes on with them"
        assert 'epd_follow_moves_total{kind="share",outcome="done"} 1.0' in metrics_of(follower)
        assert await world.says("status", "--why") == 0
        assert "share to E=0.5,P=0.5: E would be used" in capsys.readouterr().out
        await world.controller.relayout("(E-P)x2-2D")
        await until(lambda: world.reconciler.changes.present is None)
        assert cores(world) == {"E0": 2, "P0": 2, "E1": 2, "P1": 2}, "shares outlive a change of the layout"


async def test_a_stage_that_stays_on_its_cores_takes_the_shares_back_and_they_rest(tmp_path: Path) -> None:
    world = Followed(tmp_path, "(E-P)-D", devices=2, core_share="E=0.25,P=0.75")
    world.runtime.disobeys.add("P0")
    async with world.following() as follower:
        world.comes.media = 1.0
        await until(lambda: follower.moves["share", "failed"])
        assert cores(world) == {"E0": 1, "P0": 3} and world.reconciler.wanted.core_share == "E=0.25,P=0.75"
        assert any("failed: P0 does not compute on other cores" in outcome for outcome in world.outcomes())
        asked = world.comes.asked
        await until(lambda: world.comes.asked > asked + 10)
        assert follower.moves["share", "failed"] == 1, "it is not tried again at once"


async def test_shares_are_advised_and_where_they_are_fixed_refused_by_name(tmp_path: Path) -> None:
    for device, ended in (("cpu", "advised"), ("cuda", "stays"), ("npu", "stays")):
        world = Followed(tmp_path / device, "(E-P)-D", "advise", devices=2, core_share="E=0.25,P=0.75")
        world.limits = replace(world.limits, fixed_shares=why_fixed(device))
        async with world.following() as follower:
            world.comes.media = 1.0
            await until(lambda: follower.entries and follower.entries[-1].decision.need["(E-P)"] > 1)
            entry = follower.entries[-1]
            shares = [why for move, why in entry.decision.refused if move.what == "share"]
            assert (entry.outcome, shares) == (ended, [] if device == "cpu" else [why_fixed(device)])
            assert cores(world) == {"E0": 1, "P0": 3}


async def test_monoliths_become_other_groups_once_the_planner_says_so_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def answer(question: PlanQuestion, plans: Plans) -> Answer:
        asked.append(question.layout)
        best, other = ("EP-D", "2EPD") if question.rates["media"] > question.rates["text"] else ("2EPD", "EP-D")
        return Answer(question, {best: Interval.of([90.0]), other: Interval.of([1.0])})

    monkeypatch.setattr(live, "answer", answer)
    monkeypatch.setattr(moves, "TRADE_S", 0.0)
    world = Followed(tmp_path, "2EPD", devices=2)
    world.plans = Plans(PROFILE, Slo(2000.0, 50.0))
    world.comes.text = 8.0
    async with world.following() as follower:
        await until(lambda: follower.entries and "chosen for such work" in follower.entries[-1].decision.plan)
        world.comes.text, world.comes.media = 0.0, 8.0
        await until(lambda: world.layout == "EP-D" and follower.moves["relayout", "done"])
        world.comes.text, world.comes.media = 8.0, 0.0
        await until(lambda: world.layout == "2EPD" and follower.moves["relayout", "done"] == 2)
    assert asked == ["2EPD", "EP-D"]
    assert all(change.cut == 0 for change in world.reconciler.changes.past)


@pytest.mark.parametrize("works", [True, False])
async def test_a_change_that_did_nothing_is_undone_and_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """All is there in its role, and only one of the encoders is ever given pictures; or each of them is."""
    monkeypatch.setattr(outcome, "PROOF_S", 0.2)
    monkeypatch.setattr(outcome, "ENOUGH", 0.1)
    world = Followed(tmp_path, "E-P-D", devices=4)
    world.comes.media = 1.0
    async with world.following() as follower:

        async def give() -> None:
            while True:
                for name in world.up():
                    if name == "E0" or (works and name.startswith("E")):
                        world.doors.table.acquire(name, Work.ENCODE, 500.0).release()
                await asyncio.sleep(0.01)

        giving = asyncio.create_task(give())
        if works:
            await until(lambda: follower.moves["scale", "done"])
            asked = world.comes.asked
            await until(lambda: world.comes.asked > asked + 30)
            assert world.layout == "2E-P-D" and not follower.moves["scale", "undone"]
        else:
            await until(lambda: follower.moves["scale", "undone"])
            await until(lambda: world.layout == "E-P-D" and world.reconciler.changes.present is None)
            (undone,) = [entry.outcome for entry in follower.entries if entry.outcome.startswith("undone")]
            assert "E1 was given nothing while" in undone
            asked = world.comes.asked
            await until(lambda: world.comes.asked > asked + 10)
            assert world.layout == "E-P-D", "it is not tried again at once"
            assert follower._held() == ""
        giving.cancel()


async def test_how_busy_a_move_leaves_a_group_is_told_beside_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outcome, "SETTLED_S", 0.0)
    monkeypatch.setattr(outcome, "MEASURED_S", 0.3)
    world = Followed(tmp_path, "E-P-D", devices=4)
    world.comes.media = 1.0
    async with world.following() as follower:
        await until(lambda: follower.gains)
        (gain,) = follower.gains
        assert (gain.what, gain.group) == ("scale", "E") and gain.predicted == pytest.approx(0.25)
        assert gain.measured == 0.0, "nobody gave it anything"
        assert await world.says("status", "--why") == 0
        assert "E is then busy for 0% of its time, 25% was predicted" in capsys.readouterr().out


async def test_what_drains_is_taken_back_once_it_is_needed_again(tmp_path: Path) -> None:
    world = Followed(tmp_path, "3E-P-D", quiet_s=0.5)
    async with world.following() as follower:
        held = [world.doors.table.acquire(name, Work.ENCODE, 500.0) for name in ("E0", "E1", "E2")]
        await until(lambda: sum(call.startswith("drain E") for call in world.runtime.calls) == 2)
        assert world.layout == "E-P-D" and world.reconciler.changes.present is not None
        world.comes.media = 2.0
        await until(lambda: world.layout.startswith("3E") and world.reconciler.changes.present is None)
        assert not [call for call in world.runtime.calls if call.startswith(("stop E", "start E3"))]
        assert follower.moves["scale", "undone"] >= 1
        assert any("another change was begun" in entry.outcome for entry in follower.entries)
        for lease in held:
            lease.release()


async def test_a_change_that_an_operator_has_begun_is_never_superseded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "HELD_S", 0.0)
    world = Followed(tmp_path, "2E-P-D")
    async with world.following() as follower:
        lease = world.doors.table.acquire("E1", Work.ENCODE, 500.0)
        other = world.doors.table.acquire("E0", Work.ENCODE, 500.0)
        assert await world.says("relayout", "E-P-D", "--no-wait") == 0
        world.comes.media = 2.0
        await until(
            lambda: any(
                "a change is under way" in why for entry in follower.entries for _, why in entry.decision.refused
            )
        )
        assert world.layout == "E-P-D" and world.reconciler.changes.latest.what == "relayout"
        lease.release()
        other.release()
        await until(lambda: world.layout != "E-P-D")


async def test_what_an_operator_has_asked_for_is_left_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Followed(tmp_path, "E-P-D")
    async with world.following() as follower:
        assert await world.says("relayout", "E-2P-D") == 0
        world.comes.media = 4.0
        await until(lambda: follower.entries and follower.entries[-1].outcome.startswith("held: `relayout`"))
        assert world.layout == "E-2P-D"
        monkeypatch.setattr(live, "HELD_S", 0.0)
        await until(lambda: world.layout != "E-2P-D")


async def test_a_layout_that_cannot_be_reached_rests(tmp_path: Path) -> None:
    world = Followed(tmp_path, "E-P-D", devices=4)
    async with world.following() as follower:
        world.runtime.fate = lambda name: "fails"
        world.comes.media = 1.0
        await until(lambda: follower.moves["scale", "failed"])
        assert world.layout == "E-P-D"
        asked = world.comes.asked
        await until(lambda: world.comes.asked > asked + 10)
        assert follower.moves["scale", "failed"] == 1
        reasons = [why for entry in follower.entries for _, why in entry.decision.refused]
        assert any("it failed, and is not tried again" in why for why in reasons)


async def test_silent_front_doors_are_waited_for_and_nothing_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LOOK_S", 0.05)
    world = Followed(tmp_path, "E-P-D")
    async with world.following() as follower:
        world.comes.hangs, world.comes.media = True, 4.0
        asked = world.comes.asked
        await until(lambda: world.comes.asked > asked + 3)
        decided = len(follower.entries), world.layout
        world.comes.hangs, world.comes.answered = False, 0
        await until(lambda: world.comes.asked > asked + 10)
        assert world.layout == "E-P-D" and decided[1] == "E-P-D"
        world.comes.answered = 2
        await until(lambda: world.layout != "E-P-D")


async def test_a_defect_in_what_is_seen_changes_nothing_and_the_next_look_does_better(tmp_path: Path) -> None:
    world = Followed(tmp_path, "E-P-D")
    world.comes.breaks, world.comes.media = True, 4.0
    async with world.following():
        await until(lambda: world.comes.asked > 3)
        assert world.layout == "E-P-D"
        world.comes.breaks = False
        await until(lambda: world.layout != "E-P-D")


async def test_decisions_are_told_to_people_and_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = Followed(tmp_path, "E-P-D", mode="advise")
    async with world.following() as follower:
        world.comes.media = 4.0
        await until(lambda: follower.entries and follower.entries[-1].outcome == "advised")
        assert await world.says("status", "--why") == 0
        said = capsys.readouterr().out
        assert "follow: advise" in said and "E-P-D: advised" in said and "media requests/s" in said
        assert await world.says("status", "--why", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["mode"] == "advise" and told["decisions"][0]["chosen"]["relieves"] == "E"
        group = next(one for one in told["decisions"][0]["groups"] if one["group"] == "E")
        encoders = parse(told["decisions"][0]["chosen"]["layout"]).groups[0].repeat
        assert (group["there"], group["wanted"]) == (1, encoders)
        assert encoders >= 3 and f'epd_follow_desired_copies{{group="E"}} {encoders}.0' in metrics_of(follower)


async def test_what_budgets_hold_back_is_told_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = Followed(tmp_path, "(E-P)-D", mode="advise")
    world.doors.item_budgets["E0"] = 512
    async with world.following() as follower:
        await until(lambda: follower.entries)
        assert await world.says("status", "--why", "--json") == 0
        (told,) = json.loads(capsys.readouterr().out)["budgets"]
        assert (told["instance"], told["neighbours"], told["item_tokens"]) == ("E0", ["P0"], 512)
        assert await world.says("status", "--why") == 0
        assert "E0 beside P0: 512 item tokens a step, 0 steps held back" in capsys.readouterr().out


async def test_an_operator_has_it_act_and_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = Followed(tmp_path, "E-P-D", mode="advise")
    async with world.following() as follower:
        world.comes.media = 4.0
        await until(lambda: follower.entries and follower.entries[-1].outcome == "advised")
        assert await world.says("follow", "act") == 0
        assert capsys.readouterr().out == "follow: act\n"
        await until(lambda: world.layout != "E-P-D" and follower.moves["scale", "done"])
        assert await world.says("follow", "off") == 0
        world.comes.media, asked, layout = 9.0, world.comes.asked, world.layout
        await asyncio.sleep(10 * world.limits.every_s)
        assert world.comes.asked <= asked + 1 and world.layout == layout
        assert await world.says("status", "--why") == 0
        said = capsys.readouterr().out
        assert "epd-serve follow advise" in said and "E-P-D: done" in said, "what it did is still told"
        assert "epd_follow_desired_copies{" not in metrics_of(follower)
        assert await world.says("follow", "act") == 0
        await until(lambda: world.layout != layout)


async def test_nothing_begins_by_a_mode_that_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move of which it is not known yet whether it can begin has begun, or never will, when the answer comes."""
    world = Followed(tmp_path, "E-P-D")
    async with world.following() as follower:
        asked, goes_on = asyncio.Event(), asyncio.Event()
        follow = world.controller.follow

        async def slow(layout: str, core_share: str = "") -> object:
            asked.set()
            await goes_on.wait()
            return await follow(layout, core_share)

        monkeypatch.setattr(world.controller, "follow", slow)
        world.comes.media = 4.0
        async with asyncio.timeout(10.0):
            await asked.wait()
        setting = asyncio.create_task(world.post("/deployment/follow", mode="advise"))
        await asyncio.sleep(0.1)
        assert not setting.done()
        goes_on.set()
        assert (await setting).json() == {"mode": "advise"}
        begun = world.reconciler.changes.latest.number
        assert begun == 1
        await until(lambda: world.reconciler.changes.present is None)
        world.comes.media = 9.0
        await until(lambda: follower.entries[-1].outcome == "advised")
        assert world.reconciler.changes.latest.number == begun


async def test_the_next_life_of_control_goes_on_in_the_mode_that_was_set(tmp_path: Path) -> None:
    world = Followed(tmp_path, "E-P-D", mode="off")
    async with world.following():
        assert (await world.post("/deployment/follow", mode="advise")).status_code == 200
        status = await world.get("/deployment")
        assert status is not None and status.json()["follow"]["mode"] == "advise"
        after = Switch("act", FileState(tmp_path))
        await after.begin(world.made)
        assert after.told()["mode"] == "advise"
        assert (await world.post("/deployment/follow", mode="off")).status_code == 200
        after = Switch("act", FileState(tmp_path))
        await after.begin(world.made)
        assert after.told()["mode"] == "off"


async def test_a_mode_that_cannot_be_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def unreadable() -> Follower:
        raise ConfigError("--follow-profile: no such file", param="--follow-profile")

    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        await world.switch.begin(unreadable)
        assert await world.says("follow", "act") == 2
        assert "--follow-profile: no such file" in capsys.readouterr().err
        assert (await world.post("/deployment/follow", mode="no mode")).status_code == 400
        assert world.switch.told()["mode"] == "off"
        assert await world.says("follow", "perhaps") == 2
        assert "off|advise|act" in capsys.readouterr().err


async def test_without_a_follower_the_status_says_how_to_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = Commanded(tmp_path, "E-P-D")
    async with world.serving():
        assert await world.says("status", "--why") == 0
    assert "epd-serve follow advise" in capsys.readouterr().out
