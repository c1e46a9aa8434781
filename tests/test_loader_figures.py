"""The loader's rows of the report of figures, on a CPU with small shapes."""

from __future__ import annotations

import pytest

pytest.importorskip("albumentations", reason="the loader's augmentation needs albumentations")


def test_loader_figures_have_all_rows() -> None:
    from tests.gpu.cases import rows_of
    from tests.gpu.figures_loader import loader_cases

    rows = rows_of(loader_cases("cpu"))
    kinds = ("none", "ram", "disk")
    expected = [f"loader, 1 worker, cache {kind}" for kind in kinds]
    expected += ["training step alone", *(f"training, cache {kind}" for kind in kinds)]
    assert [row["what"] for row in rows] == expected
    assert all(row["images/s"] > 0 for row in rows)
    assert all(row["workers (auto)"] == 1 and 0 <= row["waits for data"] <= 1 for row in rows[4:])
