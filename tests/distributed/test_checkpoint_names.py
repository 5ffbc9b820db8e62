"""What a checkpoint holds: the family's table and nothing that only one device's modules have."""

from collections import Counter

import pytest

from tests.distributed.policy_worker import build
from tests.distributed.spawn import spawn

ONE = ["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"]


def names_in_checkpoint(rank):
    _, policy, _ = build(ONE)
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    keys = {entry.key for entry in nested_values(policy.sharded_state_dict())}
    return keys, Counter(op.mcore_name for op in policy.ops)


def load_without_one_parameter(rank, name):
    _, policy, _ = build(ONE)
    state = {"chunk0": policy.chunks[0].module.state_dict()}
    policy.load_state_dict({"chunk0": {n: v for n, v in state["chunk0"].items() if "_extra_state" not in n}})
    state["chunk0"]["surplus.weight"] = state["chunk0"].pop(name)
    policy.load_state_dict(state)


def test_checkpoint_holds_the_tensors_of_the_table_and_nothing_else():
    ((keys, table),) = spawn(names_in_checkpoint, 1, timeout_s=120)
    assert keys == set(table)
    assert set(table.values()) == {1}


def test_state_that_lacks_a_parameter_is_refused_by_name():
    name = "decoder.layers.1.mlp.router.weight"
    with pytest.raises(RuntimeError, match=f"ConversionError.*\n  missing {name}\n  unexpected surplus.weight"):
        spawn(load_without_one_parameter, 1, name, timeout_s=120)
