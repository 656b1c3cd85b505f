"""Slots: no name, no fixed cost, sealed, and safe to close under views."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import psutil
import pytest

from shmloader.errors import SharedMemoryError
from shmloader.memory import slot as slot_module
from shmloader.memory.slot import ALIGNMENT, Slot, align, close_inherited_slots
from shmloader.memory.slot_size import describe_most, uncapped_slot_bytes
from shmloader.memory.system_support import is_supported, why_unsupported
from tests.process.bytecodes import KINDS, interrupt

MIB = 1 << 20


@pytest.fixture
def slot():
    slot = Slot.create(8 * MIB)
    yield slot
    slot.close()


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def resident_bytes(slot: Slot) -> int:
    return os.fstat(slot.fileno()).st_blocks * 512


def is_mapped(inode: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any("memfd:" in line and line.split()[4] == str(inode) for line in lines)


def in_a_child(work: Callable[[], str]) -> str:
    """What ``work`` returned, or the exception's name and text, in a forked child."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                text = work()
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(there, text.encode())
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text


@pytest.mark.parametrize(
    ("nbytes", "aligned"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (10**9, 10**9)]
)
def test_align_rounds_up_to_a_cache_line(nbytes, aligned):
    assert ALIGNMENT == 64
    assert align(nbytes) == aligned


def test_linux_has_what_slots_need():
    assert is_supported()


def test_without_a_cap_a_slot_may_hold_all_memory_but_not_more():
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < uncapped_slot_bytes() <= memory


@pytest.mark.parametrize(("asked", "got"), [(1, PAGESIZE), (PAGESIZE + 1, 2 * PAGESIZE)])
def test_a_slot_is_whole_pages(asked, got):
    slot = Slot.create(asked)
    assert slot.nbytes == len(slot.mapping) == os.fstat(slot.fileno()).st_size == got
    slot.close()


def test_a_slot_begins_at_a_page_and_knows_its_address(slot):
    assert slot.address % PAGESIZE == 0
    slot.mapping[:3] = b"abc"
    assert ctypes.string_at(slot.address, 3) == b"abc"


def test_a_slot_has_no_name_in_dev_shm(slot):
    before = names_in("/dev/shm")
    other = Slot.create(MIB)
    other.mapping[:MIB] = b"x" * MIB
    assert names_in("/dev/shm") <= before
    assert "memfd:shmloader" in str(Path(f"/proc/self/fd/{other.fileno()}").readlink())
    other.close()


def test_a_huge_slot_costs_nothing_until_it_is_written():
    slot = Slot.create(1 << 36)
    assert slot.nbytes == 1 << 36
    assert resident_bytes(slot) == 0
    slot.mapping[1 << 35] = 1
    assert resident_bytes(slot) == PAGESIZE
    slot.close()


@pytest.mark.parametrize("nbytes", [0, MIB, 16 * MIB])
def test_the_length_of_a_slot_cannot_be_changed(slot, nbytes):
    with pytest.raises(PermissionError):
        os.ftruncate(slot.fileno(), nbytes)


def test_what_is_given_back_reads_as_zeros_and_takes_no_memory(slot):
    slot.mapping[: 4 * MIB] = b"x" * (4 * MIB)
    assert resident_bytes(slot) == 4 * MIB
    slot.give_back(MIB)
    assert resident_bytes(slot) == MIB
    assert slot.mapping[: 4 * MIB] == b"x" * MIB + bytes(3 * MIB)


def test_giving_back_keeps_the_page_that_is_partly_needed(slot):
    slot.mapping[: 2 * PAGESIZE] = b"x" * (2 * PAGESIZE)
    slot.give_back(1)
    assert slot.mapping[: 2 * PAGESIZE] == b"x" * PAGESIZE + bytes(PAGESIZE)


@pytest.mark.parametrize("from_byte", [8 * MIB - 1, 8 * MIB, 9 * MIB])
def test_giving_back_nothing_is_no_error(slot, from_byte):
    slot.mapping[-1] = 7
    slot.give_back(from_byte)
    assert slot.mapping[-1] == 7


def test_two_mappings_of_one_slot_see_the_same_bytes(slot):
    other = Slot(os.dup(slot.fileno()), slot.nbytes)
    slot.mapping[:5] = b"hello"
    assert other.mapping[:5] == b"hello"
    assert other.address != slot.address
    other.close()


