"""A real JupyterLab, opened as `make lab` opens it, and a headless Chromium that looks at it.

`make test-browser` brings Chromium and playwright; without them these tests skip. Every page that a test opens must keep to this
machine and report no error, or the test fails at its end.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from screen import Lab, Notebook

from composer_nb.harness.sandbox.system.linux import patience

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
TOKEN = "browser-tests"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--force-color-profile=srgb"),
)
START_S, WAIT_MS = 180, 60_000
"""How long to wait on a busy machine, in seconds and in milliseconds."""


@pytest.fixture(scope="session")
def lab(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Start JupyterLab on a copy of the notebooks and pages, as `make lab` does. Skip the tests where there is no browser."""
    home = tmp_path_factory.mktemp("lab")
    for name in ("notebooks", "docs"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("runs", "pages", ".*"))
    (home / ".venv").symlink_to(sys.prefix)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = (
        f"--no-browser --ip=127.0.0.1 --port={port} --ServerApp.port_retries=0 --IdentityProvider.token={TOKEN} "
        "--LabApp.expose_app_in_browser=True"
    )
    log = (home / "lab.log").open("w")
    server = subprocess.Popen(
        ["sh", "-c", _line_of_make_lab(options)], cwd=home, env=_environment(home), stdout=log, stderr=log
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", server, home / "lab.log")
        yield Lab(url=f"http://127.0.0.1:{port}", folder=home / "notebooks", pid=server.pid)
    finally:
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        _, survivors = psutil.wait_procs([psutil.Process(server.pid), *children], timeout=patience(30))
        for process in survivors:
            process.kill()
        server.wait()
        log.close()


def _line_of_make_lab(options: str) -> str:
    """Return the line with which `make lab` starts JupyterLab, without the steps that prepare the environment."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    process = subprocess.run(
        ["make", "-n", "lab", f"ARGS={options}"], cwd=ROOT, env=inherited, capture_output=True, text=True, check=True
    )
    return process.stdout[process.stdout.rindex("exec ") :]


def _environment(home: Path) -> dict[str, str]:
    """Return the environment of a fresh user: no settings, no workspaces, nothing written outside `home`."""
    places = {name: str(home / name.lower()) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    places |= {"JUPYTER_RUNTIME_DIR": str(home / "runtime"), "MPLCONFIGDIR": str(home / "matplotlib")}
    return {**os.environ, **places}


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + patience(START_S)
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=patience(5)):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"JupyterLab does not answer:\n{log.read_text()[-3000:]}")


@dataclass
class Watch:
    """Records what pages did that they should not."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def on(self, page: Any) -> None:
        page.on("request", lambda request: self._requested(request.url))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _requested(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:", "file:")):
            self.requests.append(url)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a browser that nobody has used before."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make test-browser brings it")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; make test-browser brings it")
    with api.sync_playwright() as play:
        context = play.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=CHROMIUM,
            headless=True,
            args=list(FLAGS),
            viewport={"width": 1280, "height": 900},
        )
        context.set_default_timeout(WAIT_MS)
        yield context
        context.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """Open a tab. Fail at its end if a request has left the machine or an error was reported."""
    tab, watch = chromium.new_page(), Watch()
    watch.on(tab)
    yield tab
    tab.close()
    assert watch.requests == [], "requests have left the machine"
    assert watch.errors == []


@pytest.fixture
def picture(page: Any) -> Callable[[str], None]:
    """Return a function that saves a screenshot in build/screenshots."""

    def take(name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png")

    return take


@pytest.fixture
def notebook(lab: Lab, page: Any) -> Callable[[str], Notebook]:
    """Return a function that opens a notebook in a fresh workspace."""

    def open_it(name: str) -> Notebook:
        page.goto(f"{lab.url}/lab/tree/notebooks/{name}?token={TOKEN}&reset")
        return Notebook(page)

    return open_it
