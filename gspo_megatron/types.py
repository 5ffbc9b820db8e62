"""The records that stages hand to each other: Prompt, Rollout, RolloutGroup, Microbatch, TrainBatch.

Shapes: B = responses of the microbatch, T = packed tokens on this rank, S = segments (= B) + 1.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


MAX_EXPONENT = 20.0
"""Overflow guard of every exponent over log-ratios, nats. Not in the papers; a ratio this far out is outside every
band. Its square, exp(40), still is a finite number; the log-ratios themselves are never clamped."""

TOO_SHORT = "too_short"
"""Rollout.filtered_because of a response below rollout.min_response_tokens."""
STALE = "stale"
"""Rollout.filtered_because of a response with a token older than cluster.max_policy_lag."""


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not finite: the weights cannot be trusted, so the run stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One task x, as text, as token ids and with what its scorer needs.

    Example: Prompt(prompt_id="9f3a...", text="a25,7>", token_ids=(10, 2, 5, 11, 7, 13), expected="7,25", entry={...})
    """

    prompt_id: str
    """SHA-256 of the text, hex: equal texts are the same prompt."""
    text: str
    token_ids: tuple[int, ...]
    expected: str
    """The one exact response; held-out accuracy compares with it."""
    entry: dict[str, Any]
    """The scorer's own record, JSON-able."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sampled response y with its record."""

    response_ids: tuple[int, ...]
    """Token ids as SGLang sampled them, EOS included when it was sampled."""
    rollout_logprobs: tuple[float, ...]
    """SGLang's log-probability of each response token, nats."""
    weight_versions: tuple[int, ...]
    """The weight_version that produced each response token; under asynchronous training they may rise within a
    response. Of a token that was put in between: that of the token before."""
    finish_reason: str
    """`stop` (EOS) or `length` (max_response_tokens or max_turns)."""
    text: str
    """The response decoded, without EOS."""
    sampling_seed: int
    reward: float | None = None
    is_exact: bool | None = None
    advantage: float | None = None
    """Group-relative; of every token, unless token_advantages says otherwise."""
    token_advantages: tuple[float, ...] | None = None
    """One per response token, for objectives that read them per token (gspo and gmpo read advantage); None: all equal
    advantage."""
    response_mask: tuple[bool, ...] | None = None
    """True on tokens that the policy sampled, False on those put in between (a tool's answer); None: all sampled."""
    turn_lengths: tuple[int, ...] | None = None
    """Sampled tokens of each turn, which add up to num_sampled_tokens; None without rollout.multi_turn."""
    turn_rewards: tuple[float, ...] | None = None
    """What rollout.multi_turn gave for each turn, 0 where it gave nothing; None: it gave nothing at all."""
    ref_logprobs: tuple[float, ...] | None = None
    """The reference policy's log-probability of each response token, nats; None without a KL penalty."""
    routed_experts: bytes | None = None
    """SGLang's experts of prompt and response, for routing replay R3 (routed_experts.py): [tokens - 1, MoE layers,
    topk], row by row, one byte an expert up to 256 experts, else two (little-endian). The last token has none."""
    filtered_because: str | None = None
    """Why it is taken out of the loss and of N; None: it is not."""

    @property
    def is_filtered(self) -> bool:
        """Whether it is taken out of the loss and of N."""
        return self.filtered_because is not None

    @property
    def num_sampled_tokens(self) -> int:
        """|y|: the tokens that carry a loss term."""
        return len(self.response_ids) if self.response_mask is None else sum(self.response_mask)

    def with_reward(self, reward: float, is_exact: bool) -> Rollout:
        """The same rollout, scored."""
        return replace(self, reward=reward, is_exact=is_exact)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """The responses of one prompt; advantages are relative to this set."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutReport:
    """Of one rollout step: what was asked of the servers and does not show in the groups."""

    num_asked: int
    """Responses."""
    num_zero_spread: int
    """Responses of groups that dynamic sampling dropped."""
    num_surplus: int
    """Responses of prompts that were sampled ahead and not needed."""
    num_retries: int
    """Requests sent again after a failure, since the report before."""
    num_continued: int
    """Responses sent on after a push had aborted them, since the report before."""
    num_retracted: int
    """Responses that a server computed anew, at a push or for want of memory, since the report before."""
    num_rejected: int
    """Servers that the run stopped sending to, until the next push to them, since the report before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """The responses of one forward pass on one rank: packed end to end (THD), or rows of equal length (BSHD).

    Rows are flattened sequence by sequence, so every [T] field reads the same in both. Position t of a sequence
    predicts token t + 1, so labels are the tokens shifted by one and every per-token field below is aligned with the
    *predicting* position. Sequences are padded to the alignment that TP, SP and CP need; padding carries
    response_mask_T False and response_index_T 0.
    """

    tokens_T: Tensor
    """[T] int64. Input ids."""
    labels_T: Tensor
    """[T] int64. The next token of the same sequence; 0 where there is none."""
    position_ids_T: Tensor
    """[T] int64. Position inside its sequence, before context-parallel slicing."""
    response_mask_T: Tensor
    """[T] bool. True where labels_T is a response token."""
    response_index_T: Tensor
    """[T] int64 in [0, B). The response that owns the position."""
    response_length_B: Tensor
    """[B] int64, tokens. |y_i| over all context-parallel ranks."""
    response_number_B: Tensor
    """[B] int64. Place of the response in the optimizer step's sequences; -1 for a dummy."""
    advantages_B: Tensor
    """[B] float32. The response's own."""
    advantages_T: Tensor
    """[T] float32. Each token's: advantages_B, unless the rollout has token_advantages; 0 outside the mask."""
    is_padding_T: Tensor
    """[T] bool. True on tokens that belong to no sequence; auxiliary losses leave them out."""
    rollout_logprobs_T: Tensor
    """[T] float32, nats. SGLang's own; 0 outside the mask."""
    old_logprobs_T: Tensor | None
    """[T] float32, nats. The trainer's, before the first minibatch; None until add_old_logprobs."""
    ref_logprobs_T: Tensor | None
    """[T] float32, nats. The reference policy's, 0 outside the mask; None without a KL penalty."""
    rollout_routes_T: Tensor | None
    """[T, MoE layers, topk] int16. SGLang's experts in all the model's layers, for routing replay R3; None without,
    and after add_old_logprobs, which leaves this rank's part of them in routed_experts."""
    routed_experts: tuple[Tensor, ...] | None
    """Routes to replay: per model chunk of this rank [MoE layers, tokens of this rank's sequence-parallel slice, topk]
    int16; None without routing replay."""
    row_length: int | None
    """Tokens of one row in padding mode, whole rows before context-parallel slicing; None when packed."""
    cu_seqlens: Tensor
    """[S] int32. Sequence starts without padding, whole sequences (not context-parallel slices)."""
    cu_seqlens_padded: Tensor
    """[S] int32. Sequence starts with padding."""
    max_seqlen: int
    """Longest padded sequence, tokens."""
    num_unpadded_tokens: int
    """Tokens of this rank's slice that are not padding."""

    @property
    def num_rows(self) -> int:
        """Megatron's micro batch size: packed sequences are one row."""
        return 1 if self.row_length is None else len(self.response_length_B)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """One optimizer step's data on one data-parallel rank, with the two global counts."""

    microbatches: list[Microbatch]
    """Same count on every data-parallel rank."""
    num_responses: int
    """N: responses of the optimizer step over all data-parallel ranks and microbatches."""
    num_tokens: int
    """T: unpadded tokens of the optimizer step over all data-parallel ranks and microbatches."""
    num_response_tokens: int
    """Of those, the ones that carry a loss term."""
    minibatch_index: int
    """Updates of this rollout before it: minibatch 0 is on-policy when old log-probs are recomputed."""
    packing_efficiency: float
    """Unpadded tokens / (microbatches x token budget) over all data-parallel ranks."""


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Where the run stands; the trainer's only mutable record."""

    rollout_step: int = 0
    optimizer_step: int = 0
    weight_version: int = 0


