"""The engine: an ordered, bounded, parallel map from index batches to batches.

This text is the architecture document of the package's core. Read it before the modules.

Tickets go in and batches come out in order. At most ``window`` tickets are in flight, and the
memory that batches take is bounded. Everything that users see is a thin layer over an engine::

    DataLoader ──▶ EpochPlan ──▶ Engine(Scheduler, Pool) ──▶ stage ──▶ batch

**The path of a batch**, with worker processes; it costs two small messages and one copy::

    user's thread                                              worker process
    ─────────────                                              ──────────────
    draw an index batch ── ticket ─▶ scheduler: pick a worker,
                                     or leave that to the queue;
                                     a FREE slot is TAKEN
                                     ── Task(seq, epoch, slot, indices) ──▶  samples = dataset[i] …
                                                               collate straight into the slot
                                                               describe it by a layout
                                     ◀── Answered(seq, slot, layout) ──────
                                     when seq is next: small fields are copied
                                     out; large ones are views of the slot,
    batch ◀───────────────────────── which is LENT
    drop it: the lease dies, the slot is FREE

**Decisions and actions.** The scheduler decides, and knows no process, thread or clock. The engine
reports what has happened (a ticket was offered, a worker has answered, a worker is lost), asks what
to do, and has its pool do it. Only the thread inside ``next_batch`` changes the scheduler.

**One raise.** What the user's code raises becomes a value where it is caught, in an answer or an
:class:`~shmloader.engine.delivery.Instead`, and ``next()`` raises it in one place. So whatever else
leaves ``next()``, such as a Ctrl-C, has interrupted it. If it only waited, the iterator goes on.
Otherwise it closes, and the loader's state stays that of the last delivered batch
(:mod:`shmloader.loader.iterator`).

**The arena** (:mod:`shmloader.memory.arena`). All slots of an engine lie in one sparse, sealed file
in memory. A worker gets its descriptor when it starts. Each process maps as much of a slot as its
batches need; giving memory back punches a hole into the file. Before a fork, the batches that the
user keeps are parted from their slots (I9).

**One queue** (:mod:`shmloader.pools.task_queue`). Where torch gives batch i to worker i mod n, each
task is sent to its worker's own socket. Where any worker may make any batch (a map-style dataset
with ``seed=`` or ``in_order=False``, or of arrays alone, an automatic number of workers, workers
that ranks share), all tasks go into one socket pair, from which every idle worker receives: the
kernel is the dispatcher. A worker writes on its status page which task it has. What is neither
queued, nor answered, nor on a living worker's page when a worker dies was the dead worker's, and is
sent again.

**Workers.** With "fork" the main process forks each. With "spawn" and "forkserver" it starts the
nursery, a fresh interpreter that imports torch and the program once and forks the workers
(:mod:`shmloader.pools.nursery`). Each worker has one record (:mod:`shmloader.engine.records`): its
state, how far its dataset has come, and how it died. The tickets of a lost worker are sent to its
replacement, or to the queue; when no restart is left, its death answers them. With
``num_workers="auto"`` the iterator decides how many are wanted (:mod:`shmloader.pools.adapting`).
Further ones are started while an epoch runs, and none ends before the epoch's end.

**Samples that hang** (``sample_timeout=``). A worker publishes which sample it loads and until when
it may. While the engine waits, it ends workers that are late. The next worker gets the ticket with
its hung samples, and raises in their places, so that the policy for bad samples applies.

**Pools** make the batches. :mod:`shmloader.pools` states everything that the engine asks of one:
processes of this rank or of all ranks of a host, threads (no slots: batches come as they are), and
an executor's tasks (each ticket in flight is a worker; batches come without slots). With
``num_workers=0`` there is neither an engine nor a pool (:mod:`shmloader.loader.inline`).

**Stages** run after the engine, with ``pin_memory=True`` or ``device=``. The engine then belongs to
a thread that exists for one epoch (:mod:`shmloader.device.thread`). It runs the engine and then the
stage, which copies a batch into page-locked memory or has the device read its slot. The user's
thread still draws the sampler, one ticket for each batch that it takes, and starts the workers.
While any loader of the process forks, these threads pause where they hold no lock
(:mod:`shmloader.threads`). A pipeline's stage on processes runs an engine on a thread,
too (:mod:`shmloader.pipeline.processes`).

**Checkpoints of datasets.** Each batch comes with its dataset's own state, or with a fingerprint.
The worker's record has the checkpoint after its last answer, from which a replacement resumes; the
user's thread has that after the last delivered batch, of which the loader's state is made. A
dataset without a state of its own is iterated again: what was delivered is re-read, compared by
fingerprints, and discarded (:mod:`shmloader.batch.stream`).

**Streams of shards** (:mod:`shmloader.streams`) need no checkpoints. A ticket asks for one batch of
one reader and says from where the reader can go on, so any worker can make it; it goes to the one
that has the reader open. The report on the batch's records says how far the reader has come. The
order learns that before it is asked for the next ticket. With ranks, it may have to wait for what
other ranks find, and then owes tickets (``NotYet``).

The words: a *ticket* is an index batch with its ``seq``, its number in the epoch; a *task* is a
ticket as it is sent to a worker, with the slot to fill. A *slot* is a range of the arena that holds
one batch; a *layout* says where its parts lie; a *lease* keeps the slot LENT and dies with the last
view of it. A *worker* is a process, a thread (``thread_pool=True``) or a number (``executor=``); a
*stream* is the iterator of its iterable dataset. An *answer* is a batch, a failure, "no batch", or
the worker's death. An *epoch left* is given up early: its answers are dropped.

The modules (those marked "pure" import no threads, processes or clock):

========================  ========================================================================
``records``               Records and states of slots and workers (pure).
``scheduler``             Tickets, their order, and epochs: all decisions (pure).
``engine``                Performs what the scheduler decides, and receives the pool's reports.
``delivery``              How exceptions are delivered, and datasets' checkpoints after a batch.
``failures``              Bad samples: counted, listed, limited.
``workers``               Says what workers do and how they ended; ends those that hang.
========================  ========================================================================
"""
