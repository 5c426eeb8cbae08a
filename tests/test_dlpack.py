"""DLPack: other libraries read a tensor's memory in place, and may write where the carrier may be written."""

import gc

import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, Evictable, FileBacked, Generic, Layout, Metal, Tensor, TiledEvictable, row_major
from strideweave.dtype import DType
from strideweave.errors import ReleasedError

CAPSULE, VERSIONED = "dltensor", "dltensor_versioned"
# NumPy exports these from 2.5 on.
NEWER = (DType.BFloat16, DType.Float8E4M3FN, DType.Float8E5M2)


class OldConsumer:
    """A consumer from before DLPack 1.0: it says nothing about versions."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def ramp():
    return sw.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4))


@pytest.mark.parametrize("kind", ["CPU", "Generic", "Metal"])
@pytest.mark.parametrize("wrap", [lambda tensor: tensor, OldConsumer], ids=["versioned", "legacy"])
def test_numpy_reads_and_writes_the_same_memory(kind, wrap):
    if kind == "Metal":
        pytest.importorskip("mlx.core", reason="the extra strideweave[metal] is not installed")
    empty = {"CPU": CPU, "Metal": Metal, "Generic": lambda _: Generic([])}[kind](0)
    tensor = Tensor(empty.new_like(range(6)), 0, row_major(2, 3))
    assert tensor.requires_grad
    array = np.from_dlpack(wrap(tensor))
    assert np.shares_memory(array, tensor.numpy())
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    tensor[0] = 9
    assert array[0, 0] == 9
    if wrap is not OldConsumer:  # NumPy takes what came in the old way for read-only
        array[1, 2] = 7
        assert (tensor[1, 2], tensor.version) == (7, 1)


@pytest.mark.parametrize("dtype", DType.members())
def test_dtypes_pass_as_they_are_or_not_at_all(dtype):
    values = np.array([0, 1, 1]).astype(dtype.numpy)
    tensor = sw.from_numpy(values)
    if dtype in NEWER and np.lib.NumpyVersion(np.__version__) < "2.5.0":
        with pytest.raises(BufferError, match="DLPack only supports"):
            np.from_dlpack(tensor)
        return
    array = np.from_dlpack(tensor)
    assert array.dtype == dtype.numpy
    assert array.tobytes() == values.tobytes()


def test_the_kind_of_capsule_is_what_the_consumer_understands():
    assert CAPSULE in repr(ramp().__dlpack__())
    assert VERSIONED not in repr(ramp().__dlpack__(max_version=(0, 8)))
    assert VERSIONED in repr(ramp().__dlpack__(max_version=(1, 0)))


@pytest.mark.parametrize("reason", ["immutable", "owned", "overlapping"])
def test_elements_that_nobody_may_write_are_exported_read_only(reason):
    tensor = ramp().detach()
    owner = None
    if reason == "immutable":
        tensor = Tensor(CPU(4, mutable=False), 0, row_major(4))
    elif reason == "owned":
        owner = Evictable(tensor.carrier, FileBacked())
    else:
        tensor = sw.broadcast_to(tensor, (2, 3, 4))
    array = np.from_dlpack(tensor)
    assert not array.flags.writeable
    assert np.shares_memory(array, tensor.numpy())
    with pytest.raises(BufferError, match="readonly"):
        tensor.__dlpack__()
    copy = np.from_dlpack(tensor, copy=True)
    assert copy.flags.writeable
    assert copy.tolist() == tensor.tolist()
    del owner


def test_the_capsule_keeps_the_memory_after_release():
    tensor = Tensor(CPU(0).new_like(range(100_000)), 0, row_major(100_000))
    array = np.from_dlpack(tensor)
    tensor.carrier.release()
    del tensor
    gc.collect()
    assert array[99_999] == 99_999
    assert array.sum(dtype=np.float64) == 99_999 * 50_000


def test_views_are_exported_with_their_strides():
    tensor = ramp().detach()
    for view in (tensor.T, sw.unsqueeze(tensor, 1), Tensor(tensor.carrier, 11, Layout((3, 2), (-4, -1)))):
        array = np.from_dlpack(view)
        assert np.shares_memory(array, tensor.numpy())
        assert array.tolist() == view.tolist()


def test_a_layout_without_a_view_is_exported_as_a_copy_only():
    tensor = Tensor(ramp().carrier, 0, Layout(((2, 2), 3), ((1, 6), 2)))
    for copy in (None, False):
        with pytest.raises(BufferError, match="has no view"):
            tensor.__dlpack__(copy=copy)
    assert np.from_dlpack(tensor, copy=True).tolist() == tensor.tolist()


def test_an_empty_tensor_passes():
    assert np.from_dlpack(sw.zeros((0, 3))).shape == (0, 3)


def test_other_devices_are_refused():
    assert ramp().__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="device"):
        ramp().__dlpack__(dl_device=(2, 0))


def test_a_released_carrier_exports_nothing():
    tensor = ramp()
    tensor.carrier.release()
    for ask in (tensor.__dlpack__, tensor.__dlpack_device__):
        with pytest.raises(ReleasedError):
            ask()


class TestCarriersWhoseValuesMove:
    """Spec: *Promoted state is required for public data access and execution* (Evictable has no DLPack buffer)."""

    @staticmethod
    def refuses(tensor):
        for ask in (tensor.__dlpack__, tensor.__dlpack_device__, lambda: np.from_dlpack(tensor)):
            with pytest.raises(BufferError, match="exposes no DLPack buffer"):
                ask()

    def test_evictable_promoted_and_evicted(self):
        carrier = Evictable(CPU(4), FileBacked())
        tensor = Tensor(carrier, 0, row_major(4))
        self.refuses(tensor)
        carrier.evict()
        self.refuses(tensor)

    def test_tiled_and_file_backed(self):
        carrier = TiledEvictable(CPU(4), FileBacked(), (2,), (2,))
        self.refuses(Tensor(carrier, 0, row_major(4)))
        self.refuses(Tensor(FileBacked().new_like([1, 2]), 0, row_major(2)))


class TestTorch:
    def test_it_shares_the_memory(self):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        tensor = ramp()
        shared = torch.from_dlpack(tensor)
        assert shared.data_ptr() == tensor.numpy().ctypes.data
        assert tuple(shared.shape) == tensor.shape
        shared[2, 3] = -1
        assert tensor[2, 3] == -1
        tensor.carrier.release()
        assert float(shared[1, 1]) == 5
