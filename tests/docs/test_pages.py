"""Pages read as plain Markdown in the repository, where the README links to them."""

import re
from pathlib import Path

import pytest

from tests.docs.test_blocks import PAGES, ROOT

# Tables that programs write stand between such comments, or make the whole file.
GENERATED = re.compile(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"```\w*\n.*?^ *```$", re.DOTALL | re.MULTILINE)

PLAIN = [*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]


def shown_text(path: Path) -> str:
    """What a page shows that is rendered as plain Markdown, without blocks of code."""
    return CODE.sub("", COMMENT.sub("", path.read_text()))


def cells_of(path: Path) -> list[str]:
    text = COMMENT.sub("", GENERATED.sub("", path.read_text()))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [cell.strip() for row in rows for cell in row.strip("|").split("|")]


def test_pages_show_no_roles_and_no_directives():
    raw = r"\{[a-z:-]+\}`[^`]*`|^ *[`:]{3,}\{.*$|^:\w+:.*$|^[<>]{7} .*$"
    found = {path: re.findall(raw, shown_text(path), re.MULTILINE) for path in PLAIN}
    shown = {path: lines for path, lines in found.items() if lines}
    assert not shown, "put directives into a comment `<!-- site … -->`, and link what it shows"


def test_cells_of_tables_are_short():
    long = [(path, cell) for path in PLAIN for cell in cells_of(path) if len(cell.split()) > 20]
    assert not long, "over 20 words: put the explanation below the table"


def test_what_only_the_site_shows_has_a_link_beside_it():
    """An included program or text can be opened from the page in the repository."""
    for path in PLAIN:
        text = path.read_text()
        for included in re.findall(r"^```\{(?:literal)?include\} (\S+)", text, re.MULTILINE):
            assert f"]({included})" in text, (path, included)


def test_the_index_links_every_page():
    """The menu is only on the site. Pages of benchmarks have an index of their own."""
    index = ROOT / "docs" / "index.md"
    linked = {
        index,
        *(index.parent / link for link in re.findall(r"\]\((\S+?\.md)", shown_text(index))),
    }
    pages = {path for path in index.parent.rglob("*.md") if path.parent.name != "benchmarks"}
    assert not pages - linked


def test_the_index_lists_how_tos_in_the_order_of_the_menu():
    text = (ROOT / "docs" / "index.md").read_text()
    menu = re.findall(r"^howto/([\w-]+)$", text, re.MULTILINE)
    assert menu[:4] == ["workers", "time", "reproducible", "resume"]
    assert re.findall(r"\]\(howto/([\w-]+)\.md\)", text) == menu


@pytest.mark.parametrize("folder", ["README.md", "docs", "examples", "shmloader"])
def test_nothing_is_to_be_installed_from_an_index_that_lacks_it(folder):
    """There is no release: `pip install shmloader[...]` cannot work, so the package is named."""
    files = [ROOT / folder, *(ROOT / folder).rglob("*.md"), *(ROOT / folder).rglob("*.py")]
    for path in filter(Path.is_file, files):
        assert not re.search(r"install .*shmloader\[", path.read_text()), path
