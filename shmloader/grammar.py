"""Puts names into sentences, for the texts of errors."""

#: Stands for the unknown id of a process of the user's executor.
UNKNOWN_PID = -1


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
