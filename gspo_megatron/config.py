"""The recipe: frozen dataclasses and a strict YAML loader; checks.py has the cross-field checks. Imports no torch.

One YAML file is one complete run. A field that changes results or cost has no default.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml


class ConfigError(ValueError):
    """A recipe that cannot run; the message lists every problem found, one a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model and how it is built in Megatron."""

    hf_dir: str
    """Hugging Face directory with config.json and tokenizer; its weights are read only if `load` names it."""
    load: str
    """Weights to start from: a Hugging Face directory, or a Megatron checkpoint (tools/convert_hf_to_mcore.py, a run's
    checkpoint/); each rank reads what it owns. `random` draws from `seed` with config.json's initializer_range."""
    dtype: Literal["float32", "bfloat16"]
    """Parameters and activations of trainer and server; router, softmax, loss and ratio stay float32."""
    fp32_lm_head: bool
    """Multiply by the output layer in float32, in trainer and server. bfloat16 logits alone move log s by more than
    the paper's band; no difference when dtype is float32."""
    mcore: dict[str, Any] = field(default_factory=dict)
    """Passed to megatron-core's TransformerConfig under its own names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Megatron's axes, upstream's names. Data parallel is what remains of the ranks."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline rank (interleaved schedule)."""
    sequence_parallel: bool = False
    """Required by megatron-core when a MoE trains with tensor parallel > 1."""
    use_distributed_optimizer: bool = True
    """Shards optimizer state over data parallel; changes memory, not results."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather the distributed optimizer's new parameters while the next forward pass runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Which processes run on a node."""

    trainer_ranks: int
    """Trainer processes on this node."""
    rollout_servers: int
    """SGLang servers on this node."""
    placement: Literal["separate", "colocated"] = "separate"
    """separate: servers have their own devices (on CPU: their own processes). colocated: they share the trainer's
    CUDA devices, and one side sleeps while the other works (colocated.py); wants weight_transport: ipc."""
    max_policy_lag: int = 0
    """0: synchronous; generation waits for the push of the newest weights. L >= 1: while the trainer trains on one
    rollout step, up to L further ones are being sampled, so that a token's weights are at most L pushes old."""
    max_restarts: int = 3
    """Of one server within an hour; when it fails once more, the run ends."""
    probe_timeout_s: float = 60.0
    """A server that takes longer for a health probe, which generates a token, is restarted, seconds. While a weight
    push pauses a server this is the limit of each step of the push instead: a bucket, or all files with disk."""
    weight_transport: Literal["broadcast", "disk", "ipc"] = "broadcast"
    """How weights reach the servers. broadcast: a process group of the trainer's rank 0 and all servers. disk: a
    Hugging Face directory in the run's folder. ipc: CUDA's, for colocated servers."""
    weight_port: int = 0
    """Rendezvous of the broadcast group; 0 takes a free port."""
    network_interface: str | None = None
    """Of the broadcast group (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); null lets the library choose."""
    host: str = "127.0.0.1"
    """Interface that servers and rendezvous bind."""
    server_port: int = 0
    """First SGLang port; 0 takes a free one."""
    start_timeout_s: float = 300.0
    """Longest wait for a server to answer a generate probe, seconds."""
    collective_timeout_s: float = 600.0
    """Longest wait inside a trainer collective, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Prompts: a reasoning-gym generator, split three ways by hash so that no text occurs twice."""

    reasoning_gym: Literal["number_sorting", "chain_sum"]
    """Generator and scorer of the reasoning-gym package; rewards/reasoning.py has the compact form of each."""
    params: dict[str, Any]
    """The generator's own configuration keys, without seed and size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdStartConfig:
    """The supervised stage that the paper starts from (section 5.1), through the same Megatron path."""

    num_steps: int
    """Optimizer steps."""
    batch_size: int
    """Demonstrations per optimizer step."""
    lr: float
    """Peak learning rate: linear warm-up, flat, linear decay to 0."""
    warmup_steps: int
    decay_fraction: float
    """Share of the steps, at the end, over which lr falls to 0."""
    flawed_fraction: float
    """Share of demonstrations that are wrong on purpose, so that RL has something to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Generation through SGLang's HTTP API."""

    num_prompts: int
    """Prompts per rollout step."""
    group_size: int
    """Responses per prompt, G."""
    temperature: float
    """Divides the logits here and in the trainer's log-probs."""
    max_response_tokens: int
    """A response that reaches it ends with finish reason `length`."""
    min_response_tokens: int = 0
    """A shorter response is taken out of the loss and of N. Not SGLang's min_new_tokens: that forbids EOS, which
    shifts log-probs against the trainer's."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Further tokens that end a response, beside EOS; with multi_turn, that end a turn."""
    oversample_prompts: int = 0
    """Prompts that are sampled beyond num_prompts at once, for groups that dynamic_sampling drops."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and sample other prompts instead (DAPO, arXiv:2503.14476, section 3.2).
    Which groups are taken depends on the order of the prompts, never on how fast a response came."""
    max_prompts_per_step: int = 0
    """Prompts that dynamic_sampling may use for one rollout step; when they do not suffice, groups with equal rewards
    fill up. 0: three times num_prompts, or num_prompts + oversample_prompts if that is more."""
    multi_turn: str | None = None
    """`module:function` of one's own that answers each turn of a response (multi_turn.py); null: one turn. The module
    is looked for in the working directory first, then where Python finds its packages."""
    max_turns: int = 0
    """Turns of a response at most; 0: as many as max_response_tokens, which counts what the function puts in between,
    has room for."""
    turn_timeout_s: float = 60.0
    """Limit of one call of the function, seconds; a longer one ends the run."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What a weight push does to requests that run (SGLang's pause modes). retract: they wait, and their keys and
    values are computed again with the new weights. in_place: they keep the keys and values of the old weights. abort:
    they end, and the client sends what they have so far as a new request."""
    flush_cache: bool = True
    """Drop cached keys and values of the old weights at a push; false keeps them as prefixes of new requests."""
    serve_fp8: bool = False
    """Servers hold weights in FP8, blocks of 128 x 128: quantised anew by every push."""
    top_p: float = 1.0
    """Must be 1: a truncated support shifts log-probs against the trainer's."""
    top_k: int = -1
    """Must be -1 (off), as top_p."""
    request_timeout_s: float = 120.0
    """Limit of one generate request, seconds. Wants to be longer than the longest response and a push together."""
    max_concurrency: int = 64
    """Requests in flight; and, apart from them, calls of multi_turn's function."""
    max_retries: int = 2
    """Further tries of a request that was not answered in time, or with a status 5xx or what a check refuses. Lost
    connections do not count: servers are restarted, up to max_restarts."""
    groups_dir: str | None = None
    """Where `--only train` reads RolloutGroups: another run's rollouts folder."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Passed to SGLang's ServerArgs under its own names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """Rewards of responses."""

    permute: bool = False
    """Control arm: permute the rewards over the rollout batch, which leaves no signal to learn from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """Group-relative advantage, (r - mean) / (std + eps)."""

    std: bool
    """False leaves r - mean."""
    ddof: int
    """1: sample standard deviation (torch's default); 0: population. The paper states neither."""
    eps: float = 1.0e-6
    overlong_filter: Literal["off", "before_statistics", "after_statistics"] = "off"
    """Take responses that reached max_response_tokens out of the loss and out of N: before or after they count in
    their group's mean and standard deviation."""
    overlong_buffer_tokens: int = 0
    """DAPO's soft punishment (arXiv:2503.14476, Eq. 13), part of the reward and so before the statistics: within this
    many tokens of max_response_tokens the reward falls linearly by up to 1. 0: off."""
    turn_rewards: bool = False
    """Rewards that the function of rollout.multi_turn gives to turns make advantages per token (advantage.py); for
    objectives that read those, so not gspo and gmpo. False refuses such rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How a rollout becomes optimizer steps and packed microbatches."""

    num_minibatches: int
    """Optimizer steps per rollout; with 1 the ratio never leaves 1 and the clip never acts (the paper: 4)."""
    max_tokens_per_microbatch: int
    """Tokens per rank and forward pass, padding included."""
    mode: Literal["packed", "padded"] = "packed"
    """packed: sequences end to end (THD). padded: rows as long as the longest sequence of the minibatch (BSHD)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionConfig:
    """Weight of the rollout correction: rho = pi_old / mu, mu being SGLang's own probability (mismatch.py)."""

    name: Literal[
        "tis", "icepop", "mis", "sequence_tis_mean", "sequence_tis_sum", "sequence_mis", "geometric_rejection"
    ]
    """tis: min(rho_t, high). icepop: rho_t inside [low, high], else 0. mis: rho_t up to high, else 0.
    sequence_tis_mean and _sum: min(exp(mean or sum of log rho_t), high). sequence_mis: exp(sum) up to high, else 0.
    geometric_rejection: 1 where exp(mean) is inside [low, high], else 0."""
    high: float
    """Upper bound of the ratio."""
    low: float | None = None
    """Lower bound of the ratio, for icepop and geometric_rejection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KlConfig:
    """Penalty for leaving the reference policy, which is the policy that RL started from."""

    coef: float
    estimator: Literal["k1", "k2", "k3"]
    """Of KL(pi || ref), with d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."""
    place: Literal["reward", "loss"]
    """reward: coef times the response's summed estimate is taken from its reward, before the group statistics.
    loss: coef times each token's estimate joins the objective's own sum; its gradient is the estimator's own, which
    is zero in expectation for k1, that of KL(pi || ref) for k2, that of KL(ref || pi) for k3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The objective."""

    name: Literal["gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "cispo", "gmpo", "sapo", "minirl"]
    """gspo: Eq. 5 and 7 of the paper; gspo_token: its per-token form; the others are for comparison (loss.py)."""
    clip_low: float | None
    """Left clipping range: ratios below 1 - clip_low stop the gradient of negative advantages. gmpo: of log-ratios.
    null for cispo and sapo."""
    clip_high: float | None
    """Right clipping range: ratios above 1 + clip_high stop the gradient of positive advantages. null for sapo."""
    old_logprobs: Literal["recompute", "rollout"]
    """recompute: by the trainer with the same packing (ratio exactly 1 on minibatch 1). rollout: SGLang's own."""
    tau_positive: float | None = None
    """sapo's temperature of the soft gate for advantages > 0 (published: 1.0)."""
    tau_negative: float | None = None
    """The same for advantages < 0 (published: 1.05)."""
    aggregation: Literal["sequence_mean", "token_mean", "token_sum", "token_sum_over_limit"] | None = None
    """How tokens' terms become one number; null is the objective's own (loss.py's table)."""
    correction: CorrectionConfig | None = None
    """Weight of each term against the mismatch between trainer and server; null: none."""
    kl: KlConfig | None = None
    """null: no reference policy is kept."""
    entropy_coef: float = 0.0
    """Entropy bonus: this times each token's entropy joins the objective's own sum."""
    routing_replay: Literal["none", "r2", "r3"] = "none"
    """r2: the update routes every token as the old-log-prob pass did. r3: both passes route it as SGLang did
    (mcore/routing_replay.py, routed_experts.py); a server then holds layers x topk x 4 bytes of host memory for each
    token of its cache, and a rollout one byte per token, MoE layer and expert."""
    allow_wide_clip: bool = False
    """Permit a sequence-level band above 0.01 with responses above 1,000 tokens."""
    band_is_measured: bool = False
    """The band was sized from the spread of log s at learning rate 0 with old_logprobs: rollout; no warning then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW through megatron-core's optimizer."""

    lr: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float
    clip_grad: float
    """Global gradient norm limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length of the run."""

    num_rollout_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Held-out evaluation, sampled with fixed seeds."""

    num_prompts: int
    num_samples: int
    """Responses per prompt; accuracy is their mean (pass@1)."""
    temperature: float
    every: int
    """Rollout steps between evaluations; the first and last state are always evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One complete run."""

    name: str
    """Names the folder under output_dir."""
    device: Literal["cpu", "cuda"]
    """cpu: megatron-core over gloo and SGLang without CUDA. cuda: NCCL and Transformer Engine."""
    seed: int
    """Seeds the model's random initialisation, the prompt stream, sampling and shuffles."""
    model: ModelConfig
    parallel: ParallelConfig
    cluster: ClusterConfig
    data: DataConfig
    cold_start: ColdStartConfig | None
    """null starts RL from model.hf_dir as it is."""
    rollout: RolloutConfig
    advantage: AdvantageConfig
    batch: BatchConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    reward: RewardConfig = field(default_factory=RewardConfig)
    output_dir: str = "runs"

    @property
    def run_dir(self) -> Path:
        """Folder of everything that the run leaves."""
        return Path(self.output_dir) / self.name

    @property
    def ranks_per_server(self) -> int:
        """SGLang processes of one server: each joins the weight push, and on GPU has its own device."""
        return int(self.rollout.sglang.get("tp_size", 1))

    @property
    def push_limit_s(self) -> float:
        """Longest wait for a server within a weight push, and of a server: what a health probe may take; the other
        ranks wait in a collective meanwhile."""
        return min(self.cluster.probe_timeout_s, self.cluster.collective_timeout_s / 2)

    @property
    def return_limit_s(self) -> float:
        """Longest wait for a lost server to come back: until its loss is noticed, and until it answers again."""
        return self.cluster.start_timeout_s + self.cluster.probe_timeout_s


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: YAML file.
        overrides: `a.b=c` items; c is read as YAML.

    Raises:
        ConfigError: lists every problem; nothing has been started.
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: wants a mapping of recipe sections, got {type(tree).__name__}")
    problems = [p for item in overrides for p in _override(tree, item)]
    recipe = _build(Recipe, tree, "", problems)
    if not problems:
        from gspo_megatron.checks import check_recipe  # here, since it needs the classes above

        problems = check_recipe(recipe)
    if problems:
        raise ConfigError(f"{path}: {len(problems)} problem(s)\n" + "\n".join(f"  {p}" for p in problems))
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The complete recipe as YAML, every default written out; load_recipe reads it back to an equal Recipe."""
    return yaml.dump(_plain_floats(asdict(recipe)), Dumper=_RecipeDumper, sort_keys=False)


class _RecipeDumper(yaml.SafeDumper):
    """Writes floats so that YAML 1.1 reads them back as floats (1.0e-05, never 1e-05)."""


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    if "e" in text and "." not in text.split("e")[0]:
        text = text.replace("e", ".0e", 1)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_RecipeDumper.add_representer(float, _represent_float)


def _plain_floats(value: Any) -> Any:
    """Tuples to lists, so that safe YAML can hold the tree."""
    if isinstance(value, dict):
        return {k: _plain_floats(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_floats(v) for v in value]
    return value


def _override(tree: dict[str, Any], item: str) -> list[str]:
    """Apply one `a.b=c` in place; returns problems."""
    key, equals, text = item.partition("=")
    if not equals:
        return [f"--set {item}: wants section.key=value"]
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            return [f"--set {item}: {parent} is not a section"]
        node = child
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"--set {item}: value is not YAML ({' '.join(str(error).split())})"]
    return []


def _build(cls: type, tree: Any, where: str, problems: list[str]) -> Any:
    """Build dataclass cls from a parsed mapping; appends problems and returns None where it cannot."""
    if not isinstance(tree, dict):
        problems.append(f"{where or 'recipe'}: wants a section with keys, got {tree!r}")
        return None
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}
    prefix = f"{where}." if where else ""
    for key in tree:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            problems.append(f"{prefix}{key}: unknown key; nearest is {prefix}{near[0]}")
    values = {}
    for name, f in known.items():
        if name in tree:
            values[name] = _coerce(hints[name], tree[name], f"{prefix}{name}", problems)
        elif f.default is MISSING and f.default_factory is MISSING:
            problems.append(f"{prefix}{name}: missing; it has no default because it changes results or cost")
    return cls(**values) if not problems else None


def _coerce(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Check value against the type hint; only int -> float is converted."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (hint,) = (h for h in get_args(hint) if h is not type(None))
    if is_dataclass(hint):
        return _build(hint, value, where, problems)  # type: ignore[arg-type]
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            problems.append(f"{where}={value!r}: wants one of {', '.join(map(str, get_args(hint)))}")
        return value
    if get_origin(hint) is list:
        (item,) = get_args(hint)
        if not isinstance(value, list) or any(type(v) is not item for v in value):
            problems.append(f"{where}={value!r}: wants a list of {item.__name__}")
        return value
    if get_origin(hint) is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            problems.append(f"{where}={value!r}: wants a mapping with keys of text")
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number:
        return float(value)
    if hint in (int, float) and isinstance(value, str) and _reads_as_float(value):
        fixed = f"{float(value):.1e}" if hint is float else str(int(float(value)))
        problems.append(
            f"{where}={value!r}: is text, wants a number; YAML needs a point before the exponent: {fixed}"
        )
    elif type(value) is not hint:
        problems.append(f"{where}={value!r}: wants {hint.__name__}, got {type(value).__name__}")
    return value


def _reads_as_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
