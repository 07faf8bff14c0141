r"""What every grader does to a response first: drop the thinking, find boxes, quote safely.

All of it is linear in the length of the text, because a policy can write 200,000 characters of anything.

Not covered: neutralising a particular tokenizer's special tokens, which needs the tokenizer (`sdpo.chat`); `quote` only
breaks the marks that chat templates have in common.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Box", "Tag", "final_text", "find_boxes", "find_tags", "quote"]

_THINK_OPEN = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_THINK_CLOSE = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_BOX_OR_BRACE = re.compile(r"\\{1,2}(?:boxed|fbox)\s{0,9}\{|\\.|[{}]", re.DOTALL)
_SPACE = re.compile(r"\s+")


def final_text(text: str) -> str | None:
    """The response without its thinking.

    Chat templates may put the opening mark into the prompt, so a lone closing mark ends the thinking as well.

    Returns:
        What follows the last closing mark and precedes any new thinking; None when thinking was begun and never ended,
        which means that the token budget cut the response.
    """
    end = 0
    for mark in _THINK_CLOSE.finditer(text):
        end = mark.end()
    opened = _THINK_OPEN.search(text, end)
    if opened is None:
        return text[end:]
    return text[end : opened.start()] if text[end : opened.start()].strip() else None


@dataclass(frozen=True, slots=True)
class Box:
    r"""One `\boxed{...}` or `\fbox{...}`.

    Attributes:
        start: where the command begins.
        content_start: where its content begins.
        end: where its content ends; -1 when the closing brace is missing.
    """

    start: int
    content_start: int
    end: int

    def content(self, text: str) -> str:
        """What is in the box; all the rest of the text when it was never closed."""
        return text[self.content_start : self.end if self.end >= 0 else len(text)]


def find_boxes(text: str) -> list[Box]:
    r"""All boxes whose braces balance, in the order of their closing braces, then those that were never closed.

    A brace after a backslash is a character, not a delimiter. So the last element is the response's last word: an
    unfinished box if there is one, else the box that closes last (the outer one where boxes are nested).
    """
    found: list[Box] = []
    opened: list[Box | None] = []
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "{":
            opened.append(None)
        elif token == "}":
            if opened and (box := opened.pop()) is not None:
                found.append(Box(box.start, box.content_start, match.start()))
        elif token.endswith("{") and token != r"\{":
            opened.append(Box(match.start(), match.end(), -1))
    return found + [box for box in opened if box is not None]


@dataclass(frozen=True, slots=True)
class Tag:
    """One `<name>...</name>`.

    Attributes:
        start, end: of the whole; `end` is the end of the text when the closing tag is missing.
        content: what is inside, as written.
        closed: whether there is a closing tag.
    """

    start: int
    end: int
    content: str
    closed: bool


def find_tags(text: str, name: str) -> list[Tag]:
    """All `<name>` elements in order, in upper or lower case, not nested: of several opening tags before a closing one
    the last counts. The last element is not closed where the text ends first."""
    found: list[Tag] = []
    opened: re.Match[str] | None = None
    for mark in re.finditer(rf"<(/?){name}>", text, re.IGNORECASE):
        if not mark.group(1):
            opened = mark
        elif opened is not None:
            found.append(Tag(opened.start(), mark.end(), text[opened.end() : mark.start()], True))
            opened = None
    if opened is not None:
        found.append(Tag(opened.start(), len(text), text[opened.end() :], False))
    return found


def quote(text: str, limit: int = 60) -> str:
    """A piece of a response for use in feedback: one line, at most `limit` characters, in double quotes.

    Marks that chat templates give a meaning (`<|...|>`, `[INST]`) are broken up, so that the quotation cannot pose as a
    turn of its own in the teacher's prompt.
    """
    line = _SPACE.sub(" ", text[: 4 * limit]).strip()
    cut = len(line) > limit or len(text) > 4 * limit
    line = line[:limit].replace("<|", "< |").replace("|>", "| >").replace("[INST]", "[ INST]").replace("</s>", "< /s>")
    return f'"{line}{"…" if cut else ""}"'
