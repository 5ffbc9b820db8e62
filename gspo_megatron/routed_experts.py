"""Routes of routing replay R3: SGLang's answer -> a rollout's bytes -> what each position of a packed batch replays.

Source of the record: sglang 0.5.21, srt/state_capturer. It lies beside the keys and values of each token: a token that
came from a cached prefix has the routes of the pass that filled the cache, one whose request was retracted those of
the pass that computed it anew. So every position has the routes that its own keys and values came from.

A push in the middle of a response makes a difference by rollout.pause_mode: in_place, each token keeps the routes of
the weights that sampled it; retract and abort, the tokens before it get routes of the newer weights, while their
log-probs stay those of the older ones. Such responses are used: the routes are of a policy that is nearer to the
trainer's, and without them most long responses would go. The metric rollout.mixed_version_fraction counts them;
num_retracted counts all that were computed anew, at equal weights, too, where only a near tie may turn.

SGLang answers one row per token but the last, which it sampled and never ran. A position without a route (that one,
padding, dummy sequences) replays experts in turn: i-th position, i * topk + (0 ... topk - 1) modulo the experts. No
log-prob of a response depends on it: the last position predicts nothing, and nobody attends to it or to padding.
Only an auxiliary loss, where one is switched on, sees the last position.

Shapes: n = tokens of prompt and response, L = one padded sequence.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.convert.families import family_of

BYTE_EXPERTS = 256
"""Up to so many, an expert's number takes one byte."""
SHOWN = 3
"""Places that an error lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteFormat:
    """Which layers and experts a model's routes are about."""

    num_layers: int
    """All: SGLang records layers without experts, too, as zeros."""
    moe_layers: tuple[int, ...]
    """Those with experts, from 0."""
    num_experts: int
    topk: int

    @classmethod
    def of(cls, hf_config: dict[str, Any]) -> RouteFormat:
        """Of the model of a config.json.

        Raises:
            ConversionError: config.json is not understood.
            ValueError: the model has no experts.
        """
        fields, _ = family_of(hf_config).transformer_config(hf_config)
        if "num_moe_experts" not in fields:
            raise ValueError(f"config.json: model_type={hf_config['model_type']}: has no experts, so no routes")
        pattern = fields.get("moe_layer_freq", [1] * fields["num_layers"])
        return cls(
            num_layers=fields["num_layers"],
            moe_layers=tuple(layer for layer, is_moe in enumerate(pattern) if is_moe),
            num_experts=fields["num_moe_experts"],
            topk=fields["moe_router_topk"],
        )

    def shape(self, num_tokens: int) -> tuple[int, int, int]:
        """[n - 1, MoE layers, topk] of a sequence of n tokens."""
        return num_tokens - 1, len(self.moe_layers), self.topk

    @property
    def dtype(self) -> torch.dtype:
        """Of the packed bytes."""
        return torch.uint8 if self.num_experts <= BYTE_EXPERTS else torch.int16

    def num_bytes(self, num_tokens: int) -> int:
        """Of the packed routes of a sequence of n tokens."""
        return torch.Size(self.shape(num_tokens)).numel() * self.dtype.itemsize


def pack_routes(answer: Any, num_tokens: int, routes: RouteFormat) -> bytes:
    """Check meta_info.routed_experts of one response and pack it.

    Args:
        answer: base64 of int32 [n - 1, layers, topk]; the layers are all of the model's.
        num_tokens: n of the response that the answer is about.
        routes: of the model.

    Returns:
        Rollout.routed_experts.

    Raises:
        ValueError: there is no record, or it is of other tokens, layers or experts.
    """
    if not isinstance(answer, str):
        raise ValueError(
            f"routed_experts={answer!r}: the server returned no routes; wants --enable-return-routed-experts there "
            "and return_routed_experts in the request"
        )
    try:
        raw = base64.b64decode(answer, validate=True)
    except binascii.Error as error:
        raise ValueError(f"routed_experts: not base64 ({error})") from error
    shape = (num_tokens - 1, routes.num_layers, routes.topk)
    if len(raw) != 4 * torch.Size(shape).numel():
        raise ValueError(
            f"routed_experts has {len(raw)} bytes, wants int32 [tokens - 1, layers, topk] = {list(shape)}: "
            "the routes are of other tokens, or of another model"
        )
    if not raw:
        return b""
    experts = torch.frombuffer(bytearray(raw), dtype=torch.int32).view(shape)[:, list(routes.moe_layers)]
    _check_experts(experts, routes)
    return experts.to(routes.dtype).numpy().tobytes()


def _check_experts(experts: Tensor, routes: RouteFormat) -> None:
    """Each row holds topk different experts; a server that did not record a layer answers zeros."""
    columns = experts.flatten(0, 1).t().contiguous()  # many rows at a time: much faster than to sort each
    wrong = ((columns < 0) | (columns >= routes.num_experts)).any(dim=0)
    for i in range(1, routes.topk):
        wrong |= (columns[:i] == columns[i]).any(dim=0)
    wrong = wrong.view(experts.shape[:2])
    if not wrong.any():
        return
    places = [
        f"token {token}, layer {routes.moe_layers[layer]}: {experts[token, layer].tolist()}"
        for token, layer in wrong.nonzero()[:SHOWN].tolist()
    ]
    raise ValueError(
        f"routed_experts: {int(wrong.sum())} of {wrong.numel()} routes are not {routes.topk} different experts in "
        f"[0, {routes.num_experts}): {'; '.join(places)}"
    )


def lay_out_routes(packed: bytes | None, num_tokens: int, length: int, routes: RouteFormat) -> Tensor:
    """[L, MoE layers, topk] int16 of one padded sequence: its own routes, then experts in turn.

    Args:
        packed: Rollout.routed_experts, routes.num_bytes long; None for a dummy sequence.
        num_tokens: n.
        length: L.
        routes: of the model.
    """
    in_turn = torch.arange(length * routes.topk).view(length, 1, routes.topk) % routes.num_experts
    laid_out = in_turn.to(torch.int16).repeat(1, len(routes.moe_layers), 1)
    if packed:
        own = torch.frombuffer(bytearray(packed), dtype=routes.dtype)
        laid_out[: num_tokens - 1] = own.view(routes.shape(num_tokens)).to(torch.int16)
    return laid_out
