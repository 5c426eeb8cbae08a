"""Files that change under an open tensor: the right bytes, or an error that names file, tensor, tile and offset."""

from __future__ import annotations

import os
import shutil
import threading

import numpy as np
import pytest

from strideweave import FileChangedError, open_tiled

TILE = 64 * 16 * 4  # bytes


@pytest.fixture
def opened(files):
    """Six experts in three shards, opened; their values."""
    arrays = {f"e.{number}": np.full((64, 16), number, np.float32) for number in range(6)}
    weights = {}
    for shard in range(3):
        held = {name: arrays[name] for name in (f"e.{2 * shard}", f"e.{2 * shard + 1}")}
        files.safetensors(f"s{shard}.safetensors", held)
        weights |= dict.fromkeys(held, f"s{shard}.safetensors")
    tensor = open_tiled(files.index(weights), tensor="e.{e}")
    yield tensor
    tensor.carrier.release()


def project(tensor, experts):
    return (
        tensor.carrier.project(tensor, tensor.carrier.select({0: experts})).wait(60).numpy()[:, 0, 0].tolist()
    )


def shrink(path):
    os.truncate(path, path.stat().st_size - TILE // 2)


def shrink_to_nothing(path):
    os.truncate(path, 0)


def grow(path):
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path):
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"new!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # however coarse the system's clock is


def replace(path):
    fresh = path.with_suffix(".new")
    shutil.copyfile(path, fresh)
    fresh.replace(path)


def disappear(path):
    path.unlink()


def become_a_folder(path):
    path.unlink()
    path.mkdir()


def lead_elsewhere(path):
    moved = path.rename(path.with_suffix(".moved"))
    other = path.with_suffix(".other")
    shutil.copyfile(moved, other)
    path.symlink_to(other)


IN_PLACE = [
    (shrink, "another size"),
    (shrink_to_nothing, "another size"),
    (grow, "another size"),
    (rewrite, "written to since"),
]
BY_NAME = [
    (replace, "another file has taken its place"),
    (disappear, "disappeared"),
    (become_a_folder, "another file has taken its place"),
    (lead_elsewhere, "another file has taken its place"),
]


@pytest.mark.parametrize(("change", "message"), IN_PLACE + BY_NAME)
def test_a_file_that_changed_before_it_was_read(files, opened, change, message):
    assert project(opened, [0]) == [0]
    path = files.folder / "s1.safetensors"
    size = path.stat().st_size
    change(path)
    before = opened.carrier.statistics()
    with pytest.raises(FileChangedError, match=message) as caught:
        project(opened, [1, 3])
    error = caught.value
    assert (error.path, error.tensor, error.tile) == (str(path), "e.{e}", (3, 0, 0))
    assert error.offset == size - TILE
    assert error.wanted != error.found
    del caught, error
    after = opened.carrier.statistics()
    assert (after.resident_tiles, after.pinned_tiles, after.pending_requests, after.in_flight_bytes) == (
        1,
        0,
        0,
        0,
    )
    assert after.bytes_read == before.bytes_read
    assert project(opened, [0, 1, 4]) == [0, 1, 4]  # the other files are as they were


@pytest.mark.parametrize(("change", "message"), IN_PLACE)
def test_a_file_that_changed_while_it_was_open(files, opened, change, message):
    assert project(opened, [2]) == [2]  # its shard is open now
    change(files.folder / "s1.safetensors")
    with pytest.raises(FileChangedError, match=message):
        project(opened, [3])
    with pytest.raises(FileChangedError, match=message):
        opened.carrier[3 * 1024]
    assert project(opened, [2, 5]) == [2, 5]  # one is in memory, one in another shard


@pytest.mark.parametrize(("change", "message"), BY_NAME)
def test_an_open_file_that_lost_its_name_gives_its_bytes_still(files, opened, change, message):
    assert project(opened, [2]) == [2]
    change(files.folder / "s1.safetensors")
    assert project(opened, [3]) == [3]
    with pytest.raises(FileChangedError, match=message):
        opened.carrier.secondary[2 * 1024]  # a single slot opens the file anew


def test_what_is_put_back_can_be_read_again(files, opened):
    path = files.folder / "s1.safetensors"
    moved = path.rename(path.with_suffix(".moved"))
    with pytest.raises(FileChangedError, match="disappeared"):
        project(opened, [2, 3])
    moved.rename(path)
    assert project(opened, [2, 3]) == [2, 3]


def test_what_was_projected_stays_what_it_was(files, opened):
    chosen = opened.carrier.project(opened, opened.carrier.select({0: [2]})).wait(60)
    shrink_to_nothing(files.folder / "s1.safetensors")
    assert np.unique(chosen.numpy()).tolist() == [2]  # a copy, not a view of the file


def test_a_file_that_shrinks_in_the_middle_of_reads_never_gives_other_bytes(files):
    """Every read gives the right bytes or the error, whenever the file is cut."""
    array = np.arange(1 << 20, dtype=np.int32).reshape(1024, 1024)
    for attempt in range(5):
        path = files.safetensors(f"{attempt}.safetensors", {"t": array})
        tensor = open_tiled(path, (8, 1024))
        cutter = threading.Timer(0.001 * attempt, os.truncate, (path, 3 << 20))
        cutter.start()
        outcomes = set()
        for number in range(0, 128, 4):
            rows = list(range(number, number + 4))
            try:
                found = tensor.carrier.project(tensor, tensor.carrier.select({0: rows})).wait(60)
            except FileChangedError:
                outcomes.add("error")
            else:
                assert np.array_equal(found.numpy(), array[number * 8 : (number + 4) * 8])
                outcomes.add("bytes")
        cutter.join()
        with pytest.raises(FileChangedError):
            tensor.carrier.secondary.get_value(0)
        assert outcomes
        tensor.carrier.release()
