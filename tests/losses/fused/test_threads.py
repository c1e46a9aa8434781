"""Losses whose output rows are cut into one part per torch thread, against torch's operators in float64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import CriterionCE, overlap, upsample_argmax, upsample_confusion
from segapp.losses.fused import bands
from segapp.losses.fused import pixel_sums as sums
from segapp.losses.fused.bands import sweep_bands
from segapp.losses.fused.grid import grid_of
from tests.support.loss_cases import class_weight, criteria, draw, relative_error

THREADS = [1, 2, 4, 40]
"""The last is more than any case here has rows."""
SIZES = [((5, 6), (33, 41)), ((9, 4), (17, 8)), ((3, 3), (2, 5)), ((1, 3), (8, 9))]
"""Sizes of logits and output; with the third, most threads have no row."""


@pytest.fixture
def _small_parts(monkeypatch):
    """Cut batches of any size, and leave torch's number of threads as it was."""
    monkeypatch.setattr(sums, "FULL_BYTES", 0)
    monkeypatch.setattr(bands, "CPU_BAND_BYTES", 4000)
    for name in ("MIN_PART_BYTES", "MIN_SHARED_BYTES", "MIN_CELL_BYTES"):
        monkeypatch.setattr(bands, name, 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


pytestmark = pytest.mark.usefixtures("_small_parts")


def test_threads_started_later_have_torchs_number():
    bands._single_threads.__wrapped__(3, 0).shutdown()
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 3


def slope_of(loss_of, logits):
    x = logits.clone().requires_grad_()
    loss = loss_of(x)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("many_cells", [True, False])
@pytest.mark.parametrize(("low", "high"), SIZES)
@pytest.mark.parametrize("align_corners", [True, False])
def test_gradient_of_interpolation_is_exact_with_any_threads(
    num_threads, many_cells, low, high, align_corners, monkeypatch
):
    if many_cells:
        monkeypatch.setattr(bands, "MIN_ROWS_OF_A_CELL", 10**9)
    logits = torch.randn(3, 4, *low, dtype=torch.float64, requires_grad=True)
    values = F.interpolate(logits, high, mode="bilinear", align_corners=align_corners)
    slope = torch.randn_like(values)
    (truth,) = torch.autograd.grad(values, logits, slope)
    torch.set_num_threads(num_threads)

    def work(shown):
        rows = set()
        for band in shown:
            rows |= set(range(band.rows.start, band.rows.stop))
            band.add_gradient(slope[band.images, :, band.rows])
        return rows

    parts, gradient = sweep_bands(work, logits, high, align_corners, with_gradient=True)
    cells = grid_of(low, high, align_corners, torch.float64, logits).cells
    assert len(parts) == min(num_threads, len(cells))
    assert sorted(row for part in parts for row in part) == list(range(high[0])), "a row in two parts, or in none"
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize(("low", "high"), SIZES)
@pytest.mark.parametrize("options", [{}, {"weight": class_weight(), "label_smoothing": 0.1, "align_corners": False}])
def test_cross_entropy_with_any_threads_matches_torch(num_threads, low, high, options):
    logits, target = draw(3, low=low, high=high)

    def truth_of(x):
        align_corners = options.get("align_corners", True)
        values = F.interpolate(x, high, mode="bilinear", align_corners=align_corners)
        smoothing = options.get("label_smoothing", 0.0)
        return F.cross_entropy(values, target, options.get("weight"), ignore_index=255, label_smoothing=smoothing)

    truth = slope_of(truth_of, logits)
    torch.set_num_threads(num_threads)
    criterion = CriterionCE(**options)
    for mine, theirs in zip(slope_of(lambda x: criterion(x, target), logits), truth, strict=True):
        assert relative_error(mine, theirs) < 1e-12


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_threads", THREADS[1:])
@pytest.mark.parametrize("name", list(criteria()))
def test_criteria_with_any_threads_match_the_full_resolution(num_threads, name, monkeypatch):
    criterion = criteria()[name]
    logits, target = draw(3, low=(5, 6), high=(33, 41))
    torch.set_num_threads(num_threads)
    ours = slope_of(lambda x: criterion(x, target), logits)
    monkeypatch.setattr(sums, "FULL_BYTES", 1 << 60)
    monkeypatch.setattr(overlap, "is_eager", lambda _: False)
    torch.set_num_threads(1)
    for mine, truth in zip(ours, slope_of(lambda x: criterion(x, target), logits), strict=True):
        assert relative_error(mine, truth) < 1e-11


@pytest.mark.parametrize("num_threads", THREADS[1:])
def test_argmax_and_confusion_with_any_threads_match_torch(num_threads):
    logits, target = draw(3, low=(5, 6), high=(33, 41))
    predicted = F.interpolate(logits, (33, 41), mode="bilinear", align_corners=True).argmax(1)
    valid = target != 255
    truth = torch.bincount(4 * target[valid] + predicted[valid], minlength=16).view(4, 4)
    torch.set_num_threads(num_threads)
    assert torch.equal(upsample_argmax(logits, (33, 41)).long(), predicted)
    assert torch.equal(upsample_confusion(logits, target).confusion.long(), truth)
