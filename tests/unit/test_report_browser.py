"""report.html in a real browser: everything is drawn, nothing is loaded, nothing complains."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mtptrain.report.page import write_report_page
from tests.unit.browser import CHROMIUM, Browser
from tests.unit.report_case import full_report, training_log

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

DRAWN = "[...document.querySelectorAll('.chart')].filter(c => c.querySelector('svg.main-svg')).length"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report_page(path, full_report(), training_log())
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def test_report_page_in_a_browser(browser: Browser, path: Path) -> None:
    browser.open(path, width=1280)
    browser.wait_for(f"{DRAWN} === 8")
    title = browser.evaluate("document.title")
    browser.evaluate("document.querySelectorAll('details').forEach(d => (d.open = true))")
    for width in (1280, 420):
        browser.look(width)
        browser.wait_for(f"[...document.querySelectorAll('.main-svg')].every(s => s.getBoundingClientRect().right <= {width})")
        assert browser.evaluate("document.documentElement.scrollWidth") == width
    ink = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"
    light = browser.evaluate(ink)
    browser.look(1280, dark=True)
    browser.wait_for(f"{ink} !== '{light}'")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.title") == title
    assert browser.console == []
    assert browser.requested == [path.resolve().as_uri()]


def test_copy_button(browser: Browser, path: Path) -> None:
    browser.open(path, width=1280)
    browser.wait_for("!document.querySelector('button.copy').hidden")
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.call("Page.bringToFront")
    browser.evaluate("document.querySelector('button.copy').click()")
    browser.wait_for("document.querySelector('button.copy').textContent === 'Copied'")
    assert browser.evaluate("navigator.clipboard.readText()") == full_report()["serve"]
