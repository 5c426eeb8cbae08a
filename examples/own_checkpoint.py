"""Serve experts out of a checkpoint as it lies on disk: nothing is converted, and only what is asked for is read.

The program first makes a small mixture of experts with the safetensors library, in three shards with an index, as
such models are published. It then opens the experts of all layers in place, as one tiled tensor, and answers 48 tokens
at once in asyncio, each through its own experts of both layers. It checks the answers with NumPy, and that exactly the
experts that were used have been read, once. safetensors comes with the extra ``demo``.
"""

import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

import strideweave as sw

LAYERS, EXPERTS, OUT, IN = 2, 24, 64, 64
SHARDS, CHOSEN, TOKENS = 3, 3, 48
NAME = "model.layers.{l}.experts.{e}.w1"

Floats = NDArray[np.float32]


def make_checkpoint(folder: Path, weights: Floats) -> None:
    """Write the experts one tensor each, dealt out over the shards, with a norm and an index as models have them."""
    weight_map = {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {
            NAME.format(l=layer, e=expert): weights[layer, expert]
            for layer in range(LAYERS)
            for expert in range(number, EXPERTS, SHARDS)
        }
        tensors[f"model.norm.{number}"] = np.ones(IN, np.float32)
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": weights.nbytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


async def answer(experts: sw.Tensor, token: Floats, routes: list[list[int]]) -> Floats:
    """Send one token through its experts, layer by layer, and average what those of a layer say."""
    carrier = experts.carrier
    for layer, chosen in enumerate(routes):
        weights = await carrier.project(experts, carrier.select({0: [layer], 1: chosen}))
        with sw.no_grad():
            said = sw.matmul(weights.reshape(CHOSEN, OUT, IN), sw.from_numpy(token))
            token = sw.relu(sw.reduce_mean(said, axis=0)).numpy()
    return token


def expected(weights: Floats, token: Floats, routes: list[list[int]]) -> Floats:
    """The same with everything in memory."""
    for layer, chosen in enumerate(routes):
        token = np.maximum((weights[layer, chosen] @ token).mean(axis=0), 0)
    return token


async def main() -> None:
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((LAYERS, EXPERTS, OUT, IN), dtype=np.float32) / 8
    tokens = rng.standard_normal((TOKENS, IN), dtype=np.float32)
    popular = EXPERTS // 2  # a router likes some experts better: here the others are never chosen
    routes = [[rng.choice(popular, CHOSEN, replace=False).tolist() for _ in range(LAYERS)] for _ in tokens]

    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), weights)

        started = time.perf_counter()
        experts = sw.open_tiled(folder, tensor=NAME)
        opened = time.perf_counter() - started
        print(f"opened {experts.shape} from {SHARDS} shards in {1e3 * opened:.1f} ms")

        answers = await asyncio.gather(
            *(answer(experts, token, route) for token, route in zip(tokens, routes, strict=True))
        )
        for token, route, got in zip(tokens, routes, answers, strict=True):
            assert np.allclose(got, expected(weights, token, route), atol=1e-4)

        used = {
            (layer, expert) for route in routes for layer, chosen in enumerate(route) for expert in chosen
        }
        found = experts.carrier.statistics()
        print(f"{TOKENS} tokens asked for {TOKENS * LAYERS * CHOSEN} experts, {len(used)} of them distinct")
        print(
            f"read {found.bytes_read:,} of {weights.nbytes:,} bytes: {found.bytes_read // found.tile_bytes} tiles"
        )
        assert found.bytes_read == len(used) * found.tile_bytes
        experts.carrier.release()


asyncio.run(main())
