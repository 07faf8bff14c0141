"""Science questions answered by one letter: an environment whose feedback a model of 135 million parameters can use.

SmolLM2-135M is at chance on these questions, but it also does not do as told: asked for one letter it writes "A: 9 kg" or
a sentence. What is graded, and what the feedback is about, is that form. Whether the letter is the right one is a metric.
The feedback shows the form, with the letter that the attempt named, twice. These words were chosen by measuring: shown
them, the model gives a single letter in 55 % of the cases against 3 % without; once brought 29 %, an explanation 7 to 17 %.
"""

from __future__ import annotations

from sdpo import Grade, Message, Task
from sdpo_envs.multiple_choice import Question, listed
from sdpo_envs.science import Science

SYSTEM = "Answer the multiple-choice question with the letter of the right option and nothing else: {letters}."


class OneLetter(Science):
    """SciKnowEval, answered by one letter; success is the form, the metric `correct` the choice.

    Takes the arguments of `sdpo_envs.science.Science`; `path` names local files where the hub is out of reach.
    """

    feedback_reveals_target = True  # the letter in the feedback is the attempt's own, and so is sometimes the right one

    def prompt(self, question: Question) -> tuple[Message, ...]:
        letters = ", ".join(question.letters[:-1]) + " or " + question.letters[-1]
        return (
            Message(role="system", content=SYSTEM.format(letters=letters)),
            Message(role="user", content=f"{question.text}\n\n{listed(question)}"),
        )

    def grade(self, task: Task, completion: str) -> Grade:
        reply = completion.strip()
        letters = "ABCD"
        formed = len(reply) == 1 and reply in letters
        correct = formed and reply in task.target
        meant = next((c for c in reply if c in letters), "A")
        return Grade(
            reward=float(formed),
            feedback="" if formed else f"Answer: {meant}\nAnswer: {meant}",
            metrics={"format": float(formed), "correct": float(correct)},
        )
