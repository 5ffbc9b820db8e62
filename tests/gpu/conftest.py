"""A model whose sizes suit Transformer Engine's kernels, and steps on it in processes of their own."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.engine import take_port
from gspo_megatron.process import Torchrun, trainer_environment

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
LIMIT_S = 240.0
SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 128,
    "initializer_range": 0.08,
}
"""Multiples of 16 throughout; the rest is the CPU recipe's model."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with random float32 weights whose norms are away from 1."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = Qwen3MoeConfig.from_pretrained(ROOT / "recipes" / "tiny-moe", **SIZES)
    model = Qwen3MoeForCausalLM(config).float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ROOT / "recipes" / "tiny-moe" / name, path / name)
    return path


class PolicySteps:
    """Runs tests.gpu.policy_step; equal calls run once."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        self.model_dir, self.folder = model_dir, folder
        self._results: dict[str, dict[str, Any]] = {}

    def __call__(
        self,
        *overrides: str,
        ranks: int = 1,
        num_steps: int = 1,
        lr: float = 1.0e-4,
        save: Path | None = None,
        load: Path | None = None,
        leaves: bool = False,
    ) -> dict[str, Any]:
        """Results of rank 0; overrides must name device and model.dtype, leaves: as policy_step.run."""
        common = [
            f"model.hf_dir={self.model_dir}",
            f"model.load={self.model_dir}",
            "cold_start=null",
            f"cluster.trainer_ranks={ranks}",
            f"parallel.expert_model_parallel_size={ranks}",
            "parallel.use_distributed_optimizer=false",
            "optimizer.clip_grad=1.0e+9",
        ]
        files = {"save": str(save) if save else None, "load": str(load) if load else None}
        job = {"overrides": common + list(overrides), "num_steps": num_steps, "lr": lr, "leaves": leaves, **files}
        key = json.dumps(job)
        if key not in self._results:
            self._results[key] = self._run(job, ranks, "cuda" if "device=cuda" in overrides else "cpu")
        return self._results[key]

    def _run(self, job: dict[str, Any], ranks: int, device: str) -> dict[str, Any]:
        import torch

        base = self.folder / f"job{len(self._results)}"
        job_path, out_path = base.with_suffix(".json"), base.with_suffix(".pt")
        job_path.write_text(json.dumps(job | {"out": str(out_path)}))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks))))
        environment = trainer_environment(device, os.environ, cuda_devices=visible if device == "cuda" else "")
        torchrun = Torchrun(
            "tests.gpu.policy_step",
            [str(job_path)],
            num_ranks=ranks,
            host=HOST,
            port=take_port(HOST, 0),
            environment=environment | {"PYTHONPATH": str(ROOT)},
            log_path=base.with_suffix(".log"),
        )
        deadline = time.monotonic() + LIMIT_S
        try:
            while torchrun.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            torchrun.stop()
        assert torchrun.poll() == 0, torchrun.log_path.read_text()
        results: dict[str, Any] = torch.load(out_path)
        return results


@pytest.fixture(scope="session")
def policy_steps(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicySteps:
    """The runner; its results are shared by all tests of a session."""
    return PolicySteps(model_dir, tmp_path_factory.mktemp("steps"))
