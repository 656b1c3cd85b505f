"""Settings of the documentation. Building needs no network; `make docs` installs Sphinx first."""

import re
import sys
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # so that it also builds from an unpacked source archive

import shmloader  # noqa: E402

project = "shmloader"
author = copyright = "The shmloader authors"  # noqa: A001 - Sphinx's name
version = release = shmloader.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["Thumbs.db", ".DS_Store"]

# ---------------------------------------------------------------- Markdown

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the changelog's headings begin at the page's level

# ---------------------------------------------------------------- docstrings

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


GROUP = re.compile(r" *\*\*(.+?)\*\*(?: :class:`(.+)`)?")


def group_title(line: str) -> str | None:
    """The title of a group of arguments, if the line of a docstring has one: ``**Workers**``."""
    found = GROUP.fullmatch(line)
    if found is None:
        return None
    title = " ".join(filter(None, found.groups()))
    return title.replace("shmloader.", "").replace(",", "")  # napoleon wants words alone


def name_groups(_app: Any, _what: Any, _name: Any, _object: Any, _options: Any, lines: Any) -> None:
    """Make a section of each group of arguments."""
    lines[:] = [line if (title := group_title(line)) is None else f"{title}:" for line in lines]


napoleon_custom_sections = sorted(
    {
        (title, "params_style")
        for path in (HERE.parent / "shmloader").rglob("*.py")
        for line in path.read_text().splitlines()
        if (title := group_title(line)) is not None
    }
)


# ---------------------------------------------------------------- what only the site shows

# Pages are read in the repository, too, where directives would be raw text: comments hide them.
SITE = re.compile(r"<!-- site\n(.*?)\n-->", re.DOTALL)
REPOSITORY = re.compile(r"<!-- repository -->.*?<!-- end -->", re.DOTALL)


def choose_for_site(_app: Any, _page: str, source: list[str]) -> None:
    """Show what only the site can show, and leave out what only the repository's readers need."""
    source[0] = SITE.sub(r"\n\1\n", source[0])
    source[0] = REPOSITORY.sub(lambda found: "\n" * found[0].count("\n"), source[0])


def setup(app: Any) -> None:
    """Sphinx calls this at its start."""
    app.connect("source-read", choose_for_site)
    app.connect("autodoc-process-docstring", name_groups, priority=400)  # before napoleon


# ---------------------------------------------------------------- links to torch

# An inventory of the names that our docstrings mention, so that the build needs no network.
DATA = """
    BatchSampler ChainDataset ConcatDataset DataLoader Dataset DistributedSampler IterableDataset
    RandomSampler Sampler SequentialSampler StackDataset Subset SubsetRandomSampler TensorDataset
    WeightedRandomSampler
"""
PAGES = {
    **{f"torch.utils.data.{name}": "data.html" for name in DATA.split()},
    "torch.Tensor": "tensors.html",
    "torch.device": "tensor_attributes.html",
    "torch.dtype": "tensor_attributes.html",
}


def write_inventory(path: Path) -> None:
    """Write the names in Sphinx's format, version 2."""
    lines = [f"{name} py:class 1 {page}#$ -" for name, page in PAGES.items()]
    head = (
        "# Sphinx inventory version 2\n# Project: PyTorch\n# Version: 2\n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.encode() + zlib.compress("\n".join([*lines, ""]).encode()))


_inventory = HERE.parent / "build" / "torch.inv"
write_inventory(_inventory)
intersphinx_mapping = {"torch": ("https://docs.pytorch.org/docs/stable", str(_inventory))}

# ---------------------------------------------------------------- the pages

highlight_language = "text"  # of blocks that name none: drawings and tables in docstrings
html_theme = "furo"
html_title = f"shmloader {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
