"""The loader of recipes: what it refuses, in which words, and that it changes nothing."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from gspo_megatron.checks import DERIVED_MCORE_KEYS
from gspo_megatron.config import ConfigError, Recipe, dump_recipe, load_recipe
from gspo_megatron.convert.families import family_of
from gspo_megatron.objective_checks import warnings_of
from tests.models import TINY_CONFIGS

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "gspo-tiny-moe-cpu.yaml"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Paths in recipes are relative to the repository."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def recipe_with(tmp_path):
    """Writes the CPU recipe with an edit of its tree and loads it."""

    def load(edit, *overrides):
        tree = yaml.safe_load(RECIPE.read_text())
        edit(tree)
        path = tmp_path / "edited.yaml"
        path.write_text(yaml.safe_dump(tree))
        return load_recipe(path, overrides)

    return load


def problems_of(*overrides):
    """The lines of the error that the CPU recipe gives with these overrides."""
    with pytest.raises(ConfigError) as error:
        load_recipe(RECIPE, overrides)
    title, *lines = str(error.value).splitlines()
    assert title == f"{RECIPE}: {len(lines)} problem(s)"
    return [line.strip() for line in lines]


def test_recipe_holds_what_the_file_says():
    recipe = load_recipe(RECIPE)
    tree = yaml.safe_load(RECIPE.read_text())
    assert recipe.loss.clip_low == tree["loss"]["clip_low"]
    assert recipe.parallel.expert_model_parallel_size == 2
    assert recipe.rollout.sglang == tree["rollout"]["sglang"]
    assert recipe.run_dir == Path("runs/gspo-tiny-moe-cpu")


def test_dumped_recipe_loads_back_equal(tmp_path):
    recipe = load_recipe(RECIPE, ["optimizer.lr=1.0e-7", "optimizer.adam_eps=1.0e-20", "rollout.groups_dir=saved"])
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe
    assert dump_recipe(load_recipe(path)) == path.read_text()
    assert "lr: 1.0e-07\n" in path.read_text()


def test_dumped_recipe_states_every_default():
    assert yaml.safe_load(dump_recipe(load_recipe(RECIPE))).keys() == set(Recipe.__dataclass_fields__)


def test_unknown_key_offers_the_nearest(recipe_with):
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rte: unknown key; nearest is optimizer\.\w+"):
        recipe_with(lambda tree: tree["optimizer"].update(learning_rte=1.0))
    with pytest.raises(ConfigError, match=r"rollout\.groupsize: unknown key; nearest is rollout\.group_size"):
        recipe_with(lambda tree: tree["rollout"].update(groupsize=8))
    with pytest.raises(ConfigError, match="rolout: unknown key; nearest is rollout"):
        recipe_with(lambda tree: tree.update(rolout={}))


def test_number_that_yaml_reads_as_text_is_refused_with_its_right_spelling():
    assert problems_of("optimizer.lr=3e-4") == [
        "optimizer.lr='3e-4': is text, wants a number; YAML needs a point before the exponent: 3.0e-04"
    ]
    assert load_recipe(RECIPE, ["optimizer.lr=3.0e-04"]).optimizer.lr == 3e-4


def test_missing_key_is_refused_and_never_filled_in(recipe_with):
    with pytest.raises(ConfigError, match=r"loss\.clip_low: missing; it has no default"):
        recipe_with(lambda tree: tree["loss"].pop("clip_low"))
    with pytest.raises(ConfigError, match=r"advantage: missing; it has no default"):
        recipe_with(lambda tree: tree.pop("advantage"))


def test_all_problems_come_at_once():
    assert problems_of("optimizer.lr=fast", "loss.name=ppo", "seeed=3", "rollout.group_size=8.0") == [
        "seeed: unknown key; nearest is seed",
        "rollout.group_size=8.0: wants int, got float",
        "loss.name='ppo': wants one of gspo, gspo_token, grpo, dr_grpo, dapo, cispo, gmpo, sapo, minirl",
        "optimizer.lr='fast': wants float, got str",
    ]


def test_several_cross_field_problems_come_at_once():
    got = problems_of("rollout.top_p=0.9", "batch.num_minibatches=5", "cluster.trainer_ranks=3")
    assert [problem.split(":")[0] for problem in got] == [
        "cluster.trainer_ranks=3",
        "batch.num_minibatches=5",
        "rollout.top_p=0.9, top_k=-1",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed=1.5", "seed=1.5: wants int, got float"),
        ("seed=true", "seed=True: wants int, got bool"),
        ("optimizer.lr=true", "optimizer.lr=True: wants float, got bool"),
        ("advantage.std=1", "advantage.std=1: wants bool, got int"),
        ("name=3", "name=3: wants str, got int"),
        ("model.mcore=[]", "model.mcore=[]: wants a mapping with keys of text"),
        ("advantage=3", "advantage: wants a section with keys, got 3"),
        ("seed=null", "seed=None: wants int, got NoneType"),
        ("model.dtype=float16", "model.dtype='float16': wants one of float32, bfloat16"),
    ],
)
def test_wrong_type_is_refused(override, problem):
    assert problems_of(override) == [problem]


def test_whole_number_serves_where_a_fraction_is_wanted():
    clip_grad = load_recipe(RECIPE, ["optimizer.clip_grad=2"]).optimizer.clip_grad
    assert (clip_grad, type(clip_grad)) == (2.0, float)


def test_key_passed_to_upstream_must_exist_there():
    assert problems_of("model.mcore.moe_router_dtyp=fp32", "rollout.sglang.mem_fraction_statik=0.5") == [
        "model.mcore.moe_router_dtyp: upstream has no such key; nearest is moe_router_dtype",
        "rollout.sglang.mem_fraction_statik: upstream has no such key; nearest is mem_fraction_static",
    ]


def test_key_that_is_derived_cannot_be_passed_to_upstream():
    assert problems_of("model.mcore.num_layers=4", "rollout.sglang.port=3000") == [
        "model.mcore.num_layers: is derived from the recipe; remove it",
        "rollout.sglang.port: is derived from the recipe; remove it",
    ]


def test_override_replaces_one_value_and_leaves_the_rest():
    plain, seeded = load_recipe(RECIPE), load_recipe(RECIPE, ["seed=7", "loss.clip_low=1.0e-2"])
    assert (seeded.seed, seeded.loss.clip_low) == (7, 0.01)
    assert seeded.loss.clip_high == plain.loss.clip_high
    assert load_recipe(RECIPE, ["seed=1", f"loss.clip_low={plain.loss.clip_low}"]) == plain


def test_later_override_wins():
    assert load_recipe(RECIPE, ["seed=7", "seed=8"]).seed == 8


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed", "--set seed: wants section.key=value"),
        ("seed.deep=1", "--set seed.deep=1: seed is not a section"),
        ("optimizer.lr=[1", "--set optimizer.lr=[1: value is not YAML"),
        ("optimizr.lr=0.0", "optimizr: unknown key; nearest is optimizer"),
    ],
)
def test_broken_override_is_refused(override, problem):
    (got,) = problems_of(override)
    assert got.startswith(problem)


def test_optional_section_can_be_null_where_that_makes_sense():
    assert problems_of("cold_start=null") == [
        "cold_start: null with model.load random would train noise; give cold_start or weights"
    ]


def test_missing_model_directory_is_refused():
    assert problems_of("model.hf_dir=recipes/absent") == ["model.hf_dir=recipes/absent: no such directory"]


def test_model_directory_without_weights_is_refused_when_weights_are_wanted(tmp_path):
    (tmp_path / "config.json").touch()
    assert problems_of(f"model.hf_dir={tmp_path}", f"model.load={tmp_path}") == [
        f"model.hf_dir={tmp_path}: has no tokenizer.json",
        f"model.load={tmp_path}: neither a Hugging Face directory with *.safetensors nor a Megatron checkpoint; "
        "random draws weights",
    ]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["parallel.expert_model_parallel_size=0"], "parallel.expert_model_parallel_size=0: wants at least 1"),
        (["cluster.rollout_servers=0"], "cluster.rollout_servers=0: wants at least 1"),
        (
            ["parallel.expert_model_parallel_size=4"],
            "cluster.trainer_ranks=2: is not a multiple of expert x expert-tensor x pipeline parallel = 4",
        ),
        (["parallel.tensor_model_parallel_size=2"], "parallel.sequence_parallel: must be true with tensor parallel"),
        (["cluster.max_policy_lag=-1"], "cluster.max_policy_lag=-1: wants at least 0"),
        (["rollout.stop_token_ids=[1, a]"], "rollout.stop_token_ids=[1, 'a']: wants a list of int"),
        (["rollout.group_size=1"], "rollout.group_size=1: wants at least 2"),
        (["batch.num_minibatches=5"], "batch.num_minibatches=5: does not divide rollout.num_prompts=32"),
        (["rollout.temperature=0"], "rollout.temperature=0.0: wants 0.01 to 10"),
        (["loss.clip_high=1"], "loss.clip_high=1.0: wants a value in (0, 1)"),
        (["optimizer.lr=-1.0"], "optimizer.lr=-1.0: wants at least 0"),
        (["advantage.ddof=2"], "advantage.ddof=2: wants 0 to 1"),
        (["train.num_rollout_steps=0"], "train.num_rollout_steps=0: wants at least 1"),
        (["seed=-1"], "seed=-1: wants 0 to"),
        (["rollout.top_k=5"], "rollout.top_p=1.0, top_k=5: must be 1.0 and -1"),
        (["rollout.top_p=0.9"], "rollout.top_p=0.9, top_k=-1: must be 1.0 and -1"),
        (["evaluate.temperature=0.0"], "evaluate.temperature=0.0: wants 0.01 to 10"),
        (["evaluate.every=0"], "evaluate.every=0: wants at least 1"),
        (["optimizer.lr=.inf"], "optimizer.lr=inf: wants at least 0"),
        (["optimizer.lr=.nan"], "optimizer.lr=nan: wants at least 0"),
        (["batch.max_tokens_per_microbatch=16"], "batch.max_tokens_per_microbatch=16: over context_parallel_size=1 "),
        (["rollout.sglang.tp_size=foo"], "rollout.sglang.tp_size='foo': wants a whole number"),
        (["rollout.sglang.tp_size=2"], "rollout.sglang.tp_size=2: wants a whole number, and 1 with device: cpu"),
        (["cluster.server_port=65535", "cluster.rollout_servers=2"], "cluster.server_port=65535: leaves no port"),
        (["parallel.virtual_pipeline_model_parallel_size=2"], "parallel.virtual_pipeline_model_parallel_size: wants"),
        (
            ["parallel.expert_tensor_parallel_size=2"],
            "cluster.trainer_ranks=2: is not a multiple of expert x expert-tensor x pipeline parallel = 4",
        ),
        (["optimizer.adam_beta2=1.5"], "optimizer.adam_beta2=1.5: wants 0 to 1"),
        (["cold_start.flawed_fraction=2"], "cold_start.flawed_fraction=2.0: wants 0 to 1"),
        (["name=../elsewhere"], "name='../elsewhere': wants letters, digits"),
        (
            ["cluster.trainer_ranks=3", "parallel.expert_model_parallel_size=3"],
            "parallel.expert_model_parallel_size=3: does not divide num_local_experts=8; use one of 1, 2, 4, 8",
        ),
        (
            ["cluster.trainer_ranks=6", "parallel.pipeline_model_parallel_size=3"],
            "parallel.pipeline_model_parallel_size x virtual=3: does not divide num_hidden_layers=4;",
        ),
    ],
)
def test_values_that_cannot_run_together_are_refused(overrides, problem):
    (got,) = problems_of(*overrides)
    assert got.startswith(problem)


EXPERT_KEYS = {"num_local_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": None}
DENSE = EXPERT_KEYS | {"model_type": "qwen3"}
TP2 = (
    *("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
    "parallel.expert_model_parallel_size=1",
)
ETP2 = ("parallel.expert_model_parallel_size=1", "parallel.expert_tensor_parallel_size=2")
CP2 = ("parallel.context_parallel_size=2", "parallel.expert_model_parallel_size=1")


@pytest.fixture
def model_with(tmp_path):
    """An override that names a copy of the recipe's model, keys of its config.json replaced, or removed where None."""

    def override(keys):
        hf_dir = shutil.copytree(ROOT / "recipes" / "tiny-moe", tmp_path / "model")
        config = json.loads((hf_dir / "config.json").read_text()) | keys
        (hf_dir / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return f"model.hf_dir={hf_dir}"

    return override


@pytest.mark.parametrize(
    ("keys", "overrides", "problem"),
    [
        (DENSE, [], "parallel.expert_model_parallel_size=2: qwen3 has no experts; set it to 1"),
        (DENSE, ETP2, "parallel.expert_tensor_parallel_size=2: qwen3 has no experts; set it to 1"),
        (
            DENSE | {"intermediate_size": 95},
            TP2,
            "parallel.tensor_model_parallel_size=2: does not divide intermediate_size=95; use one of 1, 5, 19, 95",
        ),
        (
            {"intermediate_size": 95, "mlp_only_layers": [1]},
            TP2,
            "parallel.tensor_model_parallel_size=2: does not divide intermediate_size=95; use one of 1, 5, 19, 95",
        ),
        (
            {"intermediate_size": 95, "decoder_sparse_step": 2},
            TP2,
            "parallel.tensor_model_parallel_size=2: does not divide intermediate_size=95; use one of 1, 5, 19, 95",
        ),
        (
            {"shared_expert_intermediate_size": 33},
            TP2,
            "parallel.tensor_model_parallel_size=2: does not divide shared_expert_intermediate_size=33; use ",
        ),
        (
            {"model_type": "mixtral", "moe_intermediate_size": None, "intermediate_size": 95},
            ETP2,
            "parallel.expert_tensor_parallel_size=2: does not divide intermediate_size=95; use one of 1, 5, 19, 95",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0e6, "factor": 4.0}},
            ["model.mcore.apply_rope_fusion=true"],
            "model.mcore.apply_rope_fusion: the fused kernel leaves out YaRN's attention factor on packed sequences",
        ),
        (
            {"sliding_window": 8, "use_sliding_window": True},
            [*CP2, "device=cuda"],
            "parallel.context_parallel_size=2: with sliding_window=8 Transformer Engine wants model.mcore.cp_comm_typ",
        ),
        (
            DENSE,
            ["parallel.expert_model_parallel_size=1", "loss.routing_replay=r2"],
            "loss.routing_replay=r2: qwen3 has no experts; wants none",
        ),
        (
            {"model_type": "mixtral"},
            ["loss.routing_replay=r3"],
            "loss.routing_replay=r3: SGLang 0.5.21 records mixtral's routes without their layer",
        ),
    ],
)
def test_layout_that_does_not_suit_the_model_is_refused(keys, overrides, problem, model_with):
    (got,) = problems_of(model_with(keys), *overrides)
    assert got.startswith(problem)