def test_closing_unmaps_and_may_be_repeated():
    slot = Slot.create(MIB)
    mapping, fd = slot.mapping, slot.fileno()
    slot.close()
    slot.close()
    assert mapping.closed
    assert slot.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    "view_of",
    [
        lambda slot: slot.array(),
        lambda slot: np.frombuffer(slot.array(), np.uint8),
        lambda slot: memoryview(slot.mapping),
    ],
    ids=["array", "numpy", "memoryview"],
)
def test_a_slot_closed_under_a_view_lives_as_long_as_the_view(view_of):
    slot = Slot.create(MIB)
    slot.mapping[:5] = b"hello"
    view = view_of(slot)
    address, inode = slot.address, os.fstat(slot.fileno()).st_ino
    slot.close()
    slot.close()
    assert bytes(memoryview(view).cast("B")[:5]) == b"hello"
    assert ctypes.string_at(address, 5) == b"hello"
    assert is_mapped(inode)
    del view
    assert not is_mapped(inode)


def test_each_array_is_an_object_of_its_own_over_the_whole_slot(slot):
    first, second = slot.array(), slot.array()
    assert first is not second
    assert ctypes.sizeof(first) == slot.nbytes
    assert ctypes.addressof(first) == ctypes.addressof(second) == slot.address


def test_a_forgotten_descriptor_is_closed_and_the_mapping_stays(slot):
    fd = slot.fileno()
    slot.forget_descriptor()
    slot.forget_descriptor()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    slot.mapping[:3] = b"abc"
    slot.shorten(0)
    assert slot.unmap() == 0
    assert (slot.nbytes, slot.mapping[:3]) == (8 * MIB, b"abc")


def test_without_its_descriptor_a_slot_is_not_mapped_further():
    slot = Slot.create(8 * MIB, PAGESIZE)
    slot.forget_descriptor()
    with pytest.raises(SharedMemoryError, match="Bad file descriptor"):
        slot.reach(PAGESIZE + 1)
    slot.close()


def test_a_forked_worker_closes_the_slots_it_was_born_with(slot):
    def work() -> str:
        close_inherited_slots()
        return f"{slot.mapping.closed} {slot.fileno()}"

    assert in_a_child(work) == "True -1"
    assert not slot.mapping.closed


def _leave_address_space(nbytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * PAGESIZE + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def test_under_a_limit_on_address_space_all_slots_together_have_a_quarter_of_it():
    # torch built for CUDA takes three gigabytes of address space by itself.
    mib = MIB if psutil.Process().memory_info().vms < 1 << 30 else 4 * MIB

    def work() -> str:
        limit = 4096 * mib
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        slots = [Slot.create(8192 * mib, PAGESIZE) for _ in range(4)]
        first, *_, last = slots
        first.reach(400 * mib, others=slots)
        assert first.nbytes == 500 * mib
        first.mapping[0] = 5
        view = first.array()
        for slot in slots[1:3]:
            slot.reach(200 * mib, others=slots)
            assert slot.nbytes == 250 * mib
        last.reach(200 * mib, likely=2048 * mib, others=slots)
        lengths = [slot.nbytes for slot in slots]
        assert lengths == [500 * mib, PAGESIZE, 250 * mib, 274 * mib - PAGESIZE], lengths
        last.reach(1536 * mib, others=slots)
        lengths = [slot.nbytes for slot in slots]
        assert lengths == [500 * mib, PAGESIZE, PAGESIZE, 1536 * mib], lengths
        last.mapping[1536 * mib - 1] = 7
        view[1] = b"x"
        assert first.mapping[:2] == b"\5x"
        return "right"

    assert in_a_child(work) == "right"


def test_where_a_slot_cannot_be_mapped_the_error_names_the_limit_and_what_helps():
    def work() -> str:
        _leave_address_space(10 * MIB)
        slot = Slot.create(1 << 33, PAGESIZE)
        try:
            slot.reach(20 * MIB)
        except SharedMemoryError as error:
            assert slot.nbytes == PAGESIZE
            slot.mapping[0] = 1
            return str(error)
        return "no error"

    text = in_a_child(work)
    assert text.startswith("cannot map 21.0 MB of a slot of shared memory: Cannot allocate memory")
    assert "address space of this process is limited to " in text
    assert "(`ulimit -v`; " in text
    assert text.endswith(
        "are used): raise that limit, or lower batch_size, prefetch_factor or num_workers."
    )
    assert "shm_size" not in text


def test_where_not_even_a_page_can_be_mapped_no_descriptor_is_left():
    def work() -> str:
        before = len(names_in("/proc/self/fd"))
        _leave_address_space(0)
        try:
            Slot.create(1 << 40, 1 << 30)
        except SharedMemoryError as error:
            more = len(names_in("/proc/self/fd")) - before
            return f"{more} descriptors more: {error}"
        return "no error"

    assert in_a_child(work).startswith("0 descriptors more: cannot map 1.1 GB")


def test_where_a_slot_cannot_be_made_again_no_descriptor_is_left():
    def work() -> str:
        slot = Slot.create(1 << 30, PAGESIZE)
        before = len(names_in("/proc/self/fd"))
        _leave_address_space(1 << 20)
        try:
            slot.remade(1 << 29)
        except SharedMemoryError as error:
            more = len(names_in("/proc/self/fd")) - before
            return f"{more} descriptors more: {error}"
        return "no error"

    assert in_a_child(work).startswith("0 descriptors more: cannot map 536")


def test_where_files_may_not_be_long_a_slot_is_as_long_as_they_may_be():
    def work() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 1, MIB + 1))
        slot = Slot.create(1 << 33)
        return f"{slot.most_bytes} {describe_most(slot.most_bytes)}"

    assert in_a_child(work) == (
        f"{MIB} the longest file allowed here (`ulimit -f`): raise that limit"
    )


