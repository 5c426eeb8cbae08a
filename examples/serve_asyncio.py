"""A server in small: 64 requests at once ask for overlapping experts, and each missing one is read once.

The requests run in this program's asyncio loop. Awaiting a projection never blocks that loop: reading and
copying happen in StrideWeave's own thread.
"""

import asyncio

import numpy as np

import strideweave as sw

EXPERTS, OUT, IN = 32, 96, 256


async def answer(tensor: sw.Tensor, token: np.ndarray, chosen: list[int]) -> np.ndarray:
    """Send one token through its experts and average what they say."""
    carrier = tensor.carrier
    experts = await carrier.project(tensor, carrier.select({0: chosen}))
    with sw.no_grad():
        outputs = sw.matmul(experts, sw.from_numpy(token))
        return sw.reduce_mean(outputs, axis=0).numpy()


async def main() -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((EXPERTS, OUT, IN), dtype=np.float32)
    tensor = sw.tiled(weights, (1, OUT, IN), resident=False)
    tokens = rng.standard_normal((64, IN), dtype=np.float32)
    routes = [rng.choice(EXPERTS // 2, 4, replace=False).tolist() for _ in tokens]

    answers = await asyncio.gather(
        *(answer(tensor, token, route) for token, route in zip(tokens, routes, strict=True))
    )

    for token, route, got in zip(tokens, routes, answers, strict=True):
        assert np.allclose(got, (weights[route] @ token).mean(axis=0), atol=1e-4)
    distinct = len({expert for route in routes for expert in route})
    found = tensor.carrier.statistics()
    print(f"{len(tokens)} requests for {4 * len(tokens)} experts, {distinct} of them distinct")
    print(f"read {found.bytes_read:,} bytes: {found.bytes_read // found.tile_bytes} tiles")
    assert found.bytes_read == distinct * found.tile_bytes
    tensor.carrier.release()


asyncio.run(main())
