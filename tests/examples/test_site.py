"""The website builds without a warning: no page left out, no link or heading that is not there."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = (
    "callback", "action mask", "fine-tune", "curriculum", "sweep", "best model", "PettingZoo",
    "Jupyter", "Windows",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mkdocs")
    logger.addHandler(handler)
    try:
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=False))
    finally:
        logger.removeHandler(handler)
    assert not said, "\n".join(said)
    return folder


def test_every_page_and_every_file_that_pages_link_to_is_there(site: Path) -> None:
    pages = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")]
    missing = [p for p in pages if not (site / p.with_suffix(".html")).exists()]
    assert missing == [Path("log.md")]
    assert (site / "files/examples/own_loop/before.py.html").exists()
    readme = (site / "overview.html").read_text()
    assert 'href="files/examples/own_loop/before.py.html"' in readme
    assert 'src="pictures/cartpole-five-seeds.png"' in readme
    assert (site / "pictures/cartpole-five-seeds.png").exists()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loads = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:[^"]*)', text)
        assert loads == [], page


@pytest.mark.parametrize("word", WORDS)
def test_newcomers_words_lead_to_a_page(word: str) -> None:
    """A row of the index says where it is, or that it is not there; the site's search finds it."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| ([^|]+) \| (.+) \|$", index)
    found = [where for words, where in rows if word.lower() in words.lower()]
    assert found
    assert all("](" in where or "not built in" in where for where in found)
