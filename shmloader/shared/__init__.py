"""Keeps a dataset in memory once, however many processes read it: :func:`share`."""
