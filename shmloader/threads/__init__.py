"""Background threads, and protection against forks and Ctrl-C at a bad moment.

``background`` has the base class of the package's background threads, which are parked while the
process forks a worker, and at the interpreter's exit. ``uninterruptible`` completes a step that
Ctrl-C must not leave half done. ``wakeup`` has an event that any code may set, even a finalizer.
"""
