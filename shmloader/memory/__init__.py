"""Shared memory: slots, what is written into them, and what is read out of them.

``slot`` owns the OS resource; ``slot_writer`` hands out its bytes in the worker;
``collate`` and ``flat`` fill it; ``codec`` turns whatever a collate function
returned into bytes of the slot plus a small body, and back; ``lease`` notices when the
user has dropped a batch.
"""
