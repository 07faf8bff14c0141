"""One frozen tree of settings: TOML files, then command-line overrides, then nothing else.

    [algo] name = "sdpo"        naming the algorithm alone gives the paper's setting (sdpo.algorithms);
    [loss] top_k = 20           every other key is a visible deviation, listed by `sdpo train --dry-run`.

Unknown keys are refused with the closest known ones, settings that contradict each other are refused before any model is
loaded, and so is a key that the chosen algorithm would never read. TOML has no null: where a setting may be absent, write
"none". The sections themselves are in sdpo.settings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from sdpo.algorithms import ALGORITHMS, get_algorithm
from sdpo.errors import ConfigError, boundary, did_you_mean
from sdpo.settings import (
    AlgoConfig,
    ContextConfig,
    EnvConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    PolicyConfig,
    RunConfig,
    SamplingConfig,
    Section,
    TeacherConfig,
    TrainConfig,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "AlgoConfig",
    "Config",
    "ContextConfig",
    "EnvConfig",
    "EvalConfig",
    "LossConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimConfig",
    "PolicyConfig",
    "RunConfig",
    "SamplingConfig",
    "TeacherConfig",
    "TrainConfig",
    "build_config",
    "deviations",
    "load_config",
    "parse_overrides",
]


class Config(Section):
    """All settings of a run."""

    algo: AlgoConfig
    model: ModelConfig
    env: EnvConfig
    sampling: SamplingConfig = SamplingConfig()
    context: ContextConfig = ContextConfig()
    teacher: TeacherConfig = TeacherConfig()
    loss: LossConfig = LossConfig()
    policy: PolicyConfig = PolicyConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    monitor: MonitorConfig = MonitorConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        name = _algorithm_name(data)
        if name is None or name not in ALGORITHMS:
            return data
        return _merge(get_algorithm(name).preset, data)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        for problem in _contradictions(self):
            raise ValueError(problem)
        return self

    def to_toml(self) -> dict[str, Any]:
        """The resolved settings as TOML-able values, less the sections that the algorithm does not read."""
        unread = _unread_sections(self.algo.name)
        data = {k: _no_null(v) for k, v in self.model_dump(mode="json").items() if k not in unread}
        data["algo"] = {k: v for k, v in data["algo"].items() if k in ("name", *get_algorithm(self.algo.name).options)}
        return data


def _contradictions(config: Config) -> Iterator[str]:
    """Settings that exclude each other, each as one line that names keys, values and the remedy."""
    loss, train, algorithm = config.loss, config.train, get_algorithm(config.algo.name)
    if algorithm.needs_teacher:
        if loss.granularity != "logit" and loss.divergence != "reverse_kl":
            yield (
                f'loss.granularity = "{loss.granularity}" needs loss.divergence = "reverse_kl", not "{loss.divergence}"'
            )
        if loss.granularity != "logit" and loss.top_k is not None:
            yield f'loss.top_k = {loss.top_k} has no meaning at loss.granularity = "{loss.granularity}"; set it to "none"'
        if loss.advantage_clip is not None and loss.divergence != "reverse_kl":
            yield f'loss.advantage_clip needs loss.divergence = "reverse_kl", not "{loss.divergence}"'
        context = config.context
        if context.demonstration == "none" and context.feedback == "never":
            yield 'context.demonstration = "none" and context.feedback = "never" leave the teacher nothing to know'
        if context.demonstration == "sibling" and context.feedback == "never" and train.rollouts_per_prompt == 1:
            yield (
                'context.demonstration = "sibling" with train.rollouts_per_prompt = 1 never finds one; '
                "use feedback, a task demonstration, or larger groups"
            )
    if algorithm.needs_advantages and train.rollouts_per_prompt == 1 and config.policy.baseline != "none":
        yield f'train.rollouts_per_prompt = 1 gives every advantage 0 under policy.baseline = "{config.policy.baseline}"'
    if config.policy.importance == "sequence" and config.policy.aggregation != "sequence_mean":
        yield 'policy.importance = "sequence" needs policy.aggregation = "sequence_mean" (GSPO)'
    if train.mini_batch_prompts is not None and train.prompts_per_step % train.mini_batch_prompts:
        yield (
            f"train.prompts_per_step = {train.prompts_per_step} is no multiple of "
            f"train.mini_batch_prompts = {train.mini_batch_prompts}"
        )
    if config.algo.name == "sample_routing":
        aggregations = {"policy.aggregation": config.policy.aggregation, "loss.aggregation": loss.aggregation}
        for key, value in aggregations.items():
            if value != "token_mean":
                yield f'{key} = "{value}": sample_routing divides by all routed tokens; leave it at "token_mean"'
        if loss.denominator != "active":
            yield f'loss.denominator = "{loss.denominator}": sample_routing divides by all routed tokens; leave it out'
    if train.resample_rounds and ("loss" in algorithm.sections or train.rollouts_per_prompt == 1):
        yield (
            f"train.resample_rounds = {train.resample_rounds} drops groups with equal rewards: those of one rollout always, "
            "and those that a teacher could still learn from; set it to 0"
        )
    if config.algo.name == "sdpo_grpo" and config.algo.mix in (0, 1):
        plain = "sdpo" if config.algo.mix == 0 else "grpo"
        yield f'algo.mix = {config.algo.mix:g} is plain {plain.upper()}; use algo.name = "{plain}"'
    if config.policy.overlong_buffer > config.sampling.max_tokens:
        yield (
            f"policy.overlong_buffer = {config.policy.overlong_buffer} exceeds "
            f"sampling.max_tokens = {config.sampling.max_tokens}; set it to a part of the budget, or to 0"
        )


def _unread_sections(algorithm: str) -> set[str]:
    return {"context", "teacher", "loss", "policy"} - set(get_algorithm(algorithm).sections)


def _no_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _no_null(v) for k, v in value.items()}
    return "none" if value is None else value


def _algorithm_name(data: Any) -> str | None:
    algo = data.get("algo") if isinstance(data, Mapping) else None
    if isinstance(algo, AlgoConfig):
        return algo.name
    name = algo.get("name") if isinstance(algo, Mapping) else None
    return name if isinstance(name, str) else None


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, tables merged and everything else replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        table = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = _merge(old, value) if table else value  # type: ignore[arg-type]
    return merged


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`["--optim.lr", "1e-4", "--run.resume"]` as a nested table. Values are TOML where they parse as such, else text;
    a flag without a value is true.

    Raises:
        ConfigError: an argument is not of the form --section.key.
    """
    tree: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        key, equals, value = flag[2:].partition("=")
        if not flag.startswith("--") or "." not in key:
            raise ConfigError(f"cannot read {flag!r}", hint="overrides look like --section.key value")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"--{key}: {section} is already a value, not a table")
        node[last] = _literal(value)
    return tree


