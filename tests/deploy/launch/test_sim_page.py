"""The page in a browser, over simulated stages: what it shows, its keys, a layout changed by it, phone and dark."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.host.ports import free_ports
from proxy.page.routes import SAMPLES
from tests.browser import DROP, chromium, needs_chromium, opened
from tests.deploy.client_keys import client_keys
from tests.deploy.launch.test_sim_launch import launched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OPERATOR = "an-operator-of-this-deployment"
pytestmark = [needs_chromium, pytest.mark.slow]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


def ask_with_a_dropped_picture(page: Page) -> None:
    picture = SAMPLES / "red_circle.png"
    content = base64.b64encode(picture.read_bytes()).decode()
    page.evaluate(DROP, [page.query_selector("#drop"), picture.name, content])
    page.wait_for_selector("#pictures img")
    page.click("#ask")
    page.wait_for_selector("#answer [data-state=answered]")


@pytest.mark.parametrize(("phone", "dark"), [(False, False), (True, False), (False, True)])
def test_it_shows_instances_and_rates_and_answers_about_a_picture(
    browser: Browser, tmp_path: Path, phone: bool, dark: bool
) -> None:
    with (
        launched(tmp_path, "E-P-D") as (client, _),
        opened(browser, f"{client.base_url}/", phone=phone, dark=dark) as page,
    ):
        for name in ("E0", "P0", "D0"):
            page.wait_for_selector(f"[data-instance={name}].phase-up")
        ask_with_a_dropped_picture(page)
        page.wait_for_selector("#answer-times tr[data-event=first_byte]")
        page.click("#request-list button")
        page.wait_for_selector("#request tr[data-event=dispatched] rect")
        page.wait_for_function("document.querySelectorAll('#charts canvas').length === 4")
        page.click("#table summary")
        page.wait_for_selector("#table tbody tr:nth-child(3)")
        assert not page.query_selector("#change-forms form"), "read-only without an admin key"


def test_with_keys_it_shows_nothing_before_it_has_one(browser: Browser, tmp_path: Path) -> None:
    keys = client_keys(tmp_path / "keys", "secret")
    with launched(tmp_path, "PD", "--api-key-file", keys, key="secret") as (client, _):
        with opened(browser, f"{client.base_url}/", refused=1) as page:
            page.wait_for_selector("#key input", state="visible")
            assert page.is_hidden("#deployment") and page.is_hidden("#playground")
            page.fill("#key input", "wrong")
            page.keyboard.press("Enter")
            page.wait_for_selector("text=That key was refused.")
            page.fill("#key input", "secret")
            page.keyboard.press("Enter")
            page.wait_for_selector("[data-instance=PD0].phase-up")
            ask_with_a_dropped_picture(page)
            assert "secret" not in page.content() and "secret" not in page.url


def test_the_admin_listener_s_page_changes_the_layout(browser: Browser, tmp_path: Path) -> None:
    key = tmp_path / "admin.key"
    key.write_text(OPERATOR)
    key.chmod(0o600)
    (admin,) = free_ports(1)
    flags = (
        "--admin-port",
        str(admin),
        "--admin-key-file",
        str(key),
        "--follow-every-s",
        "1",
        "--proxy",
        "explain=true",
    )
    table = f"http://127.0.0.1:{admin}/instances"
    with launched(tmp_path, "E-P-D", *flags, table=table, key=OPERATOR) as (client, _):
        with opened(browser, f"http://127.0.0.1:{admin}/", refused=1) as page:
            page.fill("#key input", OPERATOR)
            page.keyboard.press("Enter")
            page.wait_for_selector("[data-instance=E0].phase-up")
            page.wait_for_selector("#counts input[data-role=E]")
            page.fill("#counts input[data-role=E]", "2")
            page.click("#scale button[value=dry]")
            page.wait_for_selector("#change-answer:has-text('It would be: 1. start E1')")
            assert not page.query_selector("[data-instance=E1]")
            page.click("#scale button[value=go]")
            page.wait_for_selector("[data-instance=E1].phase-up")
            page.wait_for_selector("#change-list li[data-state=done][data-to='E-P-D-E']")
            page.fill("#layout", "no layout")
            page.click("#relayout button[value=go]")
            page.wait_for_selector("#change-answer:has-text('Refused')")
            page.click("#undo button")
            page.wait_for_selector("[data-instance=E1]", state="detached")
            assert not page.query_selector("#decisions li"), "nobody follows it yet"
            page.click("#follow button[value=advise]")
            page.wait_for_selector("#follow-answer:has-text('From now on: advise.')")
            page.wait_for_selector("#follow button[value=advise][aria-pressed=true]")
            page.wait_for_selector("#decisions li[data-state=stays]:has-text('E-P-D')")
            page.wait_for_selector("#follow-groups tbody tr:nth-child(3)")
        with opened(browser, f"{client.base_url}/") as page:
            page.wait_for_selector("#playground", state="visible")
            assert page.is_hidden("#deployment") and "--admin-port" in page.inner_text("#elsewhere")
            ask_with_a_dropped_picture(page)
            page.wait_for_selector("#answer-times tr[data-event=prefilled], #answer-times tr[data-event=dispatched]")
