"""What ``TiledEvictable`` is, as a definition: the one shipped carrier that has one.

Spec: *TiledEvictable owns one flat logical storage extent*. Its tiers are reached through what any carrier
offers in public: they allocate, say what they run, run it, and move through the registry.
"""

from __future__ import annotations

from strideweave.carriers.block_device import BlockDeviceCarrier
from strideweave.carriers.cpu import CPU
from strideweave.carriers.evictable import Evictable
from strideweave.carriers.extension import (
    CarrierDefinition,
    CarrierFacet,
    CompositeProvider,
    TransferRoute,
    register_carrier,
)
from strideweave.carriers.file_backed import FileBacked
from strideweave.carriers.file_parts import FileParts
from strideweave.carriers.generic import Generic
from strideweave.carriers.metal import Metal
from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
from strideweave.carriers.tiled_evictable.direct import DIRECT_OPERATIONS, TiledOperation
from strideweave.carriers.tiled_evictable.moving import MoveFromTiles, MoveToTiles
from strideweave.carriers.tiled_evictable.residency import TiledResidencyFacet

__all__: list[str] = []

_OTHERS = (BlockDeviceCarrier, CPU, Evictable, FileBacked, FileParts, Generic, Metal)

register_carrier(
    CarrierDefinition(
        TiledEvictable,
        storage=CompositeProvider(
            tiers=lambda carrier: (carrier.primary, carrier.secondary),
            compose=lambda carrier, tiers: carrier._compose(*tiers),
        ),
        operations=DIRECT_OPERATIONS,
        make_operation=TiledOperation,
        facets=(CarrierFacet(TiledResidencyFacet),),
        routes=(
            *(TransferRoute(TiledEvictable, other, MoveFromTiles) for other in _OTHERS),
            *(TransferRoute(other, TiledEvictable, MoveToTiles) for other in _OTHERS),
            TransferRoute(TiledEvictable, TiledEvictable, MoveToTiles),
        ),
    )
)
