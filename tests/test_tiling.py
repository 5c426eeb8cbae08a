"""``tiled``: the short way from an array to a tiled Tensor."""

import ml_dtypes
import numpy as np
import pytest

import strideweave
from strideweave import (
    CPU,
    LRU,
    BlockDevice,
    DType,
    FileBacked,
    Generic,
    TiledEvictable,
    TileSet,
    asarray,
    open_tiled,
    save_tiled,
    tiled,
)
from strideweave.testing import failing_transfers

ARRAYS = [
    ((6,), (2,)),
    ((6,), (6,)),
    ((4, 6), (2, 3)),
    ((4, 6), (1, 6)),
    ((4, 6), (4, 1)),
    ((3, 4, 5), (1, 4, 5)),
    ((4, 6, 2), (2, 2, 2)),
    ((2, 2, 2, 4), (1, 2, 1, 2)),
]


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("shape", "tile"), ARRAYS)
def test_the_tensor_is_the_array(shape, tile, resident):
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    tensor = tiled(array, tile, resident=resident)
    carrier = tensor.carrier
    assert isinstance(carrier, TiledEvictable)
    assert tensor.shape == shape
    assert carrier.tile_shape == tile
    assert carrier.logical_shape == shape
    assert np.array_equal(tensor.numpy(), array)
    coordinate = tuple(extent - 1 for extent in shape)
    assert tensor[coordinate] == array[coordinate]
    every = carrier.select({})
    assert np.array_equal(carrier.project(tensor, every).wait().numpy(), array)
    carrier.release()


@pytest.mark.parametrize("resident", [True, False])
def test_where_the_tiles_start(resident):
    tensor = tiled(np.zeros((4, 3), np.float32), (2, 3), resident=resident)
    carrier = tensor.carrier
    every, nothing = carrier.valid_tiles, TileSet()
    assert len(every) == 2
    assert carrier.primary_tiles == carrier.dirty_tiles == (every if resident else nothing)
    assert carrier.secondary_tiles == (nothing if resident else every)
    assert type(carrier.primary) is CPU
    assert type(carrier.secondary) is FileBacked
    carrier.release()


@pytest.mark.parametrize("resident", [True, False])
def test_as_many_axes_as_numpy_has(tmp_path, resident):
    array = np.arange(12, dtype=np.float32).reshape(3, 4, *(1,) * 62)
    tensor = tiled(array, (1, 2, *(1,) * 62), resident=resident)
    carrier = tensor.carrier
    assert np.array_equal(tensor.numpy(), array)
    assert np.array_equal(carrier.project(tensor, carrier.select({0: [2]})).wait().numpy(), array[2:])
    for number, saved in enumerate((tensor, asarray(array))):
        save_tiled(saved, tmp_path / str(number), tile_shape=carrier.tile_shape)
        assert np.array_equal(open_tiled(tmp_path / str(number)).numpy(), array)
    carrier.release()


def test_the_array_is_copied():
    array = np.zeros((4, 3), np.float32)
    tensor = tiled(array, (2, 3))
    array[0, 0] = 1.0
    assert tensor[0, 0] == 0.0
    tensor.carrier.release()


def test_options_reach_the_carrier():
    policy, secondary = LRU(max_tiles=1), CPU(0, dtype=DType.Float64)
    tensor = tiled(
        [[1, 2], [3, 4]], (1, 2), secondary=secondary, residency_policy=policy, dtype=DType.Float64
    )
    assert tensor.carrier.residency_policy is policy
    assert tensor.carrier.secondary is secondary
    assert tensor.dtype is DType.Float64
    assert tensor.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    tensor.carrier.release()


def test_one_axis_takes_an_integer():
    tensor = tiled(np.arange(6), 2)
    assert tensor.carrier.grid_shape == (3,)
    assert tensor.dtype is DType.Int64
    tensor.carrier.release()


@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
def test_every_dtype(dtype):
    array = np.arange(8).reshape(4, 2).astype(dtype.numpy)
    tensor = tiled(array, (2, 2), resident=False)
    assert tensor.dtype is dtype
    assert tensor.numpy().tobytes() == array.tobytes()
    tensor.carrier.release()


def test_secondary_kinds():
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    for secondary in (CPU(0), Generic([]), FileBacked()):
        tensor = tiled(array, (1, 3), secondary=secondary, resident=False)
        assert np.array_equal(tensor.numpy(), array)
        tensor.carrier.release()


def test_a_memory_map_is_written_through_in_waves(tmp_path, monkeypatch):
    monkeypatch.setattr(strideweave.tiling, "_WAVE_BYTES", 100)
    array = np.arange(300, dtype=np.int32).reshape(10, 30)
    np.save(tmp_path / "array.npy", array)
    tensor = tiled(np.load(tmp_path / "array.npy", mmap_mode="r"), (2, 5), resident=False)
    assert np.array_equal(tensor.numpy(), array)
    tensor.carrier.release()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", ["memory", "python", "spill", "named spill", "device"])
