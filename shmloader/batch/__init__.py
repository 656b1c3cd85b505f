"""Makes batches, with the same code in a worker process, in a thread and in the main process.

``maker`` makes batches as the configuration in ``fetch`` says. It puts together one of the
``fetchers``, which load samples and skip bad ones, and the ``collator``. ``samples`` says how a
dataset is asked for samples. ``concurrent_fetcher`` loads several at once, ``arrays`` gathers them
from arrays, ``sample_watch`` watches how long they take, and ``timer`` measures the parts of the
work. ``ragged`` explains why samples cannot be collated.

``sample_rng`` seeds random number generators, with the numbers of ``seeds``.
``remote_error`` carries exceptions to the main process, and ``failures`` failed samples.
``iterable_state`` and ``fingerprint`` make the checkpoints of datasets that ``dataset_checkpoint``
describes.

``payload`` carries the dataset and the functions to a worker, and ``portable`` to a process of an
executor. ``payload_digest`` tells whether ranks would send the same. ``unpicklable`` finds the part
that cannot be pickled.
"""
