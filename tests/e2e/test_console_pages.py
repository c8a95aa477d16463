"""Every page of the console fits wide and narrow windows, in both color schemes, and the overview has all listeners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polywire.client.sync import SyncClient
from tests.broker_process import BrokerProcess
from tests.certificates import AUTHORITY, Certificates
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


def test_connections_with_tls_count_for_their_protocol(
    filled: tuple[BrokerProcess, Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = filled[1]
    made = Certificates(tmp_path)
    tls = ("--tls-certificate", made.path("server"), "--tls-key", made.path("server", "key"))
    options = (*tls, "--polywire-tls", "127.0.0.1:0")
    with BrokerProcess(tmp_path / "data", *options, wires=("polywire", "http")) as broker:
        address = ":".join(map(str, broker.addresses["polywire-tls"]))
        monkeypatch.setenv("SSL_CERT_FILE", made.path(AUTHORITY))
        with SyncClient(f"polywire+tls://{address}") as client:
            client.create_topic("secret", 1)
            page.look(width=1200, height=800)  # narrow windows have no column for addresses
            page.open(screenshots.url(broker, "/"))
            page.until(f"{address} (TLS)")
            row = "[...document.querySelectorAll('tr')].find((row) => row.innerText.startsWith('polywire'))"
            assert page.evaluate(f"{row}.cells[2].innerText") == "1"
            assert "polywire-tls" not in page.text()
