"""Writes names, numbers, durations and sizes as text."""

#: Stands for the unknown id of a process of the user's executor.
UNKNOWN_PID = -1

_TIMES = (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))
# From this number on, three digits round up to 1.
_ROUNDED_UP = 0.9995
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def with_article(noun: str) -> str:
    """Return "a" or "an" and a noun, such as the name of a class: "an int", "a list"."""
    article = "an" if noun.lstrip("_")[:1].lower() in tuple("aeiou") else "a"
    return f"{article} {noun}"


def described_type(value: object) -> str:
    """Return the name of an object's class with its article: "an int"."""
    return with_article(type(value).__name__)


def describe_worker(worker_id: int, pid: int | None) -> str:
    """Name a worker by its number and process id. A thread has no process id."""
    if pid == UNKNOWN_PID:
        return f"worker {worker_id} (of the executor)"
    if pid is None:
        return f"worker thread {worker_id}"
    # The process id of a shared worker may not have come yet.
    return f"worker {worker_id} (pid {pid})" if pid else f"worker {worker_id}"


def seconds(duration_s: float) -> str:
    """Return a duration in seconds with two decimals, or in ms, µs or ns with three digits."""
    for unit, factor in _TIMES:
        if duration_s * factor >= _ROUNDED_UP:
            return f"{duration_s:.2f} s" if unit == "s" else f"{duration_s * factor:.3g} {unit}"
    return "0 s"


def counted(count: int, one: str, many: str = "") -> str:
    """Return a number of things; ``many`` is the plural if that is not ``one`` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def size(nbytes: float) -> str:
    """Return a number of bytes with a fitting unit."""
    for factor, unit in _SIZES:
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def as_html(text: str) -> str:
    """Return HTML that shows as the given text, for a notebook."""
    import html  # noqa: PLC0415 - takes 2 ms, and only notebooks need it

    return f"<pre>{html.escape(text)}</pre>"
