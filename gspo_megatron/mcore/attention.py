"""Core attention without Transformer Engine, packed or in rows, with context parallelism; and torch's RMSNorm.

megatron-core's own DotProductAttention refuses packing and context parallelism, and its WrappedTorchNorm refuses
sequence parallelism. Both are needed on CPU, where Transformer Engine cannot run.

Shapes: T = packed tokens on this rank, B = sequences, L = longest sequence, n = heads on this rank, d = head size,
s = tokens of one row on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor


class TorchRMSNorm(torch.nn.Module):
    """RMSNorm in float32 whose weight may be sequence-parallel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class PackedCoreAttention(MegatronModule):
    """Causal attention within each packed sequence or row, by torch's scaled_dot_product_attention.

    In a layer with a sliding window (config.window_size and window_attn_skip_freq) a token sees itself and the
    window_size[0] tokens before it. Under context parallelism each rank holds chunks r and 2*cp-1-r of every sequence
    (Megatron's balanced layout); keys and values are all-gathered. Collective over cp_group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_left = config.window_size[0] if has_window else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [T, n, d], or rows [s, B, n, d].
            key: [T, n_kv, d], or rows [s, B, n_kv, d].
            value: [T, n_kv, d], or rows [s, B, n_kv, d].
            attention_mask: unused; sequences are causal, and their padding is at their end.
            attn_mask_type: unused, always causal.
            attention_bias: unused.
            packed_seq_params: sequence starts, padded, of the whole (not context-parallel) sequences; None for rows.

        Returns:
            [T, n * d], or rows [s, B, n * d].
        """
        if packed_seq_params is not None:
            starts = packed_seq_params.cu_seqlens_q_padded
            return self._forward_packed(query, key, value, starts[1:] - starts[:-1])
        num_tokens, num_rows = query.shape[:2]
        lengths = torch.full((num_rows,), num_tokens * self.cp_group.size(), device=query.device)
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._forward_packed(query, key, value, lengths)
        return out.view(num_rows, num_tokens, -1).transpose(0, 1).contiguous()

    def _forward_packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        """[T, n, d] each -> [T, n * d].

        lengths [B]: of whole sequences; 2 * cp_size divides each when cp_size > 1.
        """
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        if cp_size == 1:
            rows_B_L, valid_B_L = _padded_rows(lengths)
            q, k, v = (_to_batch(x, rows_B_L) for x in (query, key, value))
            mask = None  # causal is enough: padding is at the end, and no real token sees it
            if self.window_left is not None:
                place_L = torch.arange(rows_B_L.shape[1], device=query.device)
                mask = self._visible(place_L[None], len(place_L))
            out = self._attend(q, k, v, mask)
        else:
            key, value = (
                gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.cp_group)
                for x in (key, value)
            )
            position_T, order = _context_parallel_positions(lengths, cp_size)
            key, value = key[order], value[order]
            rows_B_L, valid_B_L = _padded_rows(lengths // cp_size)
            rows_B_K, _ = _padded_rows(lengths)
            own = position_T.view(cp_size, -1)[cp_rank]
            mask = self._visible(_to_batch(own, rows_B_L), rows_B_K.shape[1])
            q, k, v = _to_batch(query, rows_B_L), _to_batch(key, rows_B_K), _to_batch(value, rows_B_K)
            out = self._attend(q, k, v, mask)
        return out[valid_B_L].flatten(1)

    def _visible(self, q_position_B_L: Tensor, num_keys: int) -> Tensor:
        """[B, 1, L, K] bool: which keys a query sees, by their positions in the sequence.

        Places that pad a row repeat a real position or lie after it, so each sees a key: none becomes NaN.
        """
        distance_B_1_L_K = q_position_B_L[:, None, :, None] - torch.arange(num_keys, device=q_position_B_L.device)
        visible = distance_B_1_L_K >= 0
        return visible if self.window_left is None else visible & (distance_B_1_L_K <= self.window_left)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[B, L, n, d] each -> [B, L, n, d]; without a mask, causal."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """No parameters, so nothing to save."""
        return {}


def _padded_rows(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row of the packed tensor for each place of a padded batch.

    Args:
        lengths: [B] int, tokens of each packed sequence.

    Returns:
        rows [B, L] int64 (padding repeats the sequence's last row) and valid [B, L] bool.
    """
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(int(lengths.max()), device=lengths.device)
    valid = place[None] < lengths[:, None]
    rows = starts[:, None] + torch.minimum(place[None], lengths[:, None] - 1)
    return rows.long(), valid


def _to_batch(packed: Tensor, rows: Tensor) -> Tensor:
    """[T, ...] -> [B, L, ...]."""
    return packed.index_select(0, rows.flatten()).view(*rows.shape, *packed.shape[1:])


def _context_parallel_positions(lengths: Tensor, cp_size: int) -> tuple[Tensor, Tensor]:
    """Positions of all-gathered tokens, and the permutation to whole sequences in order.

    Args:
        lengths: [B] int, whole sequences; each a multiple of 2 * cp_size.
        cp_size: context-parallel ranks.

    Returns:
        position [cp_size * T] int64, inside the sequence, in gathered (rank-major) order; order [cp_size * T] int64.
    """
    positions, sequences = [], []
    for rank in range(cp_size):
        for index, length in enumerate(lengths.tolist()):
            chunk = length // (2 * cp_size)
            for part in (rank, 2 * cp_size - 1 - rank):
                positions.append(torch.arange(part * chunk, (part + 1) * chunk, device=lengths.device))
                sequences.append(torch.full((chunk,), index, device=lengths.device))
    position, sequence = torch.cat(positions), torch.cat(sequences)
    order = torch.argsort(sequence * (int(lengths.max()) + 1) + position)
    return position, order
