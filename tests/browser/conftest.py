"""One headless chromium for all tests; without it they are skipped."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from page_runs import DESKTOP, OpenPage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="no chromium; apt-get install chromium")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if CHROMIUM is None:
                item.add_marker(skip)


@pytest.fixture(
    scope="module"
)  # as long as it lives, other tests of this process have no event loop of their own
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root, as in a container, has no sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[OpenPage]:
    """Open an address; what its console complains of, and what it asks of other hosts, fails the test at its end."""
    complaints: list[str] = []
    with ExitStack() as stack:

        def opened(address: str, size: dict[str, int] = DESKTOP, scheme: str = "light") -> Page:
            context = stack.enter_context(chromium.new_context(viewport=size, color_scheme=scheme))
            page = context.new_page()
            page.set_default_timeout(15_000)
            page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
            page.on(
                "console",
                lambda message: message.type in ("error", "warning") and complaints.append(message.text),
            )
            own = address.split("?")[0]
            page.on("request", lambda request: request.url.startswith(own) or complaints.append(request.url))
            page.goto(address)
            return page

        yield opened
    assert complaints == []


@pytest.fixture(scope="session")
def dashboard() -> Iterator[Callable[..., str]]:
    """Start `headrace dashboard` with arguments; return the address that it prints."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> str:
        command = [sys.executable, "-m", "headrace", "dashboard", *map(str, arguments), "--port", "0"]
        process = subprocess.Popen(command, stdout=-1, text=True)
        started.append(process)
        assert process.stdout is not None
        return process.stdout.readline().split(" at ")[1].strip()

    yield start
    for process in started:
        process.terminate()
        process.wait(20)
