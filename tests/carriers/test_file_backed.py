"""FileBacked: spill files and existing files, slots, holes, lifecycle, garbage collection, forks."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes import in_a_forked_child
from strideweave.carriers import CPU, FileBacked
from strideweave.dtype import DType
from strideweave.errors import ImmutableError, OwnershipError, ReleasedError
from strideweave.io.files import FileStatistics
from strideweave.io.positioned import ShortFileError
from strideweave.io.spill import SPILL_VARIABLE

FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def spilled(size: int, dtype: DType = DType.Float32) -> FileBacked:
    return FileBacked(dtype=dtype).allocate_like(size)


def path_of(carrier: FileBacked) -> Path:
    assert carrier.path is not None
    return Path(carrier.path)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.bin"
    np.arange(10, dtype="<i4").tofile(path)
    return path


# Spill files


def test_a_fresh_carrier_is_empty_and_has_no_file_until_it_needs_one() -> None:
    carrier = FileBacked()
    assert (carrier.size(), carrier.dtype(), carrier.version) == (0, DType.Float32, 0)
    assert carrier.is_mutable()
    assert carrier.path is None
    assert carrier._can_allocate()
    with pytest.raises(IndexError):
        carrier.get_value(0)


def test_allocated_slots_read_zero_and_occupy_nothing_until_written() -> None:
    carrier = FileBacked(dtype=DType.Int64)
    carrier._allocate_in_place(1 << 33)
    statistics = carrier.statistics()
    assert (carrier.size(), statistics.nbytes) == (1 << 33, 1 << 36)
    assert statistics.occupied_bytes < 1 << 20
    assert statistics.spills
    last = (1 << 33) - 1
    assert carrier[last] == 0
    carrier[last] = -5
    assert (carrier[last], carrier[last - 1], carrier.version) == (-5, 0, 1)
    assert not carrier._can_allocate()
    with pytest.raises(ValueError, match="cannot be given storage"):
        carrier._allocate_in_place(4)
    carrier.release()


def test_a_named_spill_file_is_made_at_once_and_its_name_is_taken_until_release() -> None:
    carrier = FileBacked("weights.bin")
    path = path_of(carrier)
    assert (path.name, path.exists()) == ("weights.bin", True)
    with pytest.raises(ValueError, match=r"'weights.bin' already"):
        FileBacked("weights.bin")
    assert path.exists()
    carrier.release()
    assert not path.exists()
    FileBacked("weights.bin").release()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/a"])
def test_a_filename_that_is_a_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a plain file name"):
        FileBacked(name)


def test_arguments_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(TypeError):
        FileBacked(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="DType"):
        FileBacked(dtype=np.float32)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        FileBacked().allocate_like(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        FileBacked().allocate_like(-1)


def test_the_class_is_final() -> None:
    with pytest.raises(TypeError, match="final"):
        type("Mine", (FileBacked,), {})


@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
def test_every_bit_pattern_survives_a_write_and_a_read(dtype: DType) -> None:
    count = 256 if dtype.itemsize == 1 else 1 << 12
    raw = np.random.default_rng(3).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype.itemsize == 1:
        raw = (np.arange(256) % (2 if dtype is DType.Bool else 256)).astype(np.uint8)
    values = raw.view(dtype.numpy)
    carrier = FileBacked(dtype=dtype).new_like(values)
    assert path_of(carrier).read_bytes() == values.tobytes()
    assert carrier._read_slots(0, count).tobytes() == values.tobytes()
    assert carrier._read_slots(5, 7).tobytes() == values[5:12].tobytes()
    carrier[3] = values[7]
    assert carrier._read_slots(3, 1).tobytes() == values[7:8].tobytes()
    assert type(carrier[3]) is type(dtype.to_python(values[7]))
    carrier.release()


def test_slots_are_little_endian() -> None:
    carrier = FileBacked(dtype=DType.Int32).new_like([1, -2])
    assert path_of(carrier).read_bytes() == b"\x01\0\0\0\xfe\xff\xff\xff"


def test_new_like_takes_any_iterable_and_converts_it() -> None:
    carrier = FileBacked().new_like(iter([1, 2.5, True]))
    assert [carrier[i] for i in range(3)] == [1.0, 2.5, 1.0]
    assert (carrier.version, carrier.is_mutable()) == (0, True)
    narrow = carrier.new_like([250, 3], dtype=DType.UInt8, mutable=False)
    assert (narrow[0], narrow.dtype(), narrow.is_mutable()) == (250, DType.UInt8, False)
    assert carrier.new_like([]).size() == 0
    strided = carrier.new_like(np.arange(10, dtype=np.float32)[::3])
    assert strided._read_slots(0, 4).tolist() == [0.0, 3.0, 6.0, 9.0]


@pytest.mark.parametrize(
    ("values", "dtype", "error"),
    [([300], DType.UInt8, OverflowError), (["a"], DType.Float32, TypeError), (3, DType.Float32, TypeError)],
)
def test_values_that_do_not_fit_leave_no_file(values: object, dtype: DType, error: type[Exception]) -> None:
    directory = path_of(spilled(1)).parent
    gc.collect()
    before = sorted(directory.iterdir())
    with pytest.raises(error):
        FileBacked(dtype=dtype).new_like(values)  # type: ignore[arg-type]
    gc.collect()
    assert sorted(directory.iterdir()) == before


def test_factories_work_after_release() -> None:
    carrier = spilled(4, DType.Int16)
    carrier.release()
    assert carrier.new_like([7])[0] == 7
    assert carrier.allocate_like(3).dtype() is DType.Int16
    assert carrier.supports_storage_dtype(DType.Bool)


def test_discarded_slots_give_their_space_back() -> None:
    carrier = FileBacked(dtype=DType.UInt8).new_like(np.ones(1 << 20, np.uint8))
    os.sync()
    before = carrier.statistics().occupied_bytes
    carrier._discard(1 << 18, 1 << 19)
    statistics = carrier.statistics()
    assert statistics.occupied_bytes <= before - (1 << 19)
    assert statistics.file.bytes_punched == 1 << 19
    assert carrier[0] == carrier[(1 << 20) - 1] == 1


def test_a_carrier_without_memory_has_no_bytes_and_no_array_but_gathers() -> None:
    carrier = spilled(3)
    with pytest.raises(NotImplementedError):
        carrier._bytes()
    with pytest.raises(NotImplementedError):
        carrier.dispatch_op("add")


# Slots


def test_reads_and_writes_of_slots_are_checked_and_counted() -> None:
    carrier = spilled(4, DType.Int8)
    carrier[2] = 100
    assert carrier.version == 1
    for call, error in (
        (lambda: carrier.get_value(4), IndexError),
        (lambda: carrier.get_value(-1), IndexError),
        (lambda: carrier.get_value(1.0), TypeError),  # type: ignore[arg-type]
        (lambda: carrier.set_value(4, 1), IndexError),
        (lambda: carrier.set_value(0, 128), OverflowError),
        (lambda: carrier.set_value(0, "x"), TypeError),
    ):
        with pytest.raises(error):
            call()
    assert carrier.version == 1
    assert carrier._read_slots(0, 4).tolist() == [0, 0, 100, 0]
    assert carrier.statistics().file == FileStatistics(4, 1, 1, 1)


def test_an_immutable_or_owned_carrier_refuses_public_writes() -> None:
    carrier = FileBacked(mutable=False).new_like([1.0], mutable=False)
    with pytest.raises(ImmutableError):
        carrier[0] = 2.0
    owner = object()
    mine = spilled(2)
    mine._claim(owner)
    for call in (lambda: mine.set_value(0, 1.0), mine.release, mine.increment_version):
        with pytest.raises(OwnershipError):
            call()
    mine._set_as(owner, 1, 4.0)
    assert (mine[1], carrier[0]) == (4.0, 1.0)
    mine._release_as(owner)
    assert mine.is_released()


# Release


def test_release_closes_and_removes_the_spill_file() -> None:
    carrier = spilled(8)
    path, (file, _) = path_of(carrier), carrier._file()
    number = file.fd
    carrier.release()
    carrier.release()
    assert not path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert (carrier.size(), carrier.statistics().occupied_bytes) == (0, 0)
    for call in (
        lambda: carrier[0],
        lambda: carrier._read_slots(0, 1),
        carrier._file,
        lambda: carrier._discard(0, 1),
    ):
        with pytest.raises(ReleasedError):
            call()
    assert not carrier._can_allocate()
    with pytest.raises(ReleasedError):
        carrier._allocate_in_place(1)


def test_releasing_a_carrier_without_a_file_makes_none() -> None:
    carrier = FileBacked()
    carrier.release()
    assert carrier.path is None


def test_a_forgotten_carrier_closes_and_removes_its_file_quietly() -> None:
    carrier = FileBacked().new_like(np.arange(100.0))
    path, (file, _), dead = path_of(carrier), carrier._file(), weakref.ref(carrier)
    number = file.fd
    del carrier, file
    gc.collect()
    assert dead() is None
    assert not path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


# Existing files


@pytest.mark.parametrize("kind", [str, Path])
def test_an_existing_file_is_read_in_place_and_stays(numbers: Path, kind: type) -> None:
    before = numbers.read_bytes()
    carrier = FileBacked.open(kind(numbers), dtype=DType.Int32)
    assert (carrier.size(), carrier.is_mutable(), carrier.path) == (10, False, str(numbers))
    assert carrier._read_slots(0, 10).tolist() == list(range(10))
    assert not carrier._can_allocate()
    with pytest.raises(ImmutableError):
        carrier[0] = 1
    carrier._discard(0, 10)
    carrier.release()
    assert numbers.read_bytes() == before
    again = FileBacked.open(numbers, dtype=DType.Int32)
    del again
    gc.collect()
    assert numbers.read_bytes() == before


def test_a_file_opened_mutable_is_written_in_place_and_stays(numbers: Path) -> None:
    carrier = FileBacked.open(numbers, dtype=DType.Int32, mutable=True)
    carrier[4] = -1
    carrier._discard(0, 10)
    carrier.release()
    assert np.fromfile(numbers, "<i4").tolist() == [0, 1, 2, 3, -1, 5, 6, 7, 8, 9]


@given(offset=st.integers(0, 40), size=st.none() | st.integers(0, 10))
def test_offset_and_size_choose_the_slots(
    tmp_path_factory: pytest.TempPathFactory, offset: int, size: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "chosen.bin"
    data = np.arange(40, dtype=np.uint8)
    data.tofile(path)
    fits = (40 - offset) % 4 == 0 if size is None else offset + 4 * size <= 40
    if not fits:
        with pytest.raises(ValueError, match=str(40 - offset)):
            FileBacked.open(path, dtype=DType.Int32, offset=offset, size=size)
        return
    carrier = FileBacked.open(path, dtype=DType.Int32, offset=offset, size=size)
    count = (40 - offset) // 4 if size is None else size
    assert carrier.size() == count
    expected = data[offset : offset + 4 * count].tobytes()
    assert carrier._read_slots(0, count).tobytes() == expected
    for i in range(count):
        assert carrier[i] == int.from_bytes(expected[4 * i : 4 * i + 4], "little", signed=True)


def test_a_partial_slot_at_the_end_needs_a_size(numbers: Path) -> None:
    with pytest.raises(ValueError, match=r"38 bytes from offset 2 on.* 4 bytes of a Int32"):
        FileBacked.open(numbers, dtype=DType.Int32, offset=2)
    assert FileBacked.open(numbers, dtype=DType.Int32, offset=2, size=9).size() == 9


def test_slots_beyond_the_end_are_refused_with_both_numbers(numbers: Path) -> None:
    with pytest.raises(ValueError, match=r"11 slots of Int32 are 44 bytes, .* has 40"):
        FileBacked.open(numbers, dtype=DType.Int32, size=11)
    with pytest.raises(ValueError, match=r"offset 41 .* 40 bytes"):
        FileBacked.open(numbers, dtype=DType.Int32, offset=41)
    assert FileBacked.open(numbers, dtype=DType.Int32, offset=40).size() == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"offset": -1}, ValueError),
        ({"size": -1}, ValueError),
        ({"offset": 1.5}, TypeError),
        ({"size": "3"}, TypeError),
        ({"dtype": np.int32}, TypeError),
        ({"dtype": None}, TypeError),
    ],
)
def test_options_that_make_no_sense_are_refused(
    numbers: Path, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        FileBacked.open(numbers, **{"dtype": DType.Int32, **options})  # type: ignore[arg-type]


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError):
        FileBacked.open(tmp_path / "absent", dtype=DType.Int8)
    with pytest.raises(ValueError, match="a directory"):
        FileBacked.open(tmp_path, dtype=DType.Int8)
    with pytest.raises(ValueError, match="a FIFO"):
        FileBacked.open(tmp_path / "fifo", dtype=DType.Int8)
    for bad in (b"bytes", 3, None):
        with pytest.raises(TypeError):
            FileBacked.open(bad, dtype=DType.Int8)  # type: ignore[arg-type]


def test_a_bool_file_is_read_as_numpy_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "flags.bin"
    path.write_bytes(bytes([0, 1, 2, 255]))
    carrier = FileBacked.open(path, dtype=DType.Bool)
    assert [carrier[i] for i in range(4)] == np.fromfile(path, np.bool_).tolist() == [False, True, True, True]
    assert carrier._read_slots(0, 4).tolist() == [False, True, True, True]


def test_a_file_that_was_truncated_while_open_is_an_error_with_the_path(numbers: Path) -> None:
    carrier = FileBacked.open(numbers, dtype=DType.Int32)
    os.truncate(numbers, 6)
    assert carrier[0] == 0
    with pytest.raises(ShortFileError, match=r"4 bytes were wanted at offset 4, got 2") as caught:
        carrier.get_value(1)
    assert caught.value.path == str(numbers)
    with pytest.raises(ShortFileError, match=r"40 bytes were wanted at offset 0, got 6"):
        carrier._read_slots(0, 10)
    assert carrier.statistics().pending == 0
    carrier.release()


def test_small_floats_round_trip_through_slots() -> None:
    carrier = spilled(2, DType.BFloat16)
    carrier[0] = -0.0
    carrier[1] = 1 / 3
    assert np.signbit(carrier[0])
    assert carrier[1] == float(ml_dtypes.bfloat16(1 / 3))


# Full disks


def test_a_full_disk_fails_new_like_and_a_slot_write_and_changes_nothing(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import os, pathlib, resource
        import numpy as np
        from strideweave.carriers import FileBacked
        small = FileBacked().new_like([1.0, 2.0])
        tall = FileBacked().allocate_like(4096)
        directory = pathlib.Path(small.path).parent
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            small.new_like(np.ones(1 << 16, np.float32))
        except OSError as error:
            print(error.errno, str(directory) in error.filename)
        try:
            tall[4000] = 1.0
        except OSError as error:
            print(error.errno, error.filename == tall.path, tall.version, tall[4000])
        print(len(list(directory.iterdir())), small[1])
    """)
    # -B: a module that it compiled would be cut off by the limit too, and stay so.
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", program],
        env={**os.environ, SPILL_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{errno.EFBIG} True\n{errno.EFBIG} True 0 0.0\n2 2.0\n"
    assert list(tmp_path.iterdir()) == []


# Forks and the end of the process


@FORKS
def test_a_forked_child_reads_inherited_carriers_and_cannot_hurt_them() -> None:
    carrier = FileBacked().new_like(np.arange(100_000, dtype=np.float32))
    path = path_of(carrier)

    def child() -> bool:
        good = carrier[99_999] == 99_999.0
        good &= carrier._read_slots(0, 100_000).tolist() == list(range(100_000))
        try:
            carrier[0] = 5.0
            good = False
        except PermissionError:
            good &= carrier.version == 0
        carrier._discard(0, 100_000)
        mine = carrier.new_like([3.0])
        good &= mine[0] == 3.0 and path_of(mine).parent != path.parent
        carrier.release()
        mine.release()
        path_of(mine).parent.rmdir()
        return good

    assert in_a_forked_child(child)
    assert path.exists()
    assert carrier._read_slots(0, 3).tolist() == [0.0, 1.0, 2.0]


@FORKS
def test_a_carrier_forgotten_in_a_forked_child_leaves_its_parents_file() -> None:
    holder = [FileBacked().new_like([1.0, 2.0])]
    path = path_of(holder[0])

    def child() -> bool:
        holder.clear()
        gc.collect()
        return True

    assert in_a_forked_child(child)
    assert path.exists()
    assert holder[0][1] == 2.0


@pytest.mark.parametrize("ending", ["", "carrier.release()"])
def test_nothing_is_left_behind_when_the_interpreter_ends(tmp_path: Path, ending: str) -> None:
    program = textwrap.dedent(f"""
        from strideweave.carriers import FileBacked
        carrier = FileBacked("kept").new_like([1.0])
        other = FileBacked().new_like(range(1000))
        cycle = [other]
        cycle.append(cycle)
        {ending}
    """)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, SPILL_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_write_under_way_is_finished_before_the_interpreter_ends(tmp_path: Path) -> None:
    np.zeros(1 << 24, np.uint8).tofile(tmp_path / "target")
    program = textwrap.dedent("""
        import sys
        import numpy as np
        from strideweave.carriers import CPU, FileBacked
        from strideweave.carriers.move import AwaitResult, Transfer, dispatch_move
        from strideweave.dtype import DType
        target = FileBacked.open(sys.argv[1], dtype=DType.UInt8, mutable=True)
        spill = FileBacked(dtype=DType.UInt8).allocate_like(1 << 24)
        source = CPU.from_numpy(np.full(1 << 24, 7, np.uint8))
        write = dispatch_move(CPU, FileBacked)().transfer
        for file in (spill, target):
            file._scope.start(AwaitResult(), write, [Transfer(source, 0, file, 0, 1 << 24)])
        raise SystemExit(3)
    """)
    (tmp_path / "spills").mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path / "target")],
        env={**os.environ, SPILL_VARIABLE: str(tmp_path / "spills")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    assert (np.fromfile(tmp_path / "target", np.uint8) == 7).all()
    assert list((tmp_path / "spills").iterdir()) == []


def test_a_cpu_carrier_holds_what_a_file_held() -> None:
    values = np.arange(5, dtype=np.float32)
    carrier = FileBacked().new_like(values)
    assert CPU(1).new_like(carrier._read_slots(0, 5)).numpy().tolist() == values.tolist()


@pytest.mark.parametrize("size", [1 << 61, 1 << 63, 10**30])
def test_more_slots_than_an_offset_has_bits_for_are_too_large_a_file(size):
    with pytest.raises(OSError, match=f"the file was to be {4 * size} bytes long") as caught:
        FileBacked().allocate_like(size)
    assert caught.value.errno == errno.EFBIG
    path = Path(caught.value.filename)
    del caught  # its traceback leads to the carrier
    gc.collect()
    assert not path.exists()
