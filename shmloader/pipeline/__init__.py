"""Pipelines: a source, stages one after the other, a sink. On threads, coroutines and processes.

The way of one item::

    source ──▶ queue ──▶ stage ──▶ queue ──▶ stage ──▶ … ──▶ sink ──▶ consumer
    (a thread            (jobs on an executor:               (a queue
    of its own,           threads, the loop,                 of buffer_size)
    or the loop)          processes, a user's executor)

A *flow* is one run through the source. It knows where each item is: in a queue between two stages,
or in a job, which is one item at one stage. It is pure, and decides which jobs may start, with
back-pressure: a result whose queue is full stays in its job, so the stage before it stops, and so
on up to the source. The thread that brings a result to the flow takes away the jobs that may start
now: it continues with the next one itself, and gives the others to their executors. So no thread
only passes items on, and an item may go down the whole chain on one thread.

A failure is an item, too: it goes down the queues to the consumer, past the stages, and the stages
before the one that failed stop.

Jobs run on *executors*: daemon threads, which are left behind if they are still in an op when the
pipeline stops; one event loop, on a thread; a ``concurrent.futures.Executor`` of the user's; and
for ``executor="process"`` the loader's own engine, pool and slots: items cross as tickets, results
as batches in slots.

Modules: ``ops`` (what an op is), ``plan`` (the stages as they were built, checked), ``builder``
(:class:`PipelineBuilder`), ``flow`` (pure), ``failures`` (which failures are allowed, and what is
said of them), ``epoch`` (a flow with its lock, its executors and its consumer), ``threads``,
``loop``, ``executor_stage`` and ``processes`` (executors), ``device_future`` (batches on a device),
``running`` (what must be ended), ``pipeline`` (:class:`Pipeline` and its iterator), ``loader``
(:class:`PipelineDataLoader`).
"""
