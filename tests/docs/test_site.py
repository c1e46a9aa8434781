"""The website: its navigation has every page, and its anchors are those of the pages; built with `-m slow`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from segapp.docs.pages import FOLDER, find_page, pages
from tests.support import ROOT

SITE = FOLDER / "site"


def hooks() -> ModuleType:
    """Return the module with the hooks, as mkdocs imports it."""
    spec = importlib.util.spec_from_file_location("hooks", SITE / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_navigation_has_every_page_once_and_titles() -> None:
    config = hooks().on_config(SimpleNamespace(nav=None, mdx_configs={}))
    listed = [
        item for group in config.nav[1:] for members in group.values() for page in members for item in page.items()
    ]
    assert [path for _, path in listed] == [str(page.path.relative_to(FOLDER)) for page in pages()]
    assert len({title for title, _ in listed}) == len(listed)
    assert yaml.safe_load((SITE / "mkdocs.yml").read_text())["theme"]["font"] is False, "nothing is loaded elsewhere"
    assert config.mdx_configs["toc"]["slugify"]("images/ and masks/, in splits", "-") == "images-and-masks-in-splits"


def test_pages_of_the_site_have_keywords_and_plain_pipes() -> None:
    page = find_page("tune")[0]
    file = SimpleNamespace(file=SimpleNamespace(src_uri=str(page.path.relative_to(FOLDER))))
    assert "early stopping" in hooks().on_page_markdown("# Title", page=file, config=None, files=None)
    row = hooks().on_page_markdown("| `[auto\\|RUN]` | a \\| b |", page=file, config=None, files=None)
    assert row.startswith("| `[auto|RUN]` | a \\| b |\n")
    index = SimpleNamespace(file=SimpleNamespace(src_uri="README.md"))
    assert hooks().on_page_markdown("# Title", page=index, config=None, files=None) == "# Title"


@pytest.mark.slow
def test_strict_build_succeeds(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the website needs the dependency group site")
    words = ["-m", "mkdocs", "build", "--strict", "-f", str(SITE / "mkdocs.yml"), "-d", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "early stopping" in (tmp_path / "site" / "search" / "search_index.json").read_text()
