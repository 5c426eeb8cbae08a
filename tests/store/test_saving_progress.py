"""A save says how far it is, and ends where its observer wants it to."""

from __future__ import annotations

import numpy as np
import pytest

import strideweave as sw

pytest.importorskip("xxhash")


def tensors(tmp_path):
    values = np.arange(3 * (40 << 20), dtype=np.uint8).reshape(3, 40 << 20)
    np.save(tmp_path / "values.npy", values)
    yield sw.open_tiled(tmp_path / "values.npy", (1, 40 << 20)), None
    yield sw.from_numpy(values), (1, 40 << 20)


def test_every_tile_is_counted(tmp_path):
    for number, (tensor, tile_shape) in enumerate(tensors(tmp_path)):
        seen: list[int] = []
        target = tmp_path / f"store{number}"
        sw.save_tiled_async(tensor, target, tile_shape=tile_shape, durable=False, progress=seen.append).wait()
        assert seen == sorted(set(seen))
        assert len(seen) > 1
        assert seen[-1] == 3
        tensor.carrier.release()


def test_what_the_observer_raises_ends_the_save_and_leaves_nothing(tmp_path):
    def enough(_: int) -> None:
        raise RuntimeError("enough")

    for tensor, tile_shape in tensors(tmp_path):
        with pytest.raises(RuntimeError, match="enough"):
            sw.save_tiled_async(tensor, tmp_path / "store", tile_shape=tile_shape, progress=enough).wait()
        assert [entry.name for entry in tmp_path.iterdir()] == ["values.npy"]
        tensor.carrier.release()  # which nothing unfinished keeps from it
