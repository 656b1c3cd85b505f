"""The shape of what users are told."""

import re

#: The most words that a sentence of a message may have.
MOST_WORDS = 25


def sentences_of(text: str) -> list[str]:
    """The sentences of a text. A dot inside of a name or a number ends none."""
    return [part for part in re.split(r"(?<=[.!?])\s+|\n+", text.strip()) if part]


def long_sentences(text: str) -> list[str]:
    return [part for part in sentences_of(text) if len(part.split()) > MOST_WORDS]
