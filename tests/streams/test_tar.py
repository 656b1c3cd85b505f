"""Tar shards: the samples of webdataset, and what damage does."""

import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader import ShardError
from shmloader.streams import open_tar
from tests.streams.support import tar_bytes, write, write_tar

wds = pytest.importorskip("webdataset")


def by_webdataset(path):
    """Return webdataset's samples, without what says where they are from."""
    with Path(path).open("rb") as stream:
        files = wds.tariterators.tar_file_expander([{"url": path, "stream": stream}])
        samples = list(wds.tariterators.group_by_keys(files))
    for sample in samples:
        del sample["__url__"]
    return samples


def member(name, kind=tarfile.REGTYPE, **fields):
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


PARTS = st.text(st.sampled_from("ab.A_é "), min_size=1, max_size=5)
NAMES = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


@settings(max_examples=150)
@given(
    names=st.lists(NAMES | st.just("__index__/a.txt") | st.just("__meta__"), max_size=12),
    kind=st.sampled_from(FORMATS),
)
def test_samples_are_those_of_webdataset(tmp_path_factory, names, kind):
    path = str(tmp_path_factory.mktemp("tar") / "a.tar")
    write(path, tar_bytes([(name, name.encode() * 7) for name in names], format=kind))
    try:
        expected = by_webdataset(path)
    except ValueError:
        with pytest.raises(ShardError, match="there is another file of its name"):
            open_tar.count(path)
    else:
        assert list(open_tar(path)) == expected


LONG = "/".join(["a long name"] * 30)
ODD_ARCHIVES = {
    "long names, GNU": tar_bytes(
        [(f"{LONG}.jpg", b"1"), ("b.jpg", b"2")], format=tarfile.GNU_FORMAT
    ),
    "long names, pax": tar_bytes(
        [(f"{LONG}.jpg", b"1"), ("b.jpg", b"2")], format=tarfile.PAX_FORMAT
    ),
    "names in two parts": tar_bytes(
        [("b" * 90 + "/" + "c" * 90 + ".jpg", b"1")], format=tarfile.USTAR_FORMAT
    ),
    "times with fractions": tar_bytes([(member("a.jpg", mtime=0.5), b"1"), ("b.jpg", b"")]),
    "fields of all files": tar_bytes([("a.jpg", b"1")], pax_headers={"comment": "path=c.jpg"}),
    "no UTF-8": tar_bytes([("\udcff.jpg", b"1")], format=tarfile.GNU_FORMAT),
    "folders and links": tar_bytes(
        [
            (member("d.jpg", tarfile.DIRTYPE), b""),
            (member("a.jpg"), b"1"),
            (member("a.cls", tarfile.SYMTYPE, linkname="a.jpg"), b""),
            (member("b.jpg", tarfile.LNKTYPE, linkname="a.jpg"), b""),
            (member("old.x/", tarfile.AREGTYPE), b""),
            (member("c.jpg", tarfile.CONTTYPE), b"3"),
            (member("e.jpg", tarfile.FIFOTYPE), b""),
            (member("f.jpg", tarfile.AREGTYPE), b"4"),
        ],
        format=tarfile.GNU_FORMAT,
    ),
    "an unknown kind": tar_bytes([(member("a.jpg", b"V"), b"volume"), ("b.jpg", b"1")]),
    "a sample that others split": tar_bytes([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"3")]),
    "extensions in capitals": tar_bytes([("a.JPG", b"1"), ("a.Seg.PNG", b"2")]),
    "no file": tar_bytes([]),
    "an end of one block": tar_bytes([("a.jpg", b"1" * 600)])[: 1536 + 512],
    "two archives": tar_bytes([("a.jpg", b"1")]) + tar_bytes([("b.jpg", b"2")]),
}


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tgz", "tar.zst"])
@pytest.mark.parametrize("name", ODD_ARCHIVES)
def test_odd_archives_are_read_as_webdataset_reads_them(tmp_path, name, ending):
    data = ODD_ARCHIVES[name]
    path, plain = str(tmp_path / f"a.{ending}"), str(tmp_path / "plain.tar")
    write(path, data)
    write(plain, data)
    assert list(open_tar(path)) == by_webdataset(plain)


THREE = [("a.jpg", b"1" * 600), ("b.jpg", b"2" * 600), ("c.jpg", b"3" * 600)]


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tar.zst"])
@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (512 + 1024 + 512 + 599, "at the file b.jpg, unexpected end of data"),
        (512 + 1024 + 100, "at the file a.jpg, neither a file nor a block of zeros follows"),
        (100, "at its beginning, truncated header"),
        (2 * 1536, "at the file b.jpg, neither a file nor a block of zeros follows"),
    ],
)
def test_a_cut_archive_is_an_error_before_the_first_sample(tmp_path, ending, size, problem):
    path = str(tmp_path / f"a.{ending}")
    write(path, tar_bytes(THREE)[:size])
    for read in (lambda: next(open_tar(path)), lambda: open_tar.count(path)):
        with pytest.raises(ShardError) as info:
            read()
        assert str(info.value) == (
            f"shard {path} cannot be read: {problem}. Repair or replace it, or leave it out with "
            "on_error='skip'"
        )
        assert (info.value.shard, info.value.record) == (path, None)


@pytest.mark.parametrize("ending", ["tar.gz", "tar.zst"])
def test_a_compressed_file_that_is_cut_or_is_none_is_an_error(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    write_tar(str(path), 30)
    for data in (path.read_bytes()[:-100_000], tar_bytes(THREE)):
        path.write_bytes(data)
        with pytest.raises(ShardError, match=f"shard {path} cannot be read"):
            next(open_tar(str(path)))


@pytest.mark.parametrize("byte", [0, 130, 150, 300])
def test_a_damaged_header_is_no_end_of_the_archive(tmp_path, byte):
    data = bytearray(tar_bytes(THREE))
    data[1536 + byte] ^= 0x40
    path = str(tmp_path / "a.tar")
    write(path, bytes(data))
    assert len(by_webdataset(path)) == 1
    with pytest.raises(ShardError, match=r"a\.jpg, neither a file nor a block of zeros"):
        open_tar.count(path)


def test_two_files_of_one_name_are_an_error_of_the_shard(tmp_path):
    path = str(tmp_path / "a.tar")
    write(path, tar_bytes([("x.jpg", b""), ("a.jpg", b"1"), ("a.JPG", b"2")]))
    for read in (open_tar.count, lambda path: next(open_tar(path))):
        with pytest.raises(ShardError, match=r"a\.JPG, there is another file of its name") as info:
            read(path)
        assert info.value.record is None


def test_a_sparse_file_is_refused(tmp_path):
    path = str(tmp_path / "a.tar")
    info = member("a.jpg", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})
    write(path, tar_bytes([(info, b"1\n0\n1\n".ljust(512, b"\0") + b"1")]))
    with pytest.raises(ShardError, match=r"a\.jpg, which is sparse: pack it without --sparse"):
        open_tar.count(path)


def test_a_shard_that_shrinks_while_it_is_read_is_named_with_the_record(tmp_path):
    path = tmp_path / "a.tar"
    write(str(path), tar_bytes([(f"{number}.jpg", bytes(700_000)) for number in range(6)]))
    records = open_tar(str(path))
    next(records)
    with path.open("r+b") as file:
        file.truncate(2_000_000)
    with pytest.raises(ShardError, match=r"it ends at byte 2000000") as info:
        list(records)
    assert info.value.record == 2
