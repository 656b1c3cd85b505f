"""How a batch is made: in a worker process, in a thread and in the main process alike.

``maker`` makes batches; ``fetch``, ``array_fetch`` and ``concurrent_fetcher`` load samples;
``seeding`` and ``sample_rng`` set random number generators; ``bad_samples`` says what becomes of
samples that raise, and ``remote_error`` carries an exception to the main process.
``iterable_state`` and ``fingerprint`` say how far an iterable dataset has come. ``payload`` carries
the dataset and the functions to a worker, and ``timer`` measures the parts of the work.
"""
