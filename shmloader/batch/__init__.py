"""Makes batches, with the same code in a worker process, in a thread and in the main process.

``maker`` puts together what makes batches: the ``collator``, and the fetchers, which load samples
(``fetch``, and ``stream`` for iterable datasets). ``concurrent_fetcher`` loads several samples at
once, ``arrays`` gathers them from arrays, and ``sample_watch`` watches how long they take.
``explain`` names the samples that cannot be collated, and the parts of the user's objects that
cannot be pickled.

``sample_rng`` seeds random number generators.
``failures`` carries exceptions and failed samples to the main process.
``dataset_state`` saves the states of datasets, of which checkpoints are made (``checkpoint``).

``payload`` carries the dataset and the functions to a worker, or to a process of an executor.
``fingerprint`` tells whether two processes have the same samples or the same dataset.
"""
