"""What a step must do at least: bytes it has to read, and arithmetic. A benchmark compares it with the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from noria.models.config import DecoderConfig
from noria.models.decoder import DecoderWeights
from noria.scheduler.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Work:
    """bytes_read: weights and cache, each once per program or row; flops: multiplications and additions."""

    bytes_read: float = 0.0
    flops: float = 0.0
    steps: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes_read + other.bytes_read, self.flops + other.flops, self.steps + other.steps)


class WorkModel:
    """Counts for one model and the way its weights and cache are stored.

    Reads: every weight of the layers once per forward pass, of experts those that are chosen when each token chooses
    at random; the head once per pass of the sampler, the keys and values
    that a row sees once per row. Arithmetic: 2 operations per matrix parameter and token, 2 per parameter of the head
    and row that samples, and attention's 4 per head, element and pair of query and visible key. Norms, rotations,
    activations, sampling and padding count nothing.
    """

    def __init__(
        self, model: DecoderConfig, weights: DecoderWeights, cache_token_bytes: float, attention_ranks: int = 1
    ) -> None:
        """model, weights (arrays or shapes): what one device has. cache_token_bytes: of one token in one layer.
        attention_ranks: that divide requests for attention evenly, and compute everything else for those of all."""
        self._model = model
        self._cache_token_bytes = cache_token_bytes
        self._attention_ranks = attention_ranks
        self._layer_bytes = _bytes((weights.norms, weights.matrices, weights.mla, weights.final_norm))
        self._expert_bytes = 0
        if weights.experts is not None:
            self._expert_bytes = _bytes(weights.experts.matrices)
            self._layer_bytes += _bytes(weights.experts) - self._expert_bytes
        self._head_bytes = _bytes(weights.embedding if weights.head is None else weights.head)
        parameters = model.num_layers * _attention_parameters(model) / attention_ranks
        parameters += model.num_dense_layers * 3 * model.hidden_size * model.intermediate_size
        self._missed = 0.0  # share of the experts that a token does not choose
        if (moe := model.moe) is not None:
            routing, layers = moe.routing, model.num_layers - model.num_dense_layers
            self._missed = 1 - routing.chosen / routing.experts
            here = routing.chosen * moe.experts / routing.experts  # on average, of the experts of this device
            inner = here * moe.size + moe.shared_size
            parameters += layers * model.hidden_size * (routing.experts + 3 * inner)
        self._matrix_parameters = parameters  # that a token is multiplied with
        values = model.head_dim if model.mla is None else model.mla.latent
        self._pair_flops = 2.0 * model.num_heads * (model.head_dim + values)
        self._windows: Mapping[int | None, int] = {w: model.windows.count(w) for w in model.windows}

    def forward(self, rows: Iterable[tuple[int, int]]) -> Work:
        """rows: (tokens in the cache before, tokens computed) of each request in the step, on all attention ranks."""
        tokens = keys = pairs = 0
        for computed, count in rows:
            tokens += count
            for window, layers in self._windows.items():
                keys += layers * _keys(computed, count, window)
                pairs += layers * _pairs(computed, count, window)
        return Work(
            bytes_read=self._layer_bytes
            + self._expert_bytes * (1 - self._missed**tokens)
            + keys * self._cache_token_bytes / self._attention_ranks,
            flops=2.0 * self._matrix_parameters * tokens + self._pair_flops * pairs / self._attention_ranks,
            steps=1,
        )

    def sample(self, num_rows: int) -> Work:
        """num_rows: that sample a token, on all attention ranks."""
        if not num_rows:
            return Work()
        return Work(self._head_bytes, 2.0 * self._model.hidden_size * self._model.vocab_size * num_rows)

    def total(self, schedules: Iterable[Schedule]) -> Work:
        """Of steps in the order in which they ran, from one in which every request was new."""
        total, lengths = Work(), dict[str, int]()
        for schedule in schedules:
            computed = {new.request_id: new.num_computed_tokens for new in schedule.new_requests}
            lengths |= {new.request_id: len(new.token_ids) for new in schedule.new_requests}
            for cached in schedule.cached_requests:
                computed[cached.request_id] = cached.num_computed_tokens
                if cached.token_ids is not None:
                    lengths[cached.request_id] = len(cached.token_ids)
            scheduled = schedule.num_scheduled_tokens
            if schedule.is_burst:
                total += self.burst((computed[request_id], count) for request_id, count in scheduled.items())
                continue
            # A row samples when all of its prompt is computed.
            ends = [computed[request_id] + count >= lengths[request_id] for request_id, count in scheduled.items()]
            rows = [(computed[request_id], count) for request_id, count in scheduled.items()]
            num_drafts = sum(map(len, schedule.draft_token_ids.values()))  # each is a row of the head, too
            total += self.forward(rows) + self.sample(sum(ends) + num_drafts)
        return total

    def burst(self, rows: Iterable[tuple[int, int]]) -> Work:
        """rows: (tokens in the cache before, tokens computed one after the other) of each request that decodes."""
        total, rows = Work(), list(rows)
        for step in range(max((count for _, count in rows), default=0)):
            alive = [(computed + step, 1) for computed, count in rows if step < count]
            total += self.forward(alive) + self.sample(len(alive))
        return total


def _attention_parameters(model: DecoderConfig) -> int:
    """Of a layer's matrices. Those of a latent vector's projections are as many when they are absorbed."""
    if (mla := model.mla) is None:
        return 2 * model.hidden_size * (model.num_heads + model.num_kv_heads) * model.head_dim
    queries = model.num_heads * (mla.plain + mla.rotated)
    rank, hidden = mla.query_rank, model.hidden_size
    made = hidden * queries if rank is None else rank * (hidden + queries)
    absorbed = model.num_heads * (mla.plain + mla.value) * mla.latent
    return made + hidden * (mla.latent + mla.rotated) + absorbed + model.num_heads * mla.value * hidden


def _bytes(weights: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))


def _keys(computed: int, count: int, window: int | None) -> int:
    """How many keys the tokens computed + 1 to computed + count see together."""
    end = computed + count
    return end if window is None else min(end, window - 1 + count)


def _pairs(computed: int, count: int, window: int | None) -> int:
    """Pairs of such a token and a key it sees: itself and those before it, at most `window`."""
    end = computed + count
    below = lambda n: n * (n + 1) // 2  # 1 + 2 + ... + n
    if window is None:
        return below(end) - below(computed)
    growing = below(min(end, window)) - below(min(computed, window))
    return growing + window * (max(end, window) - max(computed, window))
