"""Which experts a token gets, and with which shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from noria.ops.experts.types import Choice
from noria.ops.sums import row_max, row_sums


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The router of a mixture of experts (Shazeer et al. 2017): the experts with the largest scores.

    scoring: what makes scores of the router's logits; softmax is over all experts. renormalize: the shares of the
    chosen are made to sum to one. scale: multiplies all shares.
    groups: experts in a row form so many groups, of which only the best `chosen_groups` are chosen from (DeepSeek-V2,
    section 2.1.3). A group is as good as its best expert, or as the sum of its best two (DeepSeek-V3).
    """

    experts: int
    chosen: int
    renormalize: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["best", "best two"] = "best"

    def __call__(self, logits: jax.Array, correction: jax.Array | None = None) -> Choice:
        """logits: float32 [T, experts]. correction: [experts], added to the scores for the choice, not for the shares
        (DeepSeek-V3, section 2.1.2)."""
        if self.scoring == "sigmoid":
            scores = jax.nn.sigmoid(logits)
        else:
            scores = jnp.exp(logits - row_max(logits))
            if not self.renormalize or correction is not None:
                scores = scores / row_sums(scores)
        # What is compared and picked from must not be computed twice, in fusions that may round differently.
        scores = lax.optimization_barrier(scores)
        wanted = scores if correction is None else scores + correction.astype(jnp.float32)
        if self.chosen_groups < self.groups:
            wanted = jnp.where(self._in_best_groups(wanted), wanted, -jnp.inf)
        _, ids = lax.top_k(wanted, self.chosen)
        shares = jnp.take_along_axis(scores, ids, axis=1)
        if self.renormalize:
            shares = shares / (_sum_in_order(shares) + (1e-20 if self.scoring == "sigmoid" else 0))
        return Choice(ids, shares * self.scale)

    def _in_best_groups(self, scores: jax.Array) -> jax.Array:
        """[T, experts] -> bool, the same shape."""
        by_group = scores.reshape(len(scores), self.groups, -1)
        best, _ = lax.top_k(by_group, 1 if self.group_score == "best" else 2)
        _, groups = lax.top_k(_sum_in_order(best)[..., 0], self.chosen_groups)
        is_best = jnp.any(groups[:, :, None] == jnp.arange(self.groups), axis=1)  # [T, groups]
        return jnp.repeat(is_best, self.experts // self.groups, axis=1)


def _sum_in_order(x: jax.Array) -> jax.Array:
    """Over the last axis, as a column; of few values, in their order."""
    total = x[..., :1]
    for index in range(1, x.shape[-1]):
        total = total + x[..., index : index + 1]
    return total
