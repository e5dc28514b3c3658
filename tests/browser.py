"""Opening pages in a headless Chromium."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
needs_browser = pytest.mark.skipif(
    not BROWSER, reason="no Chromium; type: apt-get install chromium"
)


def open_page(
    url: str, folder: Path, *more: str, width: int = 1250, milliseconds: int = 10_000
) -> tuple[str, list[str]]:
    """(the page as it is after so many milliseconds of its own, lines of the console)."""
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
        "--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},1000", f"--virtual-time-budget={milliseconds}", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run([BROWSER, *flags, *more, url], capture_output=True, text=True, timeout=90)
    shutil.rmtree(folder / "profile", ignore_errors=True)
    assert "</html>" in done.stdout, f"the page did not load:\n{done.stderr[-2000:]}"
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
