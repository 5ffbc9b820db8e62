"""Checksums of tensors: what they are of, and that a change shows."""

import random

import pytest
import torch

from gspo_megatron import checksum
from gspo_megatron.checksum import Checksums, sum_of_words, xxh3

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)


def test_xxh3_is_the_published_hash_of_the_bytes():
    assert xxh3(torch.empty(0)) == "2d06800538d394c2"  # XXH3_64bits("")
    assert xxh3(torch.tensor([ord("a")], dtype=torch.uint8)) == "e6c632b61e964e1f"  # XXH3_64bits("a")


def both(tensor):
    return xxh3(tensor), int(sum_of_words(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksum_depends_on_bytes_alone_not_on_memory_layout(dtype):
    values = torch.randint(0, 100, (6, 10)).to(dtype)
    assert both(values) == both(values.clone().t().contiguous().t())
    shifted = torch.cat([values.new_zeros(1), values.flatten()])[1:].view(6, 10)  # begins at an odd place
    assert both(values) == both(shifted)
    assert both(values) != both(values.t())


def test_every_flipped_bit_shows():
    data = torch.randint(0, 256, (45,), dtype=torch.uint8)
    reference = both(data)
    for byte in range(45):
        for bit in range(8):
            flipped = data.clone()
            flipped[byte] ^= 1 << bit
            assert all(a != b for a, b in zip(both(flipped), reference, strict=True))


def test_exchanged_words_show_even_if_they_differ_in_one_bit_only():
    rng = random.Random(3)
    for bit in range(64):
        words = torch.zeros(64, dtype=torch.int64)
        i, j = rng.sample(range(64), 2)
        words[i] = 1 << bit if bit < 63 else -(2**63)
        exchanged = words.clone()
        exchanged[[i, j]] = words[[j, i]]
        assert int(sum_of_words(words)) != int(sum_of_words(exchanged)), bit


def test_length_counts_even_of_zeros():
    sums = {int(sum_of_words(torch.zeros(n, dtype=torch.uint8))) for n in range(40)}
    assert len(sums) == 40


def test_sum_does_not_depend_on_how_it_is_cut(monkeypatch):
    data = torch.randn(1000, 7)
    whole = int(sum_of_words(data))
    monkeypatch.setattr(checksum, "CHUNK_WORDS", 64)
    assert int(sum_of_words(data)) == whole


def test_checksums_are_by_name_and_a_name_comes_once():
    sums = Checksums()
    for i, dtype in enumerate(DTYPES):
        sums.add(f"t{i}", torch.ones(3).to(dtype))
    assert list(sums.resolve()) == [f"t{i}" for i in range(len(DTYPES))]
    assert sums.resolve()["t0"] == xxh3(torch.ones(3))
    with pytest.raises(ValueError, match="t1: comes twice"):
        sums.add("t1", torch.ones(1))
