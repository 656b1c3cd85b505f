"""The command line: ``doctor``, ``bench`` and ``report``.

Modules: ``main`` (arguments), ``target`` (finds the user's loader, and makes others like it), and
one for each command.
"""