@pytest.mark.parametrize(
    ("keys", "overrides"),
    [
        (DENSE, TP2),
        ({"intermediate_size": 95}, TP2),  # no dense layer reads it
        ({"sliding_window": 8, "use_sliding_window": False}, [*CP2, "device=cuda"]),
        ({"sliding_window": 8, "use_sliding_window": True}, CP2),
        ({"sliding_window": 8, "use_sliding_window": True}, [*CP2, "device=cuda", "model.mcore.cp_comm_type=a2a"]),
        ({}, ["model.mcore.apply_rope_fusion=true"]),
    ],
)
def test_layout_that_suits_the_model_is_taken(keys, overrides, model_with):
    load_recipe(RECIPE, [model_with(keys), *overrides])


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_what_config_json_decides_is_not_the_recipes_to_set(name):
    fields, _ = family_of(TINY_CONFIGS[name]).transformer_config(TINY_CONFIGS[name])
    assert fields.keys() <= DERIVED_MCORE_KEYS


def test_wide_sequence_clip_is_refused_for_long_responses_unless_allowed():
    long = ("rollout.max_response_tokens=4096", "batch.max_tokens_per_microbatch=8192")
    (got,) = problems_of(*long, "loss.clip_high=0.2")
    assert got.startswith("loss.clip_low=0.012, clip_high=0.2: above 0.01 a sequence-level ratio of 4096-token")
    load_recipe(RECIPE, [*long, "loss.clip_high=0.2", "loss.allow_wide_clip=true"])
    load_recipe(RECIPE, [*long, "loss.clip_high=0.2", "loss.name=grpo"])
    load_recipe(RECIPE, [*long, "loss.clip_low=3.0e-4", "loss.clip_high=4.0e-4"])


