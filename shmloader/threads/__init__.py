"""Background threads, and protection against forks at a bad moment.

``background`` has the base class of the package's background threads, which are parked while the
process forks a worker, and at the interpreter's exit. ``wakeup`` has an event that any code may
set, even a finalizer.
"""
