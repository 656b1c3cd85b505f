"""The command line: ``doctor``, ``bench``, ``tune`` and ``report``.

Modules: ``main`` (arguments), ``target`` (finds the user's loader, and makes others like it),
``measure`` (runs a loader, and shows the progress), ``climb`` (how ``tune`` searches and decides),
and one for each command.
"""