def test_a_secondary_whose_writes_fail_is_empty_again_and_can_be_used(tmp_path, kind, after):
    array = np.arange(4096, dtype=np.float32).reshape(4, 1024)
    device = BlockDevice(tmp_path / "disk", size=1 << 20)
    make = {
        "memory": lambda: CPU(0),
        "python": lambda: Generic([]),
        "spill": FileBacked,
        "named spill": lambda: FileBacked("values.bin"),
        "device": lambda: device.allocate(0),
    }
    secondary, free = make[kind](), device.statistics().free_bytes
    with (
        failing_transfers(CPU, type(secondary), after=after),
        pytest.raises(OSError, match="filled the disk"),
    ):
        tiled(array, (1, 1024), secondary=secondary, resident=False)
    assert (secondary.size(), secondary.is_owned(), secondary.is_released()) == (0, False, False)
    assert secondary.statistics().pending == 0
    assert device.statistics().free_bytes == free
    if kind == "device":
        assert secondary.statistics().occupied_bytes == 0
    tensor = tiled(array, (1, 1024), secondary=secondary, resident=False)
    assert np.array_equal(tensor.numpy(), array)
    tensor.carrier.release()
    device.close()


def test_foreign_byte_order_and_strides_are_read_as_values():
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::-1].T
    for resident in (True, False):
        for dtype in (DType.Int32, None):
            tensor = tiled(array, (2, 3), dtype=dtype, resident=resident)
            assert tensor.dtype is DType.Int32
            assert np.array_equal(tensor.numpy(), array)
            tensor.carrier.release()


@pytest.mark.parametrize("make", [lambda values, dtype: tiled(values, 2, dtype=dtype), asarray])
def test_real_numbers_of_other_types_are_converted_where_a_dtype_is_asked_for(make):
    for kind in (np.uint16, np.uint32, np.uint64, np.longdouble, ">u4", ml_dtypes.bfloat16, ml_dtypes.int4):
        assert make(np.array([1, 2], kind), dtype=DType.Int32).tolist() == [1, 2]
    for few in ([1, 2], (1, 2), range(1, 3), memoryview(b"\1\2"), asarray([1, 2])):
        assert make(few, dtype=DType.Float8E5M2).tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, match="uint16"):
        make(np.array([1, 2], np.uint16), dtype=None)
    with pytest.raises(OverflowError):
        make([1, 300], dtype=DType.Int8)


@pytest.mark.parametrize("make", [lambda values, dtype: tiled(values, 2, dtype=dtype), asarray])
@pytest.mark.parametrize("dtype", [DType.Float32, DType.Int64, DType.Bool])
@pytest.mark.parametrize(
    "values",
    [
        np.array([1j, 2]),
        np.array([1, 2], ml_dtypes.bcomplex32)
        if hasattr(ml_dtypes, "bcomplex32")
        else np.array([1j, 2], "c8"),
        np.array(["1", "2"], np.dtypes.StringDType()),
        np.array(["2026-12-03", "NaT"], "M8[s]"),
        np.array([1, 2], "m8[s]"),
        ["1", "2"],
        [b"1", b"2"],
        [None, 1],
        np.array([1, 2], object),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, "V4"),
        [2**70, 1],
    ],
    ids=lambda values: str(np.asarray(values).dtype),
)
def test_what_is_no_real_number_is_refused_whatever_dtype_is_asked_for(make, dtype, values):
    with pytest.raises(TypeError, match="no DType stands for"):
        make(values, dtype=dtype)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(
    ("array", "tile", "options", "error", "says"),
    [
        (np.zeros((4, 3)), (3, 3), {}, ValueError, "evenly"),
        (np.zeros((4, 3)), (2,), {}, ValueError, "axes"),
        (np.zeros((4, 3)), (2, 3, 1), {}, ValueError, "axes"),
        (np.zeros(()), (), {}, ValueError, "axes"),
        (np.zeros((0, 3)), (1, 3), {}, ValueError, "evenly"),
        (np.zeros((4, 3)), (0, 3), {}, ValueError, "tile_shape"),
        (np.zeros((4, 3)), (2.0, 3), {}, TypeError, "tile_shape"),
        (np.zeros((4, 3)), (True, 3), {}, TypeError, "tile_shape"),
        (np.zeros(4), None, {}, TypeError, "tile_shape"),
        (np.zeros(4), 2.0, {}, TypeError, "tile_shape"),
        (np.zeros((4, 3), complex), (2, 3), {}, TypeError, "complex"),
        (np.array(["a"]), (1,), {}, TypeError, "dtype"),
        (np.zeros((4, 3)), (2, 3), {"dtype": np.float32}, TypeError, "DType"),
        (np.zeros((4, 3)), (2, 3), {"secondary": object()}, TypeError, "Carrier"),
        (np.zeros((4, 3)), (2, 3), {"secondary": CPU(0)}, TypeError, "Float32"),
        (np.zeros((4, 3), np.float32), (2, 3), {"secondary": CPU(12)}, ValueError, "already"),
        (np.zeros((4, 3), np.float32), (2, 3), {"secondary": CPU(0, mutable=False)}, RuntimeError, "mutable"),
        (np.zeros((4, 3)), (2, 3), {"residency_policy": "LRU"}, TypeError, "plan"),
        (np.zeros((4, 3)), (2, 3), {"residency_policy": LRU}, TypeError, "the class LRU; call it"),
    ],
)
def test_refused(array, tile, options, resident, error, says):
    with pytest.raises(error, match=says):
        tiled(array, tile, resident=resident, **options)
    secondary = options.get("secondary")
    if isinstance(secondary, CPU):
        assert not secondary.is_owned()


def test_an_unusable_policy_is_refused_before_anything_is_written():
    secondary = CPU(0)
    with pytest.raises(TypeError, match="plan"):
        tiled(
            np.zeros((4, 3), np.float32),
            (2, 3),
            secondary=secondary,
            residency_policy=object(),
            resident=False,
        )
    assert secondary.size() == 0
