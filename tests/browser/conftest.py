"""Chromium for the dashboard's tests; playwright is imported late, since only they need it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.chromium import find_chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium; its absence is a failure, never a skip."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root, as in containers.
        arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def expect() -> Any:
    """playwright's assertions, which wait, with patience for a busy machine."""
    from playwright.sync_api import expect

    expect.set_options(timeout=20_000)
    return expect
