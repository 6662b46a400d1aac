"""What README promises is held by tests on real stages: each promise has an id, each id a test that carries it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ID = re.compile(r"<!-- promise: ([a-z-]+) -->")
README = (ROOT / "README.md").read_text()


def test_every_promise_has_a_test_on_real_stages_and_every_such_test_its_promise() -> None:
    promised = ID.findall(README)
    sources = [path.read_text() for path in (ROOT / "tests/e2e").glob("test_*.py")]
    kept = {found for text in sources for found in re.findall(r'mark\.promise\("([a-z-]+)"\)', text)}
    assert sorted(promised) == sorted(kept), "an id stands once in README, and at least once in tests/e2e"


def test_every_bullet_of_what_can_be_relied_on_is_such_a_promise() -> None:
    (section,) = [part for part in re.split(r"^## ", README, flags=re.M) if "<!-- promise: encoded-once -->" in part]
    bullets = re.split(r"^- ", section, flags=re.M)[1:]
    assert len(bullets) >= 8
    assert [bullet for bullet in bullets if not ID.search(bullet.partition("\n\n")[0])] == []
