"""``share_on_host``: one rank builds, and all ranks of the host have the same memory."""

import contextlib
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import shmloader
from shmloader import DataLoader, ShardedDataLoader, host, share_on_host
from shmloader.host import Meeting
from shmloader.memory.segment import find_segment
from shmloader.memory_maps import address_of
from shmloader.process_state import PROCESS
from tests.process.ranks import FORK, LONG_S, Run, join
from tests.process.support import TOLD_S, descriptor_count, wait_until


@pytest.fixture
def as_rank(run, monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(PROCESS, "calls_on_host", 0)
    join(run.store, 1, 2)
    yield
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def told_when_waiting(event: Any) -> Iterator[None]:
    """Set an event when this process is connected to the rank that builds."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            event.set()

    log, handler = logging.getLogger("shmloader"), Handler(logging.INFO)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def fork_child(pid: Any) -> None:
    child = os.fork()
    if not child:
        signal.pause()
    pid.value = child


def file_of(array: Any) -> int:
    segment = find_segment(*address_of(array))
    assert segment is not None
    return os.fstat(segment.sealed.file.fileno()).st_ino


def make() -> dict[str, Any]:
    return {
        "builder": os.getpid(),
        "array": np.arange(1000),
        "tensor": torch.arange(1000.0),
        "texts": [str(number) for number in range(2000)],
    }


def must_not_build() -> Any:
    raise AssertionError("another rank builds")


def contents() -> tuple[int, int, int, float, str]:
    found = share_on_host(make)
    return (
        found["builder"],
        file_of(found["array"]),
        int(found["array"].sum()),
        float(found["tensor"].sum()),
        found["texts"][1234],
    )


def test_one_rank_builds_and_all_have_the_same_memory(run) -> None:
    results = run.results(contents, 4)
    assert len(set(results)) == 1
    builder, _, *rest = results[0]
    assert builder in {one.process.pid for one in run.started}
    assert rest == [499500, 499500.0, "1234"]


def test_calls_are_told_apart_by_their_order_and_one_within_build_does_not_count(run) -> None:
    def nested() -> list[str]:
        return [*share_on_host(lambda: ["inner"] * 1000)[:1], "outer"]

    def both() -> list[str]:
        return [*share_on_host(nested), share_on_host(lambda: ["next"] * 1000)[7]]

    assert run.results(both, 2) == [["inner", "outer", "next"]] * 2


def test_a_rank_may_be_a_call_ahead(run) -> None:
    def both() -> list[str]:
        return [share_on_host(lambda text=text: [text] * 1000)[7] for text in ("first", "next")]

    assert run.start(both, 0, 2).result() == ["first", "next"]
    assert run.start(both, 1, 2).result() == ["first", "next"]


def test_another_run_builds_anew_though_the_builder_before_lives(run, tmp_path) -> None:
    before = run.start(contents, 0, 3).result()
    with contextlib.closing(Run(tmp_path / "another store")) as another:
        after = another.results(contents, 2)
    assert after[0] == after[1]
    assert after[0][:2] != before[:2]


@pytest.mark.usefixtures("as_rank")
def test_each_restart_by_torchrun_is_a_run_of_its_own(monkeypatch) -> None:
    found = []
    for count in "0011":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        found.append(host.token_of_group(""))
    assert found[0] == found[1] != found[2] == found[3]


def test_several_ranks_need_a_process_group(monkeypatch) -> None:
    """A host with one rank does not."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    loader = ShardedDataLoader([1, 2, 3], num_workers=1, worker_scope="host")
    text = r" with several ranks needs torch\.distributed: call init_process_group\(\) first\."
    with pytest.raises(RuntimeError, match=rf"^share_on_host\(\){text}$"):
        share_on_host(must_not_build)
    with pytest.raises(RuntimeError, match=f"^worker_scope='host'{text}$"):
        iter(loader)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert share_on_host(make)["builder"] == os.getpid()


@pytest.mark.usefixtures("as_rank")
def test_all_descriptors_are_closed_with_the_object(run) -> None:
    rank = run.start(contents, 0)
    rank.result()
    before = descriptor_count()
    found = share_on_host(must_not_build)
    assert descriptor_count() > before
    del found
    assert descriptor_count() == before
    assert not PROCESS.meetings


def test_the_builder_keeps_nothing_once_all_have_come(run) -> None:
    begun, has_come = FORK.Event(), FORK.Event()

    def build() -> dict[str, Any]:
        begun.set()
        return make()

    def build_and_drop() -> tuple[int, int]:
        before = descriptor_count()
        found = share_on_host(build)
        assert has_come.wait(LONG_S)
        del found
        wait_until(lambda: not PROCESS.meetings, 30)
        return before, descriptor_count()

    builder = run.start(build_and_drop, 0)
    assert begun.wait(LONG_S)
    assert run.start(contents, 1).result()[0] == builder.process.pid
    has_come.set()
    before, after = builder.result()
    assert before == after


def test_an_object_may_have_more_memories_than_a_message_takes_descriptors(run) -> None:
    def total() -> int:
        parts = share_on_host(lambda: [shmloader.share(np.full(8, n)) for n in range(300)])
        return sum(int(part.sum()) for part in parts)

    assert run.results(total, 2) == [8 * 300 * 299 // 2] * 2


def test_loaders_workers_read_it(run) -> None:
    def load() -> list[int]:
        dataset = share_on_host(lambda: torch.utils.data.TensorDataset(torch.arange(2000)))
        with DataLoader(dataset, 500, num_workers=2) as loader:
            return [int(batch.sum()) for (batch,) in loader]

    first, second = run.results(load, 2)
    assert first == second == [int(torch.arange(n, n + 500).sum()) for n in range(0, 2000, 500)]


def test_writable_arrays_are_each_ranks_own(run) -> None:
    def write() -> int:
        array = share_on_host(lambda: np.zeros(1000), writable=True)
        array[:] += 1
        return int(array.sum())

    assert run.results(write, 3) == [1000] * 3


def test_without_ranks_it_is_share() -> None:
    found = share_on_host(make)
    assert find_segment(*address_of(found["array"])) is not None
    assert not PROCESS.meetings


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"build should be a function .* got a list"):
        share_on_host([1, 2])


@pytest.mark.parametrize("error", [KeyError("no such file"), ConnectionResetError("while reading")])
def test_if_build_raises_each_rank_builds_and_raises(run, error) -> None:
    built = FORK.Value("i", 0)

    def fail() -> Any:
        with built.get_lock():
            built.value += 1
        raise error

    results = run.results(lambda: share_on_host(fail), 3)
    assert [(type(one), one.args) for one in results] == [(type(error), error.args)] * 3
    assert built.value == 3


def test_after_a_rank_whose_build_raised_the_others_have_the_object(run) -> None:
    begun = FORK.Event()

    def fail() -> Any:
        begun.set()
        raise ValueError("no such file")

    assert isinstance(run.start(lambda: share_on_host(fail), 0, 3).result(), ValueError)
    results = [run.start(contents, rank, 3).result() for rank in (1, 2)]
    assert results[0] == results[1]


def test_a_rank_that_calls_again_after_its_build_raised_stays_in_step(run) -> None:
    begun = FORK.Event()

    def two() -> Any:
        tries = []

        def build() -> Any:
            begun.set()
            tries.append(1)
            if len(tries) == 1:
                raise OSError("stale file handle")
            return ["train"]

        with pytest.raises(OSError, match="stale"):
            share_on_host(build)
        return [list(share_on_host(build)), list(share_on_host(lambda: ["val"]))]

    def other() -> Any:
        return [list(share_on_host(lambda: ["train"])), list(share_on_host(lambda: ["val"]))]

    first = run.start(two, 0)
    assert begun.wait(LONG_S)  # otherwise the other rank may build
    second = run.start(other, 1)
    assert {first.result()[1][0], second.result()[1][0]} == {"val"}


@pytest.mark.usefixtures("as_rank")
def test_an_interruption_of_the_wait_is_raised_as_it_is(run) -> None:
    begun = FORK.Event()

    def build() -> None:
        begun.set()
        signal.pause()

    class Alarm:
        def set(self) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.01)

    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError("no more time")

    builder = run.start(lambda: share_on_host(build), 0)
    assert begun.wait(LONG_S)
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        with told_when_waiting(Alarm()), pytest.raises(TimeoutError, match="no more time"):
            share_on_host(must_not_build)
    finally:
        signal.signal(signal.SIGALRM, before)
        builder.process.kill()


