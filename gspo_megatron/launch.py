"""This node's part of a run: cold start, SGLang servers, torchrun; watches what it started and stops exactly that."""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from gspo_megatron.checks import is_hf_weights
from gspo_megatron.cold_start import cold_start_dir
from gspo_megatron.config import ConfigError, Recipe, dump_recipe, load_recipe
from gspo_megatron.convert.families import check_same_model, family_of, table_for
from gspo_megatron.convert.hf_io import TensorReader, read_config
from gspo_megatron.convert.mcore_io import McoreCheckpoint
from gspo_megatron.convert.mcore_layout import HF_SUBFOLDER, resolve_folder
from gspo_megatron.convert.ops import ConversionError, check_names_and_shapes
from gspo_megatron.convert.to_hf import check_mcore_names_and_shapes, may_be_padded
from gspo_megatron.convert.to_mcore import check_weight_dtypes
from gspo_megatron.engine import RolloutError, server_environment, take_port
from gspo_megatron.fleet import NO_VERSION, Fleet
from gspo_megatron.mcore.rank import ERROR_PREFIX
from gspo_megatron.objective_checks import warnings_of
from gspo_megatron.process import RunError, Torchrun, assign_devices, trainer_environment
from gspo_megatron.sampling import Sampler, step_file
from gspo_megatron.serving import serving_dir
from gspo_megatron.supervisor import Supervisor

WATCH_INTERVAL_S = 0.2
"""Between two looks at what was started."""
_SIGNAL = re.compile(r"Signal (\d+) \(\w+\) received by PID \d+")
"""How torchrun's closing summary names a rank that was killed."""
_FOLLOWING_SIGNALS = (signal.SIGTERM, signal.SIGABRT)
"""torchrun's own to the other ranks; an abort, which a rank does itself after it said why."""
_EXCEPTION = re.compile(r"^(\w+\.)*\w*(Error|Exception)\b.*")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
"""torch writes it before each line of an uncaught error once the process group exists."""



T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe on this node; returns the exit status (0 success, 2 bad recipe, 130 interrupted, else 1)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="RECIPE", help="recipes/*.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one key of the recipe")
    parser.add_argument("--only", choices=("rollout", "train"), help="one half: sample and save, or train on saved")
    parser.add_argument("--dry-run", action="store_true", help="check the recipe and stop")
    args = parser.parse_args(arguments)
    console = Console(highlight=False)
    try:
        recipe = load_recipe(args.config, args.set)
        check_model_config(recipe, is_served=args.only != "train")
        for warning in warnings_of(recipe):
            console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
        if args.dry_run:
            console.print(f"{args.config}: valid; would write {recipe.run_dir}")
            return 0
        for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background jobs ignore it
            signal.signal(number, _interrupt)
        run(recipe, console, only=args.only)
    except ConfigError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        return 2
    except (ConversionError, OSError, RolloutError, RunError) as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything that was started has been stopped", file=sys.stderr)
        return 130
    return 0


def check_model_config(recipe: Recipe, *, is_served: bool) -> None:
    """Refuse a model that is not implemented, or that SGLang would serve as another one.

    Raises:
        ConfigError: what of config.json is not understood.
    """
    try:
        hf_config = read_config(Path(recipe.model.hf_dir))
        fields, _ = family_of(hf_config).transformer_config(hf_config)
    except ConversionError as error:
        raise ConfigError(f"model.hf_dir={recipe.model.hf_dir}: {error}") from error
    if is_served and not all(fields.get("moe_layer_freq", [])):
        raise ConfigError(
            f"model.hf_dir={recipe.model.hf_dir}: config.json has layers without experts (decoder_sparse_step, "
            "mlp_only_layers), where SGLang 0.5.21 builds experts all the same and leaves them without weights; "
            "only --only train takes such a model"
        )


def check_saved_groups(recipe: Recipe) -> None:
    """Refuse `--only train` without the groups of every step.

    Raises:
        ConfigError: names what is missing.
    """
    if recipe.rollout.groups_dir is None:
        raise ConfigError("rollout.groups_dir: --only train wants a folder of saved groups, runs/NAME/rollouts")
    folder = Path(recipe.rollout.groups_dir)
    if folder.resolve().is_relative_to(recipe.run_dir.resolve()):
        raise ConfigError(f"rollout.groups_dir={folder}: lies in this run's own folder; give the run another name")
    for step in range(1, recipe.train.num_rollout_steps + 1):
        if not step_file(folder, step).is_file():
            raise ConfigError(f"rollout.groups_dir={folder}: has no {step_file(folder, step).name}")


