"""What happens to a batch between the engine and the user: pinning, or copying to a device.

Modules: ``thread`` (the thread that runs the engine and a stage), ``staged_engine`` (its results,
on the user's thread), ``exchange`` (what the two threads pass to each other), ``pin`` and
``device`` (the stages), ``backend`` and ``drivers`` (a device, by torch's functions and by those
that torch lacks), ``page_locks`` (slots that a device reads), ``structure`` (walks a batch).
"""
