"""Processes batches between the engine and the user: pins them, or copies them to a device.

Modules: ``stage`` (what a stage is, and the one that pins), ``device`` (the stages that copy to
devices), ``thread`` (the thread that runs the engine and a stage, and its results on the user's
thread), ``backend`` (a device, by torch's functions and by its driver), ``page_locks`` (slots that
a device reads), and ``structure`` (walks a batch).
"""
