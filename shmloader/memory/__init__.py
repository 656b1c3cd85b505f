"""Shared memory: slots, what is written into them, and what is read out of them.

``slot`` owns the OS resource; ``slot_writer`` hands out its bytes in the worker; ``lease``
notices when the user has dropped a batch. Two ways lead from samples to a batch:

=============  ==============================================  ======================
way            in the worker                                   in the main process
=============  ==============================================  ======================
short          ``packer``: default collate of plain samples    ``flat``
general        ``collate``, then ``encoder``: anything         ``codec``
=============  ==============================================  ======================

``stacking`` writes tensors side by side for both. ``admission`` says whether a slot may grow, by
what ``limits`` reads of the system; ``debug`` has the checks of ``SHMLOADER_DEBUG``.
"""