CORRECTION = "loss.correction={name: tis, high: 2.0}"
TURN_REWARDS = ["rollout.multi_turn=recipes.calculator:answer", "advantage.turn_rewards=true", "loss.name=gspo_token"]
SAPO = ("loss.name=sapo", "loss.clip_low=null", "loss.clip_high=null")
TWO_TP = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["loss.clip_low=null"], "loss.clip_low=None: wants a value in (0, 1)"),
        (["loss.tau_positive=1.0"], "loss.tau_positive=1.0: gspo has no such bound; set it to null"),
        (["loss.name=cispo"], "loss.clip_low=0.012: cispo has no such bound; set it to null"),
        ([*SAPO, "loss.tau_positive=1.0"], "loss.tau_negative=None: wants a number above 0"),
        (["loss.aggregation=token_mean"], "loss.aggregation=token_mean: gspo is a mean over responses (Eq. 5)"),
        (["loss.name=gspo_token", "loss.aggregation=token_sum"], "loss.aggregation=token_sum: gspo_token is a mean"),
        (["loss.name=minirl"], "advantage.std=True: minirl is published with r - mean; set it to false"),
        (["loss.name=dr_grpo"], "advantage.std=True: dr_grpo is published with r - mean"),
        ([CORRECTION, "loss.old_logprobs=rollout"], "loss.correction: with old_logprobs: rollout every weight is 1"),
        ([CORRECTION, "loss.name=minirl", "advantage.std=false"], "loss.correction: minirl's own weight is pi_theta"),
        (["loss.correction={name: icepop, high: 5.0}"], "loss.correction.low=None: icepop wants a number"),
        (["loss.correction={name: tis, high: 5.0, low: 0.5}"], "loss.correction.low=0.5: tis wants null"),
        (["loss.correction={name: icepop, high: 0.9, low: 0.5}"], "loss.correction.low=0.5, high=0.9: want low < 1"),
        (["loss.correction={name: icepop, high: 2.0, low: 1.5}"], "loss.correction.low=1.5, high=2.0: want low < 1"),
        (["loss.correction={name: tis, high: 0.5}"], "loss.correction.low=None, high=0.5: want low < 1"),
        (["loss.correction={name: mis, high: .nan}"], "loss.correction.low=None, high=nan: want low < 1 <= high"),
        (["loss.name=gmpo", "loss.aggregation=token_mean"], "loss.aggregation=token_mean: gmpo is a mean over"),
        (["model.mcore.moe_router_force_biased=1.0"], "model.mcore.moe_router_force_biased=1.0: routes at random"),
        (["model.mcore.moe_router_force_load_balancing=true"], "model.mcore.moe_router_force_load_balancing=True: r"),
        (["model.mcore.window_size=[1, 0]"], "model.mcore.window_size: is derived from the recipe"),
        (["model.mcore.moe_router_score_function=sigmoid"], "model.mcore.moe_router_score_function: is derived"),
        (["model.mcore.gradient_accumulation_fusion=true"], "model.mcore.gradient_accumulation_fusion: is derived"),
        (["model.mcore.recompute_granularity=full"], "model.mcore.recompute_granularity=full: wants recompute_method"),
        (
            ["model.mcore.moe_router_load_balancing_type=sinkhorn"],
            "model.mcore.moe_router_load_balancing_type=sinkhorn: routes a token by what else is in the microbatch",
        ),
        (["loss.correction={name: ppo, high: 2.0}"], "loss.correction.name='ppo': wants one of tis, icepop, mis"),
        (["loss.kl={coef: -0.1, estimator: k3, place: loss}"], "loss.kl.coef=-0.1: wants at least 0"),
        (["loss.kl={coef: 0.1, estimator: k4, place: loss}"], "loss.kl.estimator='k4': wants one of k1, k2, k3"),
        (["loss.entropy_coef=-1.0"], "loss.entropy_coef=-1.0: wants at least 0"),
        (["advantage.overlong_buffer_tokens=17"], "advantage.overlong_buffer_tokens=17: is above rollout"),
        (TURN_REWARDS[:2], "advantage.turn_rewards=True: gspo reads one advantage per response; use loss.name"),
        ([*TURN_REWARDS[:2], "loss.name=gmpo"], "advantage.turn_rewards=True: gmpo reads one advantage per response"),
        (TURN_REWARDS[1:], "advantage.turn_rewards=True: rollout.multi_turn is null, so there are none"),
        ([*TURN_REWARDS, "reward.permute=true"], "advantage.turn_rewards=True: reward.permute leaves them alone"),
        (["data.reasoning_gym=chain_sum"], "rollout.multi_turn: null, but demonstrations of chain_sum call a calc"),
        (["rollout.multi_turn=recipes.no:answer"], "rollout.multi_turn=recipes.no:answer: importing recipes.no"),
        (["rollout.max_turns=-1"], "rollout.max_turns=-1: wants at least 0"),
        (["rollout.max_turns=2"], "rollout.max_turns=2: has no effect without rollout.multi_turn"),
        (["parallel.overlap_param_gather=true"], "parallel.overlap_param_gather: wants use_distributed_optimizer"),
        (["model.mcore.hidden_dropout=0.1"], "model.mcore.hidden_dropout=0.1: noise in the forward pass"),
        (["model.mcore.moe_expert_capacity_factor=1.0"], "model.mcore.moe_expert_capacity_factor=1.0: drops tokens"),
        (["model.mcore.defer_embedding_wgrad_compute=true"], "model.mcore.defer_embedding_wgrad_compute=True"),
        (["model.mcore.overlap_moe_expert_parallel_comm=true"], "model.mcore.overlap_moe_expert_parallel_comm=True: "),
        (["model.mcore.moe_router_enable_expert_bias=true"], "model.mcore.moe_router_enable_expert_bias=True: "),
        (
            ["model.mcore.moe_router_load_balancing_type=quantile_balancing"],
            "model.mcore.moe_router_load_balancing_type=quantile_balancing: refuses padding",
        ),
        (["model.mcore.moe_token_dispatcher_type=allgather"], "model.mcore.moe_token_dispatcher_type=allgather: "),
        (["model.mcore.mtp_num_layers=1"], "model.mcore.mtp_num_layers=1: multi-token prediction is not trained"),
        (["model.mcore.moe_router_load_balancing_type=seq_aux_loss"], "model.mcore.moe_router_load_balancing_type="),
        (["model.mcore.overlap_p2p_comm=false"], "model.mcore.overlap_p2p_comm: is derived from the recipe"),
        (
            ["model.mcore.moe_router_load_balancing_type=[aux_loss, global_aux_loss]"],
            "model.mcore.moe_router_load_balancing_type=global_aux_loss: its gradient depends on",
        ),
        (
            ["model.mcore.recompute_granularity=selective", "model.mcore.recompute_modules=[layernorm]"],
            "model.mcore.recompute_modules: layernorm wants Transformer Engine",
        ),
        (["model.mcore.fp8=e4m3"], "model.mcore.fp8=e4m3: wants Transformer Engine, which device: cpu lacks"),
    ],
)
def test_objectives_and_megatron_settings_that_compute_something_else_are_refused(overrides, problem):
    (got,) = problems_of(*overrides)
    assert got.startswith(problem)


