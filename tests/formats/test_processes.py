"""Tensors over files in forked children, and under other loops than asyncio's own."""

from __future__ import annotations

import os

import numpy as np
import pytest

from processes import in_a_forked_child
from strideweave import open_tiled


@pytest.fixture
def opened(files):
    path = files.safetensors("a.safetensors", {"t": np.arange(24, dtype=np.int32).reshape(4, 6)})
    tensor = open_tiled(path, (2, 6))
    yield tensor
    tensor.carrier.release()


def project(tensor):
    return tensor.carrier.project(tensor, tensor.carrier.select({0: [1]})).wait(60).numpy().tolist()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_opens_the_files_anew(opened):
    expected = [list(range(12, 18)), list(range(18, 24))]
    assert project(opened) == expected  # the file is open, and the runtime runs
    opened.carrier.evict(opened.carrier.select({}))
    assert in_a_forked_child(lambda: project(opened) == expected and opened.carrier[0] == 0)
    assert project(opened) == expected


@pytest.mark.anyio
async def test_any_loop_may_await_a_projection(opened, anyio_backend):
    handle = opened.carrier.project(opened, opened.carrier.select({0: [1, 0]}))
    assert (await handle).numpy()[:, 0].tolist() == [12, 18, 0, 6]
