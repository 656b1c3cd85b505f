"""The words of messages: at most 25 in a sentence, sizes with a unit, plurals that fit."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmloader
from shmloader.grammar import described_type, with_article
from tests.wording import long_sentences

ROOT = Path(shmloader.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# From this number of words on, a string is a message or a part of one, not a name or a format.
_FEWEST_WORDS = 5
# torch's own words.
_TORCHS = "Details are lost due to multiprocessing"


def text_of(node: ast.expr) -> str | None:
    """The text of a literal. What is formatted into it counts as one word."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "{}" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = text_of(left), text_of(right)
            return None if texts == (None, None) else "".join(text or "{}" for text in texts)
    return None


def messages_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the text of each string that is no docstring."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        text = text_of(node) if isinstance(node, ast.expr) else None
        if text is not None and len(text.split()) >= _FEWEST_WORDS and _TORCHS not in text:
            yield node.lineno, text  # type: ignore[attr-defined]
        yield from messages_in(node)


@pytest.fixture(scope="module")
def messages() -> list[tuple[str, str]]:
    """Where the package's messages stand, and their texts."""
    return [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in MODULES
        for line, text in messages_in(ast.parse(path.read_text()))
    ]


def test_no_sentence_of_a_message_has_more_than_25_words(messages) -> None:
    assert len(messages) > 400
    assert {where: long for where, text in messages if (long := long_sentences(text))} == {}


def test_sizes_in_messages_have_a_unit_that_fits(messages) -> None:
    """By ``grammar.size``; raw bytes only where each one counts, as in the size of a file."""
    exact = ("batch/token_blocks.py", "streams/download.py", "engine/engine.py")
    raw = [
        where
        for where, text in messages
        if re.search(r"\{\} ?(bytes|[kMG]B)\b", text) and not where.startswith(exact)
    ]
    assert raw == []


@pytest.mark.parametrize(
    ("code", "long"),
    [
        ('raise ValueError("a " * 26)', False),
        (f'raise ValueError("{"a " * 26}")', True),
        (f'log.warning("{"a " * 20}" "{"b " * 6}", 3)', True),
        (f'warn("{"a " * 20}" + name + f" {"b " * 5}")', True),
        (f'x = f"{"a " * 20}{{size}} {"b " * 5}"', True),
        (f'x = "{"a " * 20}. {"b " * 20}"', False),
        (f'def f():\n    """{"a " * 30}"""', False),
    ],
)
def test_messages_are_found_wherever_they_stand(code, long) -> None:
    found = [text for _, text in messages_in(ast.parse(code))]
    assert any(map(long_sentences, found)) is long


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "an int"),
        (1.5, "a float"),
        ([], "a list"),
        (object(), "an object"),
        (None, "a NoneType"),
    ],
)
def test_a_class_is_named_with_its_article(value, text) -> None:
    assert described_type(value) == text


@pytest.mark.parametrize("noun", ["an io.BytesIO", "an _io.TextIOWrapper", "a torch.Generator"])
def test_an_underscore_is_not_spoken(noun) -> None:
    assert with_article(noun.partition(" ")[2]) == noun
