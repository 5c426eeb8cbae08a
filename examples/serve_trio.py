"""The same server under trio: a handle can be awaited in any event loop, and cancelling a waiter harms nobody.

Each request has a deadline. One that misses it stops waiting; the read it began goes on, and serves the others.
Trio is no dependency of StrideWeave: ``pip install trio``.
"""

import numpy as np
import trio

import strideweave as sw

EXPERTS, OUT, IN = 32, 96, 256


async def answer(tensor: sw.Tensor, token: np.ndarray, chosen: list[int], answers: list) -> None:
    """Send one token through its experts, within five seconds."""
    carrier = tensor.carrier
    with trio.move_on_after(5):
        experts = await carrier.project(tensor, carrier.select({0: chosen}))
        with sw.no_grad():
            outputs = sw.matmul(experts, sw.from_numpy(token))
            answers.append((chosen, token, sw.reduce_mean(outputs, axis=0).numpy()))


async def main() -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((EXPERTS, OUT, IN), dtype=np.float32)
    tensor = sw.tiled(weights, (1, OUT, IN), resident=False)
    answers: list = []

    async with trio.open_nursery() as nursery:
        for token in rng.standard_normal((64, IN), dtype=np.float32):
            route = rng.choice(EXPERTS // 2, 4, replace=False).tolist()
            nursery.start_soon(answer, tensor, token, route, answers)

    for route, token, got in answers:
        assert np.allclose(got, (weights[route] @ token).mean(axis=0), atol=1e-4)
    distinct = len({expert for route, _, _ in answers for expert in route})
    found = tensor.carrier.statistics()
    print(f"{len(answers)} requests answered, {distinct} distinct experts")
    print(f"read {found.bytes_read:,} bytes: {found.bytes_read // found.tile_bytes} tiles")
    assert found.bytes_read == distinct * found.tile_bytes
    tensor.carrier.release()


trio.run(main)
