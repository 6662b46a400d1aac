"""Where devices are lent the follower goes by those that there are, and has others asked for while it wants them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from deploy.follow.live import Follower
from deploy.follow.observe import Observer
from deploy.follow.types import Limits
from epd_serve.layout_parser import parse
from tests.deploy.control.cluster import Cluster
from tests.deploy.follow.test_live import PROFILE, Comes
from tests.waiting import until


class Followed(Cluster):
    def __init__(self, folder: Path, nodes: dict[str, int], devices: int) -> None:
        super().__init__(folder, "E-P-D", nodes)
        self.comes_in = Comes()
        self.limits = Limits(devices=devices, every_s=0.02, quiet_s=0.5)

    @contextlib.asynccontextmanager
    async def following(self, mode: str = "act") -> AsyncIterator[Follower]:
        async with self.running():
            await self.whole()
            follower = Follower(
                mode,
                self.limits,
                Observer(PROFILE, 0.05),
                self.controller,
                self.reconciler,
                self.doors.table,
                self.comes_in.look,
            )
            task = asyncio.create_task(follower.run())
            try:
                yield follower
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    @property
    def used(self) -> int:
        return parse(self.reconciler.wanted.layout).device_count


async def test_what_there_is_is_used_and_what_is_lacking_is_asked_for(tmp_path: Path) -> None:
    cluster = Followed(tmp_path, {"a": 4}, devices=8)
    async with cluster.following() as follower:
        cluster.comes_in.media = 4.0
        await until(lambda: cluster.used == 4 and cluster.reconciler.changes.present is None)
        await until(lambda: sum(cluster.leases.wanted) == 4)
        cluster.comes(2)
        await until(lambda: cluster.used == 6)
        await until(lambda: sum(cluster.leases.wanted) == 2)
        cluster.comes(3)
        await until(lambda: cluster.used == 8)
        await until(lambda: not cluster.leases.wanted)
        await cluster.whole()
        assert not [kind for kind in follower.moves if kind[1] != "done"]


async def test_nodes_that_never_come_leave_nothing_behind(tmp_path: Path) -> None:
    cluster = Followed(tmp_path, {"a": 3}, devices=8)
    async with cluster.following() as follower:
        cluster.comes_in.media = 4.0
        await until(lambda: sum(cluster.leases.wanted) == 5)
        asked = cluster.comes_in.asked
        await until(lambda: cluster.comes_in.asked > asked + 10)
        assert cluster.used == 3 and not follower.moves, "nothing is tried that cannot be"
        cluster.comes_in.media = 0.0
        await until(lambda: not cluster.leases.wanted)


async def test_nothing_is_asked_for_where_an_operator_has_said_what_is_wanted_or_nothing_is_done(
    tmp_path: Path,
) -> None:
    cluster = Followed(tmp_path, {"a": 4}, devices=8)
    async with cluster.following("advise") as follower:
        cluster.comes_in.media = 4.0
        await until(lambda: sum(follower.lacking) == 4)
        assert not cluster.leases.wanted
        await follower.switch("act")
        await until(lambda: sum(cluster.leases.wanted) == 4)
        await until(lambda: cluster.reconciler.changes.present is None)
        await cluster.controller.relayout("E-P-D")
        await until(lambda: not cluster.leases.wanted)
        asked = cluster.comes_in.asked
        await until(lambda: cluster.comes_in.asked > asked + 10)
        assert cluster.used == 3 and not cluster.leases.wanted
        await follower.switch("off")
        assert follower.lacking == ()