COLOCATED = ("device=cuda", "cluster.placement=colocated", "cluster.weight_transport=ipc")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["cluster.placement=colocated", "cluster.weight_transport=ipc"],
            "cluster.placement=colocated: SGLang releases memory of CUDA devices only; use separate on the CPU",
        ),
        (["cluster.weight_transport=ipc"], "cluster.weight_transport=ipc: hands over memory of shared devices"),
        ([*COLOCATED, "cluster.weight_transport=broadcast"], "cluster.weight_transport=broadcast: colocated servers"),
        ([*COLOCATED, "cluster.weight_transport=disk"], "cluster.weight_transport=disk: colocated servers want ipc"),
        ([*COLOCATED, "cluster.max_policy_lag=1"], "cluster.max_policy_lag=1: colocated servers sleep while"),
        ([*COLOCATED, "cluster.rollout_servers=3"], "cluster.rollout_servers=3: times rollout.sglang.tp_size=1 is"),
        ([*COLOCATED, "cluster.trainer_ranks=4", "rollout.sglang={tp_size: 3}"], "rollout.sglang.tp_size=3: does not"),
        ([*COLOCATED, "rollout.sglang.enable_memory_saver=true"], "rollout.sglang.enable_memory_saver: is derived"),
        (
            [*COLOCATED, "rollout.sglang.enable_weights_cpu_backup=true"],
            "rollout.sglang.enable_weights_cpu_backup=True: with cluster.placement: colocated wants False: keeps",
        ),
        ([*COLOCATED, "rollout.sglang.weight_cache_mode=client"], "rollout.sglang.weight_cache_mode=client: with"),
        ([*COLOCATED, "rollout.sglang.base_gpu_id=1"], "rollout.sglang.base_gpu_id=1: with cluster.placement: colo"),
        ([*COLOCATED, "model.mcore.fp8=e4m3", "model.mcore.fp8_param=true"], "model.mcore.fp8_param=True: with"),
        ([*COLOCATED, "model.mcore.cuda_graph_impl=local"], "model.mcore.cuda_graph_impl=local: with cluster"),
    ],
)
def test_devices_that_servers_cannot_share_with_the_trainer_are_refused(overrides, problem):
    (got,) = problems_of(*overrides)
    assert got.startswith(problem)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["rollout.serve_fp8=true"], "rollout.serve_fp8: SGLang serves FP8 on CUDA devices only"),
        (["cluster.weight_port=65536"], "cluster.weight_port=65536: wants 0 to 65535"),
        (["cluster.server_port=9000", "cluster.rollout_servers=3", "cluster.weight_port=9002"], "cluster.weight_"),
        (["rollout.sglang.quantization=fp8"], "rollout.sglang.quantization=fp8: would take pushed weights without"),
        (["rollout.sglang.pp_size=2"], "rollout.sglang.pp_size=2: stages would have the same ranks"),
        (["rollout.sglang.speculative_algorithm=EAGLE"], "rollout.sglang.speculative_algorithm=EAGLE: a push cannot"),
        (["rollout.sglang.dp_size=2"], "rollout.sglang.dp_size=2: SGLang takes no weights so"),
    ],
)
def test_servers_that_no_push_reaches_rightly_are_refused(overrides, problem):
    (got,) = problems_of(*overrides)
    assert got.startswith(problem)


