"""A plain script: a tensor on disk, three of its tiles in memory, no event loop of your own.

Every request returns a handle; ``wait()`` blocks until it is done.
"""

import numpy as np

import strideweave as sw

# Sixty-four experts of 128 x 256 float32, 8 MiB in all, written straight to a spill file.
weights = np.random.default_rng(0).standard_normal((64, 128, 256), dtype=np.float32)
tensor = sw.tiled(weights, (1, 128, 256), resident=False, residency_policy=sw.LRU(max_tiles=3))
carrier = tensor.carrier
print(f"{tensor.shape} on disk, {len(carrier.primary_tiles)} of {len(carrier.valid_tiles)} tiles in memory")

# Gather experts 7, 2 and 19, in that order, into one dense tensor.
chosen = carrier.project(tensor, carrier.select({0: [7, 2, 19]})).wait()
assert np.array_equal(chosen.numpy(), weights[[7, 2, 19]])

# Compute with it as with any tensor: (3, 128, 256) @ (256,) -> (3, 128).
with sw.no_grad():
    x = sw.asarray(np.ones(256, np.float32))
    y = sw.matmul(chosen, x)
print(f"result {y.shape}, largest {np.abs(y.numpy()).max():.2f}")

# Change one number of one expert; its tile becomes dirty, and is written back when it leaves memory.
tensor[2, 0, 0] = 123.0
print("dirty:", carrier.dirty_tiles.coordinates)
carrier.evict(carrier.primary_tiles)
assert tensor[2, 0, 0] == 123.0

found = carrier.statistics()
print(
    f"read {found.bytes_read:,} bytes, wrote {found.bytes_written:,}, {found.hits} hits, {found.misses} misses"
)
carrier.release()
