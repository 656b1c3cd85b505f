"""What ``repr()`` of builders and pipelines shows: the source, the stages and the sink."""

from collections.abc import Sequence

from shmloader.loader.description import describe_source
from shmloader.pipeline.config import Aggregate, Pipe, RunsOn
from shmloader.pipeline.source import Source

_WHERE = {
    RunsOn.THREADS: "threads",
    RunsOn.LOOP: "coroutines",
    RunsOn.PROCESSES: "processes",
    RunsOn.EXECUTOR: "an executor",
}


def describe_chain(
    source: Source | None, stages: Sequence[Pipe | Aggregate], buffer_size: int | None
) -> str:
    """Return all parts of a pipeline, joined by arrows. Parts that are None are left out."""
    parts = [] if source is None else [describe_source(source)]
    parts += [_describe_stage(stage) for stage in stages]
    if buffer_size is not None:
        parts.append(f"sink({buffer_size})")
    return " → ".join(parts) or "empty"


def _describe_stage(stage: Pipe | Aggregate) -> str:
    if isinstance(stage, Aggregate):
        return f"aggregate({stage.size})"
    if stage.runs_on is RunsOn.DEVICE:
        return stage.name
    return f"{stage.name} ({stage.concurrency} on {_WHERE[stage.runs_on]})"
