"""Makes batches, with the same code in a worker process, in a thread and in the main process.

``maker`` makes batches as the configuration in ``fetch`` says. It puts together one of the
``fetchers``, which load samples and skip bad ones, and the ``collator``. ``samples`` says how a
dataset is asked for samples. ``concurrent_fetcher`` loads several at once, ``arrays`` gathers them
from arrays, ``sample_watch`` watches how long they take, and ``timer`` measures the parts of the
work. ``explain`` names the samples that cannot be collated, and the parts of the user's objects
that cannot be pickled.

``sample_rng`` seeds random number generators, with the numbers of ``seeds``.
``failures`` carries exceptions and failed samples to the main process.
``iterable_state`` and ``fingerprint`` make the checkpoints of datasets that ``dataset_checkpoint``
describes.

``payload`` carries the dataset and the functions to a worker or to a process of an executor.
``payload_digest`` tells whether ranks would send the same.
"""
