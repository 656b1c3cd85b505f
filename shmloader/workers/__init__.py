"""Workers: how they start, what they run, how they end.

``processes`` has the worker processes as the main process sees them, and ``child`` is what runs in
one. ``payload`` carries the dataset and the functions there. ``batch_maker`` makes batches, in
worker processes, in threads and in the main process alike; ``seeding`` and ``fetch`` are torch's
rules for random number generators and for loading. ``remote_error`` carries a failure back.
``background`` starts and ends the threads of this package.
"""
