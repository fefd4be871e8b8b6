"""GGUF files, read with nothing but numpy.

Covers version 3 of the format and the tensor types that SmolLM2 is stored in.
"""

import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np


def read(path: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads a GGUF file, dequantising every tensor to float32.

    **Arguments:**

    - `path`: the file.

    **Returns:**

    A pair `(metadata, tensors)`: the file's metadata by key (numbers, strings, lists),
    and its tensors by name, each with its axes in row-major order.
    """
    cursor = _Cursor(np.asarray(np.memmap(path, np.uint8, mode="r")))
    magic, version = cursor.take(4).tobytes(), cursor.number("u4")
    if magic != b"GGUF" or version != 3:
        raise ValueError(f"`{path}` is not a GGUF file of version 3.")
    n_tensors, n_metadata = cursor.number("u8"), cursor.number("u8")
    metadata = {cursor.string(): cursor.value(cursor.number("u4")) for _ in range(n_metadata)}
    infos = [_tensor_info(cursor) for _ in range(n_tensors)]

    start = _round_up(cursor.pos, metadata.get("general.alignment", 32))
    tensors = {}
    for name, shape, kind, offset in infos:
        if kind not in _TENSOR_TYPES:
            raise NotImplementedError(f"`{name}` has GGUF tensor type {kind}.")
        block_size, block_nbytes, dequantise = _TENSOR_TYPES[kind]
        n_blocks = math.prod(shape) // block_size
        cursor.pos = start + offset
        blocks = cursor.take(n_blocks * block_nbytes).reshape(n_blocks, block_nbytes)
        tensors[name] = dequantise(blocks).reshape(shape)
    return metadata, tensors


class _Cursor:
    """A position in the file's bytes."""

    def __init__(self, data: np.ndarray):
        self.data = data
        self.pos = 0

    def take(self, nbytes: int) -> np.ndarray:
        self.pos += nbytes
        return self.data[self.pos - nbytes : self.pos]

    def number(self, dtype: str) -> Any:
        little_endian = np.dtype(dtype).newbyteorder("<")
        return self.take(little_endian.itemsize).view(little_endian)[0].item()

    def string(self) -> str:
        return self.take(self.number("u8")).tobytes().decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, length = self.number("u4"), self.number("u8")
            return [self.value(item_kind) for _ in range(length)]
        return self.number(_NUMBERS[kind])


# Metadata value types, as the format numbers them.
_NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?"}
_NUMBERS |= {10: "u8", 11: "i8", 12: "f8"}
_STRING, _ARRAY = 8, 9


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    # The fastest-varying axis comes first in the file.
    shape = tuple(cursor.number("u8") for _ in range(cursor.number("u4")))[::-1]
    return name, shape, cursor.number("u4"), cursor.number("u8")


def _round_up(pos: int, alignment: int) -> int:
    return -(-pos // alignment) * alignment


def _f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4").copy()


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    # block: [scale: f16, minimum: f16, 16 bytes: low nibbles are weights 0-15, high 16-31]
    scale, minimum = blocks[:, :2].view("<f2"), blocks[:, 2:4].view("<f2")
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return nibbles * scale.astype(np.float32) + minimum.astype(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    # block: [scale: f16, 32 weights: i8]
    scale, weights = blocks[:, :2].view("<f2"), blocks[:, 2:].view("i1")
    return weights * scale.astype(np.float32)


# type: (weights in a block, bytes in a block, blocks -> float32 weights)
_TENSOR_TYPES: dict[int, tuple[int, int, Callable[[np.ndarray], np.ndarray]]] = {
    0: (1, 4, _f32),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}
