"""Describes what a flow waits for, for the error of a timeout."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmloader.insight.text import counted, seconds
from shmloader.pipeline.config import PipelineConfig
from shmloader.pipeline.flow import Flow, Stage
from shmloader.pipeline.stages import PipeStage
from shmloader.pipeline.verdict import one_of_threads

if TYPE_CHECKING:
    from shmloader.pipeline.epoch import StageOp

_NS = 1e9


def describe_flow(flow: Flow, config: PipelineConfig, stage_ops: "Sequence[StageOp | None]") -> str:
    """Return sentences that say which stages have items in work, how long, and which ones wait.

    Args:
        flow: The flow. Its clock was set to the present time.
        config: The pipeline's stages.
        stage_ops: How each stage is run, the source first.
    """
    sentences = []
    waiting = []
    for stage in flow.stages:
        name = config.name_of_stage(stage.number)
        sentence = _what_it_does(flow, stage, stage_ops[stage.number], config.num_threads)
        if sentence:
            sentences.append(f"{name[0].upper()}{name[1:]} {sentence}.")
        elif not stage.after.is_ended:
            waiting.append(name)
    if waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        text = ", ".join(waiting)
        sentences.append(f"{text[0].upper()}{text[1:]} {verb} for items.")
    return "".join(f" {sentence}" for sentence in sentences)


def _what_it_does(flow: Flow, stage: Stage, op: "StageOp | None", num_threads: int) -> str:
    if stage.after.is_ended:
        return "has come to its end" if stage.number == 0 else ""
    if not isinstance(stage, PipeStage) or op is None or not stage.working:
        return "" if stage.number else "waits until the next stage takes its items"
    jobs = list(stage.working)
    oldest_s = (flow.clock.now_ns - min(job.ready_ns for job in jobs)) / _NS
    if stage.number == 0:
        return f"has not yielded its next item for {seconds(oldest_s)}"
    text = f"has had {counted(len(jobs), 'item')} in work"
    text += f" for {seconds(oldest_s)}" if len(jobs) == 1 else f", one for {seconds(oldest_s)}"
    unbegun = sum(not job.began_ns for job in jobs)
    if op.waits_for_threads and unbegun:
        verb = "waits" if unbegun == 1 else "wait"
        text += f", of which {unbegun} {verb} for {one_of_threads(num_threads)} (num_threads)"
    return text
