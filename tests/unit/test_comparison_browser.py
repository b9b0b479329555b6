"""comparison.html in a real browser: everything is drawn, nothing is loaded, nothing complains."""

from pathlib import Path

import pytest

from mtptrain.report.comparison import comparison
from mtptrain.report.comparison_page import write_comparison_page
from tests.unit.browser import CHROMIUM, Browser
from tests.unit.comparison_case import four_heads

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

DRAWN = "[...document.querySelectorAll('.chart')].filter(c => c.querySelector('svg.main-svg')).length"


def test_comparison_page_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "comparison.html"
    write_comparison_page(path, comparison("smollm2", four_heads(), {}, []))
    with Browser() as browser:
        browser.open(path, width=1280)
        browser.wait_for(f"{DRAWN} === 4")
        title = browser.evaluate("document.title")
        browser.evaluate("document.querySelectorAll('details').forEach(d => (d.open = true))")
        for width in (1280, 420):
            browser.look(width)
            browser.wait_for(f"[...document.querySelectorAll('.main-svg')].every(s => s.getBoundingClientRect().right <= {width})")
            assert browser.evaluate("document.documentElement.scrollWidth") == width
        points = browser.evaluate("document.querySelectorAll('.chart')[0].querySelectorAll('.scatterlayer .point').length")
        assert points == 4 * 6 + 3 * 2  # four heads over all documents and five sources, two other methods over two sources
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("document.title") == title
        assert browser.console == []
        assert browser.requested == [path.resolve().as_uri()]
