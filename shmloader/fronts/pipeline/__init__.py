"""Pipelines: a source, stages one after the other, a sink. On threads, coroutines and processes.

The way of one item::

    source ──▶ belt ──▶ stage ──▶ belt ──▶ stage ──▶ … ──▶ sink ──▶ consumer
    (a thread           (jobs on a crew:                   (a belt
    of its own,          threads, the loop,                 of buffer_size)
    or the loop)         processes, an executor)

A *flow* is one run through the source, and knows where each item is: on a belt between two stages,
or in a job, which is one item at one stage. It is pure, and decides which job may start, under
back-pressure: a result whose belt is full stays in its job's place, so the stage before comes to
rest, and so on up to the source. Whoever brings a result to the flow takes away what may start now:
a thread that finishes a job goes on with the next one itself, and hands the others to their crews.
So no thread does nothing but pass items on, and an item may go down the whole chain on one thread.

A failure is an item, too: it goes down the belts to the consumer, past the stages, and whatever was
before the stage that failed comes to rest.

Who runs jobs (*crews*): daemon threads, which are left behind if they stay in an op when the
pipeline stops; one event loop, on a thread; a ``concurrent.futures.Executor`` of the user's; and
for ``executor="process"`` the loader's own engine, pool and slots: items cross as tickets, results
as batches in slots.

Modules: ``ops`` (what an op is), ``plan`` (the stages as they were built, checked), ``builder``
(:class:`PipelineBuilder`), ``flow`` (pure), ``failures`` (what may fail, and what is said),
``epoch`` (a flow with its lock, its crews and its consumer), ``threads``, ``loop``, ``outside`` and
``processes`` (crews), ``arrival`` (batches on a device), ``running`` (what must be ended),
``pipeline`` (:class:`Pipeline` and its iterator), ``loader`` (:class:`PipelineDataLoader`).
"""
