"""Scatter, gradients and whole writes over memory that MLX computes on."""

from __future__ import annotations

import numpy as np
import pytest

from strideweave import CPU, FileBacked, Metal, Tensor, TiledEvictable, reduce_sum, row_major, tanh
from strideweave.dtype import DType

pytest.importorskip("mlx.core", reason="the extra strideweave[metal] is not installed")

SHAPE = (5, 3, 4)
DTYPES = [dtype for dtype in vars(DType).values() if isinstance(dtype, DType)]


def on_metal(values: np.ndarray, **options) -> Tensor:
    carrier = Metal(0).new_like(values.ravel(), dtype=DType.from_numpy(values.dtype))
    return Tensor(carrier, 0, row_major(*values.shape), **options)


def experts(dtype: DType = DType.Float32, *, secondary: type = FileBacked) -> Tensor:
    values = np.random.default_rng(2).integers(0, 2, SHAPE).astype(dtype.numpy)
    slow = CPU(0, dtype=dtype) if secondary is CPU else FileBacked(dtype=dtype)
    carrier = TiledEvictable(Metal(0, dtype=dtype), slow.new_like(values.ravel()), (5, 1, 1), (1, 3, 4))
    return Tensor(carrier, 0, row_major(*SHAPE))


@pytest.mark.parametrize("secondary", [CPU, FileBacked])
def test_gradients_of_projections(secondary: type) -> None:
    """Spec: *Projection is an autograd-visible gather*."""
    source = experts(secondary=secondary)
    carrier = source.carrier
    for chosen in ([4, 1], [1, 0]):
        compact = carrier.project(source, carrier.select({0: chosen})).wait()
        assert type(compact.carrier) is Metal
        reduce_sum(tanh(compact)).backward()
    slope = 1 - np.tanh(source.numpy()) ** 2
    wanted = slope * np.array([1, 2, 0, 0, 1], np.float32)[:, None, None]
    assert np.allclose(source.grad.numpy(), wanted, rtol=1e-5)
    assert type(source.grad.carrier.primary) is Metal
    assert source.grad.carrier.tile_state((2, 0, 0)).location == "implicit"


def test_gradients_of_scatters() -> None:
    """Spec: *Scatter participates in autograd*."""
    source = experts()
    carrier = source.carrier
    selection = carrier.select({0: [3, 0]})
    compact = on_metal(np.ones((2, 3, 4), np.float32))
    result = carrier.scatter(compact, source, selection, "add").wait()
    found = result.carrier.project(result, selection).wait()
    assert np.array_equal(found.numpy(), source.numpy()[[3, 0]] + 1)
    reduce_sum(found * 3.0).backward()
    assert type(compact.grad.carrier) is Metal
    assert compact.grad.numpy().sum() == 3 * 24
    assert source.grad.numpy()[:, 0, 0].tolist() == [3, 0, 0, 3, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_bit_survives(dtype: DType) -> None:
    """Spec: *Scatter is the asynchronous projection counterpart*."""
    source = experts(dtype)
    carrier = source.carrier
    bits = np.random.default_rng(4).integers(
        0, 2 if dtype is DType.Bool else 256, 24 * dtype.itemsize, np.uint8
    )
    compact = on_metal(bits.view(dtype.numpy).reshape(2, 3, 4), requires_grad=False)
    selection = carrier.select({0: [3, 0]})
    result = carrier.scatter(compact, source, selection).wait()
    assert result.carrier.project(result, selection).wait().numpy().tobytes() == bits.tobytes()
    carrier.assign(compact, source, selection).wait()
    assert carrier.project(source, selection).wait().numpy().tobytes() == bits.tobytes()
    again = carrier.scatter(compact, source, selection, "add").wait()
    with np.errstate(all="ignore"):
        wanted = (compact + compact).numpy()
    found = again.carrier.project(again, selection).wait().numpy()
    if dtype.is_differentiable:
        found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    assert np.array_equal(found, wanted, equal_nan=dtype.is_differentiable)