def test_pushes_have_a_recipe_for_each_transport():
    load_recipe(RECIPE, ["rollout.pause_mode=abort", "cluster.weight_transport=disk", "cluster.weight_port=9000"])
    load_recipe(RECIPE, ["device=cuda", "rollout.serve_fp8=true"])
    attention = "{tp_size: 2, dp_size: 2, enable_dp_attention: true}"
    load_recipe(RECIPE, ["device=cuda", f"rollout.sglang={attention}"])


def test_colocated_servers_have_a_recipe():
    load_recipe(RECIPE, COLOCATED)
    four = ["cluster.trainer_ranks=8", "cluster.rollout_servers=4", "rollout.sglang={tp_size: 2, base_gpu_id: 0}"]
    load_recipe(RECIPE, [*COLOCATED, *four])


@pytest.mark.parametrize(
    "overrides",
    [
        [*SAPO, "loss.tau_positive=1.0", "loss.tau_negative=1.05"],
        ["loss.name=cispo", "loss.clip_low=null", "loss.clip_high=4.0"],
        TURN_REWARDS,
        ["rollout.multi_turn=recipes.calculator:answer", "data.reasoning_gym=chain_sum"],
        ["loss.name=grpo", "loss.aggregation=token_mean"],
        [CORRECTION, "loss.routing_replay=r2", "loss.kl={coef: 0.0, estimator: k1, place: reward}"],
        ["loss.correction={name: geometric_rejection, low: 0.999, high: 1.001}"],
        [*TWO_TP, "parallel.expert_tensor_parallel_size=2", "parallel.expert_model_parallel_size=1"]
        + ["model.mcore.moe_router_load_balancing_type=global_aux_loss"],
        ["model.mcore.moe_router_load_balancing_type=seq_aux_loss", "batch.mode=padded"],
        ["model.mcore.moe_token_dispatcher_type=allgather", "batch.mode=padded"],
        ["parallel.overlap_param_gather=true", "parallel.overlap_grad_reduce=true"],
        ["parallel.context_parallel_size=2", "batch.max_tokens_per_microbatch=16"],
    ],
)
def test_every_published_objective_and_correction_has_a_recipe(overrides):
    load_recipe(RECIPE, overrides)


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["batch.num_minibatches=1"], "batch.num_minibatches=1: the ratio is 1 in the only update"),
        (["loss.old_logprobs=rollout"], "loss.old_logprobs=rollout: the mismatch between server and trainer enters"),
        (
            ["model.dtype=bfloat16", "model.mcore.moe_router_dtype=null"],
            "model.mcore.moe_router_dtype=None: a bfloat16 router turns near ties",
        ),
        (["model.mcore.moe_aux_loss_coeff=0.01"], "model.mcore.moe_aux_loss_coeff=0.01: an auxiliary loss pulls"),
        (["device=cuda"], "rollout.sglang.enable_deterministic_inference is not set: SGLang ignores sampling seeds"),
        (["model.mcore.moe_z_loss_coeff=0.001"], "model.mcore.moe_z_loss_coeff=0.001: an auxiliary loss pulls"),
        (["loss.kl={coef: 0.1, estimator: k1, place: loss}"], "loss.kl: k1 in the loss has an expected gradient of"),
        (
            ["loss.routing_replay=r3", "cluster.max_policy_lag=1"],
            "rollout.pause_mode=retract: a push computes the routes of running responses anew",
        ),
    ],
)
def test_settings_that_an_author_should_know_about_are_warned_of(overrides, warning):
    (got,) = warnings_of(load_recipe(RECIPE, overrides))
    assert got.startswith(warning)


