"""Adapters for frameworks that make their own loaders, or drive ours in a way of their own.

Each adapter is a module. ``accelerate``, ``lightning`` and ``ray`` import their framework.
``transformers`` does not, and neither does ``seeding``, which adapts transforms of Albumentations
and MONAI. ``accelerate`` and ``ray`` share ``rebuilding``. Where no adapter is needed, or
:func:`shmloader.install` suffices, there is none: ``docs/howto/frameworks.md`` lists what each
framework needs.
"""
