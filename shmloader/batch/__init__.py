"""Makes batches, with the same code in a worker process, in a thread and in the main process.

``maker`` makes batches. Its configuration is in ``fetch``, which also chooses a fetcher: one of
``fetchers``, or ``tolerant_fetcher``, which skips bad samples. ``concurrent_fetcher`` loads several
samples at once, ``arrays`` gathers samples from arrays, and ``sample_watch`` watches how long
samples take. ``ragged`` explains why samples cannot be collated.

``sample_rng`` seeds random number generators through the wrappers in ``seeded_datasets``, with the
numbers of ``seeds``.
``remote_error`` carries exceptions to the main process, and ``failures`` failed samples.
``iterable_state`` and ``fingerprint`` make the checkpoints of datasets that ``dataset_checkpoint``
describes.

``payload`` carries the dataset and the functions to a worker, and ``portable`` to a process of an
executor. ``payload_digest`` tells whether ranks would send the same. ``unpicklable`` finds the part
that cannot be pickled. ``timer`` measures the parts of the work.
"""
