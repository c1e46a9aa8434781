"""BatchNorm over the whole batch, on several replicas or on several ranks."""

from segapp.parallel.sync_batchnorm.arithmetic import join_moments
from segapp.parallel.sync_batchnorm.layer import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm", "join_moments", "revert_sync_batchnorm"]
