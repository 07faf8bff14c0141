"""Algorithms: one small module each. Picking the name is the algorithm.

    sdpo                 self-distillation, the setting without rich feedback (2601.20802, Sec. 3)
    sdpo_rich_feedback   the setting with rich feedback (Sec. 4)
    grpo                 the paper's baseline; grpo_on_policy, dr_grpo and dapo are its named variants
    sdpo_grpo            a convex mix of both advantages, for small models (Sec. 4)
    sample_routing       successes to GRPO, failures with a teacher to SDPO (2604.02288)
    verifier_anchored    the teacher only re-weights GRPO's advantage (2604.03128)

A new algorithm is a module with a subclass of `Algorithm` and its preset, named here.
"""

from __future__ import annotations

from sdpo.algorithms.base import Algorithm, Objective, Signals
from sdpo.algorithms.grpo import DAPO, DRGRPO, GRPO, GRPOOnPolicy
from sdpo.algorithms.mix import SDPOGRPO
from sdpo.algorithms.sample_routing import SampleRouting
from sdpo.algorithms.sdpo import SDPO, SDPORichFeedback
from sdpo.algorithms.verifier_anchored import VerifierAnchored

__all__ = ["ALGORITHMS", "Algorithm", "Objective", "Signals", "get_algorithm"]

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        SDPO(),
        SDPORichFeedback(),
        GRPO(),
        GRPOOnPolicy(),
        DRGRPO(),
        DAPO(),
        SDPOGRPO(),
        SampleRouting(),
        VerifierAnchored(),
    )
}


def get_algorithm(name: str) -> Algorithm:
    """The algorithm of that name; `KeyError` for an unknown one (the configuration refuses it before)."""
    return ALGORITHMS[name]
