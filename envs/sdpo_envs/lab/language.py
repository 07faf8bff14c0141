"""The lab's language: 54 words, ten hidden functions on digit triples, and the templates that join them.

    question      ba 4 2 9
    solution      ba 4 2 9 S 5 7 0
    feedback      ba 4 2 9 T 5 3 0 E p2 7              an attempt, and the digit wanted at its first wrong position
    both          ba 4 2 9 S 5 7 0 T 5 3 0 E p2 7
    answer        ... A 5 7 0 <eos>

Everything here is a constant of the shipped checkpoint: after a change, pretrain anew (`recipes/lab/pretrain.py`). Not
covered: reasoning, text of free length, system messages. A model of this size has no use for them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

__all__ = [
    "CHAT_TEMPLATE",
    "DEMONSTRATION_TEMPLATE",
    "EOS",
    "FEEDBACK_TEMPLATE",
    "FUNCTIONS",
    "NAMES",
    "NOTHING",
    "PAD",
    "POSITIONS",
    "RARE",
    "SKILLS",
    "TEMPLATE",
    "UNK",
    "WORDS",
    "Binding",
    "Function",
]

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
DIGITS = tuple("0123456789")
POSITIONS = ("p1", "p2", "p3", "p4")
NOTHING: Final = "_"
"""In feedback: no digit stands here (in an attempt), or none is wanted here (a fourth word)."""
ANSWER, SOLUTION, ATTEMPT, ERROR = "A", "S", "T", "E"

TEMPLATE = "{question}{demonstration}{feedback}"
"""`context.template` of every recipe on the lab; the next two are its sections."""
DEMONSTRATION_TEMPLATE = f" {SOLUTION} {{demonstration}}"
FEEDBACK_TEMPLATE = f" {ATTEMPT} {{feedback}}"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ message['content'] }}"
    f"{{% elif message['role'] == 'assistant' %}} {ANSWER} {{{{ message['content'] }}}} {EOS} "
    "{% else %}{{ raise_exception('the lab model knows the roles user and assistant, not ' ~ message['role']) }}"
    "{% endif %}{% endfor %}"
    f"{{% if add_generation_prompt %}} {ANSWER}{{% endif %}}"
)


@dataclass(frozen=True, slots=True)
class Function:
    """`y[i] = (sign * x[order[i]] + shift) mod 10` on digit triples."""

    order: tuple[int, int, int]
    sign: int
    shift: int

    def __call__(self, digits: tuple[int, ...]) -> tuple[int, ...]:
        return tuple((self.sign * digits[i] + self.shift) % 10 for i in self.order)


FUNCTIONS = (
    Function((0, 2, 1), 1, 0),  # last two swapped
    Function((0, 1, 2), 1, 1),  # plus one
    Function((0, 1, 2), 1, 2),  # plus two
    Function((0, 1, 2), 1, 4),  # plus four
    Function((0, 1, 2), 1, 6),  # plus six
    Function((1, 2, 0), 1, 0),  # rotated to the left
    Function((1, 0, 2), 1, 3),  # first two swapped, plus three
    Function((0, 1, 2), -1, 9),  # nine minus
    Function((0, 2, 1), 1, 3),  # last two swapped, plus three
    Function((0, 2, 1), 1, 7),  # last two swapped, plus seven
)
RARE = (8, 9)
"""Functions that the pretraining shows in contexts, and almost never without one."""

SKILLS = 3
_EASY, _HARD = 24, 8
_PRIORS = (0.1, 0.2, 0.4)
_BINDING_SEED = 7


@dataclass(frozen=True, slots=True)
class Binding:
    """What a name means.

    Attributes:
        function: position in FUNCTIONS.
        hard: bound to a rare function, so that the untrained policy almost never answers right.
        prior: the share of plain pretraining questions with this name that showed its own function; 0 for a hard name,
            which no function is tied to there.
        skill: 0, 1 or 2: a third of the names, easy and hard ones.
    """

    function: int
    hard: bool
    prior: float
    skill: int


def _bindings() -> dict[str, Binding]:
    names = [consonant + vowel for consonant in "bdgklmnr" for vowel in "aeio"]
    shuffled = random.Random(_BINDING_SEED).sample(names, len(names))
    common = len(FUNCTIONS) - len(RARE)
    bound = {
        name: Binding(function=i % common, hard=False, prior=_PRIORS[i // common], skill=i % SKILLS)
        for i, name in enumerate(shuffled[:_EASY])
    }
    for i, name in enumerate(shuffled[_EASY : _EASY + _HARD]):
        bound[name] = Binding(function=RARE[i % len(RARE)], hard=True, prior=0.0, skill=i % SKILLS)
    return {name: bound[name] for name in names}


NAMES = _bindings()
"""32 names: 24 easy ones (each common function three times, with prior 0.1, 0.2 and 0.4) and 8 hard ones."""

WORDS = (PAD, EOS, UNK, *DIGITS, *POSITIONS, NOTHING, ANSWER, SOLUTION, ATTEMPT, ERROR, *NAMES)
"""The vocabulary, in the order of token ids. Only the first three are special tokens."""
