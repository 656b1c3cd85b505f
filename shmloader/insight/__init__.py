"""Measures where the time goes: the times of each batch, statistics of them, and the verdict.

An iterator records a tuple for each call of ``next()``. Everything else is computed when somebody
reads the statistics.

Modules: ``measurements`` (a batch's times, an engine's counts, the usage of workers and threads),
``record`` (what is recorded of each epoch, and written as a trace), ``sums`` (the sums over it),
``stats`` (the frozen statistics, and how they print) and ``verdict`` (one sentence about them).
"""
