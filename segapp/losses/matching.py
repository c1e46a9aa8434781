"""Matching of queries to the classes of an image: the assignment of least cost.

Shapes: N images, P predictions of an image, Q queries, C classes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segapp.losses.fused.checks import is_simulated


@torch.no_grad()
def match_queries(costs: Tensor, is_present: Tensor) -> Tensor:
    """Return the query that is matched to each present class, at least total cost.

    The Hungarian method runs on the host (scipy), so this waits for the device: once per call, with one copy of all
    costs. Every image is matched by itself; the result does not depend on the images beside it.

    Args:
        costs: (N, P, Q, C); values that are not finite count as large ones.
        is_present: (N, C) bool, the class is in the image.

    Returns:
        (N, P, C) int64 on the device of the costs; -1 for classes that are absent or, where an image has more than Q
        classes, left over.
    """
    N, P, _, C = costs.shape
    if is_simulated(costs):  # a memory plan, where tensors have no values
        return torch.zeros(N, P, C, dtype=torch.int64, device=costs.device)
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    presence = is_present[:, None, None].expand(N, P, 1, C).to(costs.dtype)
    on_host = torch.cat([costs, presence], 2).cpu().numpy()
    found = np.full((N, P, C), -1, np.int64)
    for image, of_image in enumerate(on_host):
        classes = np.flatnonzero(of_image[0, -1])
        for number, table in enumerate(of_image[:, :-1]):
            large = np.finfo(table.dtype).max / (4 * C)  # sums of so many stay finite
            queries, columns = linear_sum_assignment(np.nan_to_num(table[:, classes], nan=large).clip(-large, large))
            found[image, number, classes[columns]] = queries
    return torch.from_numpy(found).to(costs.device)
