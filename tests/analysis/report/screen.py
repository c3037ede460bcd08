"""What the tests of the page do with the browser."""

from typing import Any

# A promise of JavaScript: what a script has changed is drawn by the next frame but one.
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def open_sections(browser: Any):
    """Open the sections behind the verdicts, and wait until they are drawn: before, they may have no visible text."""
    opened = "document.querySelectorAll('details.section').forEach((part) => { part.open = true; });"
    browser.execute_script(f"{opened} return {DRAWN}")


def set_size(browser: Any, width: int, height: int):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
