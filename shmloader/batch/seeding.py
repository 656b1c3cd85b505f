"""Random streams of a worker, as torch seeds them.

Each worker's streams depend on the epoch's base seed and the worker's number alone: ``random``
and torch get their sum, ``numpy.random`` four words that torch mixes from both, so that the
libraries do not draw alike.
"""

import random

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed ``random``, ``torch`` and ``numpy.random`` of this process.

    Returns:
        The worker's seed, as ``get_worker_info().seed`` shows it.
    """
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(_generate_state(base_seed, worker_id))
    return seed