def save_groups(groups: list[RolloutGroup], path: Path) -> None:
    """Write groups as JSON lines, one group a line, under a temporary name first.

    JSON keeps every float exactly (shortest representation that reads back to the same value); bytes are base64.
    """
    tmp = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tmp.open("w") as f:
        for group in groups:
            f.write(json.dumps(asdict(group), default=_base64) + "\n")
    tmp.rename(path)


def _base64(routed_experts: bytes) -> str:
    return base64.b64encode(routed_experts).decode()


def load_groups(path: Path) -> list[RolloutGroup]:
    """Read what save_groups wrote.

    Raises:
        ValueError: the file is missing or no text, or a line is not a group; the message names file and line.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file of rollout groups; a run writes it under runs/<name>/rollouts")
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text, wants JSON lines of rollout groups ({error})") from error
    groups = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            for r in record["rollouts"]:
                if r["routed_experts"] is not None:
                    r["routed_experts"] = base64.b64decode(r["routed_experts"], validate=True)
            prompt = Prompt(**{**record["prompt"], "token_ids": tuple(record["prompt"]["token_ids"])})
            rollouts = tuple(
                Rollout(
                    **{
                        **r,
                        **{name: tuple(value) for name, value in r.items() if isinstance(value, list)},
                    }
                )
                for r in record["rollouts"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: not a rollout group ({error})") from error
        groups.append(RolloutGroup(prompt=prompt, rollouts=rollouts))
    return groups
