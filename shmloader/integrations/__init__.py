"""Adapters for frameworks that build a loader of torch's class from the attributes of ours.

Each module knows one framework, and imports it when it is imported itself. Where no adapter is
needed, or :func:`shmloader.install` suffices, there is none: ``docs/howto/frameworks.md`` lists
what each framework needs.
"""
