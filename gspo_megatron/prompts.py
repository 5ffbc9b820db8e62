"""Prompts: a reasoning-gym generator -> a seeded, resumable stream of Prompt, split three ways by hash."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gspo_megatron.config import ConfigError, DataConfig
from gspo_megatron.rewards import reasoning
from gspo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["evaluate", "cold_start", "train"]

SPLIT_OF_BUCKET: tuple[Split, ...] = ("evaluate",) + ("cold_start",) * 3 + ("train",) * 4
"""Split by SHA-256 of the text modulo 8: a text belongs to one split whatever seed or parameters produced it."""

EVALUATION_SEED = 0
"""Seed of the evaluation set; not the run's, so that runs of different seeds answer the same prompts."""

MAX_ITEMS_PER_PROMPT = 1000
"""Items that `take` reads for each prompt it owes before it concludes that the generator has too few texts."""


def load_tokenizer(hf_dir: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local Hugging Face directory.

    Raises:
        ValueError: hf_dir is no directory, or its tokenizer has no EOS token.
    """
    from transformers import AutoTokenizer

    if not Path(hf_dir).is_dir():
        raise ValueError(f"model.hf_dir={hf_dir}: no such directory; wants config.json and a tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(hf_dir), local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.hf_dir={hf_dir}: the tokenizer has no EOS token, so no response could end; "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of the text, without special tokens.

    Raises:
        ValueError: the ids do not decode to the same text.
    """
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if decoded != text:
        raise ValueError(
            f"text {text!r} reads {decoded!r} after the tokenizer of {tokenizer.name_or_path}, wants the same text; "
            "use a tokenizer whose vocabulary covers it"
        )
    return ids


def split_of(prompt_id: str) -> Split:
    """The one split that a prompt belongs to.

    Args:
        prompt_id: SHA-256 of the text, hex.
    """
    return SPLIT_OF_BUCKET[int(prompt_id, 16) % len(SPLIT_OF_BUCKET)]


class PromptStream:
    """The prompts of one split in a fixed order, resumable at `cursor`.

    Attributes:
        cursor: items of the generator read so far. A stream built with the same arguments and this cursor goes on
            exactly where this one stands.
    """

    def __init__(
        self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, split: Split, seed: int, cursor: int = 0
    ):
        """Open the generator.

        Raises:
            ConfigError: reasoning-gym refuses data.params.
        """
        self.cursor = cursor
        self._data = data
        self._tokenizer = tokenizer
        self._split = split
        self._items = _create_generator(data, seed=_generator_seed(split, seed))

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next num_prompts prompts, all distinct; a text may come again in a later call.

        Raises:
            ValueError: the generator yields too few distinct texts, or the tokenizer cannot spell one.
        """
        prompts: dict[str, Prompt] = {}
        last_item = self.cursor + MAX_ITEMS_PER_PROMPT * num_prompts
        while len(prompts) < num_prompts:
            if self.cursor == last_item:
                raise ValueError(
                    f"data.params={self._data.params}: {MAX_ITEMS_PER_PROMPT * num_prompts} items hold "
                    f"{len(prompts)} distinct prompts of split {self._split}, wants {num_prompts}; "
                    "widen the range of numbers or ask for fewer"
                )
            item = self._items[self.cursor]
            self.cursor += 1
            text = reasoning.render_prompt(item)
            prompt_id = hashlib.sha256(text.encode()).hexdigest()
            if split_of(prompt_id) == self._split and prompt_id not in prompts:
                prompts[prompt_id] = _make_prompt(prompt_id, text, item, self._tokenizer)
        return list(prompts.values())


def evaluation_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, num_prompts: int
) -> list[Prompt]:
    """Distinct held-out prompts, the same for every seed of a run; a smaller set is the start of a larger one.

    Raises:
        ConfigError: reasoning-gym refuses data.params.
        ValueError: as PromptStream.take.
    """
    return PromptStream(data, tokenizer, split="evaluate", seed=EVALUATION_SEED).take(num_prompts)


def _create_generator(data: DataConfig, *, seed: int) -> Any:
    # Imported here: the package takes two seconds, which a reader of records need not pay.
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(data.reasoning_gym, seed=seed, **data.params)
    except (AssertionError, TypeError) as error:
        raise ConfigError(
            f"data.params={data.params}: reasoning-gym's {data.reasoning_gym} refuses them ({error})"
        ) from error


def _generator_seed(split: Split, seed: int) -> int:
    """A seed far from every other: item i of reasoning-gym's seed s is item i - 1 of its seed s + 1."""
    return int(hashlib.sha256(f"{split}:{seed}".encode()).hexdigest()[:15], 16)


def _make_prompt(
    prompt_id: str, text: str, item: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Prompt:
    expected = reasoning.render_expected(item)
    # The response is what the model must be able to spell; its ids are not needed here.
    tokenize(tokenizer, expected)
    prompt = Prompt(
        prompt_id=prompt_id,
        text=text,
        token_ids=tokenize(tokenizer, text),
        expected=expected,
        entry=reasoning.scorer_entry(item),
    )
    # The package's scorer turns any error of its own into 0; an entry that it cannot read would look unsolvable.
    reward, _ = reasoning.score(prompt, expected)
    if reward != 1.0:
        raise ValueError(f"prompt {text!r}: the scorer gives its own solution {expected!r} {reward}, wants 1.0")
    return prompt