def test_what_cannot_be_pickled_is_named_in_all_ranks(run) -> None:
    def with_lock() -> dict[str, Any]:
        return {"array": np.zeros(1000), "lock": threading.Lock()}

    for error in run.results(lambda: share_on_host(with_lock), 2):
        assert isinstance(error, TypeError)
        assert "dataset['lock'] (of type _thread.lock) cannot be pickled" in str(error)
        assert "Set it to None in build()" in str(error)


@pytest.mark.parametrize("end", ["killed", "killed, with a child", "interrupted"])
def test_if_the_rank_that_builds_ends_another_one_builds(run, end) -> None:
    begun, waiting, child = FORK.Event(), FORK.Event(), FORK.Value("i", 0)

    def build() -> None:
        if "child" in end:  # which has a copy of all that the rank has open
            fork_child(child)
        begun.set()
        waiting.wait(LONG_S)
        if end == "interrupted":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGKILL)

    first = run.start(lambda: share_on_host(build), 0)
    assert begun.wait(LONG_S)

    def wait() -> int:
        with told_when_waiting(waiting):
            return share_on_host(make)["builder"]

    second = run.start(wait, 1)
    try:
        assert second.result(TOLD_S) == second.process.pid
    finally:
        if child.value:
            os.kill(child.value, signal.SIGKILL)
    if end == "interrupted":
        assert type(first.result()) is KeyboardInterrupt


