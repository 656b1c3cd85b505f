"""The one compiled part: optional, for without a compiler torch and Python copy instead."""

import sysconfig

from setuptools import Extension, setup

# One wheel serves all versions of Python from 3.11 on, but free-threaded ones have no limited API.
is_limited = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "shmloader.memory._streaming",
            ["shmloader/memory/_streaming.c"],
            extra_compile_args=["-O3"],
            define_macros=[("Py_LIMITED_API", "0x030b0000")] if is_limited else [],
            py_limited_api=is_limited,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if is_limited else {},
)
