r"""Which option did a response choose?

One extractor for every multiple-choice environment, so that training and evaluation cannot disagree. Evidence in order
of strength; within one level the last statement wins, because reasoning corrects itself:

1. the content of the last `<answer>` tag;
2. the last of: a `\boxed{}` that holds a letter, or a line such as "Answer: C" (also in other languages);
3. a conclusion in prose: "I choose option C", "C is correct", "therefore D";
4. the whole response, or its last line, being nothing but a letter or one option's text.

Never an answer: the article "a", the pronoun "I", a letter inside a word or a formula, a letter in the thinking,
several letters at once, three or more different answers, two different answers side by side, a tag or box that was
begun and not finished. Where letter and option text disagree, the letter counts.

Not covered: questions whose options are not lettered, negated questions of the kind "all except".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sdpo_envs.grading.text import final_text, find_boxes, find_tags

__all__ = ["Choice", "extract_choice"]

Problem = Literal["", "empty", "unfinished", "none", "several", "unknown"]

# A letter, perhaps wrapped in markdown, brackets or LaTeX, that is not the beginning of a word, a number or a formula.
_WRAP = r"(?:[*_`~$\"'“”‘’(\[{<「【《]|\\(?:text|textbf|mathrm|mathbf|rm|bf)\s?\{|\\[(\[])"
_LETTER = rf"(?P<wrap>{_WRAP}{{0,6}})(?P<letter>[A-Za-z])(?![A-Za-z0-9_^=+]|['’][a-z]|-[A-Za-z0-9]|\\)"
_CUE = (
    r"(?:answers?|antwort|lösung|respuesta|réponse|reponse|risposta|resposta|ответ|答案|答え|回答|정답|답|"
    r"(?:final|correct|right|best|my)\s(?:choice|option)|choice\s?:|(?:選択|选择)(?:肢|项)?)"
)
_FILLER = (
    r"(?:[\s*_`\"'“”=:：\-–—>#$]|是|为|為|は|은|는|\b(?:is|are|was|be|would|should|must|will|ist|es|est|è|é|option|choice|letter|"
    r"therefore|thus|hence|clearly|definitely|most|likely|probably|simply|just|the|correct|right|final|one|to|this|"
    r"question|i\s(?:think|believe|choose|pick))\b){0,16}?"
)
_STRONG = re.compile(rf"{_CUE}{_FILLER}\s?{_LETTER}", re.IGNORECASE)
_VERB = (
    r"(?:(?:choose|chose|select|selected|pick|picked|go\swith|going\swith|opt\sfor|vote\sfor|conclude|settle\son)"
    r"|(?:must|has\sto|should|can\sonly)\sbe|therefore|thus|hence|consequently|so(?:\sit(?:\sis|'s))?)"
)
_CONCLUSION = re.compile(
    rf"\b{_VERB}[,:]?\s(?:it\sis\s|the\s)?(?:answer\s|option\s|choice\s|letter\s)?{_LETTER}", re.IGNORECASE
)
_OPTION = re.compile(rf"\b(?:option|choice)\s{_LETTER}", re.IGNORECASE)
_IS_RIGHT = re.compile(
    rf"(?:^|[\s(]){_LETTER}[*)\]]{{0,3}}\sis\s(?:the\s)?(?:only\s|most\s|best\s)?(?:correct|right|true|best)\b",
    re.IGNORECASE,
)
_DENIAL = re.compile(
    r"\b(?:not|n't|never|no|neither|nor|eliminat\w{0,4}|exclud\w{0,4}|rul\w{1,3} out|reject\w{0,3}|wrong|incorrect|"
    r"unlike|than|if|whether)\b|n't\b",
    re.IGNORECASE,
)
_CLOSE = r"[*_`~$\"'“”‘’)\]}>」】》]{0,6}\\?[)\]]?"
_ENDS = re.compile(
    rf"{_CLOSE}\s{{0,3}}(?:$|[.,;:!?。，；：)\n]|\bb(?:ecause|y)\b|\b(?:since|as|with|for|due|given|from)\b)",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    rf"{_CLOSE}\s{{0,3}}(?P<link>,|/|&|\+|\band\b|\bor\b|\bund\b|\boder\b|\by\b|\bet\b|\bou\b|和|或|、)"
    rf"\s{{0,3}}(?:or\s|and\s|maybe\s|possibly\s|perhaps\s){{0,2}}(?:option\s)?{_LETTER}",
    re.IGNORECASE,
)
_UNWRAP = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|rm|bf|boxed|fbox)\b|[*_`~$\"'“”‘’{}\\]")
_LABEL = re.compile(
    r"(?:option|choice|answer|letter)?[\s:]{0,3}[(\[<]{0,2}\s?([A-Za-z])\s?[)\]>]{0,2}\s?(?:$|[.:)\]]\s?(?P<rest>.*)$|[-–—]\s(?P<dash>.*)$)",
    re.IGNORECASE | re.DOTALL,
)
_LISTED = re.compile(
    r"[(\[]{0,2}([A-Za-z])[)\]]{0,2}(?:\s?(?:,|/|&|;|\+|\band\b|\bor\b)\s?(?:and\s|or\s)?[(\[]{0,2}([A-Za-z])[)\]]{0,2})+",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Choice:
    """What a response chose.

    Attributes:
        letters: the letters named as the answer, sorted; one for an ordinary answer, several for a list.
        problem: why there is no single letter: "empty" response, "unfinished" thinking or answer, "none" given,
            "several" at once, "unknown" content where the letter belongs.
        said: what stands where the letter belongs, when that is not a letter.
    """

    letters: tuple[str, ...] = ()
    problem: Problem = ""
    said: str = ""

    @property
    def letter(self) -> str | None:
        """The one letter, or None."""
        return self.letters[0] if len(self.letters) == 1 and not self.problem else None


@dataclass(frozen=True, slots=True)
class _Said:
    """A statement of an answer and where it stands."""

    start: int
    end: int
    choice: Choice


def extract_choice(response: str, letters: Sequence[str], texts: Mapping[str, str] | None = None) -> Choice:
    """The option that a response chose (see the module's docstring for the rules).

    Args:
        response: anything a model wrote.
        letters: the options' capital letters, in order.
        texts: the options' texts by letter; without them an answer in words cannot be read.
    """
    if not response.strip():
        return Choice(problem="empty")
    final = final_text(response)
    if final is None:
        return Choice(problem="unfinished")
    text = unicodedata.normalize("NFKC", final).replace("\r\n", "\n")
    if not text.strip():
        return Choice(problem="empty")
    reader = _Reader(frozenset(letters), dict(texts or {}))
    for level in (reader.tags, reader.explicit, reader.conclusions, reader.bare):
        said = level(text)
        if said:
            return _decide(said, text)
    return Choice(problem="none")


def _decide(said: Sequence[_Said], text: str) -> Choice:
    """The last statement, unless the statements together are a hedge."""
    letters = {one.choice.letter for one in said if one.choice.letter}
    last = said[-1]
    if len(letters) > 2:
        return Choice(tuple(sorted(letters)), "several")
    if len(said) > 1:
        before = said[-2]
        between = text[before.end : last.start]
        if (
            len({before.choice.letters, last.choice.letters}) == 2
            and before.choice.letter
            and not _WORD.search(between)
        ):
            return Choice(tuple(sorted({*before.choice.letters, *last.choice.letters})), "several")
    return last.choice


class _Reader:
    """The levels of evidence for one question's options."""

    def __init__(self, letters: frozenset[str], texts: Mapping[str, str]) -> None:
        self.letters = letters
        self.texts: dict[str, str] = {}
        for letter, words in texts.items():
            self.texts.setdefault(_plain(words), letter)
        self.texts.pop("", None)

    def tags(self, text: str) -> list[_Said]:
        """`<answer>` tags; one that is opened last and never closed counts only if it ends in a letter."""
        found: list[_Said] = []
        for tag in find_tags(text, "answer"):
            choice = self.content(tag.content)
            if tag.closed and choice.problem == "unknown" and (sentences := self.explicit(tag.content)):
                choice = _decide(sentences, tag.content)
            if not tag.closed and not choice.letter:
                choice = Choice(problem="unfinished")
            found.append(_Said(tag.start, tag.end, choice))
        return found

    def explicit(self, text: str) -> list[_Said]:
        """Boxes that hold a letter or an option's text, and "the answer is C" in several languages."""
        found = [
            _Said(m.start(), m.end(), choice) for m in _STRONG.finditer(text) if (choice := self._matched(m, text))
        ]
        boxes = find_boxes(text)
        for box in boxes:
            choice = (
                self.content(box.content(text)) if box.end >= 0 and box.end - box.content_start < 2000 else Choice()
            )
            if choice.letters:
                found.append(_Said(box.start, box.end, choice))
        if boxes and boxes[-1].end < 0:
            found.append(_Said(boxes[-1].start, boxes[-1].content_start, Choice(problem="unfinished")))
        found += self._in_words(text)
        return sorted(found, key=lambda one: one.end)

    def conclusions(self, text: str) -> list[_Said]:
        """Prose that chooses, without the words "the answer is"."""
        found = []
        for pattern in (_CONCLUSION, _OPTION, _IS_RIGHT):
            for match in pattern.finditer(text):
                if _DENIAL.search(_clause_before(text, match.start())) or _DENIAL.search(match.group()):
                    continue
                if pattern is not _IS_RIGHT and not _ENDS.match(text, match.end()):
                    continue
                if pattern is _OPTION and text[match.end() : match.end() + 4].lstrip(" *)]").startswith(","):
                    continue
                if choice := self._matched(match, text):
                    found.append(_Said(match.start(), match.end(), choice))
        return sorted(found, key=lambda one: one.end)

    def bare(self, text: str) -> list[_Said]:
        """Nothing but the answer, in the whole text or in its last line."""
        stripped = text.strip()
        lines = stripped[-400:].splitlines()
        for line in ([stripped] if "\n" not in stripped and len(stripped) < 2000 else []) + lines[-1:]:
            choice = self.content(line)
            spelled = _LABEL.match(_unwrap(line))
            told = ((spelled["rest"] or spelled["dash"]) if spelled else "") or ""
            alone = not told or line is stripped
            if choice.letters and (alone or choice.problem == "several"):
                return [_Said(0, len(text), choice)]
        return []

    def content(self, text: str) -> Choice:
        """What stands in a tag or box, where only an answer belongs."""
        inner = _unwrap(text)
        if not inner:
            return Choice(problem="unknown")
        if (same := self.texts.get(_plain(text))) is not None:
            return Choice((same,))
        listed = _LISTED.fullmatch(inner.rstrip(". "))
        if listed:
            named = {m.upper() for m in re.findall(r"\b[A-Za-z]\b", inner)} & self.letters
            if len(named) > 1:
                return Choice(tuple(sorted(named)), "several")
        label = _LABEL.match(inner)
        if label and label.group(1).upper() in self.letters:
            return Choice((label.group(1).upper(),))
        letter, _, words = inner.partition(" ")
        if letter in self.letters and self.texts.get(_plain(words)) is not None:
            return Choice((letter,))
        glued = inner.rstrip(".")
        if 1 < len(glued) <= len(self.letters) and glued.isupper() and set(glued) <= self.letters:
            return Choice(tuple(sorted(set(glued))), "several")
        return Choice(problem="unknown", said=text.strip())

    def _matched(self, match: re.Match[str], text: str) -> Choice | None:
        """The letter of a cue, unless it is an article, a pronoun, a variable, or one of several."""
        raw, wrapped = match["letter"], bool(re.search(r"[(\[{*`$\"'“]", match["wrap"]))
        letter = raw.upper()
        if letter not in self.letters:
            return None
        ends = _ENDS.match(text, match.end()) is not None
        lower = raw.islower()
        if raw == "a" and not wrapped and ":" not in match.group():
            return None
        if (lower or raw in "AI") and not ends and not (wrapped and _closed(text, match.end())):
            more = _GOES_ON.match(text, match.end())
            if lower or more is None:
                return None
        more = _GOES_ON.match(text, match.end())
        if more is not None and more["letter"].upper() in self.letters and self._second(more, text):
            return Choice(tuple(sorted({letter, more["letter"].upper()})), "several")
        return Choice((letter,))

    def _second(self, more: re.Match[str], text: str) -> bool:
        """Whether "C, A ..." or "A and C ..." names a second answer rather than beginning another clause."""
        if more["letter"].islower() and not more["wrap"].strip():
            return False
        if more["letter"] in "AI" or more["link"] == ",":
            return (
                re.match(rf"{_CLOSE}\s{{0,3}}(?:$|[.,;:!?\n/]|\band\b|\bor\b)", text[more.end() : more.end() + 12])
                is not None
            )
        return True

    def _in_words(self, text: str) -> list[_Said]:
        """ "The answer is Mitochondria." """
        if not self.texts:
            return []
        found = []
        for cue in re.finditer(
            rf"{_CUE}(?:\s(?:is|would\sbe|must\sbe))?[\s:*]{{1,4}}(?P<words>[^\n]{{1,300}})", text, re.IGNORECASE
        ):
            words = cue["words"]
            for said in (words, words.split(". ")[0]):
                if (letter := self.texts.get(_plain(said))) is not None:
                    found.append(_Said(cue.start(), cue.end(), Choice((letter,))))
                    break
        return found


def _clause_before(text: str, start: int) -> str:
    """The last 25 characters of the same sentence: where a denial would stand."""
    return re.split(r"[.!?;\n]", text[max(0, start - 25) : start])[-1]


def _closed(text: str, end: int) -> bool:
    return text[end : end + 1] in tuple(")]}*`$\"'”")


def _unwrap(text: str) -> str:
    return _UNWRAP.sub(" ", text[:2000]).strip()


def _plain(text: str) -> str:
    """An option's text for comparison: case, white space, markdown and a final full stop do not count."""
    return " ".join(_UNWRAP.sub(" ", unicodedata.normalize("NFKC", text[:2000])).casefold().split()).rstrip(". ")
