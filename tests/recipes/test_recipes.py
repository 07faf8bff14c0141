"""Every recipe is read; those of the lab run three steps, for every algorithm and every teacher."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sdpo import load_config, train
from sdpo.algorithms import ALGORITHMS
from sdpo.metrics import METRICS
from sdpo.run import RunDir

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))
LAB = ROOT / "recipes" / "lab" / "sdpo.toml"
SMALL = [
    *("--train.steps", "3", "--train.prompts_per_step", "4", "--train.rollouts_per_prompt", "4"),
    *("--train.mini_batch_prompts", "2"),
    *("--eval.tasks", "16", "--eval.every", "3", "--run.rollouts_every", "3"),
]


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 5


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: str(p.relative_to(ROOT / "recipes")))
def test_recipe_is_read(recipe: Path) -> None:
    """A file without [algo] goes on top of the folder's sdpo.toml."""
    whole = "[algo]" in recipe.read_text()
    config = load_config([recipe] if whole else [recipe.parent / "sdpo.toml", recipe])
    assert load_config([recipe] if whole else [recipe.parent / "sdpo.toml", recipe]) == config


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_runs_three_steps_and_names_what_it_logs(name: str, tmp_path: Path) -> None:
    algorithm = ALGORITHMS[name]
    recipe = LAB if "loss" in algorithm.sections else LAB.with_name("grpo.toml")
    text = recipe.read_text().replace('name = "sdpo"', f'name = "{name}"')
    text = text.replace('name = "grpo_on_policy"', f'name = "{name}"')
    if name == "verifier_anchored":
        text += '\n[context]\ntemplate = "{question}{demonstration}{feedback}"\n'
        text += 'demonstration_template = " S {demonstration}"\nfeedback_template = " T {feedback}"\n'
    if "alpha" in text and name == "sdpo_rich_feedback":
        text = text.replace("alpha = 0.5\n", "")
    if name == "dapo":
        text += "\n[policy]\noverlong_buffer = 2\n"
    mine = tmp_path / "recipe.toml"
    mine.write_text(text)
    result = train(load_config([mine], [*SMALL, "--run.dir", str(tmp_path / "run")]))
    assert result.steps == 3
    records = RunDir(tmp_path / "run").read_metrics()
    assert [r["step"] for r in records] == [1, 2, 3]
    assert all(math.isfinite(v) for r in records for v in r.values() if isinstance(v, float))
    known = set(METRICS) | {"step", "seconds"}
    assert not {k for r in records for k in r if k not in known and not k.startswith("env/")}


@pytest.mark.parametrize("kind", ["ema", "frozen", "trust_region", "live", "snapshot"])
@pytest.mark.parametrize("rank", [0, 4])
def test_every_teacher_runs_with_all_parameters_and_with_lora(kind: str, rank: int, tmp_path: Path) -> None:
    overrides = ["--teacher.kind", kind, "--model.lora_rank", str(rank), "--run.dir", str(tmp_path / "run")]
    result = train(load_config([LAB], [*SMALL, *overrides]))
    records = RunDir(result.run_dir).read_metrics()
    distances = [r["teacher/distance"] for r in records]
    assert (distances[-1] > 0) is (kind != "live")


def test_dynamic_sampling_reports_everything_that_was_sampled(tmp_path: Path) -> None:
    """On hard names nothing succeeds at first: all groups are dropped, and the metrics and monitors say so."""
    mine = tmp_path / "recipe.toml"
    text = LAB.with_name("grpo.toml").read_text().replace('name = "grpo_on_policy"', 'name = "dapo"')
    mine.write_text(text + '\n[policy]\noverlong_buffer = 0\n[env.args]\nnames = "hard"\n')
    overrides = ["--train.resample_rounds", "2", "--env.success_threshold", "2", "--train.steps", "4"]
    result = train(load_config([mine], [*SMALL, *overrides, "--run.dir", str(tmp_path / "run")]))
    records = RunDir(result.run_dir).read_metrics()
    assert all(0 <= r["reward/mean"] < 0.5 for r in records)
    assert all(r["groups/dropped"] > 0 for r in records)
    assert max(r["groups/dropped"] for r in records) > 4, "further rounds were sampled"


def test_a_model_with_nothing_to_train_or_too_few_positions_is_refused(tmp_path: Path) -> None:
    from sdpo.errors import ConfigError

    with pytest.raises(ConfigError, match="rounds small updates"):
        train(load_config([LAB], [*SMALL, "--model.dtype", "bfloat16", "--run.dir", str(tmp_path / "a")]))
    with pytest.raises(ConfigError, match="positions of lab"):
        train(load_config([LAB], [*SMALL, "--sampling.max_tokens", "100000", "--run.dir", str(tmp_path / "b")]))
    assert not (tmp_path / "a").exists(), "a refused run leaves nothing behind"


def test_prompts_are_dumped_aligned(tmp_path: Path) -> None:
    import json

    train(load_config([LAB], [*SMALL, "--run.dir", str(tmp_path / "run"), "--run.dump_prompts", "2"]))
    pairs = [json.loads(line) for line in (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()]
    assert len(pairs) == 2
    for pair in pairs:
        n = len(pair["completion_ids"])
        assert pair["student_ids"][-n:] == pair["teacher_ids"][-n:] == pair["completion_ids"]
        assert pair["teacher_prompt"].startswith(pair["student_prompt"].removesuffix(" A"))
        assert len(pair["teacher_ids"]) > len(pair["student_ids"])


def test_equal_seeds_give_equal_runs_and_others_do_not(tmp_path: Path) -> None:
    runs = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        train(load_config([LAB], [*SMALL, "--run.dir", str(tmp_path / name), "--run.seed", str(seed)]))
        records = RunDir(tmp_path / name).read_metrics()
        runs.append([{k: v for k, v in r.items() if k != "seconds"} for r in records])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
