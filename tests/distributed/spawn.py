"""Run a function on several processes with real gloo collectives."""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def spawn(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, fresh: bool = False
) -> list[Any]:
    """Call fn(rank, *args) on each of world_size processes, with the default process group on gloo.

    Args:
        fn: a function of a module's top level; its result must pickle. One compute thread per process.
        world_size: processes.
        args: passed on; must pickle.
        timeout_s: for all of it, start included.
        fresh: start each process from a new interpreter, without what preload.py has imported and installed.

    Returns:
        The results in rank order.

    Raises:
        RuntimeError: a rank raised (with its traceback) or ended without a result.
        TimeoutError: with the ranks that had not finished. In every case no child is left running.
    """
    # A forkserver imports megatron-core once, before any thread or process group exists: each child starts at once.
    context = multiprocessing.get_context("spawn" if fresh else "forkserver")
    multiprocessing.set_forkserver_preload(["tests.distributed.preload"])
    deadline = time.monotonic() + timeout_s
    children: list[BaseProcess] = []
    rank_of: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                job = (sender, rank, world_size, rendezvous, timeout_s, fn, args)
                child = context.Process(target=_run, args=job, daemon=True)
                child.start()
                sender.close()
                children.append(child)
                rank_of[receiver] = rank
            return _collect(rank_of, deadline, timeout_s)
        finally:
            for child in children:
                child.kill()
                child.join()


def _collect(rank_of: dict[Connection, int], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(rank_of)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} had not finished after {timeout_s} s")
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                is_result, payload = pickle.loads(connection.recv_bytes())
            except EOFError as error:
                raise RuntimeError(f"rank {rank} ended without a result") from error
            if not is_result:
                raise RuntimeError(f"rank {rank} of {len(rank_of)} failed:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(len(rank_of))]


def _run(
    sender: Connection,
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout_s: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        # Plain pickle: tensors travel by value, not as shared memory of a process that is about to end.
        message = pickle.dumps((True, fn(rank, *args)))
    except BaseException:  # the parent raises it, whatever it is
        message = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(message)
    if dist.is_initialized():
        dist.destroy_process_group()