def test_recipe_as_published_and_measured_band_warn_of_nothing():
    assert warnings_of(load_recipe(RECIPE)) == []
    assert warnings_of(load_recipe(RECIPE, ["loss.routing_replay=r3"])) == []
    in_place = ["rollout.pause_mode=in_place", "rollout.flush_cache=false"]
    in_place += ["rollout.sglang={mem_fraction_static: 0.3, disable_overlap_schedule: true}"]
    assert warnings_of(load_recipe(RECIPE, ["loss.routing_replay=r3", "cluster.max_policy_lag=1", *in_place])) == []
    assert warnings_of(load_recipe(RECIPE, ["loss.old_logprobs=rollout", "loss.band_is_measured=true"])) == []


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "loss.old_logprobs=rollout",
            "loss.old_logprobs=rollout: leaves loss.routing_replay: r2 no old-log-prob pass to record; "
            "wants recompute, or routing_replay: r3 or none",
        ),
        (
            "model.mcore.moe_router_fusion=true",
            "model.mcore.moe_router_fusion=True: with loss.routing_replay: r2 it takes the fused router, which never "
            "asks for the recorded experts",
        ),
        *(
            (
                f"model.mcore.{key}={value}",
                f"model.mcore.{key}={value}: with loss.routing_replay: r2 it captures the router, which then keeps "
                "doing what it did at its capture",
            )
            for key, value in (
                ("cuda_graph_impl", "local"),
                ("enable_cuda_graph", True),
                ("external_cuda_graph", True),
            )
        ),
    ],
)
def test_what_bypasses_routing_replay_is_refused_with_it_and_allowed_without(override, problem):
    load_recipe(RECIPE, [override])
    assert problems_of("loss.routing_replay=r2", override) == [problem]


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("enable_two_batch_overlap: true", "it lets one half of a batch overwrite the other's routes"),
        ("enable_hierarchical_cache: true", "it brings back keys and values without the routes that belong to them"),
        ("chunked_prefill_size: -1", "SGLang keeps room for the routes of one chunk and dies of a longer prompt"),
    ],
)
def test_what_makes_sglang_return_other_routes_is_refused_with_their_replay(item, reason):
    sglang = f"rollout.sglang={{mem_fraction_static: 0.3, {item}}}"
    load_recipe(RECIPE, [sglang, "loss.routing_replay=r2"])
    (got,) = problems_of(sglang, "loss.routing_replay=r3")
    key, value = item.split(": ")
    assert got.startswith(f"rollout.sglang.{key}={yaml.safe_load(value)}: with loss.routing_replay: r3 {reason}")


