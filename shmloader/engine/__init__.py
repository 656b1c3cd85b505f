"""The engine: an ordered, bounded, parallel map. Tickets in, batches out, memory fixed.

The way of one batch::

    user's thread                                              worker process
    ─────────────                                              ──────────────
    draw an index batch ── ticket ─▶ scheduler: a FREE slot
                                     becomes FILLING, a worker
                                     is picked
                                     ── Task(seq, epoch, slot, indices) ──▶  samples = dataset[i] …
                                                               collate straight into the slot
                                                               describe it by a layout
                                     ◀── BatchDone(seq, slot, layout) ─────
                                     slot FULL; when seq is next:
                                     small fields are copied out;
                                     large ones are views of the
                                     slot, which is LENT
    batch ◀─────────────────────────
    drops it: the lease dies, the slot is FREE

Two small messages and one copy a batch.

With a stage (``pin_memory=True``, ``device=``) the engine belongs to a thread of its own, one for
each epoch (:mod:`shmloader.device.thread`). The user's thread goes on drawing the sampler, one
ticket for each batch that it takes, and hands the tickets over by an ``inbox``; the thread runs the
engine, and then the stage: it copies a batch out of its slot into page-locked memory, or has the
device read the slot, which is free when the copy is done. What comes out, batches and exceptions,
waits in order for the user's thread. While any loader of the process forks a worker, such threads
stand still where they hold no lock (:mod:`shmloader.threads.fork_safety`); a dead worker is
replaced by the user's thread.

The life of a worker::

    GONE ──▶ STARTING ──▶ READY ◀──▶ LEAVING ──▶ GONE
                 │          │           │
                 └──────────┴───────────┴──▶ LOST ──▶ STARTING    (it is restarted)
                                        └──▶ DEAD                 (no restart is left)

A worker has one record, in the scheduler's table (``workers``): its state, its tickets in flight,
the slots that it has mapped, its last layout, its death. The scheduler is told what has happened,
and decides; the engine has its pool do what the scheduler says is to be done: tasks are sent,
workers are started and stopped, and slots are let go of. A lost worker's tickets are sent to the
one that is started in its place, or, once no restart is left, each is answered by the worker's
death.

With dynamic dispatch (a map-style dataset, and the order is free or content does not depend on the
worker), a ticket waits in the scheduler until a worker has room for it: for one task, or for two
while batches are short. So a slow sample holds up its own batch alone; in order, the others go
on until the window is full of batches that wait for it. Somebody has to send those tickets while
the user trains: the engine has a thread of its own here even without a stage. It builds one batch
ahead, which counts as lent.

With ``num_workers="auto"`` the table has a record for the most workers there may be; those that
are not wanted are GONE. The iterator says how many it wants. A worker that is wanted is started by
the user's thread, as a restarted one is; one that is not wanted any more is LEAVING, and is stopped
when it has answered what it has.

Who the workers are is a matter of the pool, and all that a pool must do stands on one page
(:mod:`shmloader.pools`). Where the pool has a queue, the scheduler gives a ticket to no worker:
an idle one takes the oldest, and the answer says who it was. So it is with ``thread_pool=True``:
workers are threads of the main process, there are no messages, and a batch comes as it is; a slot
is then no more than a place in the window. Draws, order, failures, stages and ends are the same.

Which index batches there are is not the engine's affair: the loader's one ``EpochPlan``
(:mod:`shmloader.sampling.plan`) knows the epoch, its order, how far the user is in it, and what it
leaves over for the next one. What the loader was asked for reaches all parts as one frozen
``LoaderConfig`` (:mod:`shmloader.loader.config`).

With each batch comes what a checkpoint of the worker's dataset consists of: the dataset's own
state, if it has one, or a fingerprint of the batch. Checkpoints are kept twice: up to the last
answer, from which a dead worker is replaced, and up to the last delivered batch, from which the
loader's state is made (:mod:`shmloader.engine.iterable_checkpoints`). A dataset is resumed from its
own state.
Otherwise it is iterated again, with the random generators as they were when it began; the batches
that were delivered are read again, discarded, and compared by their fingerprints
(:mod:`shmloader.batch.iterable_state`). If it cannot be resumed, the iterator raises and ends.

A pipeline's stage on worker processes is an engine, too, on a thread of its own: an item is a
ticket, the op is the dataset, and the epoch has no end
(:mod:`shmloader.pipeline.processes`).

The words:

ticket
    A unit of work with its ``seq`` (its number in the epoch) and the epoch it belongs to.
task
    A ticket with its slot, as a worker gets it.
slot
    One piece of shared memory.
layout
    Where a batch's parts lie in its slot.
lease
    A lent slot's views; dies with the last of them.
worker
    A process that loads; or a thread, with ``thread_pool=True``.
window
    The tickets in flight.

Modules, each with one concern: ``slots`` (states of slots, pure), ``workers`` (the workers' records
and states, pure), ``routing`` (which worker gets a ticket, pure), ``scheduler`` (tickets, order and
epochs, pure), ``streams`` (how far an iterable dataset's streams have come in the workers, pure),
``stream_states`` (the same, as the user has been given of them: what is saved of a loader),
``adapting`` (how many workers there should be, pure), ``failures`` (bad samples, counted and
listed), ``wording`` (texts of errors), ``inbox`` (tickets from another thread), ``lateness`` (what
a timeout says), ``base`` (the engine as its caller sees it: where tickets come from, what a call
promises, how it ends) and ``engine`` (what it has its pool do, and what the pool tells).
"""
