"""Pages of the reference list every public name, and what the site shows of it."""

import importlib
import re
from pathlib import Path

import pytest
import torch.utils.data

from tests.docs.test_pages import ROOT, shown_text

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
MODULES = ("", ".arrow", ".cluster", ".collate", ".sampling", ".sequence", ".streams")

# An entry: a name that links its file, and text up to the next entry or empty line.
ENTRY = re.compile(
    r"^(?:- )?\[`([\w.]+)`\]\((\S+\.py)\): (.+?)(?=\n\n|\n- |\n<!--|\Z)", re.MULTILINE | re.DOTALL
)
SHOWN = re.compile(
    r"^\.\. auto(?:class|function|exception):: ([\w.]+).*\n((?: +:.*\n)*)", re.MULTILINE
)
MODULE = re.compile(r"^\.\. currentmodule:: (\S+)$", re.MULTILINE)


def entries_of(page: Path) -> dict[str, tuple[Path, str]]:
    """The name, file and text of each entry; a name may have the module of an adapter."""
    found = ENTRY.findall(shown_text(page))
    return {name.rpartition(".")[2]: (page.parent / link, text) for name, link, text in found}


def value_of(name: str, text_before: str) -> object:
    """What a directive shows, from the module that the page has named last."""
    module, _, name = name.rpartition(".")
    value = importlib.import_module(module or MODULE.findall(text_before)[-1])
    return getattr(value, name)


def members_of(value: object, options: str) -> list[str]:
    """The public members that the site shows of a value."""
    if given := re.search(r"  :members: (.+)", options):
        return given[1].split(", ")
    if ":no-members:" in options:
        return []
    names = [*vars(value).get("__annotations__", ())] if isinstance(value, type) else []  # fields
    if ":members:" in options:
        names += vars(value)
    return [name for name in names if name[:1] != "_"]


def test_public_names_are_listed():
    listed = [name for page in PAGES for name in entries_of(page)]
    for part in MODULES:
        module = importlib.import_module(f"shmloader{part}")
        for name in module.__all__:
            theirs = getattr(torch.utils.data, name, None)
            if getattr(module, name) is not theirs and f".{name}" not in MODULES:
                assert name == "__version__" or listed.count(name) == 1, f"{module.__name__}.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_entries_name_what_the_site_shows(page):
    text, entries = page.read_text(), entries_of(page)
    for found in SHOWN.finditer(text):
        value = value_of(found[1], text[: found.start()])
        said = entries[found[1].rpartition(".")[2]][1]
        for member in members_of(value, found[2]):
            assert re.search(rf"`{member}(\(\))?`", said), f"{found[1]}.{member}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_entries_link_the_file_that_defines_the_name(page):
    for name, (path, _) in entries_of(page).items():
        defined = rf"^(?:class |def |(?={name} = )){name}\b"
        assert re.search(defined, path.read_text(), re.MULTILINE), f"{name} is not in {path.name}"
