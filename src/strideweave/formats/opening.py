"""``open_tiled``: a tiled tensor over files that exist already. The one place that tells the formats apart."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from strideweave.carriers.cpu import CPU
from strideweave.carriers.file_parts import FileParts
from strideweave.carriers.part_reading import PartTable
from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
from strideweave.dtype import DType, check_dtype
from strideweave.errors import FormatError
from strideweave.formats.checkpoint import find_array, open_checkpoint
from strideweave.formats.headers import HeaderFile
from strideweave.formats.npy import MAGIC, read_npy
from strideweave.formats.raw import read_raw
from strideweave.formats.zarr import METADATA, read_zarr
from strideweave.layout.int_tuple import as_integer
from strideweave.store import is_store, open_store, read_manifest
from strideweave.tensor import Tensor
from strideweave.tiles.part_map import PartMap
from strideweave.tiling import tile_grid, tile_major_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strideweave.formats.description import StoredArray
    from strideweave.store import Manifest
    from strideweave.tiles.policy import ResidencyPolicy

__all__ = ["FORMATS", "describe", "detect_format", "open_tiled"]

FORMATS = ("npy", "raw", "safetensors", "store", "zarr")
"""What ``open_tiled`` takes as ``format``."""

_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {".safetensors": "safetensors", ".json": "safetensors", ".npy": "npy"}
)

# Files that hold arrays in another way than one after the other as they are, and the way from there.
_NOT_IN_PLACE: Mapping[str, str] = MappingProxyType(
    {
        ".npz": "numpy.load it and numpy.save each array as a .npy file",
        **dict.fromkeys((".pt", ".pth", ".ckpt"), "save its tensors with safetensors.torch.save_file"),
        **dict.fromkeys(
            (".h5", ".hdf5", ".gguf", ".onnx"), "give an array of it to tiled(), and that to save_tiled()"
        ),
    }
)


def open_tiled(
    path: str | os.PathLike[str],
    tile_shape: int | Iterable[int] | None = None,
    *,
    tensor: str | None = None,
    format: str | None = None,  # noqa: A002  the word that users know
    dtype: DType | None = None,
    shape: int | Iterable[int] | None = None,
    offset: int = 0,
    mode: Literal["r", "r+"] = "r",
    residency_policy: ResidencyPolicy | None = None,
    memory_limit: int | None = None,
) -> Tensor:
    """Open an array that lies in files as a tiled tensor, in place: nothing is copied or mapped.

    Only headers are read, so it takes milliseconds however large the files are. ``project`` then reads the tiles that
    it needs, at their places in the files. The tensor is read-only, and the files are never written to. They are not
    held open: a bounded number is at a time. One that is changed, replaced or removed afterwards gives the right
    bytes still or ``FileChangedError``, never others.

    Args:
        path: a safetensors file; an index ``*.safetensors.index.json`` or a directory with one, or with files;
            a ``.npy`` file; a raw binary file; the directory of a zarr 3 array; a store of ``save_tiled``. A symbolic
            link is followed.
        tile_shape: elements of one tile along each axis; each divides the extent. None takes one part of a pattern,
            or one chunk, as one tile; else whole rows that have about a mebibyte together.
        tensor: the name of a tensor of a safetensors file or checkpoint; None where there is only one. In a pattern
            such as ``"layers.{l}.experts.{e}.w1"`` each placeholder stands for the numbers 0 to N - 1 and becomes a
            leading axis, so that tensors of one shape, in any of the files, are one: ``(layer, expert, out, in)``.
        format: ``"safetensors"``, ``"npy"``, ``"raw"``, ``"zarr"`` or ``"store"``; None looks at the file.
        dtype: the element type of a raw file, or of a ``.npy`` file that only knows the width of its elements. Of
            others it is checked.
        shape: the extents of a raw file's array, row-major; of others it is checked.
        offset: bytes of a raw file before the array.
        mode: ``"r"``, or ``"r+"`` for a store, which alone can be written to.
        residency_policy: decides what stays primary.
        memory_limit: bytes that tiles may take in memory at any instant; None is no limit.

    Returns:
        The full Tensor; ``tensor.carrier`` is a ``TiledEvictable`` whose primary tier is CPU.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument has no meaning for this format or is missing; ``tile_shape`` does not divide the
            shape.
        FormatError: a file is damaged, of a kind that cannot be read in place, or holds something else than was
            asked for; the message names file, tensor, offset, and what was wanted and found.
        FileNotFoundError: nothing is at ``path``, or a file of the checkpoint is missing.
        OSError: the system refused to open a file.
    """
    name = _path(path)
    if mode not in ("r", "r+"):
        raise ValueError(f"mode must be 'r' or 'r+', found {mode!r}")
    found = detect_format(name, format, has_description=dtype is not None and shape is not None)
    if found == "store":
        _check_store(name, tile_shape, tensor=tensor, dtype=dtype, shape=shape, offset=offset)
        return open_store(name, mode, residency_policy=residency_policy, memory_limit=memory_limit)
    if mode == "r+":
        raise ValueError(
            f"mode 'r+' is for a store, which save_tiled makes; {name!r} has the format {found} and is "
            "only read in place"
        )
    array = _read(name, found, tensor=tensor, dtype=dtype, shape=shape, offset=offset)
    return _tensor(array, tile_shape, residency_policy, memory_limit)


def describe(
    path: str | os.PathLike[str],
    *,
    tensor: str | None = None,
    format: str | None = None,  # noqa: A002  the word that users know
    dtype: DType | None = None,
    shape: int | Iterable[int] | None = None,
    offset: int = 0,
) -> StoredArray:
    """Find out where an array lies, as ``open_tiled`` does, and make no tensor of it.

    Raises:
        TypeError, ValueError, OSError: as for ``open_tiled``.
    """
    name = _path(path)
    found = detect_format(name, format, has_description=dtype is not None and shape is not None)
    return _read(name, found, tensor=tensor, dtype=dtype, shape=shape, offset=offset)


def detect_format(path: str, asked: str | None = None, *, has_description: bool = False) -> str:
    """Tell what is at a path: one of ``FORMATS``.

    Args:
        path: a file or directory.
        asked: what the caller says; None looks at names, and at the first bytes where those say nothing.
        has_description: whether the caller knows dtype and shape, so that the file may be a raw one.

    Raises:
        ValueError: ``asked`` is unknown, nothing tells, or files of this kind cannot be read in place.
        FormatError: it is an array or a group of zarr 2.
        FileNotFoundError: nothing is there.
    """
    if asked is not None:
        if asked not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, found {asked!r}")
        if asked == "zarr":
            _refuse_zarr_2(Path(path))
        return asked
    place = Path(path)
    if place.is_dir():
        if is_store(path):
            return "store"
        _refuse_zarr_2(place)
        return "zarr" if (place / METADATA).exists() else "safetensors"
    found = _SUFFIXES.get(place.suffix) or _look_inside(path, has_description)
    if found is None:
        if instead := _NOT_IN_PLACE.get(place.suffix):
            raise ValueError(
                f"{path!r} is not read in place: a {place.suffix} file packs its arrays; {instead}"
            )
        raise ValueError(
            f"nothing tells what {path!r} is; pass format=, one of {', '.join(FORMATS)}, and for a raw file dtype= and "
            "shape="
        )
    return found


def _refuse_zarr_2(place: Path) -> None:
    """Raise FormatError where there is an array or a group of zarr 2 and none of zarr 3."""
    if (place / METADATA).exists():
        return
    for old in (".zarray", ".zgroup"):
        if (place / old).exists():
            raise FormatError(
                "zarr 2 is not read in place; write the array anew with zarr_format=3",
                path=str(place),
                wanted=METADATA,
                found=old,
            )


def _look_inside(path: str, has_description: bool) -> str | None:
    """Tell what a file is whose name does not: caches name files by their checksum."""
    with HeaderFile(path) as file:
        start = file.read(0, min(9, file.size), "first bytes")
    if start.startswith(MAGIC):
        return "npy"
    if has_description:
        return "raw"
    return "safetensors" if start[8:] == b"{" else None


def _read(
    path: str,
    found: str,
    *,
    tensor: str | None,
    dtype: DType | None,
    shape: int | Iterable[int] | None,
    offset: int,
) -> StoredArray:
    if found == "store":
        raise ValueError(
            f"{path!r} is a store, not an array in place; strideweave.store.read_manifest describes it"
        )
    extents, start = _check_arguments(path, found, tensor=tensor, dtype=dtype, shape=shape, offset=offset)
    if found == "raw":
        if dtype is None or extents is None:
            raise ValueError(f"{path!r} is raw and does not say what it holds; pass dtype= and shape=")
        return read_raw(path, dtype, extents, start)
    if found == "npy":
        array = read_npy(path, dtype)
    elif found == "zarr":
        array = read_zarr(path)
    else:
        array = find_array(open_checkpoint(path), tensor)
    _check_asked(array, path, dtype, extents)
    return array


def _check_arguments(
    path: str,
    found: str,
    *,
    tensor: str | None,
    dtype: DType | None,
    shape: int | Iterable[int] | None,
    offset: int,
) -> tuple[tuple[int, ...] | None, int]:
    """Check what a caller says about an array of this format; gives shape and offset as integers."""
    extents = None if shape is None else _extents(shape)
    start = as_integer(offset, "offset")
    if dtype is not None:
        check_dtype(dtype)
    if tensor is not None and not isinstance(tensor, str):
        raise TypeError(f"tensor must be a string, found {type(tensor).__name__}")
    if tensor is not None and found != "safetensors":
        raise ValueError(
            f"{path!r} has the format {found} and holds one array without a name; leave tensor= out"
        )
    if start < 0 or (start and found != "raw"):
        raise ValueError(
            f"offset is for raw files and not negative; found {start} for {path!r}, which is {found}"
        )
    if extents is not None and min(extents, default=1) < 0:
        raise ValueError(f"an extent must not be negative, found shape {extents}")
    return extents, start


def _check_asked(
    array: StoredArray | Manifest, path: str, dtype: DType | None, extents: tuple[int, ...] | None
) -> None:
    name = getattr(array, "name", None)
    if dtype is not None and array.dtype is not dtype:
        raise FormatError(
            "the array has another dtype than was asked for",
            path=path,
            tensor=name,
            wanted=dtype.name,
            found=array.dtype.name,
        )
    if extents is not None and array.shape != extents:
        raise FormatError(
            "the array has another shape than was asked for",
            path=path,
            tensor=name,
            wanted=extents,
            found=array.shape,
        )


def _check_store(
    path: str,
    tile_shape: int | Iterable[int] | None,
    *,
    tensor: str | None,
    dtype: DType | None,
    shape: int | Iterable[int] | None,
    offset: int,
) -> None:
    """Refuse what a store, which knows itself, contradicts."""
    extents, _ = _check_arguments(path, "store", tensor=tensor, dtype=dtype, shape=shape, offset=offset)
    manifest = read_manifest(path)
    _check_asked(manifest, path, dtype, extents)
    if tile_shape is not None and _extents(tile_shape) != manifest.grid.tile_shape:
        raise ValueError(
            f"the store {path!r} is cut into tiles of {manifest.grid.tile_shape}, found tile_shape "
            f"{_extents(tile_shape)}; leave it out, or save the tensor again in other tiles"
        )


def _tensor(
    array: StoredArray,
    tile_shape: int | Iterable[int] | None,
    policy: ResidencyPolicy | None,
    memory_limit: int | None,
) -> Tensor:
    grid = tile_grid(array.shape, array.tile_shape if tile_shape is None else _extents(tile_shape))
    table = PartTable(
        array.name,
        PartMap(grid, array.part_shape, array.order),
        array.dtype.itemsize,
        array.files,
        array.file_of,
        array.offset_of,
        array.fill,
    )
    secondary = FileParts(table, dtype=array.dtype)
    carrier = TiledEvictable(
        CPU(0, mutable=False, dtype=array.dtype),
        secondary,
        grid.grid_shape,
        grid.tile_shape,
        residency_policy=policy,
        memory_limit=memory_limit,
    )
    return Tensor(carrier, 0, tile_major_layout(grid, array.order))


def _extents(shape: int | Iterable[int]) -> tuple[int, ...]:
    extents = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    return tuple([as_integer(extent, "an extent") for extent in extents])


def _path(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"path must be str or os.PathLike[str], found {type(path).__name__}")
    return name
