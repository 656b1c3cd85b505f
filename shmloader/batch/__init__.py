"""Makes batches: in a worker process, in a thread and in the main process alike.

``maker`` makes batches. ``fetch`` says how, and by which of the ``fetchers``, of which the
``tolerant_fetcher`` skips bad samples; ``concurrent_fetcher`` loads several samples at once,
``arrays`` gathers them from arrays. ``sample_rng`` seeds random number generators, by
``seeded_datasets`` and with the numbers of ``seeds``, except for samples of which ``drawing``
proves that they draw nothing. ``failures`` carries exceptions and failed samples to the main
process. ``iterable_state`` and ``fingerprint`` take the checkpoints of datasets that
``dataset_checkpoint`` describes. ``payload`` carries the dataset and the functions to a worker, and
``timer`` measures the parts of the work.
"""
