"""requirements/: complete pins, and the same versions for tests and for production."""

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
# Their newer versions, which gpu.txt has, do not exist for Python 3.11.
PYTHON_311_ONLY = {"contourpy", "networkx"}


def pins(name):
    lines = [line for line in (REQUIREMENTS / name).read_text().splitlines() if line and not line.startswith("#")]
    return lines, dict(line.split("==") for line in lines if line.count("==") == 1)


@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt"])
def test_every_line_is_one_exact_pin_under_the_normalised_name_in_order(name):
    lines, pinned = pins(name)
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*==[a-z0-9.!+]+", line)] == []
    assert list(pinned) == sorted(pinned)
    assert len(pinned) == len(lines)


def test_cpu_and_gpu_agree_on_every_package_that_both_list():
    cpu, gpu = pins("cpu.txt")[1], pins("gpu.txt")[1]
    assert {n: (cpu[n], gpu[n]) for n in cpu.keys() & gpu.keys() if cpu[n] != gpu[n]}.keys() == PYTHON_311_ONLY
    assert {"torch", "transformers", "megatron-core", "sglang", "triton", "numpy"} <= cpu.keys() & gpu.keys()
