"""Pipelines: a source, a chain of stages, and a sink, on threads, coroutines and processes.

The path of one item::

    source ──▶ queue ──▶ stage ──▶ queue ──▶ stage ──▶ … ──▶ sink ──▶ consumer
    (a thread            (jobs on an executor:               (a queue
    of its own)           threads, the loop, processes)      of buffer_size)

A *flow* is one run through the source. It knows where each item is: in a queue between two stages,
or in a job, which is one item at one stage. It is pure, and decides which jobs may start. A result
whose queue is full stays in its job, so the stage before it stops, and so on up to the source. The
thread that brings a result to the flow takes the jobs that may start now: it continues with one of
them itself, and gives the others to their executors. So no thread only passes items on, and one
thread may take an item through the whole chain.

A failure also travels as an item: it goes through the queues to the consumer, and later stages pass
it on without calling their ops. The failed stage, and the stages before it, start no further job.

Jobs run on *executors*, of which there are three kinds:

* daemon threads, which are left behind if they are still in an op when the pipeline stops
* an event loop on a thread
* for ``executor="process"``, the loader's engine, pool and slots

If the source can be resumed and the stages keep the order, each item travels with a *checkpoint*:
the position right after the item, where a resumed epoch begins. The pipeline's state is the
checkpoint of the item that was delivered last.

Modules: ``builder`` (:class:`PipelineBuilder`), ``pipeline``
(:class:`Pipeline` and its iterator), ``config`` (the stages, checked), ``flow`` (an epoch, under a
lock), ``stages`` (pure: where each item is, and what failed), ``source`` (how sources are iterated
and resumed, and the format of a state), ``executors`` (threads and loops), ``processes`` (workers;
makes and ends all executors), ``stats`` (what was measured, and what limits).
"""
