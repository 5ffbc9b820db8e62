"""kill -9 at random points of a conversion: never a half-written target, and resuming gives the same bytes."""

import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.unit.conversion import command, environment, hashes, make_hf_dir, start_and_wait

NUM_KILLS = 20
SIZES = {"hidden_size": 512, "moe_intermediate_size": 512, "num_local_experts": 32, "num_hidden_layers": 6}
SMALL_FILES = "6MB"
TOOLS = {"convert_hf_to_mcore": ("--hf-dir", "--mcore-dir"), "convert_mcore_to_hf": ("--mcore-dir", "--hf-dir")}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A model of 300 MiB in both forms."""
    folder = tmp_path_factory.mktemp("kill")
    make_hf_dir(folder / "hf", dtype=torch.bfloat16, num_files=4, **SIZES)
    subprocess.run(arguments("convert_hf_to_mcore", folder / "hf", folder / "mcore"), env=environment(), check=True)
    return {"convert_hf_to_mcore": folder / "hf", "convert_mcore_to_hf": folder / "mcore"}


def arguments(tool, source, target):
    first, second = TOOLS[tool]
    return command(tool, first, source, second, target, "--max-shard-size", SMALL_FILES, "--workers", 2)


@pytest.mark.parametrize("tool", TOOLS)
def test_killed_conversions_resume_to_the_same_bytes(tool, sources, tmp_path):
    seed = int(os.environ.get("KILL_SEED", random.randrange(2**32)))
    print(f"KILL_SEED={seed}")
    draw = random.Random(seed)
    subprocess.run(arguments(tool, sources[tool], tmp_path / "whole"), env=environment(), check=True)
    want = hashes(tmp_path / "whole")
    num_files = sum(name.endswith((".distcp", ".safetensors")) for name in want) - 1
    for kill in range(NUM_KILLS):
        target = tmp_path / f"target{kill}"
        point = draw.randrange(num_files), draw.uniform(0.0, 0.3)
        process = start_and_wait(arguments(tool, sources[tool], target), target, num_files=point[0])
        time.sleep(point[1])
        process.kill()
        process.communicate()
        where = f"KILL_SEED={seed}, {point[1]} s after file {point[0]}"
        assert not target.exists() or hashes(target) == want, where
        partial = Path(f"{target}.partial")
        if not target.exists():
            subprocess.run(arguments(tool, sources[tool], target), env=environment(), check=True)
        assert hashes(target) == want, where
        assert not partial.exists()
        shutil.rmtree(target)
