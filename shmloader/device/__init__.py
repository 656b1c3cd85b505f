"""Processes batches between the engine and the user: pins them, or copies them to a device.

Modules: ``stage`` (what a stage is, the one that pins, and the walk through a batch), ``device``
(the stage that copies to a device, and the page locks of slots), ``thread`` (the thread that runs
the engine and a stage, and its results on the user's thread), and ``backend`` (a device, by torch's
functions and by its driver).
"""
