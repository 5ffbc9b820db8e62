"""The report page: numbers by hand, one page without requests, and runs that stopped anywhere."""

import io
import json
import math
import random
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from gspo_megatron.evaluate import wilson_interval
from gspo_megatron.metrics import MetricsWriter, load_metrics, make_row
from gspo_megatron.plots import COLOURS, INK, PLOTS, plot_lag, plot_left_out, plot_log_ratio, plot_mismatch
from gspo_megatron.report import accuracy_gain, console_summary, load_run, main, summary_lines, thinned, write_report
from gspo_megatron.types import Prompt, Rollout, RolloutGroup, RolloutReport, TrainState, save_groups

CLIP_LOW, CLIP_HIGH = 1.2e-2, 1.6e-2
RECIPE = {
    "name": "fake",
    "loss": {"name": "gspo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
    "optimizer": {"clip_grad": 1.0},
    "train": {"num_rollout_steps": 40},
}
REPORT = RolloutReport(
    num_asked=48, num_zero_spread=8, num_surplus=8, num_retries=1, num_continued=0, num_retracted=0, num_rejected=2
)
NASTY = "<script>alert('x')</script>&"


def fake_evaluation(num_exact: int) -> dict[str, float]:
    low, high = wilson_interval(num_exact, 512)
    return {
        "accuracy": num_exact / 512,
        "low": low,
        "high": high,
        "num_prompts": 512,
        "num_samples": 1,
        "mean_reward": 0.1 + 0.9 * num_exact / 512,
        "mean_response_tokens": 9.0,
        "truncated_fraction": 0.0,
        "distinct_fraction": 0.9,
    }


def fake_minibatch(rng: random.Random, k: int) -> dict[str, float]:
    """Minibatch k, from 0: drifts with k; the engine agrees exactly now and then."""
    spread = 0.006 * k
    mismatch = rng.choice([0.0, 1.0e-6, 3.0e-7])
    return {
        "clip_fraction_tokens": 0.1 * k * rng.uniform(0.5, 1.0),
        "clip_fraction_responses": 0.1 * k * rng.uniform(0.6, 1.1),
        "clip_fraction_positive": 0.1 * k,
        "clip_fraction_negative": 0.1 * k,
        "outside_band_fraction": 0.15 * k,
        "log_ratio_p05": -2.0 * spread * rng.uniform(0.7, 1.3),
        "log_ratio_p50": 0.1 * spread * rng.uniform(-1, 1),
        "log_ratio_p95": 2.0 * spread * rng.uniform(0.7, 1.3),
        "log_ratio_std": spread,
        "log_ratio_abs_max": 4.0 * spread,
        "entropy": 0.4 * rng.uniform(0.9, 1.1),
        "clamped_fraction": 0.0,
        "corrected_fraction": 0.0,
        "kl_to_reference": 0.0,
        "mismatch_abs_mean": mismatch,
        "mismatch_abs_max": 12.0 * mismatch,
        "mismatch_k1": -0.1 * mismatch,
        "mismatch_k3": mismatch**2,
        "mismatch_share_above_2": 0.0,
        "mismatch_ess_token": 1.0 - mismatch**2,
        "mismatch_chi2_token": 2.0 * mismatch**2,
        "mismatch_pearson": 1.0,
        "mismatch_log_ratio_abs_max": 3.0 * mismatch,
        "loss": -0.01 * k,
        "grad_norm": rng.uniform(0.3, 0.9),
        "lr": 1.0e-4,
        "packing_efficiency": 0.25,
    }


def fake_groups(rng: random.Random, quality: float) -> list[RolloutGroup]:
    groups = []
    for p in range(4):
        rewards = [1.0 if rng.random() < quality else rng.choice([0.0, 0.25, 0.5]) for _ in range(8)]
        mean = sum(rewards) / 8
        rollouts = tuple(
            Rollout(
                response_ids=(1,) * 9,
                rollout_logprobs=(-0.5,) * 9,
                weight_versions=(0,) * 9,
                finish_reason="stop" if m else "length",
                text=f"1,{m},{NASTY}",
                sampling_seed=m,
                reward=reward,
                is_exact=reward == 1.0,
                advantage=reward - mean,
            )
            for m, reward in enumerate(rewards)
        )
        prompt = Prompt(prompt_id=str(p), text=f"a{p},{NASTY}>", token_ids=(1,), expected=f"{p}", entry={})
        groups.append(RolloutGroup(prompt=prompt, rollouts=rollouts))
    return groups


def make_run(run_dir: Path, *, num_steps: int, recipe: bool = True, rollouts: bool = True, every: int = 10) -> Path:
    """A run directory as train.py leaves it: evaluation first, then num_steps rollout steps."""
    rng = random.Random(0)
    writer = MetricsWriter(run_dir)
    start = fake_evaluation(num_exact=117)
    writer.write(make_row(TrainState(), groups=[], minibatches=[], stage_s={"evaluate": 4.0}, evaluation=start))
    for step in range(1, num_steps + 1):
        groups = fake_groups(rng, quality=0.25 + 0.4 * step / num_steps)
        stage_s = {"rollout": 2.0 * rng.uniform(0.8, 1.2), "reward": 0.02, "batch": 0.05}
        stage_s |= {"old_logprobs": 0.4, "train": 1.6 * rng.uniform(0.9, 1.1), "weight_sync": 0.2}
        evaluation = fake_evaluation(117 + round(150 * step / num_steps)) if step % every == 0 else None
        row = make_row(
            TrainState(rollout_step=step, optimizer_step=4 * step, weight_version=step),
            groups=groups,
            minibatches=[fake_minibatch(rng, k) for k in range(4)],
            stage_s=stage_s | ({"evaluate": 4.0} if evaluation else {}),
            evaluation=evaluation,
            report=REPORT,
        )
        writer.write(row)
        if rollouts and step in (1, 9, num_steps):
            save_groups(groups, run_dir / "rollouts" / f"step_{step}.jsonl")
    writer.close()
    if recipe:
        (run_dir / "resolved.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
        versions = {"packages": {"torch": "2.13.0"}, "git_commit": "abc123", "hardware": {"cpu": "2 cores"}}
        (run_dir / "versions.json").write_text(json.dumps(versions))
        (run_dir / "checkpoint").mkdir()
        (run_dir / "hf").mkdir()
    return run_dir


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its page; tests only read it."""
    run_dir = make_run(tmp_path_factory.mktemp("finished") / "run", num_steps=40)
    write_report(run_dir)
    return run_dir


def svgs_of(page: str) -> dict[str, str]:
    """Title -> drawing."""
    return dict(re.findall(r'<svg viewBox="[^"]*" role="img" aria-label="([^"]*)">(.*?)</svg>', page, re.DOTALL))


def test_accuracy_gain_is_newcombes_interval() -> None:
    # Newcombe 1998, method 10, his case (a): 56 of 70 against 48 of 80; published limits 0.0524 and 0.3339.
    shares = {}
    for name, k, n in (("before", 48, 80), ("after", 56, 70)):
        low, high = wilson_interval(k, n)
        shares[name] = {"accuracy": k / n, "low": low, "high": high}
    gain, low, high = accuracy_gain(shares["before"], shares["after"])
    assert gain == pytest.approx(0.2)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


def test_summary_states_accuracy_steps_tokens_time_and_clip(finished: Path) -> None:
    lines = dict(summary_lines(load_run(finished)))
    assert lines["accuracy before (step 0)"].startswith("22.9% (19.4% to 26.7%)")
    assert lines["accuracy after (step 40)"].startswith("52.1% (")
    assert lines["difference"].startswith("+29.3 points (+")
    assert lines["difference"].endswith("do not overlap")
    assert lines["steps"] == "rollout step 40 of 40, 160 optimizer steps, weight version 40"
    assert lines["tokens"] == f"{40 * 32 * 9:,} response tokens"
    assert lines["responses"] == (
        "1,920 asked for: 1,280 used, 0 filtered, 640 dropped; 40 requests sent again, servers taken out 80 times"
    )
    rows = load_metrics(finished / "metrics.jsonl")
    seconds = round(sum(value for row in rows for value in row["stage_s"].values()))
    assert lines["time in the loop"].startswith(f"{seconds // 60} min {seconds % 60:02d} s (sum of the stages")
    later = [m["clip_fraction_responses"] for row in rows for m in row["minibatches"][1:]]
    assert lines["responses clipped"] == (
        f"minibatch 1: none; later ones: {sum(later) / len(later):.1%} on average"
    )
    assert lines["checkpoint"] == str(finished / "checkpoint")


def test_page_is_one_small_file_without_requests_and_with_every_plot(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert len(page) < 3_000_000
    outside_svg_names = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert not re.search(r"https?:|<link|<script|<img|@import|src=", outside_svg_names)
    assert list(svgs_of(page)) == [title for title, _, _ in PLOTS]
    for _, _, caption in PLOTS:
        assert caption.split("(")[0].split("'")[0].split("&")[0] in page
    assert INK not in page and "currentColor" in page
    assert "About this run" not in page


def test_every_plot_names_its_axes(finished: Path) -> None:
    svgs = svgs_of((finished / "report.html").read_text())
    units = {
        "Held-out accuracy": "exact responses (%)",
        "Reward in training rollouts": "reward, share",
        "Responses clipped": "responses clipped (%)",
        "Tokens clipped": "tokens clipped (%)",
        "Log-ratio of responses": "log s (nats per token)",
        "Trainer against engine": "d (nats)",
        "Entropy": "entropy (nats per token)",
        "Gradient norm": "global L2 norm",
        "Response length": "length (tokens)",
        "Groups without a signal": "groups (%)",
        "Responses left out": "responses (%)",
        "Policy lag": "policy lag (pushes)",
        "Seconds per stage": "seconds per rollout step",
    }
    assert list(svgs) == list(units)
    for title, unit in units.items():
        assert unit in svgs[title], title
        assert "rollout step" in svgs[title], title


def test_minibatches_keep_their_colours_from_plot_to_plot(finished: Path) -> None:
    svgs = svgs_of((finished / "report.html").read_text())
    for title in ("Responses clipped", "Tokens clipped", "Log-ratio of responses", "Entropy", "Gradient norm"):
        positions = [svgs[title].index(f"stroke: {colour}") for colour in COLOURS[:4]]
        assert positions == sorted(positions), title
        assert COLOURS[4] not in svgs[title], title


def test_clip_band_is_drawn_at_its_logarithm_and_only_with_a_recipe(tmp_path: Path) -> None:
    def dashed(run_dir: Path) -> list[set[float]]:
        fig = plot_log_ratio(load_run(run_dir))
        assert fig is not None
        return [{line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"} for ax in fig.axes]

    with_recipe = dashed(make_run(tmp_path / "run", num_steps=3))
    assert with_recipe == [{math.log1p(-CLIP_LOW), math.log1p(CLIP_HIGH)}] * 4
    assert dashed(make_run(tmp_path / "bare", num_steps=3, recipe=False)) == [set()] * 4


def test_mismatch_of_exactly_zero_is_drawn_at_zero(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run", num_steps=5, recipe=False))
    for row in run.rows:
        for minibatch in row["minibatches"]:
            minibatch |= {name: 0.0 for name in minibatch if name.startswith("mismatch")}
    fig = plot_mismatch(run)
    assert fig is not None
    assert all(set(line.get_ydata()) == {0.0} for line in fig.axes[0].lines)
    assert fig.axes[0].get_yscale() == "linear"
    run.rows[2]["minibatches"][1]["mismatch_abs_max"] = 2.0e-6
    fig = plot_mismatch(run)
    assert fig is not None
    assert fig.axes[0].get_yscale() == "symlog"
    assert list(fig.axes[0].lines[0].get_ydata()) == [0.0, 2.0e-6, 0.0, 0.0, 0.0]


def test_left_out_responses_and_lag_are_drawn_in_their_units(finished: Path) -> None:
    run = load_run(finished)
    shares, lags = plot_left_out(run), plot_lag(run)
    assert shares is not None and lags is not None
    assert [line.get_ydata()[-1] for line in shares.axes[0].lines] == pytest.approx([0.0, 100 / 6, 100 / 6])
    assert [list(line.get_ydata()) for line in lags.axes[0].lines] == [list(range(40))] * 2


def test_rollouts_of_first_and_last_step_are_shown_and_escaped(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert "step_1.jsonl: the first 3 of 4 prompts" in page
    assert "step_40.jsonl: the first 3 of 4 prompts" in page
    assert "step_9.jsonl" not in page
    assert NASTY not in page
    assert "a0,&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;&gt;" in page
    assert page.count("4 of 8 responses") == 6
    assert re.search(r"reward \+1\.000, advantage \+0\.\d{3}, 9 tokens, finish stop \(exact\)", page)
    assert re.search(r"reward \+0\.000, advantage -0\.\d{3}, 9 tokens, finish length<", page)


def test_run_with_only_the_first_evaluation_says_what_is_missing(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", num_steps=0, recipe=False)).read_text()
    assert list(svgs_of(page)) == ["Held-out accuracy", "Seconds per stage"]
    assert page.count("Nothing to draw yet") == len(PLOTS) - 2
    for words in ("no rollout step is finished", "no resolved.yaml", "no versions.json", "no rollouts/step_"):
        assert words in page


def test_run_without_evaluation_says_so(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=2, every=99)
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:2]))
    page = write_report(run_dir).read_text()
    assert "there is no held-out evaluation" in page
    assert "it stands at rollout step 1 of 40" in page
    assert dict(summary_lines(load_run(run_dir)))["held-out accuracy"] == "not evaluated yet"


def test_plots_of_a_long_run_thin_rows_but_keep_evaluations_and_the_last(tmp_path: Path, finished: Path) -> None:
    rows = load_metrics(finished / "metrics.jsonl")
    long = [rows[0], *({**rows[1 + step % 40], "rollout_step": step} for step in range(1, 1202))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    run = load_run(tmp_path)
    steps = [row["rollout_step"] for row in thinned(run).rows]
    assert steps == [s for s in range(1202) if s % 3 == 0 or s % 10 == 9 or s == 1201]
    assert dict(summary_lines(run))["tokens"] == f"{1201 * 32 * 9:,} response tokens"
    short = load_run(finished)
    assert thinned(short) == short


def test_report_of_equal_files_is_equal(finished: Path) -> None:
    before = (finished / "report.html").read_text()
    assert svgs_of(write_report(finished).read_text()) == svgs_of(before)


def test_command_line_writes_the_page_and_refuses_other_directories(tmp_path: Path, capsys) -> None:
    assert main([str(make_run(tmp_path / "run", num_steps=1))]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    assert main([str(tmp_path / "empty")]) == 2
    assert "metrics.jsonl: no such file" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert main([str(tmp_path)]) == 2
    assert "has no row yet" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("resolved.yaml", "a: [", "resolved.yaml: cannot be read"),
        ("versions.json", "[]", "versions.json: holds list"),
        ("rollouts/step_1.jsonl", "{}\n", "step_1.jsonl:1: not a rollout group"),
        ("rollouts/step_last.jsonl", "", "has no step number"),
    ],
)
def test_broken_file_is_named_and_leaves_no_page(tmp_path: Path, capsys, name: str, text: str, message: str) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=1)
    (run_dir / name).write_text(text)
    assert main([str(run_dir)]) == 2
    assert message in capsys.readouterr().err
    assert not (run_dir / "report.html").exists()


def test_console_table_closes_a_run(finished: Path) -> None:
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(console_summary(finished))
    text = console.export_text()
    hf_dir = str(finished / "hf")
    for words in ("22.9%", "52.1%", "160 optimizer steps", "11,520 response tokens", hf_dir, "report.html"):
        assert words in text
