"""The lab: an environment and a checkpoint on which claims about learning from feedback are tested in seconds.

A recipe sets `context.template`, `context.demonstration_template` and `context.feedback_template` to the three strings
below, so that teacher prompts are in the language of the model.
"""

from sdpo_envs.lab.environment import Lab, checkpoint
from sdpo_envs.lab.language import DEMONSTRATION_TEMPLATE, FEEDBACK_TEMPLATE, TEMPLATE

__all__ = ["DEMONSTRATION_TEMPLATE", "FEEDBACK_TEMPLATE", "TEMPLATE", "Lab", "checkpoint"]
