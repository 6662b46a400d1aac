"""Progress: rewritten rows on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

from deploy.launch.screen import Screen


def test_without_a_terminal_every_change_is_one_line() -> None:
    out = io.StringIO()
    screen = Screen(out, terminal=False)
    screen.open(["E0"])
    screen.started("E0")
    screen.phase("E0", "loading weights")
    screen.phase("E0", "loading weights")
    screen.tick()
    screen.up("E0", 3.21)
    screen.close()
    screen.down("E0", "killed by SIGKILL", 1.0)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("[E0] loading weights (")
    assert lines[1:] == ["[E0] ready in 3.2 s", "[E0] down: killed by SIGKILL; restart in 1 s"]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_rows_are_drawn_over() -> None:
    out = io.StringIO()
    screen = Screen(out, terminal=True)
    screen.open(["E0", "P0"])
    assert out.getvalue().count("\n") == 2
    screen.started("E0")
    assert "\x1b[2F" in out.getvalue()
    screen.line("warning: slow")
    screen.close()
    before = out.getvalue()
    screen.up("P0", 1.0)
    assert out.getvalue()[len(before) :] == "[P0] ready in 1.0 s\n"
