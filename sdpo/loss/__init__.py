"""The mathematics of a step, as pure functions on tensors: no model, no configuration, no state.

    distillation_loss              pull the policy towards its self-teacher        (2601.20802, Eq. 1, App. A.3)
    policy_gradient_loss           GRPO and its relatives, GSPO's ratio            (2402.03300, 2503.14476, 2507.18071)
    anchored_advantages            the teacher only re-weights the verifier        (2604.03128)
    route, entropy_weights         which rollout gets which signal                 (2604.02288)
    aggregation_weights / _count   token losses to one number, whatever the micro-batches
    truncated_importance_weights   correction for a sampler that is not the trainer
    token_logprobs, token_entropy  what the step reads off logits

Both losses return `loss`, `per_token`, `metrics` (means) and `totals` (sums and counts, to be added up over
micro-batches). Tokens outside the mask do not count, whatever they hold, NaN included. Float32 is the least precision
that anything is computed in.

Not here: losses that never hold [B, T, V] logits, teachers, group baselines (sdpo.advantage).
"""

from __future__ import annotations

from sdpo.loss.aggregate import Aggregation, aggregation_count, aggregation_weights
from sdpo.loss.anchored import anchored_advantages
from sdpo.loss.distillation import DistillationLoss, distillation_loss
from sdpo.loss.divergence import Divergence, token_divergence
from sdpo.loss.importance import truncated_importance_weights
from sdpo.loss.logprobs import LOGPROB_FLOOR, token_entropy, token_logprobs
from sdpo.loss.policy_gradient import PolicyGradientLoss, policy_gradient_loss
from sdpo.loss.routing import entropy_weights, route

__all__ = [
    "LOGPROB_FLOOR",
    "Aggregation",
    "DistillationLoss",
    "Divergence",
    "PolicyGradientLoss",
    "aggregation_count",
    "aggregation_weights",
    "anchored_advantages",
    "distillation_loss",
    "entropy_weights",
    "policy_gradient_loss",
    "route",
    "token_divergence",
    "token_entropy",
    "token_logprobs",
    "truncated_importance_weights",
]
