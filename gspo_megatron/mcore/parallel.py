"""Process groups: torch.distributed and megatron-core's parallel state, from the recipe."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from gspo_megatron.batch import BatchLayout
from gspo_megatron.config import Recipe
from gspo_megatron.mcore import router_padding
from gspo_megatron.mcore.rank import OtherRankFailed

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """This process's place on Megatron's axes, and the groups that the maths layer takes as arguments."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    tp_group: Any
    cp_rank: int
    cp_size: int
    cp_group: Any
    dp_rank: int
    dp_size: int
    pp_size: int
    is_last_stage: bool
    """This rank computes the loss (with interleaving: its last chunk does)."""
    pack_alignment: int
    """As BatchLayout's."""
    microbatch_multiple: int
    """As BatchLayout's."""
    device: torch.device

    @property
    def batch_layout(self) -> BatchLayout:
        """How batch.py divides data; sequence parallel cuts the packed tokens of a rank into tp_size slices."""
        return BatchLayout(
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            cp_rank=self.cp_rank,
            cp_size=self.cp_size,
            alignment=self.tp_size,
            pack_alignment=self.pack_alignment,
            microbatch_multiple=self.microbatch_multiple,
        )

    @property
    def shared_cp_group(self) -> Any:
        """The context-parallel group where responses are cut over ranks, else None."""
        return self.cp_group if self.cp_size > 1 else None

    def on_rank_0(self, fn: Callable[[], T]) -> T:
        """Run fn on rank 0 and hand its (picklable) result to all. Collective over the default group.

        Raises:
            OtherRankFailed: on the other ranks, when fn raised on rank 0; so that none waits in a collective.
        """
        box: list[Any] = [False, None]
        try:
            if self.rank == 0:
                box = [True, fn()]
        finally:
            dist.broadcast_object_list(box, src=0)
        if not box[0]:
            raise OtherRankFailed("rank 0 failed; its message is above or in its log")
        result: T = box[1]
        return result

    def on_every_rank(self, fn: Callable[[], T]) -> list[T]:
        """Run fn on each rank and hand all (picklable) results, by rank, to all. Collective over the default group.

        Raises:
            OtherRankFailed: on the ranks where fn did not raise, when it raised on one.
        """
        mine: tuple[bool, Any] = (False, None)
        boxes: list[Any] = [None] * self.world_size
        try:
            mine = (True, fn())
        finally:
            dist.all_gather_object(boxes, mine)
        failed = [rank for rank, (is_done, _) in enumerate(boxes) if not is_done]
        if failed:
            raise OtherRankFailed(f"ranks {failed} failed; their messages are above or in their logs")
        return [result for _, result in boxes]


def pack_alignment(recipe: Recipe) -> int:
    """Tokens that a rank's microbatch must be a multiple of for FP8, 1 without.

    The weight gradient multiplies over the token dimension, where an FP8 product wants whole groups of 16, and MXFP8's
    scales whole blocks of 32 (megatron-core's get_fp8_align_size). With sequence parallel each tensor-parallel slice
    is quantised on its own before it is gathered, so each must be whole.
    """
    if not recipe.model.mcore.get("fp8"):
        return 1
    return recipe.parallel.tensor_model_parallel_size * (32 if recipe.model.mcore.get("fp8_recipe") == "mxfp8" else 16)


def microbatch_multiple(recipe: Recipe) -> int:
    """Microbatches that an optimizer step must be a multiple of.

    The interleaved schedule runs them in groups of the pipeline size, and refuses a rest (megatron-core's
    schedules.py, microbatch_group_size_per_vp_stage).
    """
    p = recipe.parallel
    return 1 if p.virtual_pipeline_model_parallel_size is None else p.pipeline_model_parallel_size


def initialize(recipe: Recipe) -> Parallel:
    """Join the process group (torchrun's environment) and build Megatron's groups. Collective over all ranks."""
    router_padding.install()
    device = torch.device("cpu")
    if recipe.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if recipe.device == "cuda" else "gloo",
            timeout=datetime.timedelta(seconds=recipe.cluster.collective_timeout_s),
        )
    p = recipe.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tensor_model_parallel_size,
        pipeline_model_parallel_size=p.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline_model_parallel_size,
        context_parallel_size=p.context_parallel_size,
        expert_model_parallel_size=p.expert_model_parallel_size,
        expert_tensor_parallel_size=p.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(recipe.cluster.collective_timeout_s / 60)),
    )
    torch.manual_seed(recipe.seed)
    model_parallel_cuda_manual_seed(recipe.seed)
    return Parallel(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        pack_alignment=pack_alignment(recipe),
        microbatch_multiple=microbatch_multiple(recipe),
        device=device,
    )
