"""The parts of the client that need no server."""

from gspo_megatron.rollout import sampling_seed


def test_sampling_seeds_differ_in_every_part_and_fit_31_bits():
    parts = [(s, step, prompt, member) for s in (1, 11) for step in (1, 11) for prompt in "ab" for member in range(64)]
    seeds = {sampling_seed(*part) for part in parts}
    assert len(seeds) == len(parts) and all(0 <= s < 2**31 for s in seeds)
    assert max(seeds) > 2**30
    assert sampling_seed(1, 2, "p", 3) == sampling_seed(1, 2, "p", 3)
