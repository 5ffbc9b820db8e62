"""One SGLang server: its process (Engine) and the control calls on it when it runs (ServerClient).

Source: sglang 0.5.21, srt/server_args.py (arguments), srt/entrypoints/http_server.py (endpoints).
Nothing here retries: rollout.py does, and knows from RolloutError.retryable where that makes sense.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from gspo_megatron.config import ConfigError, Recipe
from gspo_megatron.process import interface_variables
from gspo_megatron.sglang_cpu import DEVICE_VARIABLE, LIMIT_VARIABLE

LOG_LINES, LOG_COLUMNS = 20, 300
"""How much of the server's log an error quotes."""
WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
"""SGLang's tags of device memory that a server can release (srt/constants.py)."""
ALL_MEMORY = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
PROBE_TEMPERATURE = 100.0
"""Flattens any model's distribution, so that equal tokens of two probes mean equal seeds and nothing else."""
KILL_TIMEOUT_S = 60.0
"""For killed processes to be gone; one that waits for a device takes its time."""
FIRST_FREE_PORT, FREE_PORT_TRIES = 20000, 100
"""Where and how often a free port is looked for."""
WATCHDOG = 'read -r _; kill -9 "-$0"'
"""Reads until its writer (the process that started the server) is gone, then ends the server's process group."""


