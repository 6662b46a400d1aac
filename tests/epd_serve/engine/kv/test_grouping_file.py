"""A P whose mode of grouping is named by a file."""

from __future__ import annotations

import pytest

from deploy.options.config import DeployConfig
from epd_serve.engine.kv.grouping_file import LOOK_EVERY_S, GroupingFile, open_grouping, replace_mode
from epd_serve.errors import ConfigError
from epd_serve.kv.grouping import LinkCost, Step

STEP = Step(layers=8, layer_bytes=1 << 20, layer_s=0.01)
COST = LinkCost(setup_s=0.001, s_per_byte=1e-9)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def named(tmp_path):
    """A file that says `bulk`, its grouping, and the clock that this goes by."""
    path, clock = tmp_path / "mode", Clock()
    replace_mode(path, "bulk")
    return path, GroupingFile(path, 1, clock), clock


def test_steps_follow_the_file_after_it_was_replaced(named):
    path, grouping, clock = named
    assert grouping.cuts(STEP, COST) == (8,)

    replace_mode(path, "fixed:4")
    clock.now += LOOK_EVERY_S

    assert grouping.cuts(STEP, COST) == (4, 8)
    assert grouping.name == "fixed:4"


def test_the_file_is_looked_at_now_and_then_only(named):
    path, grouping, clock = named
    replace_mode(path, "fixed:4")
    clock.now += LOOK_EVERY_S / 2

    assert grouping.cuts(STEP, COST) == (8,)


def test_every_replacement_is_seen_though_the_clock_of_files_is_coarse(named):
    path, grouping, clock = named
    for mode, packets in [("layerwise", 8), ("bulk", 1), ("fixed:2", 4), ("layerwise", 8)]:
        replace_mode(path, mode)
        clock.now += LOOK_EVERY_S
        assert len(grouping.cuts(STEP, COST)) == packets


@pytest.mark.parametrize(
    "break_it",
    [
        lambda path: replace_mode(path, "fixed:0"),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: replace_mode(path, "fixed:" + "9" * 5000),
    ],
)
def test_what_cannot_be_read_leaves_the_mode_and_is_logged(named, caplog, break_it):
    path, grouping, clock = named
    break_it(path)
    clock.now += LOOK_EVERY_S

    assert grouping.cuts(STEP, COST) == (8,)
    assert "KV grouping stays bulk" in caplog.text


@pytest.mark.parametrize(("text", "message"), [("wide", "'wide' is none of"), (None, "cannot be read: No such file")])
def test_a_file_that_names_no_mode_is_refused_before_the_launch(tmp_path, text, message):
    path = tmp_path / "mode"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        DeployConfig(kv_grouping=f"file:{path}")


def test_anything_else_is_read_as_ever():
    assert open_grouping("fixed:2", 1).name == "fixed:2"
    with pytest.raises(ConfigError, match="none of adaptive"):
        open_grouping("fixed:zero", 1)