def test_what_a_slot_may_hold_is_told_with_what_helps():
    assert describe_most(uncapped_slot_bytes()) == "all the memory of this machine"
    assert describe_most(MIB).startswith("raise shm_size, which")
    assert describe_most(MIB, MIB + 1).endswith("those that may be lent")


@pytest.mark.parametrize(
    ("slot_count", "needed_bytes", "enough"),
    [(8, MIB, "8MiB"), (8, MIB + 1, "9MiB"), (5, 64 * 1024, "1MiB"), (1000, 3 * MIB, "3000MiB")],
)
def test_an_shm_size_that_suffices_is_told_in_mebibytes(slot_count, needed_bytes, enough):
    text = describe_most(MIB, needed_bytes, slot_count)
    assert text.endswith(f", {slot_count} in all: shm_size='{enough}' suffices for this")


def test_a_slot_is_mapped_further_under_its_views():
    slot = Slot.create(64 * MIB, PAGESIZE)
    slot.mapping[:3] = b"abc"
    slot.views = ("a reader", [memoryview(slot.mapping)])
    before, address = slot.array(), slot.address
    slot.reach(8 * MIB)
    assert slot.nbytes == 10 * MIB
    assert slot.address != address
    assert slot.views == (None, None)
    slot.mapping[1] = ord("x")
    assert ctypes.string_at(address, 3) == before[:3] == b"axc"
    slot.reach(10 * MIB)
    assert slot.nbytes == 10 * MIB
    inode = os.fstat(slot.fileno()).st_ino
    slot.close()
    assert is_mapped(inode), "the first mapping goes with its last view"
    del before
    assert not is_mapped(inode)


def test_with_no_descriptor_for_a_second_mapping_the_first_makes_place():
    def work() -> str:
        slot = Slot.create(64 * MIB, PAGESIZE)
        slot.mapping[:3] = b"abc"
        last = os.dup(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (last, last))
        os.close(last)
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        slot.reach(8 * MIB)
        assert slot.nbytes >= 8 * MIB
        view = slot.array()
        try:
            slot.reach(32 * MIB)
        except SharedMemoryError as error:
            told = str(error)
            assert "Too many open files. Raise `ulimit -n`" in told, told
        else:
            assert sys.version_info >= (3, 13), "older mappings have a descriptor of their own"
        assert bytes(view[:3]) == slot.mapping[:3] == b"abc"
        return "right"

    assert in_a_child(work) == "right"


def test_a_mapping_that_is_far_too_long_is_made_shorter():
    slot = Slot.create(64 * MIB)
    slot.shorten(32 * MIB)
    assert slot.nbytes == 64 * MIB, "it is only twice as long"
    slot.mapping[5] = 7
    slot.shorten(10)
    assert slot.nbytes == PAGESIZE
    assert slot.mapping[5] == 7
    slot.close()


def test_with_no_descriptor_left_the_error_is_the_system_s():
    def work() -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        try:
            Slot.create(MIB)
        except OSError as error:
            return errno.errorcode[error.errno]
        return "no error"

    assert in_a_child(work) == "EMFILE"