def test_too_few_descriptors_are_said_to_be_this_process_s(run) -> None:
    def receive() -> Any:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_count() + 20, limit))
        return share_on_host(must_not_build)

    def build() -> list[Any]:
        return [shmloader.share(np.full(8, number)) for number in range(100)]

    assert run.start(lambda: len(share_on_host(build)), 0).result() == 100
    error = run.start(receive, 1).result()
    assert isinstance(error, OSError)
    assert f"process {run.started[1].process.pid} has too few file descriptors" in str(error)


def test_a_child_of_the_rank_that_built_does_not_keep_the_name(run) -> None:
    child = FORK.Value("i", 0)

    def build_and_fork() -> int:
        found = share_on_host(make)
        fork_child(child)
        return found["builder"]

    builder = run.start(build_and_fork, 0)
    assert builder.result() == builder.process.pid
    builder.process.kill()
    builder.process.join()
    try:
        late = run.start(contents, 1)
        assert late.result()[0] == late.process.pid
    finally:
        os.kill(child.value, signal.SIGKILL)


@pytest.mark.usefixtures("as_rank")
def test_what_connects_and_goes_away_is_no_rank(run) -> None:
    builder = run.start(contents, 0)
    built = builder.result()
    for _ in range(3):
        stranger = Meeting("share_on_host 0", "")
        assert not stranger.is_host
        stranger.socket.recv(1, socket.MSG_PEEK)  # it is being answered, and does not receive that
        stranger.close()
    assert contents() == built


@pytest.mark.usefixtures("as_rank")
def test_a_default_timeout_of_sockets_means_nothing(run) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0)  # over as soon as a socket waits
    try:
        built = run.start(contents, 0).result()
        assert contents() == built
    finally:
        socket.setdefaulttimeout(before)


def become_nobody() -> None:
    os.setgroups([])
    os.setresuid(65534, 65534, 65534)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@needs_root
@pytest.mark.usefixtures("as_rank")
def test_another_user_gets_nothing(run) -> None:
    builder = run.start(contents, 0)
    built = builder.result()
    guest = Meeting("share_on_host 0", "")
    guest.close()

    def attach() -> bytes:
        become_nobody()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.settimeout(LONG_S)
            channel.connect(guest.name)
            with contextlib.suppress(ConnectionResetError):
                return channel.recv(1000)
        return b""

    assert run.start(attach).result() == b""
    assert contents() == built


@needs_root
@pytest.mark.usefixtures("as_rank")
def test_what_another_user_offers_is_refused(run, monkeypatch) -> None:
    begun, ends = FORK.Event(), FORK.Event()
    user, token = os.geteuid(), host.token_of_group("")  # names are in /proc/net/unix

    def offer() -> bool:
        become_nobody()
        monkeypatch.setattr(os, "geteuid", lambda: user)
        monkeypatch.setattr(host, "token_of_group", lambda _: token)
        meeting = Meeting("share_on_host 0", "")
        begun.set()
        ends.wait(LONG_S)
        meeting.close()
        return meeting.is_host

    other = run.start(offer)
    assert begun.wait(LONG_S)
    with pytest.raises(PermissionError, match="user 65534 has taken the name"):
        share_on_host(make)
    ends.set()
    assert other.result()
