"""Every page of the console fits wide and narrow windows, in both color schemes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess
from tests.e2e.browser import Page, find_browser
from tools import screenshots

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="NO BROWSER: the console was not tried (apt install chromium)"
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, Page]]:
    """Serve the sample data of the screenshots."""
    with screenshots.stage(tmp_path_factory.mktemp("filled")) as found, screenshots.producing(found[0]):
        yield found
        assert found[1].errors == []


@pytest.mark.parametrize("picture", screenshots.PICTURES, ids=lambda picture: str(picture.name))
def test_every_page_fits_wide_and_narrow(
    filled: tuple[BrokerProcess, Page], picture: screenshots.Picture, tmp_path: Path
) -> None:
    broker, page = filled
    for width, height, dark in ((1200, 800, False), (*screenshots.NARROW, True), (360, 740, False)):
        screenshots.show(page, broker, picture, width=width, height=height, dark=dark)
        page.settle()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("getComputedStyle(document.body).color") == (
            "rgb(227, 230, 232)" if dark else "rgb(28, 32, 36)"
        )
    page.screenshot(tmp_path / picture.file)
    assert (screenshots.DOCS / picture.file).exists(), "make screenshots"
