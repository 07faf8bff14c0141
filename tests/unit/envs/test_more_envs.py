"""Mixture, judge and demonstrations."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sdpo.env import Env
from sdpo.env_check import check_env
from sdpo.errors import ConfigError, GradingError
from sdpo.types import Grade, Message, Task
from sdpo_envs.demonstrations import Demonstrations
from sdpo_envs.judge import Judge
from sdpo_envs.mixture import Mixture

HERE = Path(__file__)
WORDS = f"{HERE}:Words"
LATER = f"{HERE}:Later"


class Words(Env):
    """Repeat a word."""

    def __init__(self, size: int = 6, prefix: str = "w", test: int = 2) -> None:
        self.size, self.prefix, self.test = size, prefix, test

    def tasks(self, split: str) -> list[Task]:
        sizes = {"train": range(self.size), "test": range(self.size, self.size + self.test)}
        if split not in sizes or not sizes[split]:
            raise ConfigError(f"no split {split}")
        return [self.made(f"{self.prefix}{i}") for i in sizes[split]]

    @staticmethod
    def made(word: str) -> Task:
        prompt = (Message(role="user", content=f"Say the word that follows: {word}"),)
        return Task(word, prompt, target=word, demonstration=word)

    def grade(self, task: Task, completion: str) -> Grade:
        good = completion == task.target
        return Grade(
            1.0 if good else 0.3 * (task.target in completion),
            "" if good else "not that word",
            metrics={"length": len(completion)},
        )


class Later(Words):
    """The same, asynchronously."""

    async def grade(self, task: Task, completion: str) -> Grade:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().grade(task, completion)


def settle(verdict: Any) -> Grade:
    async def wait() -> Any:
        return await verdict

    grade = verdict if isinstance(verdict, Grade) else asyncio.run(wait())
    assert isinstance(grade, Grade)
    return grade


class TestMixture:
    def test_tasks_are_interleaved_by_weight_and_each_comes_once(self) -> None:
        env = Mixture(
            {
                "a": {"env": WORDS, "weight": 3, "args": {"size": 9}},
                "b": {"env": LATER, "args": {"size": 9, "prefix": "l"}},
            }
        )
        parts = [task.id.split("/")[0] for task in env.tasks("train")]
        assert parts[:8].count("a") == 6
        assert parts[:12].count("b") == 3
        assert parts.count("a") == parts.count("b") == 9
        assert len({task.id for task in env.tasks("train")}) == 18
        assert env.tasks("train") == env.tasks("train")

    def test_each_part_grades_its_own_with_its_own_threshold(self) -> None:
        parts = {"a": {"env": WORDS, "success_at": 0.3}, "b": {"env": LATER, "args": {"prefix": "l"}}}
        env = Mixture(parts)
        tasks = {task.id: task for task in env.tasks("train")}
        first = settle(env.grade(tasks["a/w1"], "say w1"))
        assert (first.reward, first.success) == (0.3, True)
        assert first.metrics == {"a/reward": 0.3, "a/length": 6}
        assert settle(env.grade(tasks["b/l1"], "say l1")).success is None
        assert settle(env.grade(tasks["b/l1"], "l1")).metrics["b/reward"] == 1.0
        assert [line for line in check_env(env) if line.verdict == "failed"] == []

    def test_splits_may_have_other_names_or_be_missing(self) -> None:
        env = Mixture(
            {"a": {"env": WORDS, "splits": {"valid": "test"}}, "b": {"env": WORDS, "args": {"prefix": "v", "test": 0}}}
        )
        assert [task.id for task in env.tasks("valid")] == ["a/w6", "a/w7"]
        assert {task.id[0] for task in env.tasks("test")} == {"a"}
        with pytest.raises(ConfigError, match="no part has a split 'x'"):
            env.tasks("x")

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ({}, "empty"),
            ({"a": {}}, "env is needed"),
            ({"a": {"env": WORDS, "wait": 1}}, "wait"),
            ({"a": {"env": WORDS, "weight": 0}}, "weight 0"),
            ({"a/b": {"env": WORDS}}, "slash"),
        ],
    )
    def test_bad_parts_are_one_line(self, parts: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Mixture(parts)


class Stub(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that answers by script."""

    script: ClassVar[list[tuple[int, str]]] = []
    seen: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Stub.seen.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
        status, text = Stub.script.pop(0) if Stub.script else (200, "The word is another one.")
        reply = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass


