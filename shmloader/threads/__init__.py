"""Threads of this process, and what a fork or Ctrl-C must not catch in the middle.

``background`` starts and ends every background thread of the package; ``fork_safety`` has them
stand still while the process forks a worker; ``uninterruptible`` finishes a step that Ctrl-C must
not leave half done; ``wakeup`` is an event that any thread may set, even inside a lock.
"""
