"""Reference numbers of gspo_vectors.json: computed in float64 from the published equations alone."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.config import LossConfig
from gspo_megatron.types import Microbatch

CASES: dict[str, Any] = json.loads(Path(__file__).with_name("gspo_vectors.json").read_text())["cases"]


def load_case(name: str) -> dict[str, Any]:
    """The case with its inputs; several share those of base_gspo."""
    case = CASES[name]
    return {**case, "inputs": CASES["base_gspo"]["inputs"]} if case.get("inputs") == "base" else case


def loss_config(case: dict[str, Any], name: str = "gspo", **keys: Any) -> LossConfig:
    """The case's band."""
    return LossConfig(
        name=name, clip_low=case.get("eps_low"), clip_high=case.get("eps_high"), old_logprobs="recompute", **keys
    )


def tensors(inputs: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Microbatch]:
    """logprobs_T (a leaf) and the microbatch of a case's [B, width] rows, laid end to end, pads included."""
    mask = torch.tensor(inputs["mask"], dtype=torch.bool)
    num_rows, width = mask.shape
    old = torch.tensor(inputs["logp_old"], dtype=dtype).flatten()
    rollout = torch.tensor(inputs.get("logp_rollout", torch.zeros_like(old).tolist()), dtype=dtype).flatten()
    advantages = torch.tensor(inputs["advantages"], dtype=dtype).view(num_rows, -1)  # one a row, or one a token
    starts = torch.arange(0, num_rows * width + 1, width, dtype=torch.int32)
    no_tokens = torch.zeros(num_rows * width, dtype=torch.int64)
    microbatch = Microbatch(
        tokens_T=no_tokens,
        labels_T=no_tokens,
        position_ids_T=torch.arange(width).repeat(num_rows),
        response_mask_T=mask.flatten(),
        response_index_T=torch.arange(num_rows).repeat_interleave(width),
        response_length_B=mask.sum(1),
        response_number_B=torch.arange(num_rows),
        advantages_B=advantages[:, 0].clone(),
        advantages_T=advantages.expand(num_rows, width).flatten(),
        is_padding_T=~mask.flatten(),
        rollout_logprobs_T=rollout,
        old_logprobs_T=old,
        ref_logprobs_T=None,
        rollout_routes_T=None,
        routed_experts=None,
        row_length=None,
        cu_seqlens=starts,
        cu_seqlens_padded=starts,
        max_seqlen=width,
        num_unpadded_tokens=int(mask.sum()),
    )
    return torch.tensor(inputs["logp"], dtype=dtype).flatten().requires_grad_(), microbatch
