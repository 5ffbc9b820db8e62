"""The load-balancing loss under padding, corrected: megatron-core 0.19.2, transformer/moe/router.py and moe_utils.py.

The router's padding mask is True on padding (several docstrings there say the reverse; the code inverts it). To be
removed when tests/distributed/test_padding_mode.py passes without it.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import moe_utils, router
from torch import Tensor


def install() -> None:
    """Correct the count of tokens that the router weighs its loss with; a second call changes nothing."""
    router.get_tokens_per_expert_and_token_count = _token_counts


def _token_counts(
    routing_map: Tensor, reduce_group: Any, topk: int, with_padding_mask: bool = False
) -> tuple[Tensor, Any, Any]:
    """(tokens per expert over the group, valid tokens of one rank, valid tokens of the group).

    The router multiplies each rank's part of the load-balancing loss by the rank's own count times the group's size,
    to undo the division by all tokens. Ranks of one tensor- and context-parallel group hold different amounts of
    padding, which would weigh their parts unevenly and make the gradient depend on the layout: the count handed back
    is the group's mean. A group with padding only (a dummy microbatch) counts one token, since 0 / 0 is NaN; its loss
    stays 0, no token being routed.
    """
    per_expert, own, total = moe_utils.get_tokens_per_expert_and_token_count(
        routing_map, reduce_group, topk=topk, with_padding_mask=with_padding_mask
    )
    if with_padding_mask:
        total = total.clamp(min=1)
        own = total / reduce_group.size()
    return per_expert, own, total
