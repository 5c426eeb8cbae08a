"""A carrier of your own: a tier that keeps its slots compressed, under a tensor whose tiles come and go.

The provider has four blocking functions and knows neither tensors nor tiles nor threads.
"""

import zlib

import numpy as np

import strideweave as sw
from strideweave.carriers.extension import (
    CarrierDefinition,
    DefinedCarrier,
    StorageProvider,
    register_carrier,
)

BLOCK = 4096  # slots that are compressed together


class Zlib(StorageProvider):
    """Compressed blocks by number; a block that was never written is zero."""

    def allocate(self, slots, dtype):
        """Nothing yet but what a zero block looks like."""
        return {"zero": zlib.compress(bytes(BLOCK * dtype.itemsize)), "dtype": dtype.numpy}

    def read(self, storage, start, slots):
        """Unpack the blocks that the slots lie in."""
        first, last = start // BLOCK, (start + slots - 1) // BLOCK
        packed = (storage.get(block, storage["zero"]) for block in range(first, last + 1))
        values = np.frombuffer(b"".join(map(zlib.decompress, packed)), storage["dtype"])
        return values[start - first * BLOCK :][:slots]

    def write(self, storage, start, values):
        """Unpack those blocks, change them, pack them again."""
        first, last = start // BLOCK, (start + len(values) - 1) // BLOCK
        blocks = self.read(storage, first * BLOCK, (last + 1 - first) * BLOCK).copy()
        blocks[start - first * BLOCK :][: len(values)] = values
        for block, part in enumerate(blocks.reshape(-1, BLOCK), first):
            storage[block] = zlib.compress(part, 1)

    def free(self, storage):
        """Forget every block."""
        storage.clear()


class Zipped(DefinedCarrier):
    """Slots that are kept compressed."""


register_carrier(CarrierDefinition(Zipped, storage=Zlib()))

if __name__ == "__main__":
    # Sixteen experts of 64 x 256 float32, straight to the compressed tier; three fit into memory.
    weights = np.repeat(np.arange(16 * 64, dtype=np.float32), 256).reshape(16, 64, 256)
    slow = Zipped(dtype=sw.DType.Float32)
    tensor = sw.tiled(
        weights, (1, 64, 256), secondary=slow, resident=False, residency_policy=sw.LRU(max_tiles=3)
    )
    carrier = tensor.carrier

    chosen = carrier.project(tensor, carrier.select({0: [7, 2, 11]})).wait()
    assert np.array_equal(chosen.numpy(), weights[[7, 2, 11]])

    tensor[2, 0, 0] = -1.0  # its tile becomes dirty, and is compressed again when it leaves memory
    carrier.evict(carrier.primary_tiles)
    weights[2, 0, 0] = -1.0
    again = carrier.project(tensor, carrier.select({0: range(16)})).wait()
    assert np.array_equal(again.numpy(), weights)

    done = slow.statistics()
    print(f"{carrier.statistics().resident_tiles} of 16 tiles in memory; the others are compressed")
    print(f"{done.reads} reads of {done.bytes_read:,} bytes, {done.writes} writes of {done.bytes_written:,}")
    carrier.release()
