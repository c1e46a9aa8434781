"""Exact parallel training: the loss and gradients of a single device at any split of the batch.

A library of its own: torch, the standard library, `segapp.accelerator` (kinds of devices) and `segapp.chunks`, which
imports nothing; viewers and planners take splits from there without loading torch.
"""

from segapp.chunks import RankSplit, SplitCheck, check_gpu0_bsz, check_split, plan_chunks
from segapp.parallel.batchnorm_guard import (
    check_batchnorm,
    no_samples_problem,
    smallest_chunk,
    unused_parameters,
)
from segapp.parallel.data_parallel import BalancedDataParallel, DataParallelCriterion, DataParallelModel, ReplicaOutputs
from segapp.parallel.distributed import (
    DistributedSetupError,
    PeerOutOfMemoryError,
    RankInfo,
    Ranks,
    abandon,
    all_reduce_gradients,
    init_from_env,
    is_launched,
    shutdown,
    tighten_timeout,
    wrap_ddp,
)
from segapp.parallel.dropout import SampleMasks, mask_by_sample, sample_masks
from segapp.parallel.exchange import allreduce, sum_over_ranks
from segapp.parallel.launch import die_with_parent, end_with_peers, launch_local
from segapp.parallel.model_parallel import StagePlacement, balance_stages, measure_stages, place_stages, plan_stages
from segapp.parallel.penalties import gradient_penalty
from segapp.parallel.recompute import is_recomputable, recomputed_blocks, set_recompute
from segapp.parallel.rendezvous import ReplicaDesyncError, ReplicaError, ReplicaOutOfMemoryError, current_replica
from segapp.parallel.replicas import replicate, run_replicas
from segapp.parallel.scatter_gather import gather, reduce_add, resolve_devices, scatter
from segapp.parallel.shards import Shards
from segapp.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

__all__ = [
    "BalancedDataParallel",
    "DataParallelCriterion",
    "DataParallelModel",
    "DistributedSetupError",
    "PeerOutOfMemoryError",
    "RankInfo",
    "RankSplit",
    "Ranks",
    "ReplicaDesyncError",
    "ReplicaError",
    "ReplicaOutOfMemoryError",
    "ReplicaOutputs",
    "SampleMasks",
    "Shards",
    "SplitCheck",
    "StagePlacement",
    "SyncBatchNorm",
    "abandon",
    "all_reduce_gradients",
    "allreduce",
    "balance_stages",
    "check_batchnorm",
    "check_gpu0_bsz",
    "check_split",
    "convert_sync_batchnorm",
    "current_replica",
    "die_with_parent",
    "end_with_peers",
    "gather",
    "gradient_penalty",
    "init_from_env",
    "is_launched",
    "is_recomputable",
    "launch_local",
    "mask_by_sample",
    "measure_stages",
    "no_samples_problem",
    "place_stages",
    "plan_chunks",
    "plan_stages",
    "recomputed_blocks",
    "reduce_add",
    "replicate",
    "resolve_devices",
    "revert_sync_batchnorm",
    "run_replicas",
    "sample_masks",
    "scatter",
    "set_recompute",
    "shutdown",
    "smallest_chunk",
    "sum_over_ranks",
    "tighten_timeout",
    "unused_parameters",
    "wrap_ddp",
]