class RolloutError(RuntimeError):
    """A server did not do what it was asked; the message names URL, status and answer."""

    def __init__(self, message: str, *, retryable: bool = False, is_lost: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
        """True after a connection error, a timeout, a status 5xx or a garbled answer: the same request may succeed
        later."""
        self.is_lost = is_lost
        """True after a connection error: there may be no server any more."""


def server_arguments(
    recipe: Recipe, *, model_dir: Path, port: int, weight_version: int, load_format: str = "auto"
) -> list[str]:
    """Arguments of SGLang's launch_server for this recipe; rollout.sglang's keys go through under their own names."""
    cpu_defaults = {"attention_backend": "torch_native", "sleep_on_idle": True}
    arguments = {
        "log_level_http": "warning",
        **(cpu_defaults if recipe.device == "cpu" else {}),
        **recipe.rollout.sglang,
        "model_path": str(model_dir),
        "load_format": load_format,
        "skip_tokenizer_init": True,
        "host": recipe.cluster.host,
        "port": port,
        "device": recipe.device,
        "dtype": recipe.model.dtype,
        "enable_fp32_lm_head": recipe.model.fp32_lm_head and recipe.model.dtype != "float32",
        "enable_return_routed_experts": recipe.loss.routing_replay == "r3",
        "enable_memory_saver": recipe.cluster.placement == "colocated",
        "random_seed": recipe.seed,
        "weight_version": str(weight_version),
    }
    return [text for key, value in arguments.items() for text in _argument(key, value)]


def _argument(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple)):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def server_environment(recipe: Recipe, inherited: Mapping[str, str], *, cuda_devices: str = "") -> dict[str, str]:
    """The server's environment: what is inherited, less what would change results, plus what the device needs.

    Args:
        recipe: its device and cluster.network_interface are used.
        inherited: this process's environment.
        cuda_devices: what the server sees, as CUDA_VISIBLE_DEVICES has it.

    Raises:
        ConfigError: an SGLANG_* variable is inherited that this project does not set to the same value,
            cluster.network_interface is none of this machine's, or torch's allocator is set to what colocated servers
            cannot work with.
    """
    own = {
        "CUDA_VISIBLE_DEVICES": cuda_devices,
        DEVICE_VARIABLE: recipe.device,
        LIMIT_VARIABLE: str(recipe.push_limit_s),
        **interface_variables(recipe.cluster.network_interface),
    }
    if recipe.device == "cuda":
        # After a weight push over NCCL broke, torch's watchdog ends a server when four times this has passed.
        own["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
    if recipe.cluster.placement == "colocated":
        _check_allocator(inherited)
    if recipe.device == "cpu":
        own |= {
            # From 1 MiB on memcpy writes past the caches, for sglang_checksum.CopyingByMemcpy.
            "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=1048576",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",  # tiny matmuls: two threads are ten times slower than one
            "SGLANG_USE_CPU_ENGINE": "1",
            "THP_MEM_ALLOC_ENABLE": "1",  # torch: huge pages, of which new memory for weights is had sooner
            "TORCHDYNAMO_DISABLE": "1",  # else the first batch waits for a compiler
        }
    foreign = [f"{k}={v}" for k, v in inherited.items() if k.startswith(("SGLANG_", "SGL_")) and own.get(k) != v]
    if foreign:
        raise ConfigError(
            f"environment: {', '.join(sorted(foreign))}: changes what SGLang computes and is not in the recipe; "
            f"unset {', '.join(sorted(item.partition('=')[0] for item in foreign))}"
        )
    kept = {k: v for k, v in inherited.items() if k != DEVICE_VARIABLE}
    return {**kept, **own}


def _check_allocator(inherited: Mapping[str, str]) -> None:
    """Refuse torch's expandable segments: torch-memory-saver 0.0.10 does, and a server cannot open them over IPC."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in inherited.get(name, "").replace(" ", "").lower():
            raise ConfigError(
                f"environment: {name}={inherited[name]}: with cluster.placement: colocated servers cannot release "
                "memory of expandable segments; unset it"
            )


def take_port(host: str, port: int) -> int:
    """The port, after a look whether it can be bound; a free one for 0.

    Raises:
        ConfigError: something listens there, or the host is not this machine's.
    """
    if port == 0:
        return _free_port(host)
    try:
        return _bound_port(host, port)
    except OSError as error:
        raise ConfigError(
            f"cluster.server_port={port}: port is in use on {host} or cannot be bound ({error.strerror}); "
            "stop what listens there, or set cluster.server_port to another port or to 0 for a free one"
        ) from error


def _free_port(host: str) -> int:
    """One that Linux gives to no outgoing connection, since a server takes its port many seconds later."""
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(FIRST_FREE_PORT, first_outgoing)
    for port in random.SystemRandom().sample(candidates, min(FREE_PORT_TRIES, len(candidates))):
        with suppress(OSError):
            return _bound_port(host, port)
    return _bound_port(host, 0)


def _bound_port(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise ConfigError(f"cluster.host={host}: is no address of this machine ({error.strerror})") from error
        return int(probe.getsockname()[1])


class Engine:
    """The process of one SGLang server, which ends with the process that started it, however that ends."""

    def __init__(self, process: subprocess.Popen[bytes], *, url: str, log_path: Path, device: str) -> None:
        self.process, self.url, self.log_path, self.device = process, url, log_path, device
        self._watchdog = subprocess.Popen(
            ["sh", "-c", WATCHDOG, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
        )

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        *,
        model_dir: Path,
        port: int,
        log_path: Path,
        weight_version: int = 0,
        load_format: str = "auto",
        cuda_devices: str = "",
    ) -> Engine:
        """Start a server in a session of its own; returns at once, wait_ready waits.

        Args:
            recipe: its `device`, `seed`, `model.dtype`, `cluster.host` and `rollout.sglang` are used.
            model_dir: Hugging Face directory with config.json and weights.
            load_format: SGLang's; `dummy` where the weights come by a push.
            port: HTTP port; 0 takes a free one.
            log_path: receives everything that the server prints.
            weight_version: version that the weights in model_dir have.
            cuda_devices: what the server sees, as CUDA_VISIBLE_DEVICES has it (process.assign_devices).

        Raises:
            ConfigError: the port is in use, or the environment holds foreign SGLANG_* variables.
        """
        environment = server_environment(recipe, os.environ, cuda_devices=cuda_devices)
        port = take_port(recipe.cluster.host, port)
        module = "gspo_megatron.sglang_cpu" if recipe.device == "cpu" else "sglang.launch_server"
        arguments = server_arguments(
            recipe, model_dir=model_dir, port=port, weight_version=weight_version, load_format=load_format
        )
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        url = f"http://{recipe.cluster.host}:{port}"
        return cls(process, url=url, log_path=log_path, device=recipe.device)

    def is_alive(self) -> bool:
        """Whether the server's main process runs; SGLang ends it when one of its own processes dies."""
        return self.process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server answers a real generate request; on CPU also check that it honours seeds.

        Raises:
            RolloutError: the server died, did not answer in time, or ignores seeds; quotes the end of its log.
        """
        asyncio.run(self._wait_ready(timeout_s))

    async def _wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        async with aiohttp.ClientSession() as session:
            while True:
                if not self.is_alive():
                    raise RolloutError(
                        f"{self.url}: the SGLang server ended with status {self.process.returncode}"
                        f" before it was ready; {self._log_tail()}"
                    )
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise RolloutError(
                        f"{self.url}: the SGLang server was not ready within {timeout_s:g} s "
                        f"(cluster.start_timeout_s); {self._log_tail()}"
                    )
                try:
                    first = await self._probe(session, seed=1, timeout_s=left_s)
                    break
                except RolloutError as error:
                    if not error.retryable:
                        raise
                await asyncio.sleep(0.25)
            if self.device != "cpu":
                return
            again = await self._probe(session, seed=1, timeout_s=timeout_s)
            other = await self._probe(session, seed=2, timeout_s=timeout_s)
        if first != again or first == other:
            raise RolloutError(
                f"{self.url}: the SGLang server ignores sampling seeds: seed 1 gave {first} and {again}, seed 2 gave "
                f"{other}; gspo_megatron.sglang_cpu.plugin did not take effect; {self._log_tail()}"
            )

    def check_health(self, timeout_s: float) -> None:
        """Deep probe: passes when the server samples a token for it, or answers others meanwhile.

        Raises:
            RolloutError: no answer within timeout_s, or one that says that nothing was sampled.
        """
        asyncio.run(self._check_health(timeout_s))

    async def _check_health(self, timeout_s: float) -> None:
        async with aiohttp.ClientSession() as session:
            await get(session, self.url + "/health_generate", timeout_s=timeout_s)

    def sleep(self, timeout_s: float) -> None:
        """Pause the server and release all its device memory; colocated.py wakes it.

        Raises:
            RolloutError: it did not do so in time.
        """

        async def pause_and_release() -> None:
            async with aiohttp.ClientSession() as session:
                server = ServerClient(session, self.url, timeout_s=timeout_s)
                await server.pause_generation("retract")
                await server.release_memory_occupation(ALL_MEMORY)

        asyncio.run(pause_and_release())

    async def _probe(self, session: aiohttp.ClientSession, *, seed: int, timeout_s: float) -> list[int]:
        sampling = {"temperature": PROBE_TEMPERATURE, "max_new_tokens": 8, "ignore_eos": True, "sampling_seed": seed}
        body = {"input_ids": [0], "sampling_params": sampling}
        answer = await post(session, self.url + "/generate", body, timeout_s=timeout_s)
        return list(answer["output_ids"])

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n  ".join([f"the end of {self.log_path}:", *(line[:LOG_COLUMNS] for line in lines)])

    def stop(self, limit_s: float = 5.0) -> None:
        """End the server and all of its session; returns when none of it runs. Safe to call twice.

        Args:
            limit_s: how long the server may take for its own shutdown before it is killed, seconds.

        Raises:
            RolloutError: a process does not end although it was killed.
        """
        if self.is_alive():
            self.process.terminate()
            try:
                self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while members := session_members(self.process.pid):
            if time.monotonic() > deadline:
                raise RolloutError(f"{self.url}: processes {members} run {KILL_TIMEOUT_S:g} s after SIGKILL")
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        # Last, so that the server is watched until it is gone; killed, so that it does not act.
        self._watchdog.kill()
        self._watchdog.wait()


def session_members(session: int) -> list[int]:
    """Process ids of a session, without zombies: those wait for init to reap them and hold nothing."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # After the name in brackets: state, parent, process group, session.
        state, _, _, member_of = text.rpartition(")")[2].split()[:4]
        if int(member_of) == session and state not in "ZX":
            members.append(int(stat.parent.name))
    return members


async def get(session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> Any:
    """GET; returns and raises as post."""
    return await _request(session, "GET", url, None, timeout_s)


async def post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
    """POST JSON; returns the JSON answer, or the text of an answer that is not JSON.

    Raises:
        RolloutError: no answer within timeout_s, no connection, or a status other than 200.
    """
    return await _request(session, "POST", url, body, timeout_s)


async def _request(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float
) -> Any:
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.request(method, url, json=body, timeout=timeout) as response:
            text = await response.text()
    except TimeoutError as error:
        raise RolloutError(f"{method} {url}: no answer within {timeout_s:g} s", retryable=True) from error
    except aiohttp.ClientError as error:
        raise RolloutError(f"{method} {url}: {type(error).__name__}: {error}", retryable=True, is_lost=True) from error
    if response.status != 200:
        is_retryable = response.status >= 500
        raise RolloutError(f"{method} {url}: status {response.status}: {text[:2000]}", retryable=is_retryable)
    if response.content_type != "application/json":
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        message = f"{method} {url}: status 200, but the answer is not JSON: {text[:2000]}"
        raise RolloutError(message, retryable=True) from error


class ServerClient:
    """Control calls on one running server. Each raises RolloutError with URL, status and answer when it fails.

    A weight push is a row of these calls: weight_sync.py and transports.py have the order.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> None:
        self.session, self.url, self.timeout_s = session, url, timeout_s

    async def _call(self, endpoint: str, **body: Any) -> Any:
        answer = await post(self.session, f"{self.url}/{endpoint}", body, timeout_s=self.timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RolloutError(f"POST {self.url}/{endpoint}: status 200, but success is false: {answer}")
        return answer

    async def pause_generation(self, mode: str) -> None:
        """Stop sampling; requests that come meanwhile wait.

        Args:
            mode: what it does to running requests, as rollout.pause_mode.
        """
        await self._call("pause_generation", mode=mode)

    async def continue_generation(self) -> None:
        """Resume sampling; requests that were in flight recompute their keys and values with the current weights."""
        await self._call("continue_generation", torch_empty_cache=False)

    async def flush_cache(self) -> None:
        """Drop all cached keys and values; refused while requests run."""
        await self._call("flush_cache")

    async def release_memory_occupation(self, tags: Sequence[str]) -> None:
        """Give device memory back to the device; what was in it is lost.

        weights: the parameters. SGLang copies the model's buffers aside and puts them back.
        kv_cache: the pool of keys and values; the cache is flushed.
        cuda_graph: what captured graphs keep, where SGLang captured them for it: SGLANG_MEMORY_SAVER_CUDA_GRAPH, with
        which a server of 0.5.21 does not start unless its default graphs for prefill are switched off. Otherwise
        nothing happens, and graphs stay on the device; they are valid again once weights and kv_cache are resumed,
        which get their old addresses.

        A server without enable_memory_saver, which on a CPU is every one, answers 200 and keeps its memory.

        Args:
            tags: none of them released at present. The server has to be paused (pause_generation, retract or
                in_place): a request that runs fails an assertion in its scheduler, which ends the server.
        """
        await self._call("release_memory_occupation", tags=list(tags))

    async def resume_memory_occupation(self, tags: Sequence[str]) -> None:
        """Take released device memory again, at the old addresses; the contents are undefined.

        Args:
            tags: all of them released: another one is a KeyError in the server's scheduler, which ends the server.
        """
        await self._call("resume_memory_occupation", tags=list(tags))

    async def weight_version(self) -> int:
        """The version that the server reports for its weights."""
        info = await get(self.session, f"{self.url}/model_info", timeout_s=self.timeout_s)
        return int(info["weight_version"])

    async def update_weight_version(self, weight_version: int) -> None:
        """Set the version that tokens carry from now on; returns when the server's schedulers have it."""
        await self._call("update_weight_version", new_version=str(weight_version), abort_all_requests=False)

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Join the process group that weights arrive by; returns when all world_size ranks have joined.

        Args:
            rank_offset: rank of this server's first process; its tensor-parallel ranks follow.
            backend: `gloo` on CPU, `nccl` on GPU.
        """
        await self._call(
            "init_weights_update_group",
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )

    async def destroy_weights_update_group(self, *, group_name: str) -> None:
        """Leave the process group."""
        await self._call("destroy_weights_update_group", group_name=group_name)

    async def begin_weight_update(self) -> None:
        """Open a weight update; without it update_weights_from_distributed is refused."""
        await self._call("begin_weight_update")

    async def update_weights_from_distributed(self, *, group_name: str) -> None:
        """Receive what rank 0 of the group broadcasts meanwhile, which says itself what it is (sglang_checksum.py)."""
        await self._call(
            "update_weights_from_distributed",
            names=[],
            dtypes=[],
            shapes=[],
            group_name=group_name,
            load_format="flattened_bucket",
            flush_cache=False,  # SGLang's scheduler ends when it cannot; flush_cache answers
        )

    async def end_weight_update(self) -> None:
        """Close the weight update: the server finishes what quantised layers need."""
        await self._call("end_weight_update")

    async def update_weights_from_disk(self, model_path: Path) -> None:
        """Load a Hugging Face directory's weights; begins and ends the update itself."""
        await self._call("update_weights_from_disk", model_path=str(model_path), load_format="auto", flush_cache=False)

    async def update_weights_from_tensor(self, payloads: Sequence[str]) -> None:
        """Load a bucket from CUDA memory that this process shares.

        Args:
            payloads: per rank of the server: SGLang's MultiprocessingSerializer, base64, of a flattened bucket.
        """
        await self._call(
            "update_weights_from_tensor",
            serialized_named_tensors=list(payloads),
            load_format="flattened_bucket",
            flush_cache=False,
        )

    async def received_weights(self) -> list[dict[str, str]]:
        """What the last update gave each rank of the server: Hugging Face name -> checksum (sglang_checksum.py).

        Raises:
            RolloutError: also where the server has no such record, because the plug-in is not installed.
        """
        answer = await self._call("weights_checker", action="received")
        return [rank["checksums"] for rank in answer["ranks"]]

    async def weights_checksum(self) -> list[dict[str, str]]:
        """One mapping per rank of the server: name of its (fused) parameter -> hash of its bytes.

        On CPU a hash is the first 8 bytes, hex, of the SHA-256 over the parameter's memory.
        """
        answer = await self._call("weights_checker", action="checksum")
        return [rank["checksums"] for rank in answer["ranks"]]

    async def score(self, input_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of input_ids[1:] given what precedes each, nats. SGLang applies no temperature to them."""
        answer = await self._call(
            "generate",
            input_ids=list(input_ids),
            sampling_params={"temperature": 1.0, "max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        pairs = answer["meta_info"]["input_token_logprobs"]
        if len(pairs) != len(input_ids):
            raise RolloutError(f"POST {self.url}/generate: scored {len(pairs)} tokens, wants {len(input_ids)}")
        return [float(logprob) for logprob, _, _ in pairs[1:]]
