"""What lets megatron-core run without CUDA: it refuses what it was not checked with, and changes no number."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.mcore import cpu
from tests.distributed.spawn import spawn

COUNTS = {"uneven": (3, 1), "first_empty": (0, 2), "last_empty": (2, 0), "even": (2, 2)}


def install_with_unchecked_version(rank: int) -> None:
    cpu.CHECKED_VERSIONS = ("0.1.0", "0.2.0")
    cpu.install()


def install_late(rank: int) -> None:
    import megatron.core  # noqa: F401

    cpu.install()


def test_unchecked_version_of_megatron_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"megatron-core [\d.]+: .* checked with 0\.1\.0, 0\.2\.0 only"):
        spawn(install_with_unchecked_version, 1, fresh=True)


def test_installing_after_megatron_was_imported_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="imported before mcore.cpu.install"):
        spawn(install_late, 1, fresh=True)


def rank_data(counts: tuple[int, ...], rank: int, width: tuple[int, ...]) -> list[Tensor]:
    """What the rank sends to each rank: values say sender, receiver and place; not contiguous where it has columns."""
    parts = []
    for receiver, rows in enumerate(counts):
        part = torch.arange(rows * 4.0).view(rows, 4)[:, ::2] + 100 * rank + 10_000 * receiver
        parts.append(part if width else part[:, 0])
    return parts


def collectives(rank: int) -> dict[str, Any]:
    """Results of both list collectives and of the calls that megatron-core makes with a literal "cuda"."""
    torch.manual_seed(11)
    before = torch.randn(5), torch.rand(3)
    cpu.install()
    cpu.install()  # a second time does nothing
    torch.cuda.manual_seed(11)
    state = torch.cuda.get_rng_state()
    numbers = torch.randn(5), torch.rand(3)
    torch.cuda.set_rng_state(state)
    results: dict[str, Any] = {
        "same_numbers": [torch.equal(a, b) for a, b in zip(before, numbers, strict=True)],
        "same_after_restore": torch.equal(torch.randn(5), before[0]),
        "devices": {
            "zeros": torch.zeros(2, device="cuda").device.type,
            "current": torch.ones(1, device=torch.cuda.current_device()).device.type,
            "to": torch.ones(1).to("cuda:0").device.type,
            "keyword": torch.ones(1).to(device=torch.device("cuda"), dtype=torch.float64).device.type,
            "cuda": torch.ones(1).cuda().device.type,
            "meta": torch.zeros(1, device="meta").device.type,
        },
        "type": (torch.ones(1).type(), torch.ones(1).type(torch.float64).dtype),
        "cuda_is_hidden": torch.cuda.is_available(),
    }
    for name, counts in COUNTS.items():
        for width in ((2,), ()):
            own = rank_data(counts, rank, width)[rank]
            gathered = [torch.full((n, *width), -1.0) for n in counts]
            dist.all_gather(gathered, own)
            scattered = torch.full((counts[rank], *width), -1.0)
            dist.reduce_scatter(scattered, rank_data(counts, rank, width))
            results[f"{name}{len(width)}"] = (gathered, scattered)
    with pytest.raises((RuntimeError, ValueError)):  # never a wrong number: gloo itself refuses
        dist.all_gather([torch.zeros(3), torch.zeros(1)], torch.zeros(3 - 2 * rank), async_op=True).wait()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return spawn(collectives, 2, fresh=True)


@pytest.mark.parametrize("width", [(2,), ()])
@pytest.mark.parametrize("name", COUNTS)
def test_list_collectives_take_uneven_rows(name: str, width: tuple[int, ...], ranks: list[dict[str, Any]]) -> None:
    counts = COUNTS[name]
    sent = [rank_data(counts, sender, width) for sender in range(2)]
    for rank, results in enumerate(ranks):
        gathered, scattered = results[f"{name}{len(width)}"]
        for sender in range(2):
            assert torch.equal(gathered[sender], sent[sender][sender])
        assert torch.equal(scattered, sent[0][rank] + sent[1][rank])


def test_random_numbers_are_those_of_the_cpu_generator(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["same_numbers"] == [True, True]
        assert results["same_after_restore"]


def test_literal_cuda_devices_are_the_cpu(ranks: list[dict[str, Any]]) -> None:
    devices = ranks[0]["devices"]
    assert devices.pop("meta") == "meta"
    assert set(devices.values()) == {"cpu"}
    assert ranks[0]["type"] == ("torch.cuda.FloatTensor", torch.float64)
    assert ranks[0]["cuda_is_hidden"] is False
