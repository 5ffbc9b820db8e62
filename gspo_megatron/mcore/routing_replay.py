"""Routing replay: the update routes every token as the old-log-prob pass did (R2), or both do as SGLang did (R3).

Source: megatron-core 0.19.2, transformer/moe/router_replay.py and its use in moe_utils.py; R3: arXiv:2510.11370. Core
gathers the current router's scores at given expert indices, so gates and gradients are the current policy's and only
the choice of experts is the old one's. Core leaves the rest to its caller, which is this file: whose routes each
router call gets.

- A router called inside forward_step gets the routes of the microbatch that forward_step runs.
- A router called outside of it is being recomputed in the backward pass. Every schedule takes a chunk's microbatches
  backward in the order in which it took them forward, so the routes come from a queue (core's replay_backward_list).

Both passes run the same microbatches on the same layout. Under R2 each rank replays what it recorded itself; under R3
each cuts its own layers and tokens out of the microbatch's. So nothing is communicated. What a position without a
route replays under R3, the last of a sequence and padding, is in routed_experts.py, and changes no log-prob. An
auxiliary loss, where one is switched on, still counts the experts that the current router would choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gspo_megatron.types import Microbatch


class RoutingReplay:
    """The routers of one policy on this rank; routes freely unless told to record or given routes."""

    def __init__(self, chunks: Sequence[Any], config: TransformerConfig, *, tp_rank: int) -> None:
        """Collect the chunks' routers in layer order; without config.moe_enable_routing_replay there are none."""
        modules = [[m for m in chunk.modules() if isinstance(m, TopKRouter)] for chunk in chunks]
        self.routers: list[list[RouterReplay]] = [
            [m.router_replay for m in routers if m.router_replay is not None] for routers in modules
        ]
        pattern = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * config.num_layers
        # Of each router, how many MoE layers of the whole model lie before its own; core counts layers from 1.
        self._places = [[sum(pattern[: m.layer_number - 1]) for m in routers] for routers in modules]
        # Core also keeps them in one list for the whole process, which would mix models and keep dead ones alive.
        RouterReplay.clear_global_router_replay_instances()
        self._is_enabled = config.moe_enable_routing_replay
        self._topk: int = config.moe_router_topk
        self._slices = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._slice = tp_rank if config.sequence_parallel else 0
        # Core queues a microbatch's routes for the backward pass whether or not it recomputes; where it does not,
        # the queue would hold the routes of the whole step on the device.
        self._recomputes_routers = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        )
        self._recorded: list[list[Tensor]] | None = None

    def with_rollout_routes(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with this rank's part of its rollout_routes_T as routed_experts.

        Routers see position after position of all rows; under sequence parallel, this rank's slice of the positions.

        Raises:
            ValueError: it has none, or the policy was built without routing replay.
        """
        routes_T = microbatch.rollout_routes_T
        if routes_T is None or not self._is_enabled:
            raise ValueError(
                "loss.routing_replay=r3 wants rollout_routes_T in every microbatch and a policy built with it; "
                f"got {'none' if routes_T is None else 'them'}, and {'one' if self._is_enabled else 'one without'}"
            )
        by_position = routes_T.unflatten(0, (microbatch.num_rows, -1)).transpose(0, 1)
        own = by_position.chunk(self._slices)[self._slice].flatten(0, 1).transpose(0, 1)
        return replace(
            microbatch,
            rollout_routes_T=None,
            routed_experts=tuple(own[places].contiguous() for places in self._places),
        )

    @contextmanager
    def recording(self) -> Iterator[list[tuple[Tensor, ...]]]:
        """Record the routes of the one forward-only pass in the body; routes that its microbatches carry are ignored.

        Yields:
            A list that is filled when the body ends: of each microbatch, its routed_experts (types.py), on the CPU.

        Raises:
            ValueError: the policy was built without routing replay.
        """
        if not self._is_enabled:
            raise ValueError("cannot record routes: the policy was built with loss.routing_replay=none, wants r2")
        self._recorded = [[] for _ in self.routers]
        routes: list[tuple[Tensor, ...]] = []
        try:
            yield routes
            routes += [tuple(r.cpu() for r in chunks) for chunks in zip(*self._recorded, strict=True)]
        finally:
            self._recorded = None

    @contextmanager
    def whole_pass(self, microbatches: list[Microbatch]) -> Iterator[None]:
        """Around a schedule: check the routes before it, what is left of them after it, and leave nothing behind.

        Raises:
            ValueError: some microbatches have routes and others do not, or routes that do not fit this rank's model.
            RuntimeError: a router was recomputed for some microbatches only, so that it may have replayed the routes
                of another one.
        """
        self._check_routes(microbatches)
        try:
            yield
            for c, routers in enumerate(self.routers):
                for i, router in enumerate(routers):
                    left = len(router.replay_backward_list)
                    if left not in (0, len(microbatches)):
                        raise RuntimeError(
                            f"routing replay, chunk {c}, MoE layer {i}: the backward pass left the routes of {left} "
                            f"of {len(microbatches)} microbatches, wants none, or all where it never recomputes; "
                            "gradients may be of another microbatch's routes"
                        )
        finally:
            for routers in self.routers:
                for router in routers:
                    router.clear_indices()
                    router.clear_router_replay_action()

    @contextmanager
    def forward(self, chunk: int, microbatch: Microbatch) -> Iterator[None]:
        """Around one chunk's forward pass over one microbatch: record, replay what it carries, or route freely."""
        routers = self.routers[chunk]
        if self._recorded is not None:
            for router in routers:
                router.clear_indices()
                router.set_router_replay_action(RouterReplayAction.RECORD)
            yield
            self._recorded[chunk].append(self._read(routers, microbatch))
        elif microbatch.routed_experts is not None:
            targets = microbatch.routed_experts[chunk].to(torch.int64)
            for router, target in zip(routers, targets, strict=True):
                if self._recomputes_routers:
                    router.set_target_indices(target)
                else:
                    router.target_topk_idx = target
                router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            yield
            for router in routers:
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        else:
            yield

    def _num_tokens(self, microbatch: Microbatch) -> int:
        """Tokens that a router of this rank sees: its sequence-parallel slice."""
        return len(microbatch.tokens_T) // self._slices

    def _read(self, routers: list[RouterReplay], microbatch: Microbatch) -> Tensor:
        """[MoE layers of the chunk, tokens, topk] int16 (experts are fewer than 32,768), on the routers' device."""
        device = microbatch.tokens_T.device
        shape = (len(routers), self._num_tokens(microbatch), self._topk)
        routes = torch.empty(shape, dtype=torch.int16, device=device)
        for i, router in enumerate(routers):
            recorded = router.get_recorded_indices()
            if recorded is None or recorded.shape != shape[1:]:
                got = None if recorded is None else tuple(recorded.shape)
                raise ValueError(f"routing replay, MoE layer {i} of the chunk: recorded {got}, wants {shape[1:]}")
            routes[i] = recorded
        return routes

    def _check_routes(self, microbatches: list[Microbatch]) -> None:
        missing = [i for i, m in enumerate(microbatches) if m.routed_experts is None]
        if self._recorded is not None or len(missing) == len(microbatches):
            return
        if missing:
            raise ValueError(
                f"microbatches {missing} have no routed_experts and the others have; record all with add_old_logprobs"
            )
        if not self._is_enabled:
            raise ValueError("microbatches have routed_experts; the policy was built with loss.routing_replay=none")
        for i, m in enumerate(microbatches):
            got = [tuple(routes.shape) for routes in m.routed_experts or ()]
            wants = [(len(routers), self._num_tokens(m), self._topk) for routers in self.routers]
            if got != wants:
                raise ValueError(
                    f"microbatch {i}: routed_experts has [MoE layers, tokens, topk] = {got}, wants {wants} per model "
                    "chunk; replay them on the rank, layout and packing that recorded them"
                )
