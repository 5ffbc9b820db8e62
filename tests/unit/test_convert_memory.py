"""What a conversion holds does not grow with what it converts."""

import torch

from gspo_megatron.convert.ops import slices, stack
from gspo_megatron.convert.to_mcore import BoxSource


def test_expert_after_expert_is_put_together_in_the_same_memory() -> None:
    hf = {f"{i}.{name}": torch.randn(3, 4) for i in range(5) for name in ("gate", "up")}
    op = stack("fc1", [{f"{i}.{name}": (3, 4) for name in ("gate", "up")} for i in range(5)])
    num_bytes: list[int] = []
    source = BoxSource(op, torch.bfloat16, lambda name, box: hf[name][slices(box)], num_bytes.append)
    places = set()
    for i in range(5):
        found = source(((i, i + 1), (0, 6), (0, 4)))
        assert torch.equal(found[0], torch.cat([hf[f"{i}.gate"], hf[f"{i}.up"]]).to(torch.bfloat16))
        places.add(found.data_ptr())
    assert len(places) == 1
    assert num_bytes == [48] * 5


def test_box_of_one_tensor_takes_no_memory() -> None:
    hf = {f"{i}.down": torch.randn(3, 4) for i in range(2)}
    op = stack("fc2", [{name: (3, 4)} for name in hf])
    source = BoxSource(op, torch.float32, lambda name, box: hf[name][slices(box)], lambda _: None)
    assert source(((1, 2), (0, 3), (0, 4))).data_ptr() == hf["1.down"].data_ptr()
