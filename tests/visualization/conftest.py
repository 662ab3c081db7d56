import shutil

import pytest

from tests.decoding.conftest import random_translator

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@pytest.fixture(scope="package")
def translator(tmp_path_factory):
    """Of two layers, as pages and figures show them one by one."""
    return random_translator(tmp_path_factory.mktemp("vocabulary"), num_layers=2)


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium that logs its console and its requests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()
