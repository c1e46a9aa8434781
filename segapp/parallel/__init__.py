"""Exact parallel training for your own loop: the loss and gradients of a single device for any batch split.

The page `own-loop` explains each name. This package needs only torch, the standard library, `segapp.accelerator` (kinds
of devices) and `segapp.chunks`, which imports nothing. Its modules have more functions, which segapp's trainer uses.
"""

from segapp.chunks import plan_chunks
from segapp.parallel.data_parallel import BalancedDataParallel, DataParallelCriterion, DataParallelModel
from segapp.parallel.distributed import all_reduce_gradients
from segapp.parallel.dropout import SampleMasks, mask_by_sample, sample_masks
from segapp.parallel.model_parallel import balance_stages, place_stages
from segapp.parallel.penalties import gradient_penalty
from segapp.parallel.recompute import recomputed_blocks, set_recompute
from segapp.parallel.reductions import allreduce
from segapp.parallel.replica_threads import ReplicaDesyncError, current_replica
from segapp.parallel.scatter_gather import ReplicaOutputs
from segapp.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

__all__ = [
    "BalancedDataParallel",
    "DataParallelCriterion",
    "DataParallelModel",
    "ReplicaDesyncError",
    "ReplicaOutputs",
    "SampleMasks",
    "SyncBatchNorm",
    "all_reduce_gradients",
    "allreduce",
    "balance_stages",
    "convert_sync_batchnorm",
    "current_replica",
    "gradient_penalty",
    "mask_by_sample",
    "place_stages",
    "plan_chunks",
    "recomputed_blocks",
    "revert_sync_batchnorm",
    "sample_masks",
    "set_recompute",
]


def __dir__() -> list[str]:
    return __all__