def _literal(text: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    quoted = text.lstrip()[:1] in ("'", '"', "[", "{")
    whole = len(table) == 1 and "\n" not in text and (quoted or "#" not in text)
    return table["value"] if whole else text


def load_config(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Read TOML files in order, later ones on top, then `--section.key value` overrides.

    Raises:
        ConfigError: one line for the first thing that is wrong.
    """
    data: dict[str, Any] = {}
    for file in files:
        path = Path(file)
        with boundary(f"read {path}", ConfigError, OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
            data = _merge(data, tomllib.loads(path.read_text(encoding="utf-8")))
    data = _merge(data, parse_overrides(overrides))
    return build_config(data)


def build_config(data: Mapping[str, Any]) -> Config:
    """Validate a nested table. Raises ConfigError as `load_config` does."""
    try:
        config = Config.model_validate(data)
    except ValidationError as exc:
        raise ConfigError(_one_line(exc)) from None
    unread = _unread_sections(config.algo.name) & set(data)
    options = set(data.get("algo", {})) - {"name", *get_algorithm(config.algo.name).options}
    for key in [*sorted(unread), *(f"algo.{option}" for option in sorted(options))]:
        raise ConfigError(f"{key}: algo.name = {config.algo.name!r} never reads it", hint="remove it")
    return config


def deviations(config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys that differ from the algorithm's preset: {"section.key": (preset, now)}; model, env and run apart."""
    required = {"algo": {"name": config.algo.name}, "model": {"path": "-"}, "env": {"name": "-"}}
    preset, now = Config.model_validate(required).to_toml(), config.to_toml()
    return {
        f"{section}.{key}": (preset[section][key], value)
        for section, table in now.items()
        if section not in ("model", "env", "run")
        for key, value in table.items()
        if preset[section][key] != value
    }


def _setting(location: tuple[int | str, ...]) -> str:
    """ "section.key" of an error's location, without the members of unions that pydantic appends."""
    parts: list[str] = []
    model: Any = Config
    for part in location:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
        parts.append(str(part))
        field = model.model_fields.get(str(part))
        model = None if field is None else field.annotation
    return ".".join(parts)


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    path = _setting(first["loc"])
    if first["type"] == "extra_forbidden":
        model: type[BaseModel] = Config
        for part in first["loc"][:-1]:
            inner = model.model_fields[str(part)].annotation
            assert isinstance(inner, type)
            model = inner
        return f"unknown setting {path}; {did_you_mean(str(first['loc'][-1]), model.model_fields)}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{path} is not set; it has no default"
    if not path:
        return message
    if path in Config.model_fields and first["type"] == "value_error":
        return f"{path}.{message}"  # a section's own check: its message begins with the key
    given = first["input"]
    shown = f" = {given!r}" if isinstance(given, (str, int, float, bool)) and first["type"] != "value_error" else ""
    return f"{path}{shown}: {message}"
