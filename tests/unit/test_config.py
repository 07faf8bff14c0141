"""Settings: presets, overrides, refusals before any model is loaded, and the way back through TOML."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sdpo.algorithms import ALGORITHMS
from sdpo.config import Config, _merge, build_config, deviations, load_config, parse_overrides
from sdpo.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def build(algorithm: str = "sdpo", **tables: Any) -> Config:
    base = {"algo": {"name": algorithm}, "model": {"path": "m"}, "env": {"name": "lab"}}
    return build_config(_merge(base, tables))


def refused(message: str, algorithm: str = "sdpo", **tables: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build(algorithm, **tables)
    assert "\n" not in str(error.value)


# --- presets


def test_the_algorithm_alone_gives_the_published_setting() -> None:
    config = build("sdpo")
    assert (config.loss.divergence, config.loss.alpha, config.loss.top_k) == ("js", 0.5, 100)
    assert (config.teacher.kind, config.teacher.rate) == ("ema", 0.05)
    assert (config.optim.lr, config.optim.warmup_steps) == (1e-5, 10)
    assert (config.train.prompts_per_step, config.train.rollouts_per_prompt) == (32, 8)
    rich = build("sdpo_rich_feedback")
    assert (rich.loss.divergence, rich.loss.top_k, rich.teacher.rate) == ("reverse_kl", 20, 0.01)
    assert (rich.optim.lr, rich.train.mini_batch_prompts, rich.eval.rollouts) == (1e-6, 1, 4)
    grpo = build("grpo")
    assert (grpo.policy.baseline, grpo.policy.clip_high, grpo.policy.kl_coef) == ("mean", 0.28, 0.0)
    assert grpo.train.mini_batch_prompts == 8


def test_a_given_key_beats_the_preset_and_leaves_its_neighbours() -> None:
    config = build("sdpo", loss={"top_k": 7})
    assert config.loss.top_k == 7
    assert config.loss.divergence == "js"
    assert config.teacher.rate == 0.05


def test_none_takes_a_preset_value_away() -> None:
    assert build("sdpo").loss.top_k == 100
    assert build("sdpo", loss={"top_k": "none"}).loss.top_k is None
    assert build("grpo", train={"mini_batch_prompts": "none"}).train.mini_batch_prompts is None


def test_none_stays_a_word_where_it_is_a_choice() -> None:
    assert build("sdpo", context={"demonstration": "none"}).context.demonstration == "none"
    assert build("grpo", policy={"baseline": "none"}).policy.baseline == "none"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_preset_is_valid_and_deviates_from_itself_in_nothing(algorithm: str) -> None:
    assert deviations(build(algorithm)) == {}


def test_deviations_name_preset_and_value() -> None:
    config = build("sdpo", loss={"top_k": "none"}, optim={"lr": 2e-5}, run={"seed": 3}, model={"lora_rank": 8})
    assert deviations(config) == {"loss.top_k": (100, "none"), "optim.lr": (1e-5, 2e-5)}


def test_a_config_is_frozen_and_survives_pickling() -> None:
    config = build()
    with pytest.raises(ValidationError, match="frozen"):
        config.loss.top_k = 3
    assert pickle.loads(pickle.dumps(config)) == config


# --- what is refused


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"loss": {"topk": 5}}, r"unknown setting loss.topk; did you mean top_k"),
        ({"optim": {"learning_rate": 1}}, r"unknown setting optim.learning_rate; known: .*lr"),
        ({"los": {"top_k": 5}}, r"unknown setting los; did you mean loss"),
        ({"algo": {"mixx": 0.5}}, r"unknown setting algo.mixx; did you mean mix"),
    ],
)
def test_unknown_settings_are_refused_with_the_closest_ones(tables: dict[str, Any], message: str) -> None:
    refused(message, **tables)


def test_an_unknown_algorithm_is_refused_with_the_closest_ones() -> None:
    refused(r"algo.name: 'spdo' is no algorithm; did you mean sdpo", algo={"name": "spdo"})


@pytest.mark.parametrize("missing", ["algo", "model", "env"])
def test_what_has_no_default_must_be_set(missing: str) -> None:
    tables = {"algo": {"name": "sdpo"}, "model": {"path": "m"}, "env": {"name": "lab"}}
    with pytest.raises(ConfigError, match=f"^{missing} is not set"):
        build_config({k: v for k, v in tables.items() if k != missing})
    with pytest.raises(ConfigError, match=rf"^{missing}\.\w+ is not set"):
        build_config({**tables, missing: {}})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"loss": {"divergence": "kl"}}, r"loss.divergence = 'kl': .*'forward_kl', 'reverse_kl' or 'js'"),
        ({"loss": {"alpha": 1.0}}, r"loss.alpha = 1.0: Input should be less than 1"),
        ({"optim": {"lr": -1}}, r"optim.lr = -1: Input should be greater than 0"),
        ({"optim": {"lr": float("nan")}}, r"optim.lr = nan: .*finite"),
        ({"optim": {"lr": float("inf")}}, r"optim.lr = inf: .*finite"),
        ({"train": {"steps": 2.5}}, r"train.steps = 2.5: .*integer"),
        ({"train": {"steps": "none"}}, r"train.steps = 'none': .*integer"),
        ({"train": {"steps": 0}}, r"train.steps = 0: .*greater than or equal to 1"),
        ({"optim": {"betas": [0.9]}}, r"optim.betas"),
        ({"run": {"track": "mlflow"}}, r"run.track = 'mlflow': .*'tensorboard', 'wandb' or 'trackio'"),
        ({"loss": 5}, r"loss = 5: .*dictionary"),
        ({"run": {"resume": True, "overwrite": True}}, r"run.resume and run.overwrite exclude each other"),
    ],
)
def test_values_out_of_range_are_named(tables: dict[str, Any], message: str) -> None:
    refused(message, **tables)


REVERSE = {"divergence": "reverse_kl", "top_k": "none"}


@pytest.mark.parametrize(
    ("algorithm", "tables", "message"),
    [
        ("sdpo", {"loss": {"granularity": "token"}}, r'"token" needs loss.divergence = "reverse_kl", not "js"'),
        ("sdpo", {"loss": {"granularity": "sequence", "divergence": "forward_kl"}}, r'needs .*, not "forward_kl"'),
        (
            "sdpo",
            {"loss": {"granularity": "token", "divergence": "reverse_kl"}},
            r'loss.top_k = 100 has no meaning at loss.granularity = "token"; set it to "none"',
        ),
        ("sdpo", {"loss": {"advantage_clip": 5.0}}, r'loss.advantage_clip needs loss.divergence = "reverse_kl"'),
        ("sdpo", {"context": {"demonstration": "none", "feedback": "never"}}, r"leave the teacher nothing to know"),
        (
            "sdpo",
            {"context": {"feedback": "never"}, "train": {"rollouts_per_prompt": 1}},
            r"train.rollouts_per_prompt = 1 never finds one",
        ),
        ("grpo", {"train": {"rollouts_per_prompt": 1}}, r'every advantage 0 under policy.baseline = "mean"'),
        ("sdpo_grpo", {"train": {"rollouts_per_prompt": 1}}, r"every advantage 0"),
        ("sdpo", {"train": {"mini_batch_prompts": 5}}, r"prompts_per_step = 32 is no multiple of .* = 5"),
        ("sdpo", {"train": {"mini_batch_prompts": 64}}, r"is no multiple of train.mini_batch_prompts = 64"),
        ("sdpo_grpo", {"algo": {"mix": 0}}, r'algo.mix = 0 is plain SDPO; use algo.name = "sdpo"'),
        ("dapo", {"sampling": {"max_tokens": 512}}, r"overlong_buffer = 1024 exceeds sampling.max_tokens = 512"),
    ],
)
def test_contradictions_are_refused_at_start(algorithm: str, tables: dict[str, Any], message: str) -> None:
    refused(message, algorithm, **tables)


@pytest.mark.parametrize(
    ("algorithm", "tables"),
    [
        ("sdpo", {"loss": {**REVERSE, "granularity": "token"}}),
        ("sdpo", {"loss": {**REVERSE, "granularity": "sequence"}}),
        ("sdpo_rich_feedback", {"loss": {"advantage_clip": 5.0}}),
        ("sdpo", {"context": {"demonstration": "none"}}),
        ("sdpo", {"context": {"demonstration": "task", "feedback": "never"}, "train": {"rollouts_per_prompt": 1}}),
        ("grpo", {"policy": {"baseline": "none"}, "train": {"rollouts_per_prompt": 1}}),
        ("sdpo", {"train": {"mini_batch_prompts": 16}}),
        ("dapo", {"sampling": {"max_tokens": 512}, "policy": {"overlong_buffer": 128}}),
    ],
)
def test_their_neighbours_are_accepted(algorithm: str, tables: dict[str, Any]) -> None:
    build(algorithm, **tables)


@pytest.mark.parametrize(
    ("algorithm", "tables", "key"),
    [
        ("grpo", {"context": {}}, "context"),
        ("grpo", {"teacher": {"rate": 0.1}}, "teacher"),
        ("grpo", {"loss": {"top_k": 5}}, "loss"),
        ("sdpo", {"policy": {"clip_low": 0.1}}, "policy"),
        ("verifier_anchored", {"loss": {"top_k": 5}}, "loss"),
        ("sdpo", {"algo": {"mix": 0.5}}, "algo.mix"),
        ("sdpo_grpo", {"algo": {"entropy_weights": False}}, "algo.entropy_weights"),
    ],
)
def test_what_the_algorithm_never_reads_is_refused(algorithm: str, tables: dict[str, Any], key: str) -> None:
    refused(rf"^{re.escape(key)}: algo.name = '{algorithm}' never reads it \(remove it\)", algorithm, **tables)


# --- templates


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("template", "{question}{foo}", r"context.template has an unknown slot \{foo\}"),
        ("template", "{questoin}", r"unknown slot \{questoin\}; did you mean question"),
        ("template", "{question.__class__}", r"unknown slot \{question.__class__\}"),
        ("template", "{question[0]}", r"unknown slot \{question\[0\]\}"),
        ("template", "{}", r"unknown slot \{\}"),
        ("template", "{0}", r"unknown slot \{0\}"),
        ("template", "{question", r"context.template: .*write a literal brace twice"),
        ("template", "} {question}", r"context.template: .*write a literal brace twice"),
        ("demonstration_template", "{demonstration}{feedback}", r"context.demonstration_template .* \{feedback\}"),
        ("feedback_template", "{feedback}{demonstration}", r"context.feedback_template .* \{demonstration\}"),
    ],
)
def test_unknown_slots_are_named(key: str, text: str, message: str) -> None:
    refused(message, context={key: text})


def test_own_templates_and_literal_braces() -> None:
    context = build(
        context={
            "template": "{feedback}",
            "feedback_template": "{attempt} failed: {feedback}",
            "demonstration_template": "{{json}} {demonstration}",
            "system": "any {text} at all",
        }
    ).context
    assert context.template.format(question="q", demonstration="d", feedback="f", attempt="a") == "f"
    assert context.demonstration_template.format(demonstration="d") == "{json} d"


# --- overrides and files


def test_overrides_are_toml_where_they_parse_and_text_elsewhere() -> None:
    given_ = [
        *("--optim.lr", "1e-4"),
        *("--train.steps", "5"),
        *("--run.resume",),
        *("--loss.top_k", "none"),
        *("--loss.tail", "false"),
        *("--env.name", "rg:chain_sum"),
        *("--env.args.size", "3"),
        *("--env.args.names", '["a", "b"]'),
        *("--model.template_kwargs", "{enable_thinking = false}"),
        *("--run.dir", "runs/a b"),
        *("--model.revision", '"12"'),
        *("--context.system=--be brief",),
        *("--context.template", "{question}\nNow: {feedback}"),
    ]
    assert parse_overrides(given_) == {
        "optim": {"lr": 1e-4},
        "train": {"steps": 5},
        "run": {"resume": True, "dir": "runs/a b"},
        "loss": {"top_k": "none", "tail": False},
        "env": {"name": "rg:chain_sum", "args": {"size": 3, "names": ["a", "b"]}},
        "model": {"template_kwargs": {"enable_thinking": False}, "revision": "12"},
        "context": {"system": "--be brief", "template": "{question}\nNow: {feedback}"},
    }


def test_negative_numbers_are_values_and_the_last_one_counts() -> None:
    assert parse_overrides(["--optim.lr", "-1", "--optim.lr=-2"]) == {"optim": {"lr": -2}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], r"cannot read '--resume' \(overrides look like --section.key value"),
        (["optim.lr", "1"], r"cannot read 'optim.lr'"),
        (["-optim.lr", "1"], r"cannot read '-optim.lr'"),
        (["--optim.lr", "1", "2"], r"cannot read '2'"),
        (["--loss.top_k", "3", "--loss.top_k.x", "4"], r"--loss.top_k.x: top_k is already a value"),
    ],
)
def test_what_is_no_override_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_overrides(arguments)


def test_later_files_and_then_overrides_lie_on_top(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[algo]\nname = "sdpo"\n[model]\npath = "m"\n[env]\nname = "lab"\nargs = {size = 1, deep = {x = 1, y = 1}}\n'
        "[optim]\nlr = 1e-3\nweight_decay = 0.5\n"
    )
    (tmp_path / "b.toml").write_text("[optim]\nlr = 1e-4\n[env.args.deep]\nx = 2\n")
    config = load_config([tmp_path / "a.toml", str(tmp_path / "b.toml")], ["--env.args.size", "3", "--run.seed=9"])
    assert (config.optim.lr, config.optim.weight_decay) == (1e-4, 0.5)
    assert config.env.args == {"size": 3, "deep": {"x": 2, "y": 1}}
    assert config.run.seed == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[algo\n", r"could not read .*bad.toml: TOMLDecodeError"),
        (b"[a]\nx = 1\nx = 2\n", r"could not read .*bad.toml: TOMLDecodeError"),
        (b"\xff\xfe", r"could not read .*bad.toml: UnicodeDecodeError"),
    ],
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        load_config([tmp_path / "bad.toml"])
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"could not read .*none.toml: FileNotFoundError"):
        load_config([tmp_path / "none.toml"])
    with pytest.raises(ConfigError, match="could not read"):
        load_config([tmp_path])


# --- the way back


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_resolved_settings_as_toml_give_the_same_config(algorithm: str) -> None:
    config = build(algorithm, env={"args": {"size": 3, "names": ["a"]}}, model={"template_kwargs": {"x": False}})
    assert build_config(tomllib.loads(tomli_w.dumps(config.to_toml()))) == config
    assert set(config.to_toml()["algo"]) == {"name", *ALGORITHMS[algorithm].options}


@given(
    lr=st.floats(1e-9, 10),
    top_k=st.one_of(st.just("none"), st.integers(1, 10**6)),
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{}")),
    rate=st.floats(0, 1),
    tail=st.booleans(),
)
def test_any_values_come_back_through_toml(lr: float, top_k: Any, text: str, rate: float, tail: bool) -> None:
    config = build(
        optim={"lr": lr},
        loss={"top_k": top_k, "tail": tail},
        teacher={"rate": rate},
        context={"system": text, "template": f"{{question}}{{feedback}}{text}"},
        run={"dir": f"runs/{text}"},
    )
    assert build_config(tomllib.loads(tomli_w.dumps(config.to_toml()))) == config


def test_reading_settings_needs_no_torch() -> None:
    code = (
        "import sys, sdpo.config, sdpo.run, sdpo.metrics, sdpo.monitor, sdpo.progress, sdpo.track, sdpo.statistics, "
        "sdpo.plot, sdpo.config_reference; print('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
