"""The sections of the configuration: every setting, its default, its bounds and what it means.

The docstring under each field is its entry in docs/configuration.md. How the sections hang together, the presets of the
algorithms and what contradicts what: sdpo.config.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sdpo.algorithms import ALGORITHMS
from sdpo.errors import did_you_mean

__all__ = [
    "AlgoConfig",
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
    "Section",
    "TeacherConfig",
    "TrainConfig",
]

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, "none" means absent."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # --run.dir 2024
    )

    @model_validator(mode="before")
    @classmethod
    def _none(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kinds = {name: (f.annotation, *get_args(f.annotation)) for name, f in cls.model_fields.items()}
        for key, value in data.items():
            if isinstance(value, bool) and key in kinds and bool not in kinds[key]:
                raise ValueError(f"{key} needs a value, not {str(value).lower()}")
        return {k: None if type(None) in kinds.get(k, ()) and v == "none" else v for k, v in data.items()}


class AlgoConfig(Section):
    """Which algorithm, and the few numbers that only a blend of two has."""

    name: str
    """An algorithm of `sdpo.algorithms`; it sets the defaults of all other sections."""
    mix: float = Field(0.9, ge=0, le=1)
    """`sdpo_grpo`: the weight of GRPO in A = mix * A_GRPO + (1 - mix) * A_SDPO (2601.20802, Sec. 4)."""
    entropy_weights: bool = True
    """`sample_routing`: weight distilled tokens by exp(-teacher entropy) over its mean (2604.02288)."""
    anchor_clip: float = Field(0.2, ge=0, lt=1)
    """`verifier_anchored`: the weight exp(sign(A) * gap) is clipped to 1 +- this (2604.03128)."""
    anchor_mix: float = Field(1.0, ge=0, le=1)
    """`verifier_anchored`: share of the re-weighted advantage; 0 is plain GRPO."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ALGORITHMS:
            raise ValueError(f"{name!r} is no algorithm; {did_you_mean(name, ALGORITHMS)}")
        return name


