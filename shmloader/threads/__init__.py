"""Background threads, and protection against forks and Ctrl-C at a bad moment.

``background`` starts and ends every background thread of the package. ``fork_safety`` parks them
while the process forks a worker. ``uninterruptible`` completes a step that Ctrl-C must not leave
half done. ``wakeup`` is an event that any code may set, even a finalizer.
"""