class TestJudge:
    @pytest.fixture
    def url(self) -> Iterator[str]:
        Stub.script.clear()
        Stub.seen.clear()
        server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        server.server_close()

    @staticmethod
    def graded(env: Judge, text: str) -> Grade:
        return settle(env.grade(env.tasks("train")[0], text))

    @pytest.mark.parametrize("inner", [WORDS, LATER])
    def test_failures_get_a_critique_and_keep_their_reward(
        self, url: str, inner: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CRITIC_KEY", "k1")
        env = Judge(inner, url=url, model="critic", api_key_env="CRITIC_KEY")
        grade = self.graded(env, "say w0")
        assert (grade.reward, grade.feedback) == (0.3, "The word is another one.")
        (request,) = Stub.seen
        assert (request["path"], request["model"], request["key"]) == ("/v1/chat/completions", "critic", "Bearer k1")
        shown = request["messages"][1]["content"]
        assert "say w0" in shown
        assert "not that word" in shown
        assert self.graded(env, "w0") == Grade(1.0, metrics={"length": 2})  # a success is not sent
        assert len(Stub.seen) == 1

    def test_critiques_are_cached_across_objects(self, url: str, tmp_path: Path) -> None:
        cache = str(tmp_path / "critiques.jsonl")
        for _ in range(2):
            env = Judge(WORDS, url=url, model="critic", cache=cache)
            assert self.graded(env, "x").feedback == self.graded(env, "x").feedback == "The word is another one."
        assert len(Stub.seen) == 1
        self.graded(Judge(WORDS, url=url, model="other", cache=cache), "x")
        assert len(Stub.seen) == 2

    def test_calls_are_bounded(self, url: str) -> None:
        env = Judge(WORDS, url=url, model="critic", max_calls=2)
        told = [self.graded(env, f"x{i}") for i in range(4)]
        assert [grade.feedback for grade in told] == ["The word is another one."] * 2 + ["not that word"] * 2
        assert [grade.metrics["judge/failed"] for grade in told] == [0, 0, 1, 1]

    def test_a_passing_fault_is_tried_again_and_a_lasting_one_falls_back(self, url: str) -> None:
        Stub.script += [(503, ""), (429, ""), (200, "third time")]
        env = Judge(WORDS, url=url, model="critic")
        assert self.graded(env, "x").feedback == "third time"
        Stub.script += [(401, "")]
        assert self.graded(env, "y").feedback == "not that word"
        assert len(Stub.seen) == 4  # a refusal is not tried again
        unreachable = Judge(WORDS, url="http://127.0.0.1:9/v1", model="critic", timeout=0.5)
        assert self.graded(unreachable, "x").metrics["judge/failed"] == 1

    def test_only_the_end_of_a_long_attempt_is_sent(self, url: str) -> None:
        self.graded(Judge(WORDS, url=url, model="critic", max_chars=50), "a" * 5000 + "the end")
        shown = Stub.seen[0]["messages"][1]["content"]
        assert "the end" in shown
        assert "a" * 60 not in shown

    def test_the_reward_is_the_critic_s_only_when_asked(self, url: str) -> None:
        Stub.script += [(200, "Nearly. <score>0.7</score>"), (200, "no score"), (500, ""), (500, ""), (500, "")]
        env = Judge(WORDS, url=url, model="critic", reward="judge")
        grade = self.graded(env, "x")
        assert (grade.reward, grade.feedback, grade.success) == (0.7, "Nearly.", None)
        for text in ("y", "z"):
            with pytest.raises(GradingError, match="no score"):
                self.graded(env, text)

    def test_the_policy_may_be_the_critic(self) -> None:
        env = Judge(WORDS)
        with pytest.raises(GradingError, match="there is no critic"):
            self.graded(env, "x")
        env.bind_policy(lambda messages: f"I see {len(messages)} messages")
        assert self.graded(env, "x").feedback == "I see 2 messages"
        assert pickle.loads(pickle.dumps(env)).tasks("train") == env.tasks("train")

    def test_contract_and_arguments(self, url: str) -> None:
        assert [line for line in check_env(Judge(WORDS, url=url, model="critic")) if line.verdict == "failed"] == []
        with pytest.raises(ConfigError, match="without model"):
            Judge(WORDS, url=url)
        with pytest.raises(ConfigError, match="one of env, judge"):
            Judge(WORDS, reward="both")  # type: ignore[arg-type]


class TestDemonstrations:
    @staticmethod
    def write(path: Path, rows: list[dict[str, Any]]) -> str:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    def test_columns_messages_and_system(self, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}]
        rows = [
            {"ask": "q1", "say": "a1"},
            {"ask": [{"role": "user", "content": "q2"}], "say": ["a2", "more"]},
            {"messages": chat},
        ]
        env = Demonstrations(
            self.write(tmp_path / "r.jsonl", rows), prompt="ask", response="say", system="Be kind.", test_fraction=0
        )
        tasks = env.tasks("train")
        assert [task.demonstration for task in tasks] == ["a1", "a2\nmore", "a b"]
        assert all(task.prompt[0] == {"role": "system", "content": "Be kind."} for task in tasks)
        assert settle(env.grade(tasks[2], "<think>x</think>A  b")) == Grade(
            1.0, success=True, metrics={"exact": 1.0, "f1": 1.0}
        )
        assert settle(env.grade(tasks[2], "a c")).reward == pytest.approx(0.5)
        assert (
            settle(
                Demonstrations(str(tmp_path / "r.jsonl"), prompt="ask", response="say", measure="none").grade(
                    tasks[2], "a b"
                )
            ).reward
            == 0
        )

    def test_division_is_seeded_and_long_rows_are_counted_not_cut(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "r.jsonl", [{"prompt": f"p{i}", "response": "x" * (i + 1)} for i in range(20)])
        env = Demonstrations(path, max_chars=15, test_fraction=0.25)
        kept = [*env.tasks("train"), *env.tasks("test")]
        assert (len(kept), env.too_long) == (15, 5)
        assert max(len(task.demonstration or "") for task in kept) == 15
        assert "characters: 5" in env.describe()
        assert env.tasks("test") == Demonstrations(path, max_chars=15, test_fraction=0.25).tasks("test")
        assert env.tasks("test") != Demonstrations(path, max_chars=15, test_fraction=0.25, seed=1).tasks("test")

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"question": "q", "response": "r"}, "no column 'prompt' .*it has: question, response"),
            ({"prompt": "q"}, "no column 'response'"),
            ({"prompt": "q", "response": " "}, "response is empty"),
            ({"messages": [{"role": "user", "content": "q"}]}, "last message is the user's"),
            ({"messages": [{"role": "assistant", "content": "a"}]}, "does not follow a user's message"),
            ({"messages": [{"role": "tool", "content": "a"}]}, "not {role, content}"),
            ({"prompt": [], "response": "r"}, "no messages"),
        ],
    )
    def test_bad_rows_are_one_line(self, tmp_path: Path, row: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Demonstrations(self.write(tmp_path / "r.jsonl", [row])).tasks("train")

    def test_bad_arguments(self) -> None:
        for arguments, message in (
            ({}, "either path or hub"),
            ({"hub": "x/y"}, "no revision"),
            ({"path": "x", "test_fraction": 1.0}, "below 1"),
        ):
            with pytest.raises(ConfigError, match=message):
                Demonstrations(**arguments)  # type: ignore[arg-type]
