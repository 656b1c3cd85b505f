"""Adapters for frameworks that make their own loaders, or drive ours in a way of their own.

Each adapter is a module. ``accelerate``, ``lightning`` and ``ray`` import their framework.
``seeding`` adapts transforms of Albumentations and MONAI, and imports neither. ``rebuilding`` is
shared by the adapters. Where no adapter is needed, or :func:`shmloader.install` suffices, there is
none: ``docs/howto/frameworks.md`` lists what each framework needs.
"""
