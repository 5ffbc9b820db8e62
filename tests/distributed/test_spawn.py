"""The helper that the distributed tests rest on: results, failures and time limits."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import spawn


def summed(rank: int, factor: float) -> torch.Tensor:
    value = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(value)
    return value


def failing(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 breaks here")
    time.sleep(60)


def dying(rank: int) -> None:
    os._exit(3)


def sleeping(rank: int) -> None:
    time.sleep(60)


def test_results_come_back_in_rank_order_from_a_real_collective() -> None:
    assert [r.tolist() for r in spawn(summed, 2, 2.0)] == [[6.0], [6.0]]


def test_failing_rank_is_named_with_its_traceback_while_others_hang() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed:(.|\n)*in failing(.|\n)*rank 1 breaks here"):
        spawn(failing, 2)
    assert not multiprocessing.active_children()


def test_rank_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 0 ended without a result"):
        spawn(dying, 1)


def test_timeout_leaves_no_child_running() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0\] had not finished after 3.0 s"):
        spawn(sleeping, 1, timeout_s=3.0)
    assert time.monotonic() - start < 10.0
    assert not multiprocessing.active_children()
