"""Interpolation tables and bands against F.interpolate and its autograd gradient in float64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from segapp.losses.fused import bands
from segapp.losses.fused.bands import plan_parts, sweep_bands
from segapp.losses.fused.grid import grid_of
from tests.support.loss_cases import relative_error

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("align_corners", [True, False])
def test_parts_cover_every_row_once_and_are_even(num_parts, align_corners):
    grid = grid_of((9, 9), (50, 40), align_corners, torch.float32, torch.empty(0))
    parts = plan_parts(grid.cells, num_parts)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(50))
    assert len(parts) == min(num_parts, len(grid.cells))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 2 * grid.tallest_cell


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_threads", [1, 2, 4, 40])
@pytest.mark.parametrize("band_bytes", [1600 << 10, 2000])
@pytest.mark.parametrize("many_cells", [True, False])
@pytest.mark.parametrize(
    ("low", "high"), [((5, 7), (33, 50)), ((6, 6), (6, 6)), ((9, 4), (17, 8)), ((1, 3), (8, 9)), ((9, 7), (5, 3))]
)
@pytest.mark.parametrize("align_corners", [True, False])
def test_sweep_visits_every_pixel_and_sums_the_gradient(
    monkeypatch, set_threads, low, high, align_corners, many_cells, band_bytes, num_threads
):
    for name in ("MIN_PART_BYTES", "MIN_SHARED_BYTES", "MIN_CELL_BYTES"):  # batches of any size are cut
        monkeypatch.setattr(bands, name, 1)
    monkeypatch.setattr(bands, "CPU_BAND_BYTES", band_bytes)
    if many_cells:
        monkeypatch.setattr(bands, "MIN_ROWS_OF_A_CELL", 10**9)
    logits = torch.randn(3, 4, *low, dtype=torch.float64, requires_grad=True)
    values = F.interpolate(logits, high, mode="bilinear", align_corners=align_corners)
    slope = torch.randn_like(values)
    (truth,) = torch.autograd.grad(values, logits, slope)
    seen = torch.full_like(values, torch.nan)
    set_threads(num_threads)

    def work(shown):
        rows = set()
        for band in shown:
            rows |= set(range(band.rows.start, band.rows.stop))
            seen[band.images, :, band.rows] = band.values
            band.add_gradient(slope[band.images, :, band.rows])
        return rows

    parts, gradient = sweep_bands(work, logits, high, align_corners, with_gradient=True)
    assert len(parts) == min(num_threads, len(grid_of(low, high, align_corners, torch.float64, logits).cells))
    assert sorted(row for part in parts for row in part) == list(range(high[0])), "a row in two parts, or in none"
    assert relative_error(torch.softmax(seen, 1), torch.softmax(values.detach(), 1)) < 1e-12
    assert relative_error(gradient, truth) < 1e-12


@pytest.mark.parametrize("kind", [bands.BlockSweep, bands._CellSweep])
@pytest.mark.parametrize("align_corners", [True, False])
def test_no_two_threads_write_to_one_row(kind, align_corners):
    logits = torch.randn(2, 4, 9, 6, dtype=torch.float64)
    grid = grid_of((9, 6), (40, 20), align_corners, torch.float64, logits)
    owners = torch.zeros(9, dtype=torch.int64)
    for part in bands.plan_parts(grid.cells, 4):
        gradient = torch.zeros_like(logits)
        for band in kind(logits, grid, part, gradient, 4000):
            band.add_gradient(torch.ones_like(band.values))
        owners += (gradient != 0).any(3).any(1).any(0)
    assert owners.tolist() == [1] * 9


def test_tables_made_in_inference_mode_serve_training():
    with torch.inference_mode():
        grid_of((3, 3), (21, 22), True, torch.float32, torch.empty(0))
    grid = grid_of((3, 3), (21, 22), True, torch.float32, torch.empty(0))
    assert not grid.fractions.is_inference()


def test_thread_count_of_the_process_is_unchanged():
    before = torch.get_num_threads()
    logits = torch.randn(4, 8, 16, 16)
    sweep_bands(lambda shown: [None for _ in shown], logits, (256, 256), True)
    assert torch.get_num_threads() == before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == before
    bands._single_threads.__wrapped__(3, 0).shutdown()  # its threads have one each, and later ones torch's number
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 3
