"""The pages of `report`, `compare` and `suspects` in a Chromium: nothing is requested, cut off, covered or empty."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.commands import suspects
from segapp.config import validate_config
from segapp.custom.trust import TRUST_VARIABLE
from segapp.report.compare import compare_runs
from segapp.report.page import write_report
from tests.support.runs import draw_scene, train

pytestmark = pytest.mark.slow

HOME = Path.home()  # a test has another one
COMMANDS = ("chromium", "google-chrome", "chromium-browser")

CLASSES = ['<b>road</b> & "x"', "a_class_whose_name_is_long_and_has_no_space_at_all", "{{ 7 * 7 }}"]
RUNS = ['<i>low & "x"', "<i>a_run_whose_name_is_long_and_has_no_space_at_all", "<i>{{ 7 * 7 }}"]
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "one": (1, "Net", ("prediction",)),
    "sixty": (60, "Net", ("wrong pixels",)),
    "everywhere": (3, "OneClassNet", ("prediction",)),
}
"""Number of classes; the model, of which one predicts one class everywhere; pictures that may have a single color."""
PAGES = ["one-report", "one-compare"] + [
    f"{case}-{page}" for case in ("sixty", "everywhere") for page in ("report", "compare", "suspects")
]
"""`suspects` refuses a run with one class, because its masks have several classes per pixel."""

FAULTS = """() => {
  const faults = [], width = document.documentElement.clientWidth, light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map((each) => (each / 255) ** 2.2)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05
  }
  document.querySelectorAll("details").forEach((each) => each.open = true)
  if (document.documentElement.scrollWidth > width) faults.push("the page is wider than the window")
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange()
  while (texts.nextNode()) {
    const node = texts.currentNode, svg = node.parentElement.closest("text")
    if (!node.data.trim() || node.parentElement.closest("title, nav")) continue
    range.selectNodeContents(node)
    let scroller = null, back = node.parentElement
    for (const box of svg ? [svg.getBoundingClientRect()] : range.getClientRects()) {
      scroller = null
      for (let place = node.parentElement; place && !scroller; place = place.parentElement) {
        const {overflowX, display} = getComputedStyle(place), edge = place.getBoundingClientRect()
        if (overflowX == "visible" || display == "inline") continue
        if (["auto", "scroll"].includes(overflowX)) scroller = place
        const left = edge.left - place.scrollLeft, right = scroller ? left + place.scrollWidth : edge.right
        if (box.left < left - 1 || box.right > right + 1) faults.push(`cut off: ${node.data}`)
        if (!scroller && (box.top < edge.top - 1 || box.bottom > edge.bottom + 1)) faults.push(`cut off: ${node.data}`)
      }
      if (!scroller && (box.left < 0 || box.right > width)) faults.push(`outside of the window: ${node.data}`)
    }
    const cell = node.parentElement.closest("td, th")
    if (cell && getComputedStyle(cell).position == "sticky" && cell.offsetWidth > scroller.clientWidth / 2
        && scroller.scrollWidth > scroller.clientWidth) faults.push(`covers the table: ${node.data}`)
    if (svg?.matches(".value")) continue
    while (getComputedStyle(back).backgroundColor == "rgba(0, 0, 0, 0)") back = back.parentElement
    const {fill, color} = getComputedStyle(node.parentElement)
    const lights = [light(svg ? fill : color), light(getComputedStyle(back).backgroundColor)]
    if (Math.max(...lights) / Math.min(...lights) < 4.5) faults.push(`weak contrast: ${node.data}`)
  }
  for (const text of document.querySelectorAll("svg text")) {
    const size = parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a
    if (size < 7 || size > 20) faults.push(`text of ${size.toFixed(1)} px: ${text.textContent}`)
  }
  for (const image of document.images) {
    const {naturalWidth: width, naturalHeight: height} = image
    const context = new OffscreenCanvas(width, height).getContext("2d")
    context.drawImage(image, 0, 0)
    const pixels = width ? context.getImageData(0, 0, width, height).data.buffer : []
    if (new Set(new Uint32Array(pixels)).size < 2) faults.push(`empty: ${image.alt}`)
  }
  return [...new Set(faults)]
}"""
IS_COVERED = """(link) => {
  const {left, top} = link.getBoundingClientRect()
  return !link.contains(document.elementFromPoint(left + 3, top + 3))
}"""
DRAWINGS = """() => [...document.querySelectorAll("svg")].map((svg) => {
  const {left, top, right, bottom} = svg.getBoundingClientRect()
  return [left, top + scrollY, right, bottom + scrollY].map(Math.round)
})"""


def draw_data(root: Path, num_classes: int) -> None:
    """Draw three images per split; no two have the same size, and their names have markup."""
    rng = np.random.default_rng(num_classes)
    for split in ("train", "val"):
        for i, (height, width) in enumerate(((48, 96), (80, 56), (64, 64))):
            image, mask = draw_scene(rng, height, width)
            if num_classes != 3:
                ids = rng.permutation(height * width // 64).reshape(height // 8, width // 8) % max(2, num_classes)
                mask = np.kron(ids, np.ones((8, 8))).astype(np.uint8)
            for kind, pixels in (("images", image), ("masks", mask)):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(root / kind / split / f'<u>{i} & "x".png'), pixels)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the pages of three runs per case."""
    out = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRUST_VARIABLE, "1")
        patch.setattr(suspects, "MAX_PICTURED", 3)
        for case, (num_classes, model, _) in CASES.items():
            draw_data(out / case / "data", num_classes)
            for i, run in enumerate(RUNS):
                config = {
                    "name": case, "seed": i,
                    "data": {
                        "format": "folder", "root": str(out / case / "data"), "crop_px": [32, 32], "workers": 0,
                        "classes": [*CLASSES, *(f"class {k}" for k in range(3, 60))][:num_classes],
                        "multilabel": "channels" if num_classes == 1 else None,
                    },
                    "model": {"library": "python", "name": f"tests.support.own_parts:{model}"},
                    "loss": {"name": "bce" if num_classes == 1 else "ce"},
                    "optim": {"name": "adamw", "lr": (0.01, 0.03, 0.001)[i]},
                    "train": {"epochs": 2 - i % 2, "batch_size": 2}, "log": {"tensorboard": False, "every_steps": 1},
                }  # fmt: skip
                assert train(validate_config(config), out / case / "sweep" / run) == 0
            (out / case / "sweep" / "sweep.json").write_text("{}")
            write_report(str(out / case / "sweep" / RUNS[0]), out / f"{case}-report.html", num_worst=3)
            compare_runs([str(out / case / "sweep")], out / f"{case}-compare.html", num_images=3)
            if f"{case}-suspects" in PAGES:
                suspects.write_suspects([str(out / case / "sweep")], split=None, out=out / case, min_area_px=30)
                (out / case / "suspects.html").rename(out / f"{case}-suspects.html")
        yield out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser of playwright, or else one of the machine."""
    how = "install one with `playwright install chromium` or `apt-get install chromium`"
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: uv sync")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PLAYWRIGHT_BROWSERS_PATH", os.environ.get("PLAYWRIGHT_BROWSERS_PATH", str(HOME / ".cache/ms-playwright"))
        )
        with playwright.sync_playwright() as started:
            own = started.chromium.executable_path
            found = own if Path(own).exists() else next(filter(None, map(shutil.which, COMMANDS)), None)
            if found is None:
                pytest.skip(f"no Chromium on this machine: {how}")
            opened = started.chromium.launch(executable_path=found)
            yield opened
            opened.close()


def faults_of(
    browser: Any,
    file: Path,
    width: int = 420,
    scheme: str = "light",
    names: tuple[str, ...] = (),
    flat: tuple[str, ...] = (),
) -> list[str]:
    """Return what a reader of a page would miss: sentences.

    Args:
        names: texts that the page must show.
        flat: beginnings of the names of pictures that may have a single color.
    """
    with browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme) as context:
        page, said = context.new_page(), []
        page.set_default_timeout(5000)
        page.add_init_script("addEventListener('securitypolicyviolation', (e) => console.error(e.violatedDirective))")
        page.on("request", lambda request: said.append(f"requested: {request.url}"))
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.goto(file.as_uri())
        shown, alone = page.inner_text("body"), tuple(f"empty: {name}" for name in flat)
        faults = [fault for fault in page.evaluate(FAULTS) if not fault.startswith(alone)]
        picture = cv2.imdecode(np.frombuffer(page.screenshot(full_page=True), np.uint8), cv2.IMREAD_COLOR)
        for left, top, right, bottom in page.evaluate(DRAWINGS):
            drawn = picture[top:bottom, left:right].reshape(-1, 3)
            if not len(drawn) or (drawn == drawn[0]).all():
                faults.append(f"empty: drawing at {left}, {top}")
        if page.locator("a[title=enlarge]").count():
            page.locator("a[title=enlarge]").first.click()
            links = page.locator("figure:target nav a").all()
            faults += [f"covered: {link.inner_text()}" for link in links if link.evaluate(IS_COVERED)]
    asked = [text for text in said if text != f"requested: {file.as_uri()}" and not text.startswith("requested: data:")]
    return asked + faults + [f"not shown: {name}" for name in names if name not in shown]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_all_of_its_text_and_pictures(
    browser: Any, pages: Path, name: str, width: int, scheme: str
) -> None:
    case, page = name.split("-")
    num_classes, _, flat = CASES[case]
    runs = {"report": RUNS[:1], "compare": RUNS, "suspects": sorted(RUNS)[:1]}[page]
    names = [*CLASSES[:num_classes], *runs, "<u>0 &", "<u>1 &"]
    assert faults_of(browser, pages / f"{name}.html", width, scheme, tuple(names), flat) == []


STYLES = {
    "font-src": "@font-face { font-family: f; src: url(https://nowhere.invalid/f.woff2); } h1 { font-family: f; }",
    "the page is wider": ".facts { width: 900px; }",
    "outside of the window: sweep": "h1 { margin-left: -3rem; }",
    "cut off: finished": ".state { width: 3rem; overflow: hidden; white-space: nowrap; vertical-align: top; }",
    "covers the table: a_class": ".scroll td:first-child { max-width: none !important; white-space: nowrap; }",
    "weak contrast: config": "summary { color: #999; }",
    "text of 4": ".chart > svg { min-width: 0 !important; }",
    "empty: drawing": ".chart > svg * { display: none; }",
    "covered: close": "figure:target { padding-bottom: 0 !important; }",
}
MISTAKES = {
    **{fault: ("</style>", f"{style}</style>") for fault, style in STYLES.items()},
    "requested: https": ("<meta http-equiv.*", f"<style>{STYLES['font-src']}</style>"),
    "not shown: <b>road": ("&lt;b&gt;road&lt;/b&gt;", "<b>road</b>"),
    "img-src": ("<h1>", '<img src="https://nowhere.invalid/x.png"><h1>'),
    "empty: image of <u>": ('src="data:image/jpeg;base64,[^"]*', 'src="data:image/jpeg;base64,'),
}
"""Part of a sentence about a fault -> a pattern in a page, and what replaces it."""


@pytest.mark.parametrize("fault", MISTAKES)
def test_a_mistake_in_a_page_is_noticed(browser: Any, pages: Path, tmp_path: Path, fault: str) -> None:
    pattern, text = MISTAKES[fault]
    page, count = re.subn(pattern, lambda _: text, (pages / "sixty-report.html").read_text())
    assert count
    (tmp_path / "page.html").write_text(page)
    assert [said for said in faults_of(browser, tmp_path / "page.html", names=(CLASSES[0],)) if fault in said]
