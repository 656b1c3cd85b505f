"""Adapters for frameworks that make their own loaders, or drive ours in a way of their own.

Each adapter is a module. ``accelerate`` and ``lightning`` import their framework. ``seeding``, for
transforms of Albumentations and MONAI, imports none. Where no adapter is needed, or
:func:`shmloader.install` suffices, there is none: ``docs/howto/frameworks.md`` lists what each
framework needs. ``prometheus`` is for no framework: it exports metrics of loaders.
"""
