"""Names in sentences."""

import pytest

from shmloader.grammar import described_type, with_article


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
