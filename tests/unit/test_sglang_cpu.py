"""The CPU replacements that can be tested without a server."""

import os
import struct
import subprocess
import sys

import pytest
import torch

from gspo_megatron import sglang_cpu


def murmur3(data, h=0):
    """MurmurHash3_x86_32 of whole 4-byte blocks, on bytes, as its author publishes it."""

    def rotate(x, r):
        return (x << r | x >> (32 - r)) & 0xFFFFFFFF

    for (k,) in struct.iter_unpack("<I", data):
        h ^= rotate(k * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotate(h, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_reference_hash_gives_the_published_value():
    assert murmur3(b"test") == 0xBA6BD213


def test_hash_is_murmur3_of_seed_position_and_column():
    seeds = [0, 1, 2**31 - 1, 2**62 + 12345, 2**64 - 1]
    positions, columns = [0, 1, 77, 2**31 - 1, 5], [0, 1, 47, 151935]
    hashed = sglang_cpu.murmur_hash32(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions, dtype=torch.int32), torch.tensor(columns)
    )
    assert hashed.dtype == torch.uint32
    assert hashed.tolist() == [
        [murmur3(struct.pack("<QII", s, p, c)) for c in columns] for s, p in zip(seeds, positions, strict=True)
    ]


def test_another_sglang_version_is_refused(monkeypatch):
    sglang_cpu.check_version()
    monkeypatch.setattr(sglang_cpu, "CHECKED_VERSIONS", ("0.0.1",))
    with pytest.raises(RuntimeError, match=r"sglang==0\.5\.21: .* 0\.0\.1; install one of these"):
        sglang_cpu.check_version()


def test_a_missing_entry_point_is_refused(monkeypatch):
    sglang_cpu.check_entry_point()
    monkeypatch.setattr(sglang_cpu, "ENTRY_POINT", "gspo_megatron.other:plugin")
    with pytest.raises(RuntimeError, match="wants 'gspo_megatron.other:plugin' once; .*pip install"):
        sglang_cpu.check_entry_point()


STAND_IN = """
import importlib.util, sys
import gspo_megatron.sglang_cpu
assert importlib.util.find_spec("not_a_package") is None
import sgl_kernel.flash_attn
from torchvision.transforms import InterpolationMode
mode = InterpolationMode.BICUBIC
try:
    mode()
except NotImplementedError as error:
    print(error)
"""


def run_with_device(device):
    environment = {**os.environ, "GSPO_MEGATRON_DEVICE": device}
    return subprocess.run(
        [sys.executable, "-c", STAND_IN], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_absent_packages_can_be_imported_but_not_called():
    done = run_with_device("cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "torchvision.transforms.InterpolationMode.BICUBIC was called, but its package is not"
    )


def test_nothing_is_replaced_on_another_device():
    done = run_with_device("cuda")
    assert done.returncode != 0 and "No module named 'sgl_kernel'" in done.stderr
