"""Messages to token ids, through the tokenizer's chat template; the only caller of it.

A prompt is rendered with its generation header and tokenised once. Completions are never rendered or tokenised: training
uses the ids that were sampled. Text that a model or a program wrote (feedback, demonstrations) is neutralised before it
enters a prompt: a special token spelled out in it must not become that token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from sdpo.errors import ConfigError
from sdpo.types import Message

__all__ = ["Chat", "remove_thinking"]

_LONGEST_TOKEN = 32  # characters: far above the mean of any tokenizer
_THINKING_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def remove_thinking(text: str) -> str:
    """The text without its reasoning: whole spans, a span whose opening tag was in the prompt, and one never closed.

    Not covered: templates that put reasoning into channels instead of tags (Harmony, Gemma).
    """
    for opening, closing in _THINKING_TAGS:
        text = re.sub(f"{re.escape(opening)}.*?{re.escape(closing)}\\s*", "", text, flags=re.DOTALL)
        if closing in text:
            text = text.rpartition(closing)[2].lstrip()
        text = text.partition(opening)[0]
    return text.strip()


class Chat:
    """A tokenizer with its chat template.

    Args:
        tokenizer: a transformers tokenizer.
        template_kwargs: passed to every rendering, student's and teacher's alike.
        name: how messages call the model.

    Raises:
        ConfigError: the tokenizer has no chat template or no end token.
    """

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, *, name: str = "model"
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of {name} has no chat template", hint="use an instruction-tuned model, or set one"
            )
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer of {name} has no end token", hint="set tokenizer.eos_token")
        self.tokenizer = tokenizer
        self.name = name
        self.template_kwargs = dict(template_kwargs or {})
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special}
        self._special_ids = set(map(int, tokenizer.all_special_ids)) | {
            int(i) for i, t in tokenizer.added_tokens_decoder.items() if t.special
        }
        tags = {tag for pair in _THINKING_TAGS for tag in pair}
        self._thinking_ids = {i for i in self._special_ids if tokenizer.convert_ids_to_tokens(i) in tags}
        spelled = sorted((s for s in special if len(s) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, spelled))) if spelled else None

    @property
    def eos_id(self) -> int:
        """The tokenizer's end token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def pad_id(self) -> int:
        """What padded cells hold. It may equal the end token: masks come from lengths, never from ids."""
        pad = self.tokenizer.pad_token_id
        return self.eos_id if pad is None else int(pad)

    def render(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        """The prompt as text.

        Raises:
            ConfigError: the template refuses the messages, for example a system role it does not know.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(m) for m in messages],
                    tokenize=False,
                    add_generation_prompt=generation,
                    **self.template_kwargs,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError) as exc:
            roles = " ".join(m["role"] for m in messages)
            raise ConfigError(
                f"the chat template of {self.name} refuses the roles [{roles}]: {exc}",
                hint="a template without a system role needs that text in the user turn",
            ) from exc

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt as token ids, generation header included."""
        return self.encode(self.render(messages))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, nothing added."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids; special tokens are left out unless asked for."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))

    def completion_text(self, ids: Sequence[int]) -> str:
        """A completion for graders and demonstrations: without special tokens, save those that enclose thinking.

        Some tokenizers hold thinking tags as special tokens; without them thoughts would run into the answer.
        """
        if not self._thinking_ids.intersection(ids):
            return self.decode(ids)
        kept = [i for i in ids if i in self._thinking_ids or i not in self._special_ids]
        return self.decode(kept, special=True)

    def neutralise(self, text: str) -> str:
        """The text with every spelled-out special token broken up, so that it is read as text."""
        return self._special.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text) if self._special else text

    def count(self, text: str, most: int) -> int:
        """Tokens of a text, or `most` where it has more."""
        return min(most, len(self.encode(text[: _LONGEST_TOKEN * most])))

    def cut(self, text: str, budget: int, *, middle: bool = False) -> tuple[str, int]:
        """The text within a budget of tokens, what was cut marked in it.

        Args:
            middle: keep both ends instead of the beginning.

        Returns:
            The text and the number of tokens cut (of a text of megabytes at least that number).
        """
        most = _LONGEST_TOKEN * budget  # characters; tokenising megabytes to keep a page would take seconds
        if len(text) > most:
            text = f"{text[: most // 2]}{text[len(text) - most // 2 :]}" if middle else text[:most]
        ids = self.encode(text)
        lost = len(ids) - budget
        if lost <= 0:
            return text, 0
        head = budget - budget // 2 if middle else budget
        tail = budget - head
        left = self.decode(ids[:head], special=True).rstrip("\ufffd")
        right = self.decode(ids[len(ids) - tail :], special=True).lstrip("\ufffd") if tail else ""
        return f"{left} [... {lost} tokens cut ...] {right}".rstrip(), lost

    def check(self, student: Sequence[Message], teacher: Sequence[Message]) -> None:
        """Compare how a student's and a teacher's prompt end, before any training.

        Raises:
            ConfigError: they do not end in the same generation header, or the template drops a system text.
        """
        for messages in (student, teacher):
            text = self.render(messages)
            for message in messages:
                if message["role"] == "system" and message["content"].strip() not in text:
                    raise ConfigError(
                        f"the chat template of {self.name} drops the system text", hint="move it into the user turn"
                    )
        student_ids, teacher_ids = self.prompt_ids(student), self.prompt_ids(teacher)
        header = len(student_ids) - len(self.encode(self.render(student, generation=False)))
        if header <= 0:
            raise ConfigError(
                f"the chat template of {self.name} adds no generation header",
                hint="a completion must start at the same place in every prompt",
            )
        if student_ids[-header:] != teacher_ids[-header:]:
            raise ConfigError(
                f"student and teacher prompts end differently under the chat template of {self.name}: "
                f"{self.decode(student_ids[-header:], special=True)!r} and "
                f"{self.decode(teacher_ids[-header:], special=True)!r}",
                hint="check context.template and model.template_kwargs",
            )
