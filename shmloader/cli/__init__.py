"""The command line: ``doctor``, ``bench`` and ``report``.

Modules: ``main`` (arguments), ``target`` (finds the user's loader, and makes others like it),
``measure`` (runs a loader, and shows the progress), and one for each command. ``doctor`` uses
``machine`` (what the machine offers),
``diagnosis`` (the problems of a loader), ``parts`` (walks through a dataset) and ``hazards``
(objects that do not work in workers).
"""
