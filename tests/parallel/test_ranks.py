"""Exactness over the processes of a gloo group, and errors at the start."""

import atexit
import io
import itertools
import json
import os
import pickle
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from segapp.losses import CriterionCE, surrogate
from segapp.parallel import SyncBatchNorm, distributed
from segapp.parallel.distributed import DistributedSetupError, Ranks, init_from_env, wrap_ddp
from segapp.parallel.reductions import all_reduce_ranks, has_other_ranks, layers_group, stack_ranks, use_layers_group
from tests.support.gpu.fake_cuda import FakeGpu
from tests.support.rank_runs import run_ranks


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids=["2 ranks", "3 ranks"])
def figures(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "figures.json"
    code = f"from tests.support.rank_checks import main; main({str(path)!r})"
    run_ranks(cwd=path.parent, num_ranks=request.param, code=code)
    return json.loads(path.read_text())


def test_ranks_match_one_device_also_without_samples(figures):
    exact = {name: errors for name, errors in figures.items() if name.startswith("exact, ")}
    assert len(exact) == 4
    for loss, grads, state in itertools.chain(*exact.values()):
        assert loss <= 1e-12
        assert grads <= 1e-10
        assert state <= 1e-12


def test_recomputed_blocks_change_no_bit_and_no_exchange(figures):
    assert figures["recomputed"] == [[True, True]] * len(figures["recomputed"])


def test_surrogate_has_the_gradient_of_one_device_in_ddp(figures):
    assert len(figures["surrogate"]) == 12
    assert {name: row for name, row in figures["surrogate"].items() if max(row) > 1e-10} == {}


@pytest.mark.parametrize("kind", ["wgan-gp", "wgan-lp", "dragan"])
def test_rank_penalties_match_one_device_in_second_order(figures, kind):
    for penalty, grads in figures["penalties"][kind]:
        assert penalty <= 1e-12
        assert grads <= 1e-9


@pytest.mark.parametrize("case", ["one machine", "two machines", "other bytes on the same machine"])
def test_ranks_map_a_checkpoint(figures, case):
    """Also bytes that differ on one machine, where the main rank has verified them."""
    assert figures["checkpoints"][case] == [["checkpoint", 0.0]] * len(figures["checkpoints"][case])


DAMAGED = "is damaged: its sha256 is not the one in manifest.json"


@pytest.mark.parametrize("case", ["other bytes there", "no file there", "no file on one machine"])
def test_rank_that_sees_another_checkpoint_ends_all(figures, case):
    reason = DAMAGED if case == "other bytes there" else "No such file or directory"
    for kind, message in figures["checkpoints"][case]:
        assert kind == "CheckpointError"
        where = r"/\S+: rank 1, on \S+, does not see the checkpoint of rank 0"
        assert re.fullmatch(rf"{where} \({reason}\): put it on a file system that all machines share", message)


def test_ranks_agree_on_the_remaining_values(figures):
    assert max(figures["gradients"]) == 0
    assert figures["differentiated twice"] == [1.0]
    assert figures["any rank"] == [True, False]
    assert figures["timeouts"] == [70.0, 70.0], "also of the group of the layers"
    rank, _, local_rank, _, backend, is_main = figures["info"]
    assert (rank, local_rank, is_main) == (0, 0, True)
    assert backend in ("gloo", "nccl")


def test_options_of_ddp_reach_it():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        nets = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
        plain = wrap_ddp(nets[0])
        other = wrap_ddp(nets[1], gradient_as_bucket_view=False, find_unused_parameters=True, bucket_cap_mb=3.0)
        assert (plain.gradient_as_bucket_view, plain.find_unused_parameters) == (True, False)
        assert (other.gradient_as_bucket_view, other.find_unused_parameters) == (False, True)
        assert other.bucket_bytes_cap == 3 * 2**20 < plain.bucket_bytes_cap
    finally:
        dist.destroy_process_group()


FULL = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR not set in the environment: start the program with `torchrun"),
        ({"RANK": None, "LOCAL_RANK": None}, "RANK, LOCAL_RANK not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number"),
        ({"LOCAL_WORLD_SIZE": "2x"}, "LOCAL_WORLD_SIZE='2x' is not a number"),
        ({"RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
        ({}, "cuda:63"),
    ],
)
def test_missing_or_wrong_setup_of_a_rank_is_named(monkeypatch, change, words):
    for name, value in {**FULL, **change}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(DistributedSetupError, match=words):
        init_from_env(device="cuda:63")


@pytest.fixture
def set_rank(monkeypatch):
    """Give the function that makes this process a rank of a launcher, whose end it does not watch."""
    watched = []
    monkeypatch.setattr(distributed, "die_with_parent", lambda: watched.append("the launcher"))

    def set_rank(**variables):
        for name, value in {**FULL, **variables}.items():
            monkeypatch.setenv(name, value)
        return watched

    return set_rank


@pytest.fixture
def joins(monkeypatch, set_rank):
    """The steps in which a rank joins the others, which do not exist: arguments by name."""
    calls = set_rank()
    monkeypatch.setattr(distributed, "_meeting_store", lambda *args: calls.append(args[:2]) or "store")
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: calls.append((*args, options)))
    return calls


def test_failed_rendezvous_error_names_the_address(set_rank):
    set_rank(RANK="1")
    said = r"rank 1 of 2 could not join the others at 127\.0\.0\.1:29999 within 1 s \(nothing listens"
    with pytest.raises(DistributedSetupError, match=said):
        init_from_env(device="cpu", start_timeout_s=1)
    assert not torch.distributed.is_initialized()


def test_rank_watches_its_launcher_before_it_waits_for_others(joins, set_rank):
    set_rank(RANK="1", WORLD_SIZE="3")
    info = init_from_env(device="cpu", start_timeout_s=77.0)
    assert (info.rank, info.world_size, info.local_rank, info.device, info.backend) == (
        1, 3, 0, torch.device("cpu"), "gloo"
    )  # fmt: skip
    watch, meeting, (backend, options) = joins
    assert (watch, meeting) == ("the launcher", (1, 3))
    chosen = [options[name] for name in ("store", "rank", "world_size", "device_id")]
    assert (backend, chosen) == ("gloo", ["store", 1, 3, None])
    assert (info.start_timeout_s, options["timeout"]) == (77.0, timedelta(seconds=77))


@pytest.fixture(params=[1, 2])
def group_size(request):
    """A process group whose other ranks do not exist, and its size."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    if dist.is_initialized():
        dist.destroy_process_group()


def test_group_of_one_rank_has_no_others(group_size):
    assert has_other_ranks() == (group_size > 1)
    assert stack_ranks(torch.arange(2.0)).shape == (group_size, 2)
    logits, target = torch.randn(2, 3, 4, 4, requires_grad=True), torch.zeros(2, 8, 8, dtype=torch.uint8)
    own = CriterionCE().statistics(logits, target)
    own_share = surrogate(CriterionCE(), own, own, average=False)
    assert torch.equal(surrogate(CriterionCE(), own, own), own_share * group_size)


@pytest.mark.parametrize("group_size", [2], indirect=True)
def test_layers_exchange_in_a_group_of_their_own(group_size, monkeypatch):
    """In DDP's group each of a layer's small exchanges would wait behind a bucket of gradients."""
    group, used = dist.new_group(), []
    for name in ("all_reduce", "all_gather_into_tensor"):
        real = getattr(dist, name)

        def noted(*args, real=real, name=name, group=None, **options):
            used.append((name, group))
            return real(*args, group=group, **options)

        monkeypatch.setattr(dist, name, noted)
    use_layers_group(group)
    layer, x = SyncBatchNorm(3), torch.randn(4, 3, 2, 2, requires_grad=True)
    layer(x).sum().backward()
    assert used == [("all_gather_into_tensor", group), ("all_reduce", group)]
    used.clear()
    all_reduce_ranks(torch.ones(1))
    assert used == [("all_reduce", None)]
    distributed.shutdown()
    assert layers_group() is None


def test_layers_of_nccl_get_a_group_of_high_priority(joins, monkeypatch, fake_cuda):
    fake_cuda.gpus = [FakeGpu()] * 3
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    monkeypatch.setattr(dist, "new_group", lambda **options: joins.append(("group", options)) or "the layers' group")
    info = init_from_env(backend="nccl")
    assert layers_group() == "the layers' group"
    use_layers_group(None)
    assert (info.backend, os.environ.pop("NCCL_LAUNCH_ORDER_IMPLICIT")) == ("nccl", "1")
    assert info.device == torch.device("cuda:2")
    (_, first), (_, second) = joins[2:]
    assert second["timeout"] == first["timeout"]
    assert second["pg_options"].is_high_priority_stream
    init_from_env(backend="gloo")
    assert layers_group() is None
    assert len(joins) == 4 + 3, "no second group"


def test_process_that_abandons_its_group_ends_at_once(monkeypatch):
    ends = []
    monkeypatch.setattr(atexit, "register", lambda function, *args: function(*args))
    monkeypatch.setattr(distributed, "signal_children", lambda number: ends.append(number.name))
    monkeypatch.setattr(os, "_exit", ends.append)
    distributed.abandon(7)
    assert ends == ["SIGKILL", 7]


class Marker:
    """A value whose unpickling makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Known:
    def __init__(self, number):
        self.number = number


def test_values_of_other_ranks_run_no_code(monkeypatch, tmp_path):
    """The second of three ranks is a stranger, who has connected to a port in its place."""

    def saved(value):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def all_gather(parts, own, group):
        assert group == "host"
        sent = [own if own.dtype == torch.int64 else own[: sizes[0]], saved(theirs), saved((3, {"a": torch.ones(2)}))]
        for part, each in zip(parts, sent, strict=True):
            if own.dtype == torch.int64:
                part.fill_(own.item() if each is own else each.numel())
            else:
                part[: each.numel()] = each
        sizes[:] = [int(own)] if own.dtype == torch.int64 else sizes

    sizes = [0]
    monkeypatch.setattr(dist, "new_group", lambda **_: "host")
    monkeypatch.setattr(dist, "all_gather", all_gather)
    ranks = Ranks(distributed.RankInfo(0, 3, 0, torch.device("cpu"), "nccl"), classes=[Known])
    theirs = Known(5)
    own, known, (number, tensors) = ranks.gather(["own", None, 2.5, 2**70])
    assert (own, known.number, number, tensors["a"].tolist()) == (["own", None, 2.5, 2**70], 5, 3, [1, 1])
    theirs = Marker(tmp_path / "ran")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        ranks.gather("own")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        ranks.from_main(None)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(theirs))
    assert (tmp_path / "ran").exists(), "the value would have run code"


def test_exchanges_on_the_host_wait_as_long_as_the_others(monkeypatch):
    groups = []
    monkeypatch.setattr(dist, "new_group", lambda **options: groups.append(options))
    Ranks(distributed.RankInfo(0, 3, 0, torch.device("cpu"), "nccl", start_timeout_s=77.0))
    assert groups == [{"backend": "gloo", "timeout": timedelta(seconds=77)}]


def test_exchanges_of_ranks_send_what_they_are_given(monkeypatch):
    """The other of two ranks sends the same numbers, and is the main rank."""
    info = distributed.RankInfo(1, 2, 1, torch.device("cpu"), "gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: tensor.mul_(2))
    other = {"mine": None}  # for all else, it sends this

    class Two(Ranks):
        def gather(self, value):
            return [other.get(value, ("of", 0)), value]

    ranks, alone = Two(info), Ranks()
    assert (ranks.is_main, alone.is_main) == (False, True)
    assert (ranks.from_main(5), alone.from_main(5)) == (("of", 0), 5)
    assert (ranks.first_of("mine"), ranks.first_of("ours"), alone.first_of("mine")) == ("mine", ("of", 0), "mine")
    assert ranks.any_of(True, False) == (True, False)
    whole, half = torch.tensor([3, 5]), torch.tensor([[0.5], [1.5]])
    for given in ((whole,), (whole, half)):
        assert alone.sums(given) is given
        for total, own in zip(ranks.sums(given), given, strict=True):
            assert total.dtype == own.dtype
            assert total.tolist() == (2 * own).tolist()
    assert (whole.tolist(), half.tolist()) == ([3, 5], [[0.5], [1.5]])
