"""Fixtures for all tests: a tiny drawn data set, a tiny config and the real CamVid images; hooks for fault results."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shlex
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from tests.support import ROOT, fault_table
from tests.support.disk import skip_syncs
from tests.support.gpu.fake_cuda import FakeCuda
from tests.support.isolation import Places, Watch, users_places
from tests.support.programs import connection_to

# No deadline: an example may be slow on a busy machine. The same examples in every run: `explore` draws others.
hypothesis.settings.register_profile("segapp", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("segapp")
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

CAMVID = ROOT.parent / "shared" / "camvid"

skip_syncs()  # a third of the suite would be waiting for it
_watch = Watch(users_places())
_reports: list[pytest.TestReport] = []
_began_s = time.monotonic()
_names_before: set[str] = set()
_rss_bytes = 0
_trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # a function of glibc, so of Linux
GROWTH_BYTES = 100 * 2**20
"""Growth of this process over one test file from which its cycles are collected."""


def pytest_sessionstart(session: pytest.Session) -> None:
    if is_controller(session):
        fault_table.check_results_path()
        _names_before.update(visible_files())
    _watch.take()  # what was looked at here is no use by a test


LONG = ("slow", "gpu", "benchmark", "faults_long")
"""Markers of tests that the default suite leaves out."""
DURATIONS = ROOT / "tests" / "durations.json"
"""Seconds of each file that takes more than two; `pytest --store-durations` writes them."""


SERVER = pytest.StashKey[socket.socket]()
"""The connection that keeps the fork server running between two workers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--store-durations", action="store_true", help=f"write the seconds of each file to {DURATIONS.name}"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leaves out what takes long, unless `-m` names a marker of it: `-m "not faults"` has no slow tests either."""
    if getattr(config.option, "tx", None) and not config.pluginmanager.hasplugin("_cov"):
        # Coverage would miss the lines that the server has run. The name is that of `programs.fork_server_name`.
        config.option.testrunuid = uuid.uuid4().hex
        name = os.environ["SEGAPP_TEST_FORK_SERVER"] = f"segapp-fork-server-{config.option.testrunuid}"
        config.stash[SERVER] = connection_to(name)
        words = sys.executable, str(ROOT / "tests" / "support" / "forked_worker.py")
        config.option.tx = [f"popen//python={shlex.join(words)}" for _ in config.option.tx]
    if not set(re.findall(r"\w+", config.option.markexpr)) & set(LONG):
        words = [f"({config.option.markexpr})"] if config.option.markexpr else []
        config.option.markexpr = " and ".join([*words, *(f"not {marker}" for marker in LONG)])


def pytest_xdist_auto_num_workers() -> int:
    """More workers than cores: a third of the tests' time is spent waiting, for processes and timeouts."""
    return len(os.sched_getaffinity(0)) + 4


@pytest.hookimpl(tryfirst=True)  # before the expression of `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_unsampled_cases(items)
    fault_table.note_cases(items)
    durations_s = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -durations_s.get(file_of(item.nodeid), 0))  # a long file at the end would be waited for


def pytest_collection_finish() -> None:
    """Leave the objects of the imports out of each later collection: there are over a million of them."""
    gc.collect()
    gc.freeze()


def mark_unsampled_cases(items: list[pytest.Item]) -> None:
    """Mark the cases of a test that `sampled(every)` leaves out of the default suite as slow."""
    seen: Counter[str] = Counter()
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


