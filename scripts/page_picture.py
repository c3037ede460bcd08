"""Make README's moving picture: a report's page, a click on a cell, both texts, and the slider over the evictions.

python scripts/page_picture.py results/runs/demo docs/page.gif     needs Chromium, chromium-driver and selenium
"""

import argparse
import io
import shutil
import time
from pathlib import Path
from typing import Any

from PIL import Image

SIZE = (1180, 860)
# What happens before each frame, and how long the frame stays, in milliseconds.
FRAMES = (
    ("", 2500),
    ("document.getElementById('heatmaps').scrollIntoView()", 2500),
    ("document.querySelectorAll('#boards td button.cell')[arguments[0]].click()", 3000),
    ("slide(1)", 1500),
    ("slide(2)", 1500),
    ("slide(3)", 1500),
    ("slide(99)", 3500),
)
SLIDE = """window.slide = (at) => {
  const choice = document.querySelector("#drill input[type=range]");
  if (!choice) return;
  choice.value = at;
  choice.dispatchEvent(new Event("input"));
};"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="a run directory with a report")
    parser.add_argument("picture", type=Path, help="the GIF to write")
    parser.add_argument("--cell", type=int, default=2, help="which score to click, from 0")
    options = parser.parse_args()
    frames = [frame.quantize(96) for frame in shots(options.run / "report/report.html", options.cell)]
    first, *rest = frames
    durations = [milliseconds for _, milliseconds in FRAMES]
    first.save(options.picture, save_all=True, append_images=rest, duration=durations, loop=0, optimize=True)
    print(options.picture)


def shots(page: Path, cell: int) -> list[Any]:
    """A picture of the page after each of `FRAMES`."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.set_window_size(*SIZE)
        driver.get(page.resolve().as_uri())
        driver.execute_script(SLIDE)
        found = []
        for script, _ in FRAMES:
            driver.execute_script(script, cell)
            time.sleep(1)
            found.append(Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB"))
        return found
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
