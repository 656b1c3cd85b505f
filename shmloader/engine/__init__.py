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
                                     ◀── BatchDone(seq, layout) ───────────
                                     slot FULL; when seq is next:
                                     small fields are copied out;
                                     large ones are views of the
                                     slot, which is LENT
    batch ◀─────────────────────────
    drops it: the lease dies, the slot is FREE

Two small messages and one copy a batch. The words:

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
window
    The tickets in flight.

Modules, each with one concern: ``slots`` (states of slots, pure), ``routing`` (which worker
gets a ticket, pure), ``scheduler`` (tickets, order and epochs, pure), ``arena`` (the slots
themselves, in the main process), ``answers`` (what may come back), ``failures`` (bad samples,
counted and listed), ``wording`` (texts of errors) and ``engine`` (the only one that acts).
"""
