"""Float32 weights out of a ``.safetensors`` file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.demo.weight_file import WeightFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from strideweave.demo.config import EncoderConfig

__all__ = ["SafetensorsWeights"]


class SafetensorsWeights(WeightFile):
    """Weights that the ``safetensors`` library reads; only what is asked for is copied into memory.

    Raises:
        ImportError: the library is missing; it comes with the extra ``strideweave[demo]``.
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or a weight is missing, of another shape, or not float32.
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
        self._file: Any = _open(path)
        try:
            self._check()
        except ValueError:
            self.close()
            raise

    def _check(self) -> None:
        present = set(self._file.keys())
        missing = [name for name in self.names if name not in present]
        if missing:
            raise ValueError(
                f"{self.path} lacks {len(missing)} of the encoder's {len(self.names)} weights, the first is "
                f"{missing[0]!r}; it holds {len(present)} tensors, such as {min(present, default=None)!r}"
            )
        for name in self.names:
            piece = self._file.get_slice(name)
            found, dtype = tuple(piece.get_shape()), piece.get_dtype()
            if found != self.shape(name) or dtype != "F32":
                raise ValueError(
                    f"{self.path}: {name} is {dtype} {found}, the encoder needs F32 {self.shape(name)}"
                )

    def _read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        if self._file is None:
            raise ValueError(f"{self.path} is closed: {name} cannot be read")
        if start == stop:  # the library refuses an empty range at the end
            return np.empty((0, *self.shape(name)[1:]), dtype=np.float32)
        piece: NDArray[np.float32] = self._file.get_slice(name)[start:stop]
        return piece

    def close(self) -> None:
        """Unmaps the file. Idempotent."""
        if self._file is not None:
            self._file.__exit__(None, None, None)
            self._file = None


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - optional library
    except ImportError as error:
        raise ImportError(
            "reading model.safetensors needs the safetensors library: pip install 'strideweave[demo]'"
        ) from error
    if not path.is_file():
        raise FileNotFoundError(f"there is no model file {path}")
    try:
        return safe_open(path, "np")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({path.stat().st_size} bytes): {error}"
        ) from error
