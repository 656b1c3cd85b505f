"""The compiled part, which is optional: without a compiler, torch and Python copy instead.

Also the addresses in the package's metadata, which only the workflow that publishes it knows.
"""

import os
import re
import sysconfig
from collections.abc import Mapping

from setuptools import Extension, setup
from setuptools.command.egg_info import egg_info

# One wheel serves all versions of Python from 3.11 on, but free-threaded ones have no limited API.
is_limited = not sysconfig.get_config_var("Py_GIL_DISABLED")


def urls_of(repository: str) -> dict[str, str]:
    """Return the links that an index page shows."""
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/HEAD/docs/index.md",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def with_absolute_links(readme: str, repository: str) -> str:
    """Return the README with links that work outside the repository, too."""
    link = re.compile(r'(!\[[^\]]*\]\(|\]\(|src=")(?!https?://|#)')
    kinds = {"]": "blob"}  # of a page; images are shown raw
    return link.sub(lambda it: f"{it[1]}{repository}/{kinds.get(it[1][0], 'raw')}/HEAD/", readme)


class EggInfo(egg_info):
    """Writes the metadata, with addresses if GitHub's workflow builds the package."""

    def run(self) -> None:
        """Run the command."""
        where: Mapping[str, str] = os.environ
        if {"GITHUB_SERVER_URL", "GITHUB_REPOSITORY"} <= where.keys():
            repository = f"{where['GITHUB_SERVER_URL']}/{where['GITHUB_REPOSITORY']}"
            metadata = self.distribution.metadata
            metadata.project_urls = urls_of(repository)
            metadata.long_description = with_absolute_links(metadata.long_description, repository)
        super().run()


setup(
    cmdclass={"egg_info": EggInfo},
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