def check_weights(model_dir: Path, hf_dir: Path) -> None:
    """Refuse weights that do not fit config.json, before a server or trainer starts.

    Args:
        model_dir: as model.load.
        hf_dir: as model.hf_dir, from which the trainer's model is built.

    Raises:
        ConversionError: a file that cannot be read, a config.json of another model than hf_dir's, or a list of
            missing, surplus and misshapen tensors, or of those that are no weights.
    """
    config_dir = model_dir if is_hf_weights(model_dir) else resolve_folder(model_dir) / HF_SUBFOLDER
    check_same_model(read_config(hf_dir), read_config(config_dir), config_dir)
    hf_config = read_config(config_dir)
    if is_hf_weights(model_dir):
        reader = TensorReader(model_dir)
        table = table_for(hf_config, reader.shapes())
        check_names_and_shapes(table, reader.shapes(), str(model_dir), read_hf=reader.read_box)
        check_weight_dtypes(reader.tensors(), str(model_dir))
        return
    with McoreCheckpoint(model_dir, verify=False) as checkpoint:  # its ranks verify the data before they load it
        check_mcore_names_and_shapes(
            table_for(hf_config, ()), checkpoint.tensors, str(model_dir), may_be_padded=may_be_padded(checkpoint)
        )


def _interrupt(signal_number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def run(recipe: Recipe, console: Console, *, only: str | None = None) -> None:
    """Run the recipe from its cold start to its report.

    Args:
        recipe: checked.
        console: progress.
        only: `rollout` samples and saves groups with the starting weights; `train` trains on saved groups.

    Raises:
        ConfigError: a port is taken or the environment conflicts.
        RolloutError: a server did not start.
        RunError: the trainer or a server failed.
    """
    trainer_environment(recipe.device, os.environ, network_interface=recipe.cluster.network_interface)
    ports: list[int] = []
    if only == "train":
        check_saved_groups(recipe)
    elif only == "rollout" and recipe.cold_start is None and not is_hf_weights(Path(recipe.model.load)):
        raise ConfigError(
            f"model.load={recipe.model.load}: --only rollout has no trainer to push weights, and SGLang reads no "
            "Megatron checkpoint; convert it with tools/convert_mcore_to_hf.py"
        )
    else:
        server_environment(recipe, os.environ)
        ports = server_ports(recipe)
    config_path = prepare_run_dir(recipe, console)
    model_dir = ensure_cold_start(recipe, config_path, console)
    check_weights(model_dir, Path(recipe.model.hf_dir))
    with ExitStack() as stack:
        supervisor = None
        if ports:
            supervisor = stack.enter_context(make_supervisor(recipe, model_dir, ports, console, only=only))
            supervisor.start()
        if only == "rollout":
            assert supervisor is not None
            rollout_only(recipe, supervisor, console)
            return
        arguments = ["--config", str(config_path), "--model-dir", str(model_dir)]
        arguments += ["--servers"] if supervisor is not None else []
        console.print(f"starting the trainer: {recipe.cluster.trainer_ranks} rank(s)")
        trainer = start_torchrun(recipe, "gspo_megatron.train", arguments, "trainer", stack)
        watch(trainer, supervisor)
    finish(recipe, console)


def prepare_run_dir(recipe: Recipe, console: Console) -> Path:
    """Make the run's folder with resolved.yaml and versions.json; an older run of the name is moved aside."""
    run_dir = recipe.run_dir
    if run_dir.exists():
        number = 1
        while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
            number += 1
        run_dir.rename(aside)
        console.print(f"{run_dir} exists; moved to {aside}")
    run_dir.mkdir(parents=True)
    config_path = run_dir / "resolved.yaml"
    config_path.write_text(dump_recipe(recipe))
    (run_dir / "versions.json").write_text(json.dumps(provenance(), indent=2) + "\n")
    return config_path


def provenance() -> dict[str, Any]:
    """Versions, commit and hardware of this run."""
    packages = ("torch", "megatron-core", "sglang", "transformers", "tokenizers", "safetensors", "reasoning-gym")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        **git_state(Path(__file__).parents[1]),
        "machine": platform.machine(),
        "cpu_cores": os.cpu_count(),
    }


def git_state(root: Path) -> dict[str, Any]:
    """Commit of the checkout, and whether files differ from it."""
    answers = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        try:
            done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=10)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return {"commit": "unknown: git did not answer"}
        if done.returncode != 0:
            return {"commit": "unknown: not a git checkout"}
        answers.append(done.stdout.strip())
    return {"commit": answers[0], "has_local_changes": bool(answers[1])}


