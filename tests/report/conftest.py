"""One browser for all tests of pages, which are slow tests: they run every night."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.report.browser import Page, browser


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """The browser; afterwards its console must be empty, and nothing but files and data may have been asked for."""
    chromium.emulate(1400)
    yield chromium
    assert chromium.log("browser") == []
    requests = [json.loads(entry["message"])["message"] for entry in chromium.log("performance")]
    urls = [r["params"]["request"]["url"] for r in requests if r["method"] == "Network.requestWillBeSent"]
    assert all(url.startswith(("file:", "data:")) for url in urls), urls
