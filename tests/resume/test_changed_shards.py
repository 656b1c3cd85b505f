"""Shards that change between a state and the run that goes on from it are an error in time."""

import json
import os
from pathlib import Path

import pytest

from shmloader import DataLoader
from shmloader.streams import Shards, fingerprints, mix

READERS = 4


@pytest.fixture
def files(tmp_path):
    """Return 20 shards of 6 records."""
    paths = [tmp_path / "data" / f"{number:02}" for number in range(20)]
    paths[0].parent.mkdir()
    for number, path in enumerate(paths):
        path.write_text("".join(f"{number}.{line}\n" for line in range(6)))
        os.utime(path, (number, number))
    return paths


def lines(path):
    yield from Path(path).read_text().splitlines()


def make_loader(files, change=lambda stream: stream, **options):
    stream = change(Shards(files, lines, seed=3, readers=READERS))
    stream = stream.shuffle(4).batch(4, collate=list)
    return DataLoader(stream, batch_size=None, **options)


def state_after(loader, steps):
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(steps)]
    return json.loads(json.dumps(loader.state_dict())), batches


def deliver(loader):
    """Return what comes before an error, and its text."""
    found, iterator = [], iter(loader)
    with pytest.raises(ValueError, match="does not fit the shards") as info:
        found.extend(iterator)  # keeps those before the error
    return found, str(info.value).splitlines()


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"on_error": "skip"}, {"thread_pool": True}], ids=str
)
def test_no_batch_of_a_reader_comes_after_a_shard_of_it_has_changed(files, options):
    if options.get("thread_pool"):
        options = {**options, "num_workers": 2}
    loader = make_loader(files, **options)
    whole = list(loader)
    state, _ = state_after(make_loader(files), 9)
    for file in files:
        text = file.read_text()
        file.write_text(text + "\n")
        loader = make_loader(files, **options)
        loader.load_state_dict(state)
        batches, message = deliver(loader)
        assert batches == whole[9 : 9 + len(batches)]
        assert len(batches) < READERS
        assert any(
            f"{file}, or another one of 5 shards, has another size" in one for one in message
        )
        file.write_text(text)
        os.utime(file, (0, 0))
    loader = make_loader(files, **options)
    loader.load_state_dict(state)
    assert list(loader) == whole[9:]


def test_a_shard_that_is_gone_is_named(files):
    state, _ = state_after(make_loader(files), 9)
    files[7].unlink()
    loader = make_loader(files)
    loader.load_state_dict(state)
    assert f"{files[7]}, or another one of 5 shards," in deliver(loader)[1][0]


@pytest.mark.parametrize("steps", [0, 9], ids=["between epochs", "in an epoch"])
@pytest.mark.parametrize(
    "change",
    [
        lambda files: files.append(files[0].with_name("more")),
        lambda files: files.pop(),
        lambda files: files.reverse(),
        lambda files: files.append(files.pop(1).with_name("other")),
    ],
    ids=["grown", "shorter", "reversed", "another name"],
)
def test_another_list_of_shards_is_refused_at_once(files, change, steps):
    state, _ = (
        state_after(make_loader(files), steps) if steps else (make_loader(files).state_dict(), 0)
    )
    change(files)
    with pytest.raises(ValueError, match=r"shards \(.* in the state, .* shards \(.* in this"):
        make_loader(files).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        lambda stream: stream.repeat().take(240),
        lambda stream: mix({stream: 1}, stop=400),
        lambda stream: mix({stream.repeat().take(240): 1}, stop="all"),
    ],
    ids=["repeat", "number", "mix"],
)
def test_readers_that_share_shards_in_later_passes_compare_all_of_them_at_once(files, change):
    state, batches = state_after(make_loader(files, change), 9)
    loader = make_loader(files, change)
    loader.load_state_dict(state)
    assert batches + list(loader) == list(make_loader(files, change))
    files[5].write_text("changed\n")
    with pytest.raises(ValueError, match=f"{files[5]}, or another one of 20 shards"):
        make_loader(files, change).load_state_dict(state)


def test_a_state_between_epochs_is_refused_at_once(files):
    state = make_loader(files).state_dict()
    files[5].write_text("changed\n")
    with pytest.raises(ValueError, match=f"{files[5]}, or another one of 20 shards"):
        make_loader(files).load_state_dict(state)


def test_the_shards_of_all_streams_of_a_mix_are_compared(files):
    def change(stream):
        more = Shards([f"{file}.b" for file in files], lines, seed=4, readers=READERS)
        return mix({stream: 1, more: 1}, stop="all")

    for file in files:
        file.with_name(f"{file.name}.b").write_text(file.read_text())
    state, _ = state_after(make_loader(files, change), 9)
    for file in (files[5], files[5].with_name(f"{files[5].name}.b")):
        text = file.read_text()
        file.write_text("changed\n")
        loader = make_loader(files, change)
        loader.load_state_dict(state)
        batches, message = deliver(loader)
        assert len(batches) < READERS
        assert f"{file}, or another one of 10 shards" in message[0]
        file.write_text(text)
        os.utime(file, (0, 0))


def test_later_states_of_the_epoch_keep_the_sizes_of_the_first(files):
    state, batches = state_after(make_loader(files), 5)
    changed = make_loader(files)
    changed.load_state_dict(state)
    iterator = iter(changed)
    batches += [next(iterator) for _ in range(READERS)]
    files[5].write_text("changed\n")
    state = changed.state_dict()
    loader = make_loader(files)
    loader.load_state_dict(state)
    assert str(files[5]) in deliver(loader)[1][0]
    # The next epoch reads the shards as they are.
    list(iterator)
    state, _ = state_after(changed, 5)
    loader = make_loader(files)
    loader.load_state_dict(state)
    assert list(loader)


def test_a_run_that_goes_on_looks_only_at_the_shards_of_the_readers_that_it_begins(
    files, monkeypatch
):
    state, _ = state_after(make_loader(files), 9)
    looked, stat = [], os.stat

    def spy(path, *args, **kwargs):
        looked.append(path)
        return stat(path, *args, **kwargs)

    loader = make_loader(files)
    monkeypatch.setattr(fingerprints.os, "stat", spy)
    loader.load_state_dict(state)
    iterator = iter(loader)
    assert not set(looked) & set(map(str, files))
    for steps in range(1, READERS + 1):
        next(iterator)
        assert len(set(looked) & set(map(str, files))) == 5 * steps
    list(iterator)
    assert len([path for path in looked if path in set(map(str, files))]) == 20


@pytest.mark.parametrize("count", [3, 2500], ids=["few", "as many as threads look at"])
def test_shards_may_be_moved_as_a_whole_and_not_change(tmp_path, count):
    def digests(folder):
        shards = [str(folder / f"{number}.tar") for number in range(count)]
        return fingerprints.names_digest(shards), fingerprints.sizes_digest([shards])

    first = tmp_path / "a"
    first.mkdir()
    for number in range(count):
        (first / f"{number}.tar").write_bytes(bytes(number % 7))
    names, sizes = digests(first)
    moved = first.rename(tmp_path / "b")
    assert digests(moved) == (names, sizes)
    (moved / f"{count - 1}.tar").write_bytes(bytes(9))
    assert digests(moved)[1] != sizes
