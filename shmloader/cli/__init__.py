"""The command line: ``doctor``, ``bench`` and ``report``.

Modules: ``main`` (arguments), ``target`` (finds the user's loader, and makes others like it), and
one for each command. ``doctor`` uses ``hazards`` (the parts of a dataset that do not work in forked
workers).
"""
