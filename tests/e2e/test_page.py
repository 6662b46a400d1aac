"""The page in a browser, on real stages: a picture dropped, its answer streamed, its waterfall, a layout changed."""

from __future__ import annotations

import base64
import subprocess
import sys

import pytest

from proxy.page.routes import SAMPLES
from tests.browser import DROP, chromium, needs_chromium, opened
from tests.e2e.serving import ROOT, Serving

GROWTH = """() => {
  window.lengths = new Set();
  const note = () => window.lengths.add(document.querySelector("#answer .text")?.textContent.length ?? 0);
  const all = { childList: true, subtree: true, characterData: true };
  new MutationObserver(note).observe(document.getElementById("answer"), all);
}"""


def command(launch: Serving, *words: str) -> None:
    argv = [sys.executable, "-m", "deploy.cli", *words, "--run-root", str(launch.root / "run")]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, timeout=300)


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("launch", ["E-P-D"], indirect=True)
def test_a_dropped_picture_is_answered_and_a_change_of_the_layout_is_seen(launch: Serving) -> None:
    picture = base64.b64encode((SAMPLES / "red_circle.png").read_bytes()).decode()
    with chromium() as browser, opened(browser, f"{launch.url}/") as page:
        page.set_default_timeout(120_000)
        for name in ("E0", "P0", "D0"):
            page.wait_for_selector(f"[data-instance={name}].phase-up")
        page.evaluate(GROWTH)
        page.evaluate(DROP, [page.query_selector("#drop"), "mine.png", picture])
        page.wait_for_selector("#pictures img[alt='mine.png']")
        page.click("#ask")
        page.wait_for_selector("#answer [data-state=answered]")
        assert page.inner_text("#answer .text").strip() == "a red circle"
        assert page.evaluate("window.lengths.size") > 2, "it came in pieces"
        page.wait_for_selector("#answer-times tr[data-event=encoded]")
        page.click("#request-list button")
        page.wait_for_selector("#request tr[data-event=prefilled] rect.took")
        command(launch, "scale", "E=2")
        page.wait_for_selector("[data-instance=E1].phase-up")
        page.wait_for_selector("#change-list li[data-state=done][data-to='E-P-D-E']")
        command(launch, "undo")
        page.wait_for_selector("[data-instance=E1]", state="detached")
