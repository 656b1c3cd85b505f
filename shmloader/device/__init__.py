"""Processes batches between the engine and the user: pins them, or copies them to a device.

Modules: ``stage`` (what a stage is), ``pin`` and ``device`` (the stages), ``thread`` (the thread
that runs the engine and a stage), ``staged_engine`` (its results, on the user's thread),
``exchange`` (what the two threads pass to each other), ``backend`` and ``drivers`` (a device, by
torch's functions and by those that torch lacks), ``page_locks`` (slots that a device reads), and
``structure`` (walks a batch).
"""