def ensure_cold_start(recipe: Recipe, config_path: Path, console: Console) -> Path:
    """The directory that RL starts from; trains the cold start unless an equal recipe already did."""
    if recipe.cold_start is None:
        return Path(recipe.model.load)
    out_dir = cold_start_dir(recipe)
    with ExitStack() as stack:
        lock = stack.enter_context(out_dir.with_name(out_dir.name + ".lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two runs that need it, one trains it and the other waits
        if out_dir.is_dir():
            console.print(f"cold start: reusing {out_dir}")
            return out_dir
        console.print(f"cold start: {recipe.cold_start.num_steps} supervised steps into {out_dir}")
        arguments = ["--config", str(config_path)]
        watch(start_torchrun(recipe, "gspo_megatron.cold_start", arguments, "cold_start", stack), None)
    return out_dir


def server_ports(recipe: Recipe) -> list[int]:
    """HTTP port of each server of this node, found free before anything is started.

    Raises:
        ConfigError: a port that the recipe names is taken.
    """
    cluster = recipe.cluster
    if cluster.server_port:
        return [take_port(cluster.host, cluster.server_port + i) for i in range(cluster.rollout_servers)]
    free: set[int] = set()
    while len(free) < cluster.rollout_servers:  # a port that was just given back may be offered again
        free.add(take_port(cluster.host, 0))
    return sorted(free)


def make_supervisor(
    recipe: Recipe, model_dir: Path, ports: Sequence[int], console: Console, *, only: str | None
) -> Supervisor:
    """The servers, not started: without weights, which the trainer pushes; `--only rollout` has none, so with them."""
    has_weights = only == "rollout"
    return Supervisor(
        recipe,
        model_dir=serving_dir(recipe, model_dir, has_weights=has_weights),
        load_format="auto" if has_weights else "dummy",
        weight_version=0 if has_weights else NO_VERSION,
        ports=ports,
        console=console,
    )


def start_torchrun(recipe: Recipe, module: str, arguments: list[str], log_name: str, stack: ExitStack) -> Torchrun:
    """Start the trainer's ranks; the stack stops them."""
    host = recipe.cluster.host
    cuda_devices = assign_devices(recipe, os.environ)[0]
    torchrun = Torchrun(
        module,
        arguments,
        num_ranks=recipe.cluster.trainer_ranks,
        host=host,
        port=take_port(host, 0),
        environment=trainer_environment(
            recipe.device,
            os.environ,
            cuda_devices=cuda_devices,
            network_interface=recipe.cluster.network_interface,
        ),
        log_path=recipe.run_dir / "logs" / f"{log_name}.log",
    )
    stack.callback(torchrun.stop)
    return torchrun


def watch(trainer: Torchrun, supervisor: Supervisor | None) -> None:
    """Wait for the trainer, and keep the servers up meanwhile.

    Raises:
        RunError: the trainer failed, or a server that cannot be restarted.
    """
    while trainer.poll() is None:
        if supervisor is not None:
            supervisor.check()
        time.sleep(WATCH_INTERVAL_S)
    status = trainer.process.wait()
    if status != 0:
        cause = f"torchrun was killed by signal {-status}" if status < 0 else cause_of(trainer.log_path)
        raise RunError(f"trainer ended with status {status}: {cause}; see {trainer.log_path}")


def cause_of(log_path: Path) -> str:
    """Why a trainer ended, from its log: a signal from outside, and the first error that a rank printed."""
    log = _RANK_PREFIX.sub("", log_path.read_text(errors="replace"))
    signals = [found[0] for found in _SIGNAL.finditer(log) if int(found[1]) not in _FOLLOWING_SIGNALS]
    lines = log.splitlines()
    errors = [i for i, line in enumerate(lines) if line.startswith(ERROR_PREFIX)]
    if errors:
        details = itertools.takewhile(lambda text: text.startswith("  "), lines[errors[0] + 1 :])
        message = "\n".join([lines[errors[0]].removeprefix(ERROR_PREFIX), *details])
        return "; ".join([*signals[:1], message])
    # A rank that failed before run_rank took over, in an import for instance.
    raised = [line for line in lines if _EXCEPTION.match(line)]
    return next(iter(signals + raised), "it printed no error")


def rollout_only(recipe: Recipe, supervisor: Supervisor, console: Console) -> None:
    """Sample, score and save every step's groups with the starting weights, and keep the servers up meanwhile.

    Raises:
        RolloutError: from the sampling.
        RunError: a server cannot be restarted.
    """
    fleet = Fleet(supervisor.folder)

    def bring_up() -> None:  # a server reads the starting weights itself, also when it is restarted
        fleet.confirm(fleet.announced(), 0)

    def on_rank_0(fn: Callable[[], T]) -> T:
        supervisor.check()
        return fn()

    bring_up()
    with closing(Sampler(recipe, fleet, on_rank_0=on_rank_0, bring_up=bring_up, is_trained=False)) as sampler:
        for step in range(1, recipe.train.num_rollout_steps + 1):
            groups, _ = sampler.collect(step)
            sampler.save(groups, step)
            console.print(f"step {step:>4}  {sum(len(g.rollouts) for g in groups)} responses")
    console.print(f"rollout groups are in {recipe.run_dir / 'rollouts'}")


def finish(recipe: Recipe, console: Console) -> None:
    """Write the report and say what was made and where."""
    from gspo_megatron.report import console_summary, write_report

    write_report(recipe.run_dir)
    console.print(console_summary(recipe.run_dir))


if __name__ == "__main__":
    sys.exit(main())