def file_of(test: str) -> str:
    """The file of a test below `tests/`."""
    return test.partition("::")[0].removeprefix("tests/")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Gives freed memory back after each file; glibc would keep it, and several workers share the machine."""
    global _rss_bytes
    if nextitem is None or nextitem.path == item.path or _trim_heap is None:
        return
    _trim_heap(0)
    if rss_bytes() > _rss_bytes + GROWTH_BYTES:
        gc.collect()  # graphs of torch.export are cycles, which the collector rarely visits
        _trim_heap(0)
    _rss_bytes = rss_bytes()


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not is_controller(session):
        return
    if session.config.getoption("--store-durations"):
        durations_s: Counter[str] = Counter()
        for report in _reports:
            durations_s[file_of(report.nodeid)] += report.duration
        rounded = {name: round(duration_s) for name, duration_s in sorted(durations_s.items()) if duration_s > 2}
        DURATIONS.write_text(json.dumps(rounded, indent=1) + "\n")
    if os.environ.get(fault_table.RESULTS_VARIABLE):
        fault_table.write_results(_reports, time.monotonic() - _began_s)
    if written := visible_files() - _names_before:
        print(
            f"\nerror: the tests wrote into the root of the repository: {', '.join(sorted(written))}", file=sys.stderr
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def is_controller(session: pytest.Session) -> bool:
    """False in a worker of pytest-xdist."""
    return not hasattr(session.config, "workerinput")


def visible_files() -> set[str]:
    """The names at the root of the repository, and the user's runs there; hidden ones (caches) left out."""
    places = [*ROOT.iterdir(), *ROOT.glob("runs/*")]
    return {str(path.relative_to(ROOT)) for path in places if not path.name.startswith(".")}


@pytest.fixture(scope="session", autouse=True)
def _places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("places"))


@pytest.fixture(autouse=True)
def _own_places(_places: Places) -> Iterator[None]:
    """An empty working directory and an empty home for each test; fails one that uses those of the user.

    It comes before `monkeypatch`, which returns to the working directory when a test is over.
    """
    yield from _places.own()
    if uses := _watch.take():
        pytest.fail(f"the test, or a fixture of it, used files of the user: {', '.join(uses[:5])}", pytrace=False)


@pytest.fixture
def repository_root(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the repository as the working directory, for what a reader of the pages starts there."""
    monkeypatch.chdir(ROOT)
    return ROOT


@pytest.fixture(autouse=True)
def _faults_took_place(
    _own_places: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fails a case of the fault table in which a failpoint was armed that never acted."""
    if request.node.get_closest_marker("case") is None:
        yield
        return
    from segapp.failpoints import MARKS_VARIABLE
    from tests.support.fault_runs import assert_acted

    marks = request.getfixturevalue("tmp_path_factory").mktemp("marks")
    monkeypatch.setenv(MARKS_VARIABLE, str(marks))
    yield
    assert_acted(marks)


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    """Disarms the failpoints that a test arms in this process."""
    from segapp import failpoints

    yield
    failpoints.arm("")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process; gives its exit code, standard output and standard error."""
    from segapp.__main__ import main

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        return int(str(ended.value.code or 0)), *capsys.readouterr()

    return run


@pytest.fixture
def trusted_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import any custom component, as `--trust-parts` does: it is about what comes after the question."""
    monkeypatch.setenv("SEGAPP_TRUST_PARTS", "1")


@pytest.fixture
def logical_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `parallel.memory_budget_mib` hold on logical devices of the CPU, in trainings of this process."""
    from tests.support.budgets import enforce_budgets

    enforce_budgets(monkeypatch)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A machine with the GPUs that a test puts into its `gpus`: `torch.cuda` and `torch.version` answer for them."""
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch, "version", fake.version)
    return fake


@pytest.fixture(scope="session")
def camvid() -> Path:
    """The folder of the real CamVid images; skips where it is missing."""
    if not CAMVID.is_dir():
        pytest.skip("the CamVid images are not on this machine")
    return CAMVID


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `folder` data set of 10 training and 4 validation images of three sizes, 3 classes."""
    # Here, not above: the tests of segapp.parallel and segapp.losses run where there is nothing but torch.
    from tests.support.runs import draw_tiny_data

    return draw_tiny_data(tmp_path_factory.mktemp("tiny-data"))


@pytest.fixture
def tiny(tiny_root: Path) -> dict[str, Any]:
    """A config as nested plain values: 3 epochs of 5 steps of some milliseconds."""
    from tests.support.runs import MODEL

    return {
        "name": "tiny",
        "seed": 3,
        "data": {
            "format": "folder",
            "root": str(tiny_root),
            "classes": ["ground", "box", "disc"],
            "crop_px": [24, 40],
            "workers": 0,
        },
        "model": MODEL,
        "optim": {"name": "adamw", "lr": 0.001},
        "schedule": {"warmup_steps": 3},
        "train": {"epochs": 3, "batch_size": 2, "ema": 0.9},
        "log": {"every_steps": 1, "tensorboard": False},
    }
