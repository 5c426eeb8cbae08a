"""Carrier classes that are described instead of written: a definition, and who provides the storage.

A class of your own that keeps its values somewhere unusual: give a ``StorageProvider`` with a few blocking
functions, name the class, register both.

    class Zipped(DefinedCarrier):
        "Compressed slots."

    register_carrier(CarrierDefinition(Zipped, storage=ZlibProvider()))

Spec: *TiledEvictable owns one flat logical storage extent*, whose class is the one shipped with a definition.
"""

from strideweave.carriers.extension.defined import DefinedCarrier, DefinedStatistics
from strideweave.carriers.extension.definition import (
    CarrierDefinition,
    CarrierFacet,
    CompositeProvider,
    TransferRoute,
)
from strideweave.carriers.extension.registration import (
    carrier_definition,
    register_carrier,
    withdraw_carrier,
)
from strideweave.carriers.extension.storage import StorageProvider

__all__ = [
    "CarrierDefinition",
    "CarrierFacet",
    "CompositeProvider",
    "DefinedCarrier",
    "DefinedStatistics",
    "StorageProvider",
    "TransferRoute",
    "carrier_definition",
    "register_carrier",
    "withdraw_carrier",
]
