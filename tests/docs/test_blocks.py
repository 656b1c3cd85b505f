"""Every code block of the README and the documentation runs as pasted into a file of its own.

Where a page says at its top that its blocks continue the ones before them, they run one after the
other, as pasted into one file. Blocks with worker processes also run under forkserver, the default
of Python 3.14, where each worker imports the file.
"""

import ast
import gc
import itertools
import logging
import multiprocessing
import re
import shlex
import signal
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shmloader.cli.main import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

# The pages with blocks; those that are included from elsewhere have none of their own.
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

CONTINUES = "Every block on this page continues the ones"


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        path: The page.
        line: Number of its first line in the page.
        language: What follows the fence.
        code: Its lines.
    """

    path: Path
    line: int
    language: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks_of(path: Path) -> Iterator[Block]:
    fence, language, first, lines = "", "", 0, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not fence and (found := re.fullmatch(r"\s*(`{3,}|~{3,}|:{3,})\s*(\S*).*", line)):
            fence, language, first, lines = found[1], found[2], number + 1, []
        elif fence and line.strip() == fence:
            yield Block(path, first, language, "\n".join(lines) + "\n")
            fence = ""
        elif fence:
            lines.append(line)
    assert not fence, f"{path}:{first}: a block without an end"


def blocks_of_docstrings(path: Path) -> Iterator[Block]:
    """The blocks of a module's docstrings: `.. code-block:: python`, and plain ones after `::`."""
    source = path.read_text()
    if "::\n" not in source and ".. code-block::" not in source:
        return  # sooner than after it is parsed
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is None:
            continue
        docstring = node.body[0]
        for number in range(docstring.lineno, docstring.end_lineno):
            line = lines[number - 1]
            _, directive, language = line.partition(".. code-block:: ")
            if directive or line.endswith("::"):
                rest = lines[number : docstring.end_lineno]
                code = textwrap.dedent("\n".join(indented_beyond(line, rest)))
                yield Block(path, number + 1, language, code + "\n")


def indented_beyond(line: str, rest: list[str]) -> Iterator[str]:
    """The lines at the beginning of `rest` that are empty or indented by more than `line`."""
    margin = len(line) - len(line.lstrip())
    for other in rest:
        if other.strip() and len(other) - len(other.lstrip()) <= margin:
            break
        yield other


DOCSTRING_BLOCKS = [
    block
    for path in sorted((ROOT / "shmloader").rglob("*.py"))
    for block in blocks_of_docstrings(path)
]


def python_runs() -> list[object]:
    runs: list[list[Block]] = []
    for path in PAGES:
        blocks = [block for block in blocks_of(path) if block.language == "python"]
        # tests/frameworks and tests/cluster run those that need a framework or a cluster.
        elsewhere = r"integrations(?!\.prom)|shmloader\.cluster"
        blocks = [one for one in blocks if not re.search(elsewhere, one.code)]
        continues = CONTINUES in " ".join(path.read_text().split())
        runs += [blocks] if continues else [[block] for block in blocks]
    runs += [[block] for block in DOCSTRING_BLOCKS if block.language == "python"]
    return [pytest.param(run, id=run[0].name) for run in runs]


def shell_blocks() -> list[object]:
    blocks = [block for path in PAGES for block in blocks_of(path)]
    return [pytest.param(block, id=block.name) for block in blocks if block.language == "sh"]


def paste(run: list[Block], folder: Path) -> Path:
    """Writes blocks into a file, on their page's lines; training steps take no time."""
    lines: list[str] = []
    for block in run:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    path = folder / f"{run[0].path.stem.replace('-', '_')}_as_pasted.py"
    code = re.sub(r"time\.sleep\(.+?\)(?=  # your training step)", "pass", "\n".join(lines) + "\n")
    path.write_text(code)
    return path


def run_pasted(run: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = paste(run, folder)
    module = types.ModuleType("__main__")
    module.__file__ = str(path)  # workers of spawn and forkserver import it
    monkeypatch.setitem(sys.modules, "__main__", module)
    before = signal.getsignal(signal.SIGTERM)
    try:
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    finally:
        signal.signal(signal.SIGTERM, before)
        logging.captureWarnings(capture=False)
    module.__dict__.clear()
    gc.collect()


def has_worker_processes(code: str) -> bool:
    starts = re.search(r"num_workers=(?!0)|executor=['\"]process['\"]|ProcessPoolExecutor", code)
    return starts is not None and "thread_pool=True" not in code


RUNS_WITH_WORKERS = [
    run for run in python_runs() if any(has_worker_processes(block.code) for block in run.values[0])
]


def unguarded(code: str) -> str:
    """The statements that run when a worker imports the code."""
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return "\n".join(
        ast.unparse(node)
        for node in ast.parse(code).body
        if not isinstance(node, definitions)
        and not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
    )


@pytest.mark.parametrize("run", python_runs())
def test_python_blocks_run_as_pasted(run, tmp_path, monkeypatch, capsys):
    run_pasted(run, tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    for block in run:
        for told in re.findall(r"print\(error\)  # (.+) …$", block.code, re.MULTILINE):
            assert told in printed, block.name


@pytest.mark.sampled(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("run", RUNS_WITH_WORKERS)
def test_blocks_with_workers_run_where_workers_import_the_file(run, tmp_path, monkeypatch):
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        run_pasted(run, tmp_path, monkeypatch)
    finally:
        multiprocessing.set_start_method(None, force=True)


def test_blocks_with_workers_have_a_main_guard():
    for block in itertools.chain.from_iterable(map(blocks_of, PAGES)):
        if block.language == "python":
            assert not has_worker_processes(unguarded(block.code)), block.name


def test_a_page_says_at_its_top_that_its_blocks_continue():
    for path in PAGES:
        text = " ".join(path.read_text().split())
        assert (CONTINUES in text.partition("```")[0]) == (CONTINUES in text), path


@pytest.mark.parametrize("block", shell_blocks())
def test_commands_exist_and_take_their_arguments(block, capsys):
    """What the commands do is tested elsewhere: make by CI, the examples in tests/integration."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in block.code.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "make":
            assert words[1] in targets, line
        elif words[0] == "shmloader":
            with pytest.raises(SystemExit) as ended:
                main([*words[1:], "--help"])
            assert ended.value.code == 0, line
            known = capsys.readouterr().out
            for word in words:
                assert not word.startswith("-") or word in known, line
        elif words[0] in ("python", "torchrun"):
            programs = [word for word in words if word.endswith(".py")]
            assert programs, line
            assert all((ROOT / program).is_file() for program in programs), line
        else:
            assert words[:2] == ["pip", "install"], line


def test_every_kind_of_block_is_run_or_known_not_to_be():
    shown = {"text", "", "sh", "python"}
    for path in PAGES:
        for block in blocks_of(path):
            assert block.language in shown or block.language.startswith("{"), block.name


@pytest.mark.parametrize("block", DOCSTRING_BLOCKS, ids=lambda block: block.name)
def test_blocks_of_docstrings_are_run_or_are_no_python(block):
    if block.language != "python":
        assert block.language == "", block.name
        with pytest.raises(SyntaxError):
            ast.parse(block.code)


def test_the_readme_has_at_most_150_lines():
    assert len(README.read_text().splitlines()) <= 150


def links_of(text: str) -> list[str]:
    return [one or other for one, other in re.findall(r'\]\(([^)#\s]+)|src="([^"]+)"', text)]


def test_links_of_the_readme_lead_to_files():
    for path in (README, ROOT / "CONTRIBUTING.md"):
        for link in links_of(path.read_text()):
            assert link.startswith("https://") or (ROOT / link).exists(), link
