"""The prompt stream: splits, seeds, resuming, and what it refuses."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from transformers import AutoTokenizer

from gspo_megatron import prompts
from gspo_megatron.config import ConfigError, DataConfig
from gspo_megatron.prompts import PromptStream, Split, evaluation_prompts, load_tokenizer, split_of, tokenize
from gspo_megatron.rewards import reasoning

HF_DIR = Path(__file__).parents[2] / "recipes" / "tiny-moe"
DATA = DataConfig(
    reasoning_gym="number_sorting",
    params={
        "min_numbers": 2,
        "max_numbers": 4,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0.0,
        "max_value": 99.0,
    },
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(HF_DIR)


def texts(prompts):
    return [prompt.text for prompt in prompts]


def test_splits_are_disjoint_over_twenty_thousand_items(tokenizer):
    # A small range makes texts recur, so that a text in two splits would show.
    small = replace(DATA, params={**DATA.params, "max_numbers": 3, "max_value": 20.0})
    found, num_items = {}, 0
    for split in get_args(Split):
        stream = PromptStream(small, tokenizer, split=split, seed=1)
        found[split] = set()
        while stream.cursor < 7_000:
            found[split].update(texts(stream.take(50)))
        num_items += stream.cursor
    assert num_items > 20_000
    assert len(set.union(*found.values())) == sum(map(len, found.values()))


@pytest.mark.parametrize(("split", "share"), [("evaluate", 1 / 8), ("cold_start", 3 / 8), ("train", 1 / 2)])
def test_each_split_has_its_share_of_items(tokenizer, split, share):
    stream = PromptStream(DATA, tokenizer, split=split, seed=1)
    for _ in range(40):
        stream.take(20)
    assert 800 / stream.cursor == pytest.approx(share, rel=0.1)


def test_split_depends_on_the_text_alone(tokenizer):
    for seed in (1, 2):
        for prompt in PromptStream(DATA, tokenizer, split="train", seed=seed).take(50):
            assert prompt.prompt_id == hashlib.sha256(prompt.text.encode()).hexdigest()
            assert split_of(prompt.prompt_id) == "train"


def test_buckets_of_the_hash_map_to_splits():
    assert [split_of(f"{i:064x}") for i in range(9)] == [
        "evaluate",
        *["cold_start"] * 3,
        *["train"] * 4,
        "evaluate",
    ]


def test_stream_is_reproducible_and_moves_on(tokenizer):
    first, second = (PromptStream(DATA, tokenizer, split="train", seed=7) for _ in range(2))
    a, b = first.take(32), first.take(32)
    assert second.take(32) == a
    assert second.take(32) == b
    assert texts(a) != texts(b)


def test_stream_resumes_at_a_cursor(tokenizer):
    whole = PromptStream(DATA, tokenizer, split="train", seed=7)
    whole.take(32)
    resumed = PromptStream(DATA, tokenizer, split="train", seed=7, cursor=whole.cursor)
    assert resumed.take(32) == whole.take(32)
    assert resumed.cursor == whole.cursor


def test_neighbouring_seeds_share_almost_no_prompts(tokenizer):
    # Item i of the package's seed s is item i - 1 of its seed s + 1: seeds passed through would share all but one.
    three = replace(DATA, params={**DATA.params, "min_numbers": 3})
    a, b = (set(texts(PromptStream(three, tokenizer, split="train", seed=seed).take(300))) for seed in (1, 2))
    assert len(a & b) < 10


def test_prompts_of_one_batch_are_distinct_though_texts_recur(tokenizer):
    tiny = replace(DATA, params={**DATA.params, "max_numbers": 2, "max_value": 9.0})
    stream = PromptStream(tiny, tokenizer, split="train", seed=1)
    first, second = texts(stream.take(60)), texts(stream.take(60))
    assert len(set(first)) == len(set(second)) == 60
    assert set(first) & set(second)


def test_too_few_distinct_texts_is_an_error_not_a_hang(tokenizer):
    tiny = replace(DATA, params={**DATA.params, "max_numbers": 2, "max_value": 2.0})
    with pytest.raises(ValueError, match=r"distinct prompts of split train, wants 32"):
        PromptStream(tiny, tokenizer, split="train", seed=1).take(32)


def test_evaluation_prompts_are_distinct_held_out_and_nested(tokenizer):
    prompts = evaluation_prompts(DATA, tokenizer, num_prompts=512)
    assert len(set(texts(prompts))) == 512
    assert {split_of(prompt.prompt_id) for prompt in prompts} == {"evaluate"}
    assert evaluation_prompts(DATA, tokenizer, num_prompts=100) == prompts[:100]


def test_prompt_carries_ids_and_an_entry_that_scores_its_expected_response(tokenizer):
    for prompt in PromptStream(DATA, tokenizer, split="train", seed=3).take(50):
        assert tokenizer.decode(prompt.token_ids) == prompt.text
        assert not set(prompt.token_ids) & set(tokenizer.all_special_ids)
        assert reasoning.score(prompt, prompt.expected) == (1.0, True)
        numbers = sorted(map(int, reasoning.prompt_numbers(prompt.text)), reverse=prompt.text[0] == "d")
        assert prompt.expected == ",".join(map(str, numbers))


def test_sums_are_a_second_generator(tokenizer):
    sums = DataConfig(reasoning_gym="chain_sum", params={"min_terms": 2, "max_terms": 3, "max_digits": 2})
    for prompt in PromptStream(sums, tokenizer, split="train", seed=3).take(50):
        assert tokenizer.decode(prompt.token_ids) == prompt.text
        assert reasoning.score(prompt, prompt.expected) == (1.0, True)
        assert int(prompt.expected) == sum(reasoning.prompt_terms(prompt.text))


def test_text_that_the_tokenizer_cannot_spell_is_named(tokenizer):
    with pytest.raises(ValueError, match="'a25#7>' reads 'a257>'"):
        tokenize(tokenizer, "a25#7>")


def test_tokenizer_without_eos_is_refused(tmp_path):
    without = AutoTokenizer.from_pretrained(HF_DIR)
    without.eos_token = None
    without.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no EOS token"):
        load_tokenizer(tmp_path)


def test_missing_tokenizer_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such directory"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("bad", [{"max_numbrs": 3}, {"min_numbers": 5}, {"seed": 1}])
def test_params_that_the_generator_refuses_are_a_config_error(tokenizer, bad):
    with pytest.raises(ConfigError, match="data.params"):
        PromptStream(replace(DATA, params={**DATA.params, **bad}), tokenizer, split="train", seed=1)


def test_item_whose_own_solution_does_not_score_is_refused(tokenizer):
    numbers = ["25.0", "7.0"]
    metadata = {"source_dataset": "number_sorting", "direction": "ascending"}
    item = {"metadata": {**metadata, "original_numbers": numbers, "sorted_numbers": numbers}}
    with pytest.raises(ValueError, match="prompt 'a25,7>': the scorer gives its own solution '25,7' 0.0"):
        prompts._make_prompt("", "a25,7>", item, tokenizer)
