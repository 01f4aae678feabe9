"""A real browser for the page's tests and pictures: Debian's chromium, driven through selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NEEDED = ("chromium", "chromedriver")


def missing() -> str | None:
    """What there is not, in words; None where a browser can be started."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install selenium"
    gone = [name for name in NEEDED if shutil.which(name) is None]
    return f"there is no {gone[0]}: apt-get install chromium chromium-driver" if gone else None


@contextmanager
def browser(width: int = 1280, height: int = 900, scale: float = 1.0, dark: bool = False) -> Iterator[Any]:
    """A headless chromium of this size that reaches for nothing but what it is told to open."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new",
        "--no-sandbox",  # it may run as root, in a container
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-extensions",
        "--disable-sync",
        "--no-first-run",
        "--hide-scrollbars",
        f"--force-device-scale-factor={scale}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        yield driver
    finally:
        driver.quit()
