"""A headless Chromium that holds what it opens to what every page of ours keeps to: no error in its console, nothing
asked of another origin, no serious finding of axe. `make test-page` installs what it needs."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TOOLS = all(importlib.util.find_spec(name) for name in ("playwright", "axe_playwright_python"))
needs_chromium = pytest.mark.skipif(not (CHROMIUM and TOOLS), reason="no Chromium, or not its tools: make test-page")
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
PAGE_S = 60.0
REFUSAL = "with a status of 4"
SERIOUS = ("serious", "critical")


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root, in containers
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, refused: int = 0, phone: bool = False, dark: bool = False) -> Iterator[Page]:
    """The page at `url`; what it has to keep to is looked at in the end.

    Args:
        refused: answers of 4xx that are meant, each of which is an error of the console.
    """
    context = browser.new_context(viewport=PHONE if phone else DESK, color_scheme="dark" if dark else "light")
    context.set_default_timeout(1000 * PAGE_S)
    page = context.new_page()
    errors: list[str] = []
    asked: set[str] = set()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.add(request.url))
    try:
        page.goto(url)
        yield page
        assert sum(REFUSAL in error for error in errors) == refused, errors
        assert not [error for error in errors if REFUSAL not in error], errors
        own = urlsplit(url)[:2]
        assert not [one for one in asked if not one.startswith(("data:", "blob:")) and urlsplit(one)[:2] != own]
        assert not findings(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
    finally:
        context.close()


def findings(page: Page) -> list[str]:
    """What axe finds that is serious."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in violations
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


DROP = """([element, name, base64]) => {
  const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type: "image/png" }));
  element.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
}"""
"""Drops a file, as a user's mouse would."""
