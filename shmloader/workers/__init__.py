"""Workers, processes or threads: how they start, what they run, how they end.

``processes`` is the pool as the main process sees it; ``child`` is what runs in a worker;
``payload`` carries dataset and functions there; ``seeding`` and ``fetch`` are torch's
rules for random streams and for loading; ``remote_error`` brings a failure home. ``threads`` is the
pool whose workers are threads, ``thread_task`` what one of them is given.
"""
