"""Triton that cannot run: torch's operators take its place with one warning, in any thread and in backward."""

import contextlib
import threading
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from segapp.losses import CriterionCE, upsample_cross_entropy
from segapp.losses.cross_entropy import choose_implementation
from segapp.losses.fused import checks, kernels
from segapp.losses.fused.block_sizes import KernelError
from segapp.losses.fused.pixel_sums import PixelOptions
from segapp.parallel import DataParallelCriterion
from tests.support.gpu.as_on_cuda import take_cuda_road
from tests.support.loss_cases import draw, relative_error

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch on Linux")

from segapp.losses.fused import triton_cross_entropy
from tests.support.gpu.compiled_kernels import pretend_card

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cuda_road(monkeypatch, set_full_bytes):
    take_cuda_road(monkeypatch)
    set_full_bytes(1)


@pytest.fixture
def _trial_succeeds(monkeypatch):
    monkeypatch.setattr(kernels, "_try", lambda _: None)


@contextlib.contextmanager
def all_warnings():
    """The RuntimeWarnings of the body, in every thread."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RuntimeWarning)
        yield shown


class DriverWithoutCompiler:
    """Compiles a module in C before it does anything, as Triton's CUDA driver does."""

    def get_current_device(self):
        from triton.runtime.build import compile_module_from_src

        compile_module_from_src("int nothing(void) { return 0; }", "cuda_utils")
        raise AssertionError("a C compiler was found")


def loss_and_gradient(logits, target, implementation="auto"):
    x = logits.clone().requires_grad_()
    loss = CriterionCE(label_smoothing=0.1, implementation=implementation)(x, target)
    loss.backward()
    return loss.detach(), x.grad


def check_results(results, logits, target):
    truth = loss_and_gradient(logits, target, "reference")
    for result in results:
        for mine, theirs in zip(result, truth, strict=True):
            assert relative_error(mine, theirs) < 1e-12


def test_without_a_compiler_the_run_goes_on(monkeypatch, tmp_path):
    from triton.runtime import build

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if hasattr(build, "_find_compiler"):
        build._find_compiler.cache_clear()
    logits, target = draw(2)
    with pretend_card(driver=DriverWithoutCompiler()), all_warnings() as shown:
        assert choose_implementation(logits, target) == "sums"
        results = [loss_and_gradient(logits, target) for _ in range(3)]
    check_results(results, logits, target)
    messages = [str(warning.message) for warning in shown]
    assert len(messages) == 1
    assert "Failed to find C compiler" in messages[0]
    assert "`segapp doctor` says what is missing" in messages[0]


@pytest.mark.usefixtures("_trial_succeeds")
@pytest.mark.parametrize("where", ["forward", "backward", "replicas"])
def test_failed_launch_after_the_trial_falls_back(where, monkeypatch):
    def broken(*_):
        raise OSError("[Errno 28] No space left on device\nin the cache\nof the kernels")

    monkeypatch.setattr(triton_cross_entropy, "_launch", broken)
    logits, target = draw(3)
    with all_warnings() as shown:
        if where == "replicas":
            x = logits.clone().requires_grad_()
            parts = [x[:1], x[1:2], x[2:]]
            loss = DataParallelCriterion(CriterionCE(label_smoothing=0.1), ["cpu"] * 3)(parts, target)
            loss.backward()
            results = [(loss.detach(), x.grad)]
        elif where == "backward":
            monkeypatch.setattr(kernels, "_results", {CPU: "not used yet"})
            x = logits.clone().requires_grad_()
            loss = checkpoint(CriterionCE(label_smoothing=0.1), x, target, use_reentrant=True)
            kernels._results.clear()
            loss.backward()  # computes the loss again, in autograd's thread
            results = [(loss.detach(), x.grad)]
        else:
            results = [loss_and_gradient(logits, target) for _ in range(3)]
    check_results(results, logits, target)
    assert ["No space left" in str(warning.message) for warning in shown] == [True]
    assert kernels._results == {CPU: "OSError: [Errno 28] No space left on device ... of the kernels"}


@pytest.mark.usefixtures("_trial_succeeds")
@pytest.mark.parametrize("implementation", ["auto", "triton"])
def test_empty_batch_leaves_the_kernels_on(implementation):
    logits, target = draw(2)
    assert choose_implementation(logits, target) == "triton"
    x = logits[:0].clone().requires_grad_()
    with all_warnings() as shown:
        loss_sum, weight_sum = upsample_cross_entropy(x, target[:0], implementation=implementation)
        loss_sum.backward()
    assert (float(loss_sum.detach()), float(weight_sum), x.grad.shape) == (0, 0, x.shape)
    assert shown == []
    assert kernels._results == {CPU: None}
    assert choose_implementation(logits, target) == "triton"


def test_trial_runs_once_however_many_threads_ask(monkeypatch):
    tried = []

    def slow(device):
        tried.append(device)
        threading.Event().wait(0.05)
        raise KernelError(device, RuntimeError("no driver"))

    monkeypatch.setattr(kernels, "_try", slow)
    with all_warnings() as shown:
        found = []
        threads = [threading.Thread(target=lambda: found.append(kernels.has_kernels(CPU))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert tried == [CPU]
    assert found == [False] * 8
    assert ["no driver" in str(warning.message) for warning in shown] == [True]


@pytest.mark.usefixtures("_trial_succeeds")
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_out_of_memory_is_no_reason_to_fall_back(error, monkeypatch):
    def full(*_):
        raise error

    monkeypatch.setattr(triton_cross_entropy, "_launch", full)
    with pytest.raises(type(error), match="out of memory"):
        loss_and_gradient(*draw(2))
    assert kernels._results == {CPU: None}


def test_wrong_result_of_the_trial_is_a_failure():
    with pretend_card(90), all_warnings():  # its launches store nothing
        assert not kernels.has_kernels(CPU)
    assert "instead of [-3, 7]" in kernels._results[CPU]


def test_capture_of_a_graph_asks_the_device_nothing(monkeypatch):
    monkeypatch.setattr(checks, "is_capturing", lambda _: True)
    stubs = {"is_capturing": lambda _: True, "raise_reported": None, "report_range": None, "_launch": lambda *_: None}
    for name, stub in {**stubs, "bounds_of_bad_ids": lambda *_: torch.tensor([3, 3])}.items():
        monkeypatch.setattr(triton_cross_entropy, name, stub)
    logits, target = draw(2, dtype=torch.float32)
    options = PixelOptions(True, 255, label_smoothing=0.0)
    loss_sum, _, gradient = triton_cross_entropy.cross_entropy_by_triton(
        logits, target, None, options, with_gradient=True
    )
    assert torch.isnan(loss_sum)  # of the bad id 3
    assert gradient.shape == logits.shape
