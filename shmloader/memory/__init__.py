"""Shared memory: slots, what is written into them, and what is read out of them.

``arena`` owns the file in which all slots lie, and maps them. ``limits`` decides whether a slot may
grow, from what it reads of the system. ``writer`` hands out a slot's bytes in the worker, and has
torch's collate functions write into them. Samples become a batch in one of two ways:

* ``flat``: what ``default_collate`` makes of plain samples, and ``rows`` of a dataset of arrays;
* ``pickled``: anything else.

``pickled`` pickles all that is sent to other processes, with large data beside the pickle.
``segment`` is memory that is written once and then shared, also for the large buffers of a pickle.
"""
