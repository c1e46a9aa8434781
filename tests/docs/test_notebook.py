"""The page python as a notebook: its code runs in a Jupyter kernel and shows the bar, the image and the table."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from segapp.docs.pages import find_page
from tests.support import ROOT
from tests.support.page_blocks import blocks
from tests.support.transcripts import difference

PAGE = find_page("python")[0].path
CELLS = [block for block in blocks() if block.page == PAGE and block.language == "python" and block.mark != "not run"]
SHOWN = ["network.plot(path)", "import pandas; pandas.DataFrame(result.history.rows())"]
"""Last lines of cells that the page names: their values are shown."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_page_python_runs_as_a_notebook(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="a notebook needs the dependency group notebook")
    nbformat = pytest.importorskip("nbformat")
    (tmp_path / "data").symlink_to(ROOT / "data")
    cells = [nbformat.v4.new_code_cell(text) for text in [block.text for block in CELLS] + SHOWN]
    notebook = nbformat.v4.new_notebook(cells=cells)
    place = {"metadata": {"path": str(tmp_path)}}
    kernel = {"PYTHONPATH": str(ROOT), "PATH": str(Path(sys.executable).parent)}
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place)
    client.execute(env={**kernel, "HOME": str(tmp_path)})  # raises an error of a cell

    for cell, block in zip(cells, CELLS, strict=False):
        (promised,) = [each.text for each in blocks() if each.source == block and each.language == "text"] or [""]
        printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        assert not promised or difference(printed, promised) == "", block.place
    bars = [state["state"] for state in notebook.metadata.widgets[WIDGETS]["state"].values()]
    assert [bar["value"] for bar in bars if bar["_model_name"] == "FloatProgressModel" and bar["max"] == 108] == [108]
    assert any("mIoU=" in str(bar.get("value")) and "loss=" in str(bar["value"]) for bar in bars)
    image = Image.open(io.BytesIO(base64.b64decode(data_of(cells[-2], "image/png"))))
    assert image.width == 512
    assert "<th>miou</th>" in data_of(cells[-1], "text/html")


WIDGETS = "application/vnd.jupyter.widget-state+json"


def data_of(cell: Any, kind: str) -> str:
    """Return the value that a cell shows, in one form."""
    (value,) = [output.data for output in cell.outputs if output.output_type == "execute_result"]
    return str(value[kind])
