"""Demonstrations: the mix of right and flawed responses, each flaw told from the others."""

import random
from collections import Counter
from pathlib import Path

import pytest

from gspo_megatron.demonstrations import demonstration
from gspo_megatron.prompts import load_tokenizer, tokenize
from gspo_megatron.types import Prompt
from recipes import calculator

HF_DIR = Path(__file__).parents[2] / "recipes" / "tiny-moe"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(HF_DIR)


def make_prompt(tokenizer, text: str, expected: str, *, source: str = "number_sorting") -> Prompt:
    entry = {"metadata": {"source_dataset": source}}
    return Prompt(prompt_id=text, text=text, token_ids=tokenize(tokenizer, text), expected=expected, entry=entry)


def sample_texts(tokenizer, prompt: Prompt, *, count: int, flawed_fraction: float, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        shown = demonstration(prompt, tokenizer, rng, flawed_fraction=flawed_fraction, function=calculator.answer)
        *ids, last = shown.response_ids
        assert last == tokenizer.eos_token_id
        texts.append(tokenizer.decode(ids))
    return texts


def test_mix_of_flaws_has_the_stated_shares(tokenizer):
    prompt = make_prompt(tokenizer, "a30,10,40,20>", "10,20,30,40")
    counts = Counter(sample_texts(tokenizer, prompt, count=10_000, flawed_fraction=0.7))
    kinds = {
        "right": ["10,20,30,40"],
        "copied": ["30,10,40,20"],
        "opposite": ["40,30,20,10"],
        "swapped": ["20,10,30,40", "10,30,20,40", "10,20,40,30"],
        "missing": ["20,30,40", "10,30,40", "10,20,40", "10,20,30"],
    }
    assert set(counts) == {text for members in kinds.values() for text in members}
    share = {kind: sum(counts[text] for text in members) / 10_000 for kind, members in kinds.items()}
    want = {"right": 0.30, "copied": 0.28, "opposite": 0.21, "swapped": 0.105, "missing": 0.105}
    assert share == pytest.approx(want, abs=0.016)


@pytest.mark.parametrize(("flawed_fraction", "right"), [(0.0, 200), (1.0, 0)])
def test_flawed_fraction_reaches_both_ends(tokenizer, flawed_fraction, right):
    prompt = make_prompt(tokenizer, "d10,40>", "40,10")
    counts = Counter(sample_texts(tokenizer, prompt, count=200, flawed_fraction=flawed_fraction))
    assert counts["40,10"] == right


def test_demonstrations_follow_the_generators_seed(tokenizer):
    prompt = make_prompt(tokenizer, "a30,10,40,20>", "10,20,30,40")
    a, b, c = (sample_texts(tokenizer, prompt, count=50, flawed_fraction=0.7, seed=seed) for seed in (1, 1, 2))
    assert a == b != c


def test_single_number_has_no_flawed_demonstration(tokenizer):
    prompt = make_prompt(tokenizer, "a7>", "7")
    with pytest.raises(ValueError, match="min_numbers"):
        demonstration(prompt, tokenizer, random.Random(0), flawed_fraction=1.0)
    assert sample_texts(tokenizer, prompt, count=5, flawed_fraction=0.0) == ["7"] * 5


def test_sums_are_shown_with_calls_whose_replies_are_masked(tokenizer):
    prompt = make_prompt(tokenizer, "12+45-77>", "-20", source="chain_sum")
    shown = demonstration(prompt, tokenizer, random.Random(0), flawed_fraction=0.0, function=calculator.answer)
    assert tokenizer.decode(shown.response_ids) == "12+45=57,57-77=-20,-20<|eos|>"
    put_in = [i for i, is_sampled in zip(shown.response_ids, shown.response_mask, strict=True) if not is_sampled]
    assert tokenizer.decode(put_in) == "57,-20,"
    assert shown.response_mask[:9] == (True,) * 6 + (False,) * 3


def test_mix_of_flaws_in_sums_has_the_stated_shares(tokenizer):
    prompt = make_prompt(tokenizer, "12+45-77>", "-20", source="chain_sum")
    counts = Counter(sample_texts(tokenizer, prompt, count=10_000, flawed_fraction=0.7))
    kinds = {
        "right": ["12+45=57,57-77=-20,-20"],
        "sign": ["12-45=-33,-33-77=-110,-110", "12+45=57,57+77=134,134"],
        "left out": ["12-77=-65,-65", "12+45=57,57"],
        "first": ["12"],
    }
    assert set(counts) == {text for members in kinds.values() for text in members}
    share = {kind: sum(counts[text] for text in members) / 10_000 for kind, members in kinds.items()}
    assert share == pytest.approx({"right": 0.30, "sign": 0.28, "left out": 0.21, "first": 0.21}, abs=0.016)


def test_sums_want_a_function_that_answers_their_calls(tokenizer):
    prompt = make_prompt(tokenizer, "12+45>", "57", source="chain_sum")
    for function, message in ((None, "set rollout.multi_turn"), (lambda *_: None, "does not answer the call '12.45'")):
        with pytest.raises(ValueError, match=message):
            demonstration(prompt, tokenizer, random.Random(0), flawed_fraction=0.0, function=function)
    alone = make_prompt(tokenizer, "12>", "12", source="chain_sum")
    with pytest.raises(ValueError, match="min_terms"):
        demonstration(alone, tokenizer, random.Random(0), flawed_fraction=1.0, function=calculator.answer)