class ModelConfig(Section):
    """The policy."""

    path: str
    """Hub id or folder of a causal language model, or a name that a package registers under `sdpo.models`."""
    revision: str | None = None
    """Hub revision."""
    gguf_file: str | None = None
    """Name of a GGUF file in `path` to read the weights from."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", ...; auto takes CUDA where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters that are trained; float32 unless memory forbids it."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the matrix products (autocast); auto is bfloat16 on CUDA and on CPUs with AMX, else float32."""
    threads: int | None = Field(None, ge=1)
    """CPU threads for torch; none: OMP_NUM_THREADS where it is set, else as many as there are idle cores at start."""
    attention: str | None = None
    """`attn_implementation` of transformers; none leaves the choice to transformers."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    lora_rank: int = Field(0, ge=0)
    """Rank of a LoRA adapter; 0 trains all parameters."""
    lora_alpha: float = Field(32.0, gt=0)
    """LoRA scale: the update is multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapter while training; teachers and samplers run without it."""
    lora_targets: str | tuple[str, ...] = "all-linear"
    """Modules that get an adapter (peft's `target_modules`)."""
    template_kwargs: dict[str, Any] = {}
    """Passed to the chat template on both sides, for example {enable_thinking = false}."""


class EnvConfig(Section):
    """The environment."""

    name: str
    """Entry point, `package.module:Class`, `file.py:Class` or `adapter:name`."""
    args: dict[str, Any] = {}
    """Arguments of its constructor."""
    train_split: str = "train"
    """Split to train on."""
    success_threshold: float = 0.5
    """A reward of at least this is a success where the environment does not say (2601.20802, released settings)."""
    max_concurrent: int = Field(32, ge=1)
    """Rollouts graded at the same time."""
    timeout: float = Field(300.0, gt=0)
    """Seconds after which grading one rollout is given up: the rollout is failed, not wrong."""


class SamplingConfig(Section):
    """How rollouts are drawn."""

    temperature: float = Field(1.0, gt=0)
    """Student temperature; the loss divides the student's logits by it too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; 1 keeps everything."""
    top_k: int | None = Field(None, ge=1)
    """Sample from the k likeliest tokens; none keeps all."""
    max_tokens: int = Field(8192, ge=1)
    """Completion budget in tokens."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Tasks with longer prompts are left out at start, and counted."""
    batch_size: int = Field(256, ge=1)
    """Rollouts decoded at the same time."""


class ContextConfig(Section):
    """What the self-teacher sees in addition to the question."""

    demonstration: Literal["sibling", "task", "sibling_or_task", "none"] = "sibling"
    """A successful rollout of the group, the task's own demonstration, the first of both that exists, or nothing."""
    choice: Literal["first", "random", "shortest"] = "first"
    """Which successful sibling; "random" is drawn from the run's seed."""
    own_success: Literal["exclude", "include"] = "exclude"
    """Whether a success may be its own demonstration: "include" as the paper's text, "exclude" as the released code."""
    feedback: Literal["without_demonstration", "always", "never"] = "without_demonstration"
    """When the environment's feedback on the own attempt is shown."""
    feedback_on_success: bool = False
    """Show feedback to successful rollouts too."""
    rows: Literal["all", "failures"] = "all"
    """Which rollouts get a teacher context."""
    remove_thinking: bool = True
    """Cut reasoning out of demonstrations: tagged spans, also when only one of the tags is there."""
    max_demonstration_tokens: int = Field(8192, ge=1)
    """Longer demonstrations lose their middle."""
    max_feedback_tokens: int = Field(2048, ge=1)
    """Longer feedback loses its end."""
    max_prompt_tokens: int = Field(10240, ge=1)
    """Budget of the whole teacher prompt; feedback, then demonstration, give way. The question is never cut."""
    template: str = "{question}{demonstration}{feedback}\n\nNow write a complete, correct answer to the question above."
    """The teacher's last user turn; slots {question}, {demonstration}, {feedback}, {attempt}."""
    demonstration_template: str = (
        "\n\nFor reference, this answer to the question was judged correct:\n\n{demonstration}"
    )
    """Fills {demonstration} where there is one; slot {demonstration}."""
    feedback_template: str = "\n\nAn attempt at the question was judged wrong. The checker reported:\n\n{feedback}"
    """Fills {feedback} where it is shown; slots {feedback}, {attempt}."""
    system: str = ""
    """System text for the teacher alone, after the task's own."""

    @model_validator(mode="after")
    def _slots(self) -> ContextConfig:
        allowed = {
            "template": {"question", "demonstration", "feedback", "attempt"},
            "demonstration_template": {"demonstration"},
            "feedback_template": {"feedback", "attempt"},
        }
        for key, slots in allowed.items():
            try:
                parts = list(string.Formatter().parse(getattr(self, key)))
            except ValueError as exc:
                raise ValueError(f"{key}: {exc}; write a literal brace twice") from exc
            for _, name, spec, conversion in parts:
                if name is not None and name not in slots:
                    raise ValueError(f"{key} has an unknown slot {{{name}}}; {did_you_mean(name, slots)}")
                if spec or conversion:
                    raise ValueError(f"{key}: the slot {{{name}}} takes no format")
        if not any(slot in self.template for slot in ("{demonstration}", "{feedback}", "{attempt}")):
            raise ValueError("template shows the teacher nothing new; it needs {demonstration} or {feedback}")
        for key, slot in (("demonstration_template", "{demonstration}"), ("feedback_template", "{feedback}")):
            if slot not in getattr(self, key):
                raise ValueError(f"{key} lacks its slot {slot}")
        return self


class TeacherConfig(Section):
    """Whose weights the self-teacher has."""

    kind: Literal["ema", "frozen", "trust_region", "live", "snapshot"] = "ema"
    """ema: a running average; frozen: the initial weights; trust_region: the geometric mixture of initial and current
    model; live: the current weights; snapshot: a copy taken every `every` steps (2601.20802, App. A.2)."""
    rate: float = Field(0.05, ge=0, le=1)
    """ema: teacher <- (1 - rate) * teacher + rate * policy after each step; trust_region: the policy's share."""
    every: int = Field(10, ge=1)
    """snapshot: steps between two copies."""
    temperature: float = Field(1.0, gt=0)
    """Teacher temperature; its own, not the sampler's."""


class LossConfig(Section):
    """The distillation loss."""

    divergence: Literal["forward_kl", "reverse_kl", "js"] = "js"
    """forward_kl: KL(teacher || student); reverse_kl: KL(student || teacher); js: generalised Jensen-Shannon."""
    alpha: float = Field(0.5, gt=0, lt=1)
    """js: weight of the teacher in the mixture."""
    top_k: int | None = Field(None, ge=1)
    """Compare on the k likeliest tokens; none compares the whole vocabulary."""
    top_k_from: Literal["student", "teacher"] = "student"
    """Whose k likeliest tokens."""
    tail: bool = True
    """Add the rest of the mass as one more outcome; otherwise both sides are renormalised over the k."""
    granularity: Literal["logit", "token", "sequence"] = "logit"
    """logit: whole distributions; token: the sampled token; sequence: its mean over the sequence (reverse_kl only)."""
    is_clip: float | None = Field(2.0, gt=0)
    """Upper bound on the importance ratio policy / old policy; none: no ratio."""
    token_clip: float | None = Field(None, gt=0)
    """Upper bound on the divergence of one token (2601.18734)."""
    advantage_clip: float | None = Field(None, gt=0)
    """Bound on |log teacher - log student| as an advantage (reverse_kl only; 2601.20802, Table 12)."""
    skip_first_tokens: int = Field(0, ge=0)
    """Completion tokens at the start that do not count (2601.19897: 3)."""
    aggregation: Aggregation = "token_mean"
    """Mean over tokens, mean of sequence means, or sum over rows * max_tokens."""
    denominator: Literal["active", "all"] = "active"
    """Rows in the denominator: those with a teacher context, or all (the released code)."""


class PolicyConfig(Section):
    """The policy-gradient loss."""

    baseline: Literal["mean", "mean_std", "leave_one_out", "none"] = "mean"
    """Group baseline of the advantage; mean_std also divides by the group's standard deviation."""
    outcome_gate: bool = False
    """Advantage 0 for groups without a success, whatever their shaped rewards say."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Lower clip of the importance ratio."""
    clip_high: float = Field(0.28, ge=0)
    """Upper clip of the importance ratio."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the loss of tokens with a negative advantage."""
    importance: Literal["token", "sequence"] = "token"
    """Importance ratio by token, or one for the sequence (GSPO)."""
    aggregation: Aggregation = "token_mean"
    """Mean over tokens, mean of sequence means, or sum over rows * max_tokens (Dr.GRPO)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of KL(policy || initial model)."""
    overlong_buffer: int = Field(0, ge=0)
    """DAPO: tokens before the budget over which the reward sinks by up to 1; 0: none."""


class OptimConfig(Section):
    """AdamW."""

    lr: float = Field(1e-5, gt=0)
    """Learning rate after warm-up."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm above which the gradient is scaled down."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after warm-up, over all optimiser steps."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up, counted in steps of training, not in mini-batches."""

    @field_validator("betas")
    @classmethod
    def _decay_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{list(betas)} are not both in [0, 1)")
        return betas


class TrainConfig(Section):
    """Sizes of a step, and how long."""

    steps: int = Field(100, ge=1)
    """Steps of generation; each has prompts_per_step / mini_batch_prompts optimiser steps."""
    prompts_per_step: int = Field(32, ge=1)
    """Tasks in a step."""
    rollouts_per_prompt: int = Field(8, ge=1)
    """Size of a group."""
    mini_batch_prompts: int | None = Field(None, ge=1)
    """Tasks in an optimiser step; none: all of the step, on-policy."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Padded tokens in one forward pass, by the longer of student and teacher row. Never changes the gradient."""
    rollout_is_clip: float | None = Field(2.0, gt=0)
    """Upper bound on the ratio trainer / sampler of log-probs; none: no correction."""
    resample_rounds: int = Field(0, ge=0)
    """DAPO: replace groups whose rewards are all equal, at most this many times; what is left is dropped and counted."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """The step fails when more than this share of its rollouts could not be graded."""
    save_every: int = Field(50, ge=0)
    """Steps between two checkpoints; 0: only the last and the best."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints kept, the best apart."""


class EvalConfig(Section):
    """Evaluation while training and by `sdpo eval`."""

    every: int = Field(10, ge=0)
    """Steps between two evaluations; 0: none."""
    at_start: bool = True
    """Evaluate before the first step."""
    split: str = "test"
    """Split to evaluate on."""
    tasks: int | None = Field(None, ge=1)
    """The first n tasks of the split; none: all."""
    rollouts: int = Field(16, ge=1)
    """Rollouts a task."""
    temperature: float = Field(0.6, ge=0)
    """0 is greedy."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus."""


class MonitorConfig(Section):
    """Thresholds of the warnings (docs/troubleshooting.md)."""

    patience: int = Field(3, ge=1)
    """Steps in a row before a warning, and steps without the condition before the same warning may come again."""
    eval_patience: int = Field(2, ge=1)
    """The same for evaluations; also how many the length of evaluated completions is averaged over."""
    grad_norm_floor: float = Field(1e-4, ge=0)
    """Warn when the gradient norm stays under this."""
    grad_norm_ceiling: float = Field(100.0, gt=0)
    """Warn when the gradient norm, before clipping, exceeds this."""
    length_drop: float = Field(0.5, gt=0, le=1)
    """Warn when completions are shorter than this share of their length when reward last rose."""
    reward_rise: float = Field(0.05, gt=0)
    """Reward, or the success rate of an evaluation, counts as risen when it grew by this."""
    truncated_fraction: float = Field(0.3, gt=0, le=1)
    """Warn when more than this share of rollouts runs into the token budget."""
    repetition_ratio: float = Field(10.0, gt=1)
    """Warn when completions compress by more than this on average (zlib, last 10,000 characters; 2604.08527)."""
    entropy_floor: float = Field(0.02, ge=0)
    """Warn when the policy's entropy, in nats a token, stays under this although tasks are still failed."""
    logprob_gap: float = Field(0.2, gt=0)
    """Warn when mean |trainer - sampler| log-prob exceeds this."""
    failed_fraction: float = Field(0.1, gt=0, le=1)
    """Warn when more than this share of rollouts cannot be graded."""
    collapse_drop: float = Field(0.2, gt=0, le=1)
    """Validation has collapsed when it stays this far (relative) below its best for `eval_patience` evaluations."""
    collapse_sharp: float = Field(0.5, gt=0, le=1)
    """It has collapsed at once when it is this far (relative) below its best."""
    collapse_min: float = Field(0.1, ge=0, le=1)
    """A fall of less than this (absolute) is noise, however large it is relative to a small best."""
    stop_on_collapse: bool = False
    """End the run when validation has collapsed or sampler and trainer disagree; the best checkpoint is kept anyway."""


class RunConfig(Section):
    """Where the run is written, and what seeds it."""

    dir: str = "runs/default"
    """Run directory."""
    seed: int = Field(0, ge=0)
    """Drives data order, sampling, initialisation of adapters and dropout."""
    resume: bool = False
    """Continue the run in `dir` from its newest checkpoint."""
    overwrite: bool = False
    """Remove what is in `dir` first."""
    dump_prompts: int = Field(0, ge=0)
    """Write this many aligned student and teacher prompts of the first step to prompts.jsonl."""
    rollouts_every: int = Field(10, ge=0)
    """Steps between two rollout files; 0: none."""
    track: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Also log to this tracker (extra `track`)."""

    @model_validator(mode="after")
    def _exclusive(self) -> RunConfig:
        if self.resume and self.overwrite:
            raise ValueError("resume and run.overwrite exclude each other; give one of them")
        return self