@pytest.mark.parametrize("kernel", ["this", "before 5.14"])
def test_pages_can_be_had_before_they_are_written(slot, kernel, monkeypatch):
    if kernel != "this":
        monkeypatch.setattr(slot_module, "_POPULATE_WRITE", 9999)
    slot.mapping[:5000] = b"x" * 5000
    slot.populate(5000, 10 * PAGESIZE + 1)
    assert os.fstat(slot.fileno()).st_blocks * 512 == 11 * PAGESIZE
    assert slot.mapping[: 11 * PAGESIZE] == b"x" * 5000 + bytes(11 * PAGESIZE - 5000)
    slot.populate(5000, 5001)


def test_pages_that_cannot_be_had_are_an_error_and_no_signal():
    fd = os.memfd_create("shmloader")
    os.ftruncate(fd, MIB)
    slot = Slot(fd, MIB)
    os.ftruncate(fd, PAGESIZE)
    slot.populate(0, PAGESIZE)
    with pytest.raises(SharedMemoryError, match="no memory for a slot's pages"):
        slot.populate(0, 2 * PAGESIZE)
    slot.close()


# Systems that refuse something --------------------------------------------------------------------


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.fixture
def _asked_anew():
    why_unsupported.cache_clear()
    yield
    why_unsupported.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (os, "memfd_create", "memfd_create"),
        (os, "ftruncate", "ftruncate"),
        (fcntl, "fcntl", "fcntl(F_ADD_SEALS)"),
        (mmap, "mmap", "mmap"),
        (os, "pidfd_open", "pidfd_open"),
        (signal, "pidfd_send_signal", "pidfd_send_signal"),
        (os, "eventfd", "eventfd"),
        (select, "poll", "poll"),
        (socket, "socketpair", "socketpair"),
        (socket.socket, "send", "sendto"),
        (socket.socket, "recv", "recvfrom"),
        (socket, "send_fds", "sendmsg"),
        (socket, "recv_fds", "recvmsg"),
    ],
)
def test_what_is_refused_is_named_and_leaves_no_descriptor(module, name, call, monkeypatch):
    before = names_in("/proc/self/fd")
    monkeypatch.setattr(module, name, refuse)
    assert why_unsupported() == f"{call} is refused (Permission denied)"
    assert not is_supported()
    monkeypatch.undo()
    assert names_in("/proc/self/fd") == before


@pytest.mark.usefixtures("_asked_anew")
def test_what_is_missing_is_told_apart_from_what_is_refused(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert why_unsupported() == "pidfd_open is missing in this Python: it needs Linux 5.3 or newer"
    why_unsupported.cache_clear()

    def is_unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "memfd_create", is_unknown)
    text = "memfd_create is missing (Function not implemented): it needs Linux 5.3 or newer, and"
    assert why_unsupported().startswith(text)


@pytest.mark.usefixtures("_asked_anew")
def test_a_lack_of_descriptors_is_no_lack_of_support():
    def work() -> str:
        told = set()
        for count in range(3, 40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, 40))
            told.add(why_unsupported())
            why_unsupported.cache_clear()
        return str(told)

    assert in_a_child(work) == "{None}"


class _NoAdvice(mmap.mmap):
    """A mapping of which nothing can be said to the kernel."""

    def madvise(self, *_: object) -> None:
        refuse()


def test_where_the_kernel_takes_no_advice_a_slot_works_all_the_same(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", _NoAdvice)
    slot = Slot.create(MIB)
    slot.populate(0, 10 * PAGESIZE)
    assert resident_bytes(slot) == 10 * PAGESIZE
    assert not slot.give_back(PAGESIZE)
    assert resident_bytes(slot) == 10 * PAGESIZE
    slot.close()


# Interruptions -----------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "call",
    [
        lambda slot: slot.reach(4 * MIB),
        lambda slot: slot.populate(0, 2 * MIB),
        lambda slot: slot.give_back(0),
    ],
    ids=["reach", "populate", "give_back"],
)
def test_an_interruption_is_never_taken_for_a_refusal_of_the_system(call, kind):
    nth, outcome = 0, None
    while outcome is None or outcome.where is not None:
        nth += 1
        slot = Slot.create(8 * MIB, 2 * MIB)
        try:
            outcome = interrupt(lambda slot=slot: call(slot), nth, kind)
            assert outcome.where is None or outcome.has_arrived(kind), outcome.where
            slot.reach(6 * MIB)  # and it can be used
            slot.mapping[6 * MIB - 1 : 6 * MIB] = b"x"
        finally:
            slot.close()
    assert nth > 5
