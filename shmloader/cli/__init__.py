"""The command line: ``doctor``, ``bench`` and ``report``.

Modules: ``main`` (arguments), ``target`` (finds the user's loader, makes others like it, and runs
one), and one for each command. ``doctor`` uses ``diagnosis`` (the problems of a loader) and
``parts`` (the parts of a dataset, and which of them do not work in workers).
"""
