"""What the tests of the page do with the browser."""

from typing import Any

# Open the sections behind the verdicts.
OPEN = "document.querySelectorAll('details.section').forEach((part) => { part.open = true; })"


def set_size(browser: Any, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
