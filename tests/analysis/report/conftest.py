"""Headless Chromium for the tests of the page, and what they do with it."""

import shutil

import pytest


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_window_size(1300, 1000)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium):
    """The browser with an empty page and empty logs: what the test before left says nothing of this one."""
    chromium.get("about:blank")
    for log in ("browser", "performance"):
        chromium.get_log(log)
    return chromium
