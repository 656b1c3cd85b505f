"""What a timeout says: which stages have items in work, for how long, and which ones wait."""

import asyncio
import queue
import re
import threading

import pytest

from shmloader import PipelineBuilder
from tests.process.support import wait_until
from tests.unit.pipeline.support import SOON_S, Gate, chain


def text_of_timeout(pipeline, timeout_s=0.01):
    with pytest.raises(TimeoutError) as caught:
        pipeline.get_item(timeout_s)
    text = str(caught.value)
    assert text.startswith(f"the pipeline returned no item within {timeout_s} seconds. Nothing is")
    return text


DURATION = r"[\d.]+ (s|ms|µs)"


def test_the_stage_that_has_items_in_work_is_named_and_those_that_wait():
    gate = Gate()

    def decode(item):
        gate.pass_through()
        return item

    async def load(item):
        await asyncio.sleep(0)
        return item

    builder = PipelineBuilder().add_source(range(3)).pipe(load)
    builder.pipe(decode, concurrency=2).aggregate(4).pipe(sum, name="add")
    with builder.add_sink().build().auto_stop() as pipeline:
        gate.wait_until_reached(2)
        wait_until(lambda: "the source" not in text_of_timeout(pipeline))
        text = text_of_timeout(pipeline)
        gate.open()
        assert pipeline.get_item(SOON_S) == 3
    assert re.search(rf"stage 'decode' \(2 items, for up to {DURATION}\)\.", text), text
    assert text.endswith("aggregate(4), stage 'add'."), text


def test_a_source_that_yields_nothing_is_named():
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    with chain(iter(inbox.get, None), abs).auto_stop() as pipeline:
        text = text_of_timeout(pipeline)
        inbox.put(None)
    assert re.search(rf"In work: the source \(1 item, for up to {DURATION}\)\.", text), text
    assert text.endswith(" Idle: stage 'abs'.")


def test_a_process_that_has_an_item_is_named():
    builder = PipelineBuilder().add_source(range(1)).pipe(wait_for_ever, executor="process")
    with builder.add_sink().build().auto_stop() as pipeline:
        wait_until(lambda: "'wait_for_ever' (1 item" in text_of_timeout(pipeline))


def wait_for_ever(item):
    threading.Event().wait()
