"""The lab: its environment, its language and the shipped checkpoint."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo.chat import Chat
from sdpo.config import ContextConfig
from sdpo.context import ContextBuilder
from sdpo.env import load_env
from sdpo.errors import ConfigError
from sdpo.types import Completion, Group, Message, Rollout, Task
from sdpo_envs.lab import DEMONSTRATION_TEMPLATE, FEEDBACK_TEMPLATE, TEMPLATE, Lab, checkpoint
from sdpo_envs.lab.environment import feedback
from sdpo_envs.lab.language import FUNCTIONS, NAMES, RARE, SKILLS, WORDS

DIGITS = st.sampled_from("0123456789")
TRIPLE = st.lists(DIGITS, min_size=3, max_size=3).map(" ".join)
LAB = Lab(train_size=1)
(QUESTION,) = LAB.tasks("train")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pretrain() -> ModuleType:
    path = ROOT / "recipes" / "lab" / "pretrain.py"
    spec = importlib.util.spec_from_file_location("lab_pretrain", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lab_pretrain"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint())


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint()).eval()


# --- feedback and grading


@given(attempt=TRIPLE, target=TRIPLE)
def test_feedback_reveals_one_position_the_first_wrong_one(attempt: str, target: str) -> None:
    told = feedback(attempt, target)
    pairs = list(zip(attempt.split(), target.split(), strict=True))
    wrong = [i for i, (got, wanted) in enumerate(pairs) if got != wanted]
    if not wrong:
        assert told == ""
        return
    shown, _, hint = told.partition(" E ")
    assert shown == attempt
    assert hint == f"p{wrong[0] + 1} {target.split()[wrong[0]]}"


@given(attempt=TRIPLE, first=TRIPLE, second=TRIPLE)
def test_feedback_is_a_function_of_the_attempt_and_one_digit(attempt: str, first: str, second: str) -> None:
    """Two targets that agree up to the first wrong position cannot be told apart by feedback."""
    a, x, y = attempt.split(), first.split(), second.split()
    cut = next((i for i in range(3) if a[i] != x[i]), None)
    if cut is None:
        return
    same = " ".join([*x[: cut + 1], *y[cut + 1 :]])
    assert feedback(attempt, first) == feedback(attempt, same)


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        ("4 2 9", ""),
        ("  4\n2\t9 ", ""),
        ("4 7 9", "4 7 9 E p2 2"),
        ("7 7 7", "7 7 7 E p1 4"),
        ("", "_ _ _ E p1 4"),
        ("4 2", "4 2 _ E p3 9"),
        ("4 2 9 1", "4 2 9 E p4 _"),
        ("4 2 9 9 9 9", "4 2 9 E p4 _"),
        ("5 2 9 1", "5 2 9 E p1 4"),
        ("429", "_ _ _ E p1 4"),
        ("4 ba 9", "4 _ 9 E p2 2"),
        ("4 ² ٩", "4 _ _ E p2 2"),
        ("4 2 9.", "4 2 _ E p3 9"),
        ("<eos> <pad> E", "_ _ _ E p1 4"),
    ],
)
def test_feedback_on_attempts_of_every_form(attempt: str, told: str) -> None:
    assert feedback(attempt, "4 2 9") == told


HOSTILE = [
    "",
    " \n\t",
    "\x00",
    "9" * 200_000,
    "4 " * 100_000,
    "<eos>" * 1000,
    "{question}{0}{{",
    "\ud800",
    "A S T E p1",
    "٤ ٢ ٩",
    "4 2 9\x00",
    "<think>4 2 9</think>",
]


@pytest.mark.parametrize("attempt", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_attempts_get_zero_and_words_of_the_vocabulary(attempt: str) -> None:
    env = Lab()
    task = env.tasks("train")[0]
    grade = env.grade(task, attempt)
    assert grade.reward == 0.0
    assert grade.success is False
    assert set(grade.feedback.split()) <= set(WORDS)
    assert len(grade.feedback.split()) == 6


@given(st.text())
def test_any_text_gets_the_same_grade_twice(attempt: str) -> None:
    env, task = LAB, QUESTION
    grade = env.grade(task, attempt)
    assert grade == env.grade(task, attempt)
    assert (grade.reward == 1.0) == (attempt.split() == task.target.split()) == (grade.feedback == "")


def test_the_demonstration_is_right_and_is_not_in_the_prompt() -> None:
    env = Lab()
    for task in env.tasks("test"):
        assert task.demonstration is not None
        assert env.grade(task, task.demonstration).reward == 1.0
        assert len(task.prompt) == 1
        assert task.prompt[0]["content"].split() == [task.metadata["name"], *task.id.partition("-")[2]]


# --- splits


@pytest.mark.parametrize("names", ["all", "easy", "hard", 0, 1, 2])
def test_no_test_question_is_trained_whatever_the_arguments(names: str | int) -> None:
    test = {t.id for t in Lab(names, seed=3, test_size=10**6).tasks("test")}
    train = {t.id for t in Lab("all", seed=4, train_size=10**6).tasks("train")}
    assert test
    assert not test & train


def test_sizes_order_and_seeds() -> None:
    env = Lab()
    assert (len(env.tasks("train")), len(env.tasks("test"))) == (16_384, 1_024)
    ids = [t.id for t in env.tasks("train")]
    assert len(set(ids)) == len(ids)
    assert ids == [t.id for t in Lab(seed=0).tasks("train")]
    assert ids != [t.id for t in Lab(seed=1).tasks("train")]
    assert [t.id for t in Lab(train_size=7).tasks("train")] == ids[:7]


def test_names_select_hard_easy_and_disjoint_skills() -> None:
    def names(of: str | int) -> set[str]:
        return {str(t.metadata["name"]) for t in Lab(of, test_size=10**6).tasks("test")}

    assert len(names("easy")) == 24
    assert len(names("hard")) == 8
    skills = [names(skill) for skill in range(SKILLS)]
    assert sum(map(len, skills)) == len(set().union(*skills)) == 32
    assert all(task.metadata["hard"] for task in Lab("hard").tasks("test"))
    for skill in skills:
        assert {NAMES[name].hard for name in skill} == {True, False}
        assert {NAMES[name].prior for name in skill if not NAMES[name].hard} == {0.1, 0.2, 0.4}


def test_hard_names_are_those_of_rare_functions() -> None:
    assert all(binding.hard == (binding.function in RARE) for binding in NAMES.values())
    outputs = {tuple(f((i, j, k)) for i in range(3) for j in range(4, 7) for k in range(7, 10)) for f in FUNCTIONS}
    assert len(outputs) == len(FUNCTIONS)


@pytest.mark.parametrize(
    ("args", "words"),
    [({"names": "harder"}, "harder"), ({"names": 3}, "3"), ({"names": True}, "True"), ({"names": ["easy"]}, "easy"),
     ({"train_size": 0}, "train_size = 0"), ({"test_size": -1}, "test_size = -1")],
)  # fmt: skip
def test_wrong_arguments_are_named(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", "")):
        load_env("sdpo_envs.lab:Lab", **args)


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'tset'.*test"):
        Lab().tasks("tset")


# --- language


def test_every_word_survives_the_tokenizer(tokenizer: Any) -> None:
    assert len(WORDS) == len(set(WORDS)) == len(tokenizer) == 54
    for i, word in enumerate(WORDS):
        assert tokenizer(word, add_special_tokens=False)["input_ids"] == [i]
        assert tokenizer.decode([i], skip_special_tokens=False) == word
    text = " ".join(WORDS[3:])
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert set(tokenizer.all_special_tokens) == {"<pad>", "<eos>", "<unk>"}
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("zebra")["input_ids"]) == "<unk>"


def test_the_chat_template_puts_the_answer_marker_last(tokenizer: Any) -> None:
    chat = Chat(tokenizer)
    user = [Message(role="user", content="ba 4 2 9")]
    assert chat.decode(chat.prompt_ids(user), special=True) == "ba 4 2 9 A"
    whole = [*user, Message(role="assistant", content="9 2 4")]
    assert chat.decode(chat.encode(chat.render(whole, generation=False)), special=True) == "ba 4 2 9 A 9 2 4 <eos>"
    with pytest.raises(ConfigError, match="system"):
        chat.render([Message(role="system", content="hello"), *user])


def test_pretraining_sequences_are_what_the_context_builder_renders(pretrain: ModuleType, tokenizer: Any) -> None:
    """Decode drawn sequences, rebuild each through Chat and ContextBuilder, and compare token for token."""
    env = Lab()
    chat = Chat(tokenizer)
    builder = ContextBuilder(
        ContextConfig.model_validate(
            {
                "template": TEMPLATE,
                "demonstration_template": DEMONSTRATION_TEMPLATE,
                "feedback_template": FEEDBACK_TEMPLATE,
                "feedback": "always",
            }
        ),
        chat,
    )
    drawn = pretrain.Mixture(pretrain.build_tokenizer(), 5).draw(400)
    seen = set()
    for row in drawn.ids:
        words = [WORDS[i] for i in row if WORDS[i] != "<pad>"]
        ids = [int(i) for i in row[: len(words)]]
        begin = words.index("A") + 1
        solution = " ".join(words[words.index("S") + 1 :][:3]) if "S" in words else ""
        told = " ".join(words[words.index("T") + 1 : words.index("A")]) if "T" in words else ""
        question = (Message(role="user", content=" ".join(words[:4])),)
        if not solution and not told:
            assert (*chat.prompt_ids(question), *ids[begin:]) == tuple(ids)
        else:
            wanted = solution or _target(told)
            task = Task(id="t", prompt=question, target=wanted)
            attempt = " ".join(told.split()[:3]) if told else "_"
            texts = [attempt, solution] if solution else [attempt]
            rollouts = tuple(
                Rollout("t", i, (), Completion(text, (1,)), env.grade(task, text)) for i, text in enumerate(texts)
            )
            context = builder.context(Group(task, rollouts), rollouts[0])
            assert context is not None
            expected = list(context.prompt_ids)
            if solution and not told:  # the environment has feedback on every failure: leave it out
                text = pretrain.teacher_text(question[0]["content"], solution, "")
                expected = list(chat.prompt_ids([Message(role="user", content=text)]))
            assert expected + ids[begin:] == ids
        assert len(ids) == begin + 4
        assert words[-1] == "<eos>"
        seen.add((bool(solution), bool(told)))
    assert len(seen) == 4


def _target(told: str) -> str:
    """Some target that this feedback is true of."""
    shown, _, hint = told.partition(" E ")
    words = shown.split()
    words[int(hint[1]) - 1] = hint.split()[1]
    return " ".join(words)


def test_wrong_answers_count_only_after_their_first_deviation(pretrain: ModuleType) -> None:
    mixture = pretrain.Mixture(pretrain.build_tokenizer(), 1)
    drawn = mixture.draw(4000)
    counted = (drawn.labels != pretrain.IGNORED).sum(axis=1)
    assert set(np.unique(counted)) == {1, 2, 3, 4}
    solution = WORDS.index("S")
    shares = []
    for ids, labels in zip(drawn.ids, drawn.labels, strict=True):
        begin = int(np.flatnonzero(ids == WORDS.index("A"))[0]) + 1
        answer, label = ids[begin : begin + 4], labels[begin : begin + 4]
        start = int((label == pretrain.IGNORED).sum())
        assert (label[start:] == answer[start:]).all()
        if solution in ids:
            truth = ids[5:8]
            shares.append(start > 0)
            assert (answer[:3] != truth).any() == (start > 0)
            if start:
                assert (answer[: start - 1] == truth[: start - 1]).all()
                assert answer[start - 1] != truth[start - 1]
        elif WORDS.index("T") not in ids:
            assert start == 0
    assert 0.25 < np.mean(shares) < 0.35


def test_the_mixture_follows_its_seed(pretrain: ModuleType) -> None:
    tokenizer = pretrain.build_tokenizer()
    first, again, other = (pretrain.Mixture(tokenizer, seed).draw(64).ids for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()


# --- the shipped checkpoint


def test_the_checkpoint_is_whole_and_small(model: Any, tokenizer: Any, pretrain: ModuleType) -> None:
    folder = checkpoint()
    record = json.loads((folder / "lab.json").read_text())
    assert record["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    assert model.num_parameters() == 163_648
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert tokenizer.get_vocab() == pretrain.build_tokenizer().get_vocab()
    assert tokenizer.chat_template == pretrain.build_tokenizer().chat_template


def test_the_shipped_teacher_knows_better_than_the_policy(model: Any, tokenizer: Any, pretrain: ModuleType) -> None:
    gap = pretrain.teacher_gap(model, tokenizer, questions=256, seed=5)
    assert gap["policy"] <= 0.25
    assert gap["policy_hard"] <= 0.06
    assert gap["retry"] <= 0.25
    assert gap["with_feedback"] >= 0.60
    assert gap["with_solution"] >= 0.95
    assert gap["with_both"] >= 0.95


def test_pretraining_lowers_the_loss_and_repeats_itself(
    pretrain: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = pretrain.build_tokenizer()
    weights = []
    for _ in range(2):
        model = pretrain.build_model(0)
        pretrain.train(model, pretrain.Mixture(tokenizer, 0), 40, log_every=20)
        weights.append(model.lm_head.weight.detach().clone())
    first, last = (float(line.split()[3]) for line in capsys.readouterr().out.splitlines()[:2])
    assert last < first - 0.2
    assert bool((weights[0] == weights[1]).all())


def test_the_documented_example_is_true() -> None:
    text = (ROOT / "recipes" / "lab" / "README.md").read_text()
    (task,) = [
        t
        for split in ("train", "test")
        for t in Lab(train_size=10**6, test_size=10**6).tasks(split)
        if t.id == "ba-429"
    ]
    assert f"{task.prompt[0]['content']}  ->  {task.target}" in text
    assert f"T {feedback('5 3 0', task.target)} A" in text
