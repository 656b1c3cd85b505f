"""The engine: an ordered, bounded, parallel map from index batches to batches.

This text is the architecture document of the package's core. Read it before the modules.

Tickets go in and batches come out in order. At most ``window`` tickets are in flight, and the
memory that batches take is bounded. Everything that users see is a thin layer over an engine::

    DataLoader ──▶ EpochPlan ──▶ Engine(Scheduler, Pool) ──▶ stage ──▶ batch

The :class:`~shmloader.sampling.plan.EpochPlan` yields index batches. It knows the epoch, its order,
how far the user has come, and what is carried over into the next epoch. The arguments of the loader
reach all parts as one frozen :class:`~shmloader.loader.config.LoaderConfig`.

**The path of a batch**, with worker processes::

    user's thread                                              worker process
    ─────────────                                              ──────────────
    draw an index batch ── ticket ─▶ scheduler: pick a worker,
                                     or leave that to the queue;
                                     a FREE slot is TAKEN
                                     ── Task(seq, epoch, slot, indices) ──▶  samples = dataset[i] …
                                                               collate straight into the slot
                                                               describe it by a layout
                                     ◀── BatchDone(seq, slot, layout) ─────
                                     when seq is next:
                                     small fields are copied out;
                                     large ones are views of the
                                     slot, which is LENT
    batch ◀─────────────────────────
    drop it: the lease dies, the slot is FREE

A batch costs two small messages and one copy.

**The arena** (:mod:`shmloader.memory.arena`). All slots of an engine lie in one sparse, sealed file
in memory, at a fixed distance from each other. A worker gets its descriptor when it starts, so no
descriptor travels with a task. A slot grows by being written to: each process maps as much of it as
its batches need. Giving memory back punches a hole into the file. If user code keeps a batch where
its slot must be used again, the batch is parted from the slot: its pages become private to the
process. That is done for what a worker's code keeps, and in the main process before a fork (I9).
A worker whose dataset has large states also has a slot for these, which keeps its pages
(:mod:`shmloader.batch.state_slot`).

**Decisions and actions.** The scheduler decides. The engine reports what has happened (a ticket was
offered, a worker has answered, a worker is lost), and the scheduler changes the tickets, slots and
worker records. The scheduler knows no process, thread or clock. The engine asks it what to do, and
has its pool do it: send a task, start or stop a worker. The pool reports what happened. Only the
thread that is inside ``next_batch`` changes the scheduler.

**One raise.** What the user's code raises becomes a value where it is caught, a ``Failure`` or an
:class:`~shmloader.engine.delivery.Instead`, and ``next()`` raises it in one place. So whatever else
leaves ``next()``, such as a Ctrl-C, has interrupted it. If it only waited, the iterator goes on.
Otherwise it closes, and the loader's state stays that of the last delivered batch
(:mod:`shmloader.loader.iterator`).

**One queue** (:mod:`shmloader.pools.task_queue`). Where torch gives batch i to worker i mod n, each
task is sent to its worker's own socket. Where any worker may make any batch (a map-style dataset
with ``seed=`` or ``in_order=False``, an automatic number of workers, workers that ranks share), all
tasks of the window go into one socket pair, from which every idle worker receives: the kernel is
the dispatcher. A slow sample then delays only its own batch, and workers go on while the user
trains, though no thread of ours runs. Answers come by each worker's own socket. A worker writes on
its status page which task it has. When a worker dies, what is neither queued, nor answered, nor on
a living worker's page was the dead worker's, and is sent again.

**The life of a worker**::

    GONE ──▶ RUNNING ──▶ LEAVING ──▶ GONE
                │           ├──────▶ GONE    (it died)
                ├───────────┴──────▶ DEAD    (it died, and no restart is left)
                └──▶ LOST ──▶ RUNNING        (it is restarted)

Each worker has one record in the scheduler's table: its state, how far its dataset has come, and
how it died. The tickets of a lost worker are sent to its replacement, or to the queue. When no
restart is left, each of them is answered by the worker's death.

**How workers start** (:mod:`shmloader.pools.starting`). With "fork" the main process forks each
worker. With "spawn" and "forkserver" it starts the nursery, a fresh interpreter that imports torch
and the program once and forks the workers (:mod:`shmloader.pools.nursery`). It reaps them, too, and
reports their exit codes. Each worker unpickles the dataset itself.

**Samples that hang** (``sample_timeout=``). A worker publishes which sample it is loading and until
when it may (:mod:`shmloader.batch.sample_watch`). When that time has passed while the engine waits,
the engine asks for the worker's Python stack and ends the worker, and the scheduler notes the
sample in its ticket. The worker is replaced as after a death. The new worker is sent the ticket
together with its hung samples, and raises in their places, so that the policy for bad samples
applies. A thread cannot be ended: it is left behind, and its ticket is put into the queue again.

**Pools** make the batches. :mod:`shmloader.pools` lists everything that the engine asks of one.

* With processes, batches come in slots.
* With ``worker_scope="host"`` the workers serve all ranks of a host. A separate process starts and
  reaps them (:mod:`shmloader.pools.host_service`). Each rank has a socket to each worker, and its
  own queue, slots and window. A worker serves the queues that have tasks in turn. A worker's death
  is reported to all ranks, and costs a restart in the rank whose batch the worker was making.
* With threads (``thread_pool=True``) there are no messages and no slots. Idle threads take the
  oldest ticket from one queue, and the answer says which thread took it.
* With ``executor=`` a worker is only a number, which stands for one task in flight; there are as
  many of them as the window has tickets. A task carries no dataset: the executor's process that
  runs it keeps one. Batches come without slots: the executor's transport has made their memory
  (:mod:`shmloader.pools.executor`).

With ``num_workers=0`` there is neither an engine nor a pool: ``next()`` draws an index batch and
makes its batch on the calling thread (:mod:`shmloader.loader.inline`).

Draws, order, bad samples, timeouts and the end of an epoch are handled alike for all pools.

**Stages** run after the engine, with ``pin_memory=True`` or ``device=``. The engine then belongs to
a thread that exists for one epoch (:mod:`shmloader.device.thread`). The user's thread still draws
the sampler, one ticket for each batch that it takes, and hands tickets over through an ``Inbox``.
The thread runs the engine and then the stage, which copies a batch into page-locked memory or has
the device read its slot; the slot is free when that copy is done. Batches and exceptions wait in
order for the user's thread. While any loader of the process forks a worker, these threads pause
where they hold no lock (:mod:`shmloader.threads.background`), and it is the user's thread that
replaces a dead worker.

**Automatic worker counts** (``num_workers="auto"``): the table has a record for each worker that
there may be, and those that do not run are GONE. The iterator decides how many are wanted
(:mod:`shmloader.pools.adapting`), and tells the engine. If the ranks of a host share the workers,
the process that owns them decides in the same way, from what the iterators report, and each
engine's pool reports the number. The first workers by number are the wanted ones, so all engines
agree on which they are. The user's thread starts workers, as for restarts. A worker that is no
longer wanted is LEAVING: it is asked to receive no more tasks, answers its last one, and ends.

**Checkpoints of datasets.** Each batch comes with what a checkpoint of the worker's dataset needs:
the dataset's own state if it has one, or a fingerprint of the batch. Each worker's dataset has two
checkpoints. One is in the worker's record and describes the dataset after the worker's last answer;
a replacement of the worker resumes from it. The user's thread keeps the other, which describes the
dataset after the last delivered batch; the loader's state is made from it. A dataset with a state
of its own is resumed from that state. Any other is iterated again from the same random generator
states, and the batches that were already delivered are re-read, compared by their fingerprints, and
discarded (:mod:`shmloader.batch.dataset_state`). If a dataset cannot be resumed, the iterator
raises and ends.

**Pipelines** run a stage on worker processes with an engine that has its own thread: an item is a
ticket, the operation is the dataset, and the epoch has no end
(:mod:`shmloader.pipeline.processes`).

The words:

ticket
    A unit of work: an index batch with its ``seq``, which is its number in the epoch.
task
    A ticket as it is sent to a worker, with the slot to fill.
arena
    The file in memory in which all slots of an engine lie.
slot
    A piece of shared memory that holds one batch: a range of the arena.
layout
    A description of where the parts of a batch lie in its slot.
lease
    Keeps a slot LENT. It dies with the last view of the slot.
worker
    A process that makes batches; a thread with ``thread_pool=True``; a number with ``executor=``.
stream
    The iterator of one worker's iterable dataset.
window
    The most tickets that may be in flight.
answer
    What comes back for a ticket: a batch, a failure, "no batch", or the worker's death.
epoch left
    An epoch that is given up early: its tasks are finished, and their answers are dropped.

The modules (those marked "pure" import no threads, processes or clock):

========================  ========================================================================
``slots``                 States of the slots (pure).
``workers``               Records and states of the workers (pure).
``scheduler``             Tickets, their order, and epochs: all decisions (pure).
``delivery``              What is said of a batch that is delivered, or raised in its place.
``engine``                Performs what the scheduler decides, and receives the pool's reports.
``inbox``                 Tickets on their way from the user's thread to the engine's.
``slot_batches``          Builds batches from slots, and frees the slots.
``failures``              Bad samples: counted, listed, limited.
``dataset_checkpoints``   Checkpoints of the workers' datasets at the last delivered batch.
``lateness``              Asks late workers what they are doing, for a timeout's error.
``hang_watch``            Ends workers that hang in a sample (``sample_timeout``).
``wording``               Texts of errors and log messages.
========================  ========================================================================
"""
