"""Makes batches: in a worker process, in a thread and in the main process alike.

``maker`` makes batches. ``fetch`` and ``concurrent_fetcher`` load samples, ``arrays`` gathers them
from arrays. ``sample_rng`` seeds random number generators, except for samples of which ``drawing``
proves that they draw nothing. ``failures`` carries exceptions and failed samples to the main
process. ``iterable_state`` and ``fingerprint`` take checkpoints of datasets. ``payload`` carries
the dataset and the functions to a worker, and ``timer`` measures the parts of the work.
"""