def test_replay_of_sglangs_routes_goes_with_either_old_logprobs_and_is_switched_on_by_the_recipe_alone():
    for source in ("recompute", "rollout"):
        load_recipe(RECIPE, ["loss.routing_replay=r3", f"loss.old_logprobs={source}"])
    assert problems_of("rollout.sglang.enable_return_routed_experts=true") == [
        "rollout.sglang.enable_return_routed_experts: is derived from the recipe; remove it"
    ]


def test_routing_replay_goes_with_the_defaults_of_what_could_bypass_it():
    defaults = (
        "moe_router_fusion=false",
        "moe_router_load_balancing_type=aux_loss",
        "moe_expert_capacity_factor=null",
        "overlap_moe_expert_parallel_comm=false",
        "cuda_graph_impl=none",
        "enable_cuda_graph=false",
        "external_cuda_graph=false",
    )
    load_recipe(RECIPE, ["loss.routing_replay=r2", *(f"model.mcore.{item}" for item in defaults)])


def test_routing_replay_is_switched_on_in_the_recipe_and_not_in_upstreams_keys():
    assert problems_of("model.mcore.moe_enable_routing_replay=true") == [
        "model.mcore.moe_enable_routing_replay: is derived from the recipe; remove it"
    ]


def test_file_that_is_absent_or_no_mapping_or_no_yaml_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    with pytest.raises(ConfigError, match="No such file"):
        load_recipe(path)
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match="wants a mapping of recipe sections, got list"):
        load_recipe(path)
    path.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not YAML"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["rollout.min_response_tokens=17"], "rollout.min_response_tokens=17: is above rollout.max_"),
        (["rollout.oversample_prompts=4"], "rollout.oversample_prompts=4: has no effect without"),
        (["rollout.max_prompts_per_step=64"], "rollout.max_prompts_per_step=64: has no effect without"),
        (
            ["rollout.dynamic_sampling=true", "rollout.oversample_prompts=9", "rollout.max_prompts_per_step=40"],
            "rollout.max_prompts_per_step=40: wants at least num_prompts + oversample_prompts, 41",
        ),
        (["rollout.dynamic_sampling=true", "reward.permute=true"], "rollout.dynamic_sampling: chooses groups by"),
        (["rollout.stop_token_ids=[5, 48, -1]"], "rollout.stop_token_ids: has [48, -1], wants ids in [0,"),
        (
            ["rollout.pause_mode=in_place", "cluster.max_policy_lag=1", "rollout.flush_cache=false"],
            "rollout.pause_mode=in_place: with SGLang's overlap schedule",
        ),
        (["rollout.pause_mode=in_place"], "rollout.flush_cache=True: SGLang refuses it while requests run"),
    ],
)
def test_sampling_keys_that_contradict_each_other_are_refused(overrides, problem):
    (got,) = problems_of(*overrides)
    assert got.startswith(problem)


def test_sampling_keys_that_go_together_pass():
    load_recipe(RECIPE, ["rollout.dynamic_sampling=true", "rollout.oversample_prompts=8"])
    load_recipe(RECIPE, ["rollout.stop_token_ids=[5]", "rollout.min_response_tokens=2"])
    load_recipe(RECIPE, ["rollout.pause_mode=in_place", "rollout.flush_cache=false"])
    overrides = ["rollout.pause_mode=in_place", "cluster.max_policy_lag=1", "rollout.flush_cache=false"]
    load_recipe(RECIPE, [*overrides, "rollout.sglang.disable_overlap_schedule=true"])
