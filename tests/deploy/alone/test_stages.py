"""What a proxy is told of the stages that somebody else runs: a file, or flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.alone.stages import given_stages, listed_stages, read_stages_file
from epd_serve.errors import ConfigError
from epd_serve.roles import Role


def stages_file(folder: Path, text: str) -> str:
    path = folder / "stages.yaml"
    path.write_text(text)
    return str(path)


def test_a_stages_file_becomes_instances(tmp_path: Path) -> None:
    text = "model: m\nstages:\n  - {id: P0, role: P, url: 'http://h:1/', incarnation: a, kv_endpoint: 'ipc:///p', "
    text += "kv_news: ['ipc:///n0', 'ipc:///n1'], load_news: 'ipc:///l'}\n"
    given = read_stages_file(stages_file(tmp_path, text))
    (one,) = given.instances
    assert (one.id, one.role, one.url, one.incarnation) == ("P0", Role.P, "http://h:1", "a")
    assert one.kv_endpoint == "ipc:///p"
    assert (one.kv_news, one.kv_workers, one.load_news) == (("ipc:///n0", "ipc:///n1"), (), "ipc:///l")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: []", "model"),
        ("model: m\nstages: []", "at least one"),
        ("model: m\nstagess: []\nstages: [{id: a, role: P, url: 'http://h:1'}]", "did you mean 'stages'"),
        ("model: m\nstages: [{id: a, role: P}]", "id, role and url"),
        ("model: m\nstages: [{id: a, role: X, url: 'http://h:1'}]", "unknown role 'X'"),
        ("model: m\nstages: [{id: a, role: P, url: 'https://h:1'}]", "neither http://HOST:PORT"),
        ("model: m\nstages: [{id: a, role: P, url: 'http://[::1'}]", "neither http://HOST:PORT"),
        ("model: m\nstages: [{id: a, role: P, url: 'http://h:99999'}]", "neither http://HOST:PORT"),
        ("model: m\nstages: [{id: a, role: P, url: 'http://h:1/v1'}]", "neither http://HOST:PORT"),
        ("model: m\nstages: [{id: a, role: P, url: 'http://h:1', devices: 3}]", "got `int` - at `$.devices`"),
        ("model: m\nstages: [{id: a, role: P, url: 'http://h:1', incarnaton: 3}]", "did you mean 'incarnation'"),
        ("model: m\nstages: [{id: a, role: P, url: 'http://h:1', kv_news: 'ipc:///n'}]", "got `str` - at `$.kv_news`"),
        (
            "model: m\nstages: [{id: a, role: P, url: 'http://h:1', load_news: 7}]",
            "Expected `str | null`, got `int` - at `$.load_news`",
        ),
        ("{", "stages.yaml"),
    ],
)
def test_what_is_wrong_in_a_stages_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_stages_file(stages_file(tmp_path, text))
    assert message in str(refused.value) and refused.value.param == "--stages"


def test_listed_stages_are_numbered_by_their_role_and_a_url_alone_runs_all_of_a_model() -> None:
    words = [
        "E=http://h:3",
        "PD=http://10.0.0.4:8100",
        "http://h:1",
        "PD=http://[fd00::1]:8100/",
        "EPD=http://h:2",
        "PD=unix:/run/s",
    ]
    given = listed_stages(words, "m")
    assert given.model == "m"
    assert [(one.id, one.role, one.url) for one in given.instances] == [
        ("E0", Role.E, "http://h:3"),
        ("PD0", Role.PD, "http://10.0.0.4:8100"),
        ("EPD0", Role.EPD, "http://h:1"),
        ("PD1", Role.PD, "http://[fd00::1]:8100"),
        ("EPD1", Role.EPD, "http://h:2"),
        ("PD2", Role.PD, "unix:/run/s"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["P=http://h:1"], "works with other stages"),
        (["PD=http://h:1", "D=http://h:2"], "--stages FILE.yaml"),
        (["E=http://h:1"], "give a --stage PD=URL"),
        (["E=http://h:1", "EPD=http://h:2"], "give a --stage PD=URL"),
        (["Q=http://h:1"], "unknown role 'Q'"),
        (["http://h:1", "EPD=http://h:1/"], "given twice"),
        (["PD=https://h:1"], "not [ROLE=]http://HOST:PORT"),
        (["https://h:1"], "not [ROLE=]http://HOST:PORT"),
        (["http://user:word@h:1"], "not [ROLE=]http://HOST:PORT"),
        (["http://h:1/?role=PD"], "not [ROLE=]http://HOST:PORT"),
        (["unix:run/s"], "[ROLE=]unix:/PATH"),
        (["h:1"], "not [ROLE=]http://HOST:PORT"),
        ([""], "not [ROLE=]http://HOST:PORT"),
    ],
)
def test_what_is_wrong_in_a_listed_stage_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        listed_stages(words, "m")
    assert message in str(refused.value) and refused.value.param == "--stage"


@pytest.mark.parametrize(
    ("file", "listed", "model", "param"),
    [
        (None, [], "", "--stages"),
        ("stages.yaml", ["http://h:1"], "m", "--stages"),
        ("stages.yaml", [], "m", "--served-model-name"),
        (None, ["http://h:1"], "", "--stage"),
    ],
    ids=["neither", "both", "two names", "no name"],
)
def test_stages_are_given_in_one_way_with_one_name(file: str | None, listed: list[str], model: str, param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        given_stages(file, listed, model)
    assert refused.value.param == param
