"""Which of two ways a feature is fetched by: past the host where its encoder is reached so, else through the arena."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from epd_serve import wire
from epd_serve.engine.ec import direct_source
from epd_serve.engine.ec.device_ledger import DevicePin
from epd_serve.engine.ec.device_probe import Path
from epd_serve.engine.ec.direct_source import DirectSource
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from store.arena import Arena
from store.arena.lease import Lease
from store.errors import StoreError, StoreFullError, StoreUnavailableError
from tests.epd_serve.engine.ec.stages import Remote, TwoTiers


class Agents:
    """Stands in for `DeviceSource`: features by key, or the error that a fetch ends in."""

    def __init__(self, endpoints: Any, *, on_path: Any, **more: Any) -> None:
        self.on_path = on_path
        self.features: Agents = self
        self.met: list[str] = []
        self.paths: dict[str, Path] = {}
        self.there: dict[str, DevicePin | StoreError] = {}
        self.fetches: list[tuple[str, int]] = []

    def meet(self, encoder: str) -> None:
        self.met.append(encoder)

    def decide(self, encoder: str, path: Path) -> None:
        self.paths[encoder] = path
        self.on_path(encoder, path, "")

    def path(self, encoder: str) -> Path:
        return self.paths.get(encoder, Path.PROBING)

    def lease_local(self, key: str) -> DevicePin | None:
        return None

    def fetch(self, key: str, nbytes: int = 0) -> DevicePin | None:
        self.fetches.append((key, nbytes))
        found = self.there.get(key)
        if isinstance(found, StoreError):
            raise found
        return found

    def close(self) -> None:
        """Nothing is open."""


class Rig:
    def __init__(self, arena: Arena) -> None:
        self.remote = Remote()
        self.said: list[wire.FeaturePath] = []
        wiring = StageWiring("P0", Role.P, "p1", arena=str(arena.path), feature_path="device")
        self.source = DirectSource(wiring, TwoTiers(arena, self.remote), ["ipc://x"], self.said.append)
        self.agents: Agents = self.source._device  # type: ignore[assignment]

    def encoder(self, name: str, path: Path) -> None:
        self.report(name)
        self.agents.decide(f"{name}.1", path)

    def report(self, name: str) -> None:
        self.source.hear(wire.StoreReport(name, f"{name}.1", 0, 0, 0, feature_path="device"))

    def announced(self, key: str, by: str) -> wire.FeatureReady:
        event = wire.FeatureReady(key, 64, f"{by}.1", wire.NO_ARENA, True)
        self.source.hear(event)
        return event

    def on_device(self, key: str) -> DevicePin:
        pin = self.agents.there[key] = DevicePin(key, 0, 64, (64,), "uint8", lambda pin: None)
        return pin

    def on_host(self, key: str) -> None:
        self.remote.features[key] = (bytes(64), (64,), "uint8")


@pytest.fixture
def rig(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(direct_source, "DeviceSource", Agents)
    made = Rig(arena)
    yield made
    made.source.close()


def test_what_an_encoder_that_is_reached_has_made_goes_past_the_host(rig: Rig) -> None:
    rig.encoder("E0", Path.DEVICE)
    event, pin = rig.announced("k", by="E0"), rig.on_device("k")
    assert rig.source.reaches(event)
    assert rig.source.fetch("k") is pin
    assert (rig.agents.fetches, rig.remote.fetches) == ([("k", 64)], [])


def test_what_another_has_made_is_not_tried_on_its_device(rig: Rig) -> None:
    rig.encoder("E0", Path.DEVICE)
    rig.encoder("E1", Path.ARENA)
    event = rig.announced("k", by="E1")
    rig.on_host("k")
    assert not rig.source.reaches(event)
    with held(rig.source.fetch("k")):
        assert rig.agents.fetches == []


@pytest.mark.parametrize(("second", "direct"), [(Path.DEVICE, True), (Path.ARENA, False), (Path.PROBING, False)])
def test_of_an_unknown_encoder_it_is_fetched_directly_only_if_all_are_reached(
    rig: Rig, second: Path, direct: bool
) -> None:
    rig.encoder("E0", Path.DEVICE)
    rig.encoder("E1", second)
    assert rig.source.fetch("k") is None
    assert bool(rig.agents.fetches) is direct
    assert rig.remote.fetches == ["k"], "the host is asked in the end"


@pytest.mark.parametrize("error", [StoreUnavailableError("slow"), StoreFullError("full")])
def test_a_fetch_that_fails_is_looked_for_on_the_host(rig: Rig, error: StoreError) -> None:
    rig.encoder("E0", Path.DEVICE)
    rig.agents.there["k"] = error
    with pytest.raises(type(error)):
        rig.source.fetch("k")
    rig.on_host("k")
    with held(rig.source.fetch("k")):
        assert rig.source.counters()["device.fetch_failed"] == 2


def test_an_encoder_is_met_once_it_says_that_it_has_the_way_and_told_again_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.source.hear(wire.StoreReport("E0", "E0.1", 0, 0, 0))
    assert rig.agents.met == []
    rig.encoder("E0", Path.DEVICE)
    rig.report("E0")
    assert rig.said == [wire.FeaturePath("P0", "E0.1", "device")]
    monkeypatch.setattr(direct_source, "_SAY_AGAIN_S", 0.0)
    rig.report("E0")
    assert len(rig.said) == 2, "an announcement may be lost"
    assert rig.agents.met == ["E0.1"]


def held(found: Any) -> Lease:
    assert isinstance(found, Lease)
    return found
