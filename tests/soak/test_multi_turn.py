"""The calculator recipe from its cold start: the policy learns to use the tool, and every record has its turns."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from gspo_megatron.metrics import load_metrics
from gspo_megatron.multi_turn import Turn
from gspo_megatron.prompts import load_tokenizer
from gspo_megatron.types import load_groups
from recipes.calculator import answer

ROOT = Path(__file__).parents[2]
OUTPUT_DIR = ROOT / "runs" / "soak"
NUM_STEPS = 40
MAX_MISMATCH = 1.0e-5
"""Nats, as in tests/e2e/test_run.py: trainer and server agree on the tokens between replies."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@cache
def run() -> Path:
    """The folder of a finished run."""
    OUTPUT_DIR.mkdir(parents=True, exist_ok=True)
    items = ["name=calculator", f"output_dir={OUTPUT_DIR.relative_to(ROOT)}", f"train.num_rollout_steps={NUM_STEPS}"]
    command = [sys.executable, "-m", "gspo_megatron.launch", "--config", "recipes/gspo-tiny-moe-calculator-cpu.yaml"]
    command += [part for item in items for part in ("--set", item)]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    return OUTPUT_DIR / "calculator"


def rows() -> list[dict]:
    return load_metrics(run() / "metrics.jsonl")


def test_reward_and_held_out_accuracy_rise_clearly() -> None:
    before, after = rows()[0]["evaluation"], rows()[-1]["evaluation"]
    rewards = [row["reward_mean"] for row in rows()[1:]]
    turn_rewards = [row["turn_reward_mean"] for row in rows()[1:]]
    print(f"\naccuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}")
    assert 0.15 <= before["accuracy"] <= 0.45
    assert after["accuracy"] >= before["accuracy"] + 0.30
    assert before["high"] < after["low"]
    assert fmean(rewards[-5:]) >= fmean(rewards[:2]) + 0.25
    assert fmean(turn_rewards[-5:]) >= fmean(turn_rewards[:2]) + 0.25


def test_first_minibatch_is_on_policy_and_trainer_and_server_agree() -> None:
    first = [row["minibatches"][0] for row in rows()[1:]]
    assert {minibatch["clip_fraction_tokens"] for minibatch in first} == {0.0}
    assert max(minibatch["mismatch_abs_mean"] for minibatch in first) < MAX_MISMATCH


@pytest.mark.parametrize("kind", ["rollouts", "evaluations"])
def test_every_reply_is_masked_and_what_the_calculator_says_to_the_turns_before(kind: str) -> None:
    tokenizer = load_tokenizer(ROOT / "recipes" / "tiny-moe")
    num_replies = 0
    for path in sorted((run() / kind).glob("*.jsonl")):
        for group in load_groups(path):
            for rollout in group.rollouts:
                replies, turns, text = [], [], ""
                pairs = list(zip(rollout.response_ids, rollout.response_mask, strict=True))
                for i, (token_id, is_sampled) in enumerate(pairs):
                    text += tokenizer.decode([token_id])
                    if i + 1 == len(pairs) or pairs[i + 1][1] != is_sampled:
                        if is_sampled:
                            turns.append(Turn(token_ids=(), text=text[:-1], stop=text[-1:]))
                        else:
                            replies.append(text)
                            assert text == answer(group.prompt, turns).text
                        text = ""
                assert len(turns) == len(rollout.turn_lengths) == len(replies) + 1
                num_replies += len(replies)
    assert num_replies > 200
    assert json.loads((run() / "metrics.jsonl").read_text().splitlines()[-1])["turns_mean"] > 2.0


def test_advantages_differ_between_turns_where_their_rewards_do() -> None:
    groups = load_groups(run() / "rollouts" / "step_00001.jsonl")
    per_response = [len(set(r.token_advantages)) for g in groups for r in g.rollouts if r.token_advantages is not None]
    assert max(per_response) > 2
