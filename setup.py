"""The one compiled part: optional, for without a compiler torch copies instead."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "shmloader.memory._streaming",
            ["shmloader/memory/_streaming.c"],
            extra_compile_args=["-O2"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
