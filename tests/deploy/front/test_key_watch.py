"""The file of clients' keys while front doors serve: what changes is told once, what is broken changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deploy.front.key_watch import KeyMetrics, KeyWatch, api_keys_of, of_this_machine, read_key_text
from epd_serve.errors import ConfigError
from proxy.config.keys import ApiKeys, written
from tests.deploy.client_keys import client_keys
from tests.proxy.fakes import api_keys


class World:
    """A watch on a file that begins with the key `one`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.json"
        name = client_keys(self.path, "one")
        self.told: list[ApiKeys] = []
        self.texts: list[str] = []
        self.said: list[str] = []
        self.registry = CollectorRegistry()
        text = read_key_text(name)
        self.watch = KeyWatch(
            name, text, of_this_machine(name), self._tell, self.said.append, KeyMetrics(self.registry)
        )

    def _tell(self, keys: ApiKeys, text: str) -> None:
        self.told.append(keys)
        self.texts.append(text)

    def metrics(self) -> tuple[float | None, float | None]:
        """How many keys, and whether the file is broken."""
        return self.registry.get_sample_value("epd_api_keys"), self.registry.get_sample_value("epd_api_key_file_broken")


async def test_what_changes_is_told_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.watch.look()
    assert world.told == [] and world.metrics() == (1, 0)
    client_keys(world.path, "one", "two")
    await world.watch.look()
    await world.watch.look()
    assert [[key.name for key in keys.keys] for keys in world.told] == [["one", "two"]]
    assert world.texts == [world.path.read_text()] and world.metrics() == (2, 0)
    assert world.said == ["API keys: 2 from now on"]


@pytest.mark.parametrize("broken", ["", "{", "one\ntwo\n", '{"salt": "00"}', None, "open to all"])
async def test_a_broken_file_changes_nothing_and_is_said_once(tmp_path: Path, broken: str | None) -> None:
    world = World(tmp_path)
    if broken is None:
        world.path.unlink()
    elif broken == "open to all":
        world.path.chmod(0o644)
    else:
        world.path.write_text(broken)
    for _ in range(3):
        await world.watch.look()
    assert world.told == [] and world.metrics() == (1, 1)
    [line] = world.said
    assert line.startswith("error: the API keys stay as they are: ") and "keys.json" in line
    world.path.unlink(missing_ok=True)
    client_keys(world.path, "one")
    await world.watch.look()
    assert world.metrics() == (1, 0) and world.told == [], "it is as it was"
    client_keys(world.path)
    await world.watch.look()
    assert [len(keys.keys) for keys in world.told] == [0], "nobody gets in"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("first-secret\nsecond-secret\n", "epd-serve key add"),
        (written(api_keys("a")).replace('"salt"', '"sal"'), "sal"),
        (written(api_keys("a")).replace('"version": 1', '"version": 2'), "version is 2"),
        (written(api_keys("a")).replace('"hash": "', '"hash": "x'), "key a: hash"),
        (written(api_keys("a")).replace('"name": "a"', '"name": "a b"'), "name 'a b'"),
        (written(api_keys("a", requests_in_flight=1)).replace("1\n", "-1\n"), "requests_in_flight"),
        (written(api_keys("a", requests_in_flight=1)).replace("requests_in_flight", "tokens"), "no limit tokens"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_and_no_key_is_quoted(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        api_keys_of(text, "clients.json")
    assert "clients.json" in str(refused.value) and "secret" not in str(refused.value)


def test_two_keys_of_one_name_or_hash_are_refused() -> None:
    [key] = api_keys("a").keys
    with pytest.raises(ConfigError, match="the name of a"):
        ApiKeys("5a" * 16, (key, key))
    with pytest.raises(ConfigError, match="the hash of"):
        ApiKeys("5a" * 16, (key, type(key)("b", key.hash)))
