"""Checksums of weights, by which the trainer and the servers compare what a push sent with what arrived.

CPU tensors: XXH3, 64 bits, of the bytes. CUDA tensors: a sum over 64-bit words on the device, which is exact in any
order of summation; nothing waits for it before resolve. The two sides of a push hold the same kind of tensor.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

CHUNK_WORDS = 2**24
"""Words that sum_of_words works on at once: its temporaries are three times 128 MiB."""
_WORD_BYTES = 8
_PRIME = -7046029254386353131  # 0x9E3779B97F4A7C15, 2^64 over the golden ratio, as int64


def bytes_of(tensor: Tensor) -> Tensor:
    """[bytes] uint8, of the tensor's own memory where it lies in one piece."""
    if tensor.numel() == 1:  # torch calls one contiguous whatever its stride, and gives no view of it then
        tensor = tensor.as_strided((1,), (1,))
    return tensor.contiguous().flatten().view(torch.uint8)


def xxh3(tensor: Tensor) -> str:
    """XXH3 of a CPU tensor's bytes, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(bytes_of(tensor.detach()).numpy().data)


def sum_of_words(tensor: Tensor) -> Tensor:
    """Sum modulo 2^64 of a tensor's 64-bit words, each mixed and times an odd number that depends on its place.

    A changed bit always changes the sum: its word changes by mixing, which can be undone, and an odd factor keeps
    that difference. Mixing brings the upper half of a word into the lower one, so that words that differ in their
    highest bit alone cannot change places unseen.

    Returns:
        [] int64 on the tensor's device.
    """
    data = bytes_of(tensor.detach())
    num_bytes = data.numel()
    padding = -num_bytes % _WORD_BYTES
    if padding or data.storage_offset() % _WORD_BYTES:
        data = torch.cat([data, data.new_zeros(padding)])
    words = data.view(torch.int64)
    total = torch.tensor(num_bytes * 2 + 1, dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        place = torch.arange(start, start + part.numel(), device=data.device) * _PRIME
        factor = place ^ (place >> 29) | 1
        total = total + ((part ^ (part >> 32 & 0xFFFFFFFF)) * factor).sum()
    return total


class Checksums:
    """Of named tensors, in the order of add. Holds no tensor."""

    def __init__(self) -> None:
        self._values: dict[str, str | Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor's checksum.

        Raises:
            ValueError: the name was there before.
        """
        if name in self._values:
            raise ValueError(f"{name}: comes twice")
        self._values[name] = xxh3(tensor) if tensor.device.type == "cpu" else sum_of_words(tensor)

    def resolve(self) -> dict[str, str]:
        """Checksum of each tensor, hexadecimal; waits for the device once."""
        sums = [value for value in self._values.values() if isinstance(value, Tensor)]
        words = iter(torch.stack(sums).tolist() if sums else [])
        return {
            name: value if isinstance(value, str) else f"{next(words) % 2**64:016x}"
            for name, value in self._values.items()
        }
