"""Puts names into sentences, for the texts of errors."""


def with_article(noun: str) -> str:
    """Return "a" or "an" and a noun, such as the name of a class: "an int", "a list"."""
    article = "an" if noun.lstrip("_")[:1].lower() in tuple("aeiou") else "a"
    return f"{article} {noun}"


def described_type(value: object) -> str:
    """Return the name of an object's class with its article: "an int"."""
    return with_article(type(value).__name__)
