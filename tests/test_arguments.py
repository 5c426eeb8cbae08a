"""What public names say about arguments that they do not take."""

from __future__ import annotations

import importlib.util
import inspect
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import strideweave as sw
from strideweave import LRU, S3FIFO, testing
from strideweave.carriers import extension, move
from strideweave.flags import as_flag, as_optional_flag
from strideweave.io.spill import SpillDirectory
from strideweave.runtime.event_loop import current_runtime

CLASSES = [
    cls
    for name in sw.__all__
    if inspect.isclass(cls := getattr(sw, name)) and not issubclass(cls, BaseException)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_about_arguments_names_a_public_class(cls):
    wrong = [
        lambda: cls(*[object()] * 30),
        lambda: cls(no_such_option=1),
        lambda: cls(*[object()] * 30, no_such_option=1),
    ]
    for call in wrong:
        with pytest.raises(TypeError) as caught:
            call()
        for named in re.findall(r"(\w+)\.__(?:init|new)__\(\)", str(caught.value)):
            assert named in sw.__all__


@pytest.mark.parametrize("policy", [LRU, S3FIFO])
@pytest.mark.parametrize(("bounds", "options"), [((16,), {}), ((16, 2), {}), ((16,), {"max_tiles": 16})])
def test_a_bound_without_a_name_is_refused_with_the_names_there_are(policy, bounds, options):
    name, got = policy.__name__, ", ".join(map(str, bounds))
    with pytest.raises(TypeError) as caught:
        policy(*bounds, **options)
    assert str(caught.value) == (
        f"{name} takes its bound by name, {name}(max_tiles=...) or {name}(max_bytes=...); got {name}({got})"
    )


# Flags

NO_FLAGS = ["no", "", 1, 0, 1.0, [], np.array([True]), np.ones(()), sw.DType.Bool]
OPTIONAL = {"CPU.from_numpy: mutable", "Tensor: requires_grad"} | {
    f"Tensor.{name}: copy" for name in ("numpy", "__array__", "__dlpack__")
}


def flags_of(public):
    """The flags among the parameters of a public function, or of a class's public methods and constructor."""
    if inspect.isfunction(public):
        found = {"": public}
    elif inspect.isabstract(public) or hasattr(public, "__dataclass_fields__"):
        found = {}  # somebody else's method, or a record, which is made by the library
    else:
        names = [*(name for name in dir(public) if name[0] != "_"), "__init__", "__array__", "__dlpack__"]
        found = {f".{name}": getattr(public, name, None) for name in names}
    for suffix, function in found.items():
        if inspect.isfunction(function) or inspect.ismethod(function):
            for parameter in inspect.signature(function).parameters.values():
                if parameter.annotation in {"bool", "bool | None"}:
                    yield f"{public.__name__}{suffix}: {parameter.name}".replace(".__init__:", ":")


FLAGS = sorted(
    {
        flag
        for module in (sw, move, extension, testing)
        for name in module.__all__
        for flag in flags_of(getattr(module, name))
    }
)


class Lists(extension.StorageProvider):
    def allocate(self, slots, dtype):
        return np.zeros(slots, dtype.numpy)

    def read(self, storage, start, slots):
        return storage[start : start + slots]

    def write(self, storage, start, values):
        storage[start : start + len(values)] = values

    def free(self, storage):
        pass


@pytest.fixture(scope="module")
def own_class():
    class Listed(extension.DefinedCarrier):
        """A carrier by definition."""

    extension.register_carrier(extension.CarrierDefinition(Listed, storage=Lists()))
    yield Listed
    for other in (sw.CPU, sw.FileBacked, sw.Generic, sw.Metal, Listed):
        for pair in {(Listed, other), (other, Listed)}:
            move.unregister_move_operation(*pair)


@pytest.fixture
def disk(tmp_path):
    with sw.BlockDevice(tmp_path / "disk.bin", size=1 << 20) as device:
        yield device


@pytest.fixture
def weights():
    tensor = sw.tiled(np.ones((4, 2), np.float32), (1, 2))
    with tensor.carrier:
        yield tensor


@pytest.fixture
def calls(own_class, disk, weights, tmp_path):
    """A call for each flag of a public name, given its value."""
    array = np.ones(4, np.float32)
    slots = tmp_path / "slots.bin"
    slots.write_bytes(array.tobytes())
    tensor, cpu, tiled = sw.asarray(array), sw.CPU(4), weights.carrier
    facet = tiled.require_facet(sw.TiledResidencyFacet)
    tiles = tiled.valid_tiles
    pair = (sw.CPU, sw.CPU)
    carriers = {
        "CPU": cpu,
        "Generic": sw.Generic([1.0]),
        "FileBacked": sw.FileBacked(),
        "BlockDeviceCarrier": disk.allocate(0),
        "DefinedCarrier": own_class(4),
        "Evictable": sw.Evictable(sw.CPU(4), sw.FileBacked()),
        "TiledEvictable": tiled,
    }
    metal = sw.Metal(4) if importlib.util.find_spec("mlx") else None
    made = {
        "BlockDevice: direct": lambda flag: sw.BlockDevice(tmp_path / "new.bin", size=1 << 20, direct=flag),
        "BlockDevice.allocate: empty": lambda flag: disk.allocate(4, empty=flag),
        "BlockDevice.allocate: mutable": lambda flag: disk.allocate(4, mutable=flag),
        "BlockDeviceCarrier: mutable": lambda flag: sw.BlockDeviceCarrier(disk, mutable=flag),
        "CPU: empty": lambda flag: sw.CPU(4, empty=flag),
        "CPU: mutable": lambda flag: sw.CPU(4, mutable=flag),
        "CPU.from_numpy: mutable": lambda flag: sw.CPU.from_numpy(array, mutable=flag),
        "CPU.numpy: writable": lambda flag: cpu.numpy(writable=flag),
        "DefinedCarrier: mutable": lambda flag: own_class(4, mutable=flag),
        "FileBacked: mutable": lambda flag: sw.FileBacked("named.bin", mutable=flag),
        "FileBacked.open: mutable": lambda flag: sw.FileBacked.open(
            slots, dtype=sw.DType.Float32, mutable=flag
        ),
        "Generic: mutable": lambda flag: sw.Generic([1.0], mutable=flag),
        "Metal: empty": metal and (lambda flag: sw.Metal(4, empty=flag)),
        "Metal: mutable": metal and (lambda flag: sw.Metal(4, mutable=flag)),
        "Metal.allocate_like: empty": metal and (lambda flag: metal.allocate_like(4, empty=flag)),
        "Metal.allocate_like: mutable": metal and (lambda flag: metal.allocate_like(4, mutable=flag)),
        "Metal.new_like: mutable": metal and (lambda flag: metal.new_like(array, mutable=flag)),
        "Tensor: requires_grad": lambda flag: sw.Tensor(cpu, 0, sw.row_major(4), requires_grad=flag),
        "Tensor.__array__: copy": lambda flag: tensor.__array__(copy=flag),
        "Tensor.__dlpack__: copy": lambda flag: tensor.__dlpack__(max_version=(1, 0), copy=flag),
        "Tensor.backward: retain_graph": lambda flag: tensor.backward(tensor.detach(), retain_graph=flag),
        "Tensor.numpy: copy": lambda flag: tensor.numpy(copy=flag),
        "Tensor.numpy: writable": lambda flag: tensor.numpy(writable=flag),
        "failing_transfers: after": lambda flag: testing.failing_transfers(*pair, after=flag).__enter__(),
        "gelu: approximate": lambda flag: sw.gelu(tensor, approximate=flag),
        "register_carrier: replace": lambda flag: extension.register_carrier(
            extension.carrier_definition(sw.TiledEvictable), replace=flag
        ),
        "registered_move_operation: replace": lambda flag: move.registered_move_operation(
            *pair, sw.MoveOperation, replace=flag
        ).__enter__(),
        "save_tiled: durable": lambda flag: sw.save_tiled(weights, tmp_path / "store", durable=flag),
        "save_tiled: overwrite": lambda flag: sw.save_tiled(weights, tmp_path / "store", overwrite=flag),
        "save_tiled_async: durable": lambda flag: sw.save_tiled_async(
            weights, tmp_path / "store", durable=flag
        ),
        "save_tiled_async: overwrite": lambda flag: sw.save_tiled_async(
            weights, tmp_path / "store", overwrite=flag
        ),
        "set_grad_enabled: mode": sw.set_grad_enabled,
        "tiled: resident": lambda flag: sw.tiled(array, (2,), resident=flag),
    }
    for name, carrier in carriers.items():
        size, values = carrier.size() or 4, np.ones(carrier.size() or 4)
        made[f"{name}.allocate_like: empty"] = partial(_with, carrier.allocate_like, size, "empty")
        made[f"{name}.allocate_like: mutable"] = partial(_with, carrier.allocate_like, size, "mutable")
        made[f"{name}.new_like: mutable"] = partial(_with, carrier.new_like, values, "mutable")
    for owner in (tiled, facet):
        name = type(owner).__name__
        for method in ("evict", "evict_async"):
            made[f"{name}.{method}: durable"] = partial(_with, getattr(owner, method), tiles, "durable")
        made[f"{name}.flush: durable"] = lambda flag, owner=owner: owner.flush(durable=flag)
        made[f"{name}.flush_async: durable"] = lambda flag, owner=owner: owner.flush_async(durable=flag)
    for name in ("reduce_max", "reduce_mean", "reduce_min", "reduce_sum"):
        made[f"{name}: keepdims"] = partial(_with, getattr(sw, name), tensor, "keepdims")
    return made


def _with(function, argument, name, flag):
    return function(argument, **{name: flag})


def test_every_public_flag_is_called_here(calls):
    assert sorted(calls) == FLAGS


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_a_bool_and_nothing_changes_otherwise(flag, calls, weights, disk, tmp_path):
    call, name = calls[flag], flag.split(": ")[1]
    if call is None:
        pytest.skip("MLX is not installed")

    def state():
        carrier = weights.carrier
        files = sorted(tmp_path.iterdir()), spill_names()
        return (
            files,
            carrier.primary_tiles,
            carrier.dirty_tiles,
            disk.statistics().extents,
            sw.is_grad_enabled(),
        )

    before = state()
    for wrong in [*NO_FLAGS, *([] if flag in OPTIONAL else [None])]:
        with pytest.raises(TypeError, match=rf"{name} must be a bool( or None)?, found"):
            call(wrong)
        assert state() == before


def spill_names():
    path = current_runtime().service(SpillDirectory).statistics().path
    return [] if path is None else sorted(Path(path).iterdir())


def test_a_flag_of_numpy_is_a_bool():
    for flag in (True, False):
        for same in (flag, np.bool_(flag)):
            assert as_flag(same, "a flag") is as_optional_flag(same, "a flag") is flag
    assert as_optional_flag(None, "a flag") is None
    with pytest.raises(TypeError, match="durable must be a bool, found 'no' of type str"):
        as_flag("no", "durable")
    with pytest.raises(TypeError, match="copy must be a bool or None, found 1 of type int"):
        as_optional_flag(1, "copy")
