"""A draft head beside the model: its weights, its layer of cache, and its programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noria.batch.buckets import Buckets, pick
from noria.batch.inputs import BatchShape
from noria.batch.pack import DraftInputs, StepInputs, pack_drafts
from noria.batch.persistent import PersistentBatch
from noria.cache.layout import BlockIds, CacheLayout
from noria.config import ResolvedConfig
from noria.errors import ConfigError
from noria.models.eagle3 import Eagle3Head
from noria.observe.step_clock import StepClock
from noria.ops import native
from noria.ops.ragged_paged_attention.api import FULL_ATTENTION, KVCache
from noria.ops.ragged_paged_attention.tpu_lines import Lines
from noria.runner.backends import choose_ops
from noria.runner.capture import Programs
from noria.runner.pack_weights import MatrixForm
from noria.runner.weights import WeightPlace
from noria.step.draft_head import HeadPrograms, HeadState
from noria.step.programs import StepPrograms
from noria.weights.base import Checkpoint

Jobs = dict[Hashable, Callable[[], Any]]


class HeadRunner:
    """Call, in this order: load or describe, initialize, jobs; then follow with every step, and draft."""

    def __init__(
        self,
        head: Eagle3Head,
        config: ResolvedConfig,
        target: WeightPlace,
        layout: CacheLayout,
        cache_dtype: str,
        programs: Programs,
        clock: StepClock,
    ) -> None:
        """target, layout: of the model's weights, on one device, and its cache. programs, clock: its runner's."""
        assert config.speculation is not None
        self.head = head
        self._config = config
        self._placement, dtype = target.placement, target.dtype
        self._layout = layout
        self._cache_dtype = cache_dtype
        self._programs = programs
        self._clock = clock
        # The tables of layers that see everything, if there are any; otherwise the head sees as far as they reach.
        windows = [spec.window for spec in layout.groups]
        widest = max(range(len(windows)), key=lambda group: windows[group] or 0)
        self._group = windows.index(None) if None in windows else widest
        self._window = windows[self._group] or FULL_ATTENTION
        layer = dataclasses.replace(head.config.layer, windows=(windows[self._group],))
        self._ops = choose_ops(config, layer, dtype, cache_dtype, self._placement.devices[0].platform)
        matrices = MatrixForm(self._ops.linear.packed, config.speculation.quantization)
        self._place = WeightPlace(matrices, dtype, self._placement)
        self._max_drafts = config.speculation.num_speculative_tokens
        self.weights: Any = None
        self.state: HeadState | None = None
        self._follow: Any = None
        self._draft: Any = None
        self._shape: BatchShape | None = None

    def load(self, checkpoint: Checkpoint | None, progress: Callable[[int, int], None] | None = None) -> None:
        """From a checkpoint, or, when there is none, random weights. Raises WeightsError, or ConfigError when the head
        drafts tokens that the model does not have."""
        self.weights = self._place.load(self.head.declaration(), checkpoint, self._config.seed or 0, progress)
        if (offsets := self.weights.offsets) is None:
            return
        tokens = np.arange(len(offsets)) + np.asarray(offsets)
        vocab = self.head.config.layer.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocab or len(np.unique(tokens)) < len(tokens):
            raise ConfigError(f"its tensor d2t does not name different tokens of the model's {vocab}; fetch it again")

    def describe(self, checkpoint: Checkpoint | None) -> None:
        """In place of load where only the programs are wanted."""
        self.weights = self._place.describe(self.head.declaration(), checkpoint)

    @property
    def weight_bytes(self) -> int:
        """Loaded or not."""
        shapes = self._place.plain_shapes(self.head.declaration()) if self.weights is None else self.weights
        return self._placement.bytes_on_one(shapes)

    @property
    def block_bytes(self) -> int:
        """What a block of the pool takes more than without a head."""
        c, size = self.head.config.layer, self._config.block_size
        if self._ops.cache_in_lines:
            return self._lines.bytes_per_block(size)
        return KVCache.bytes_per_block(size, c.num_kv_heads, c.head_dim, self._cache_dtype)

    @property
    def _lines(self) -> Lines:
        """How the cache lies where the attention wants it in lines."""
        c = self.head.config.layer
        return Lines(c.num_kv_heads, c.head_dim, self._cache_dtype)

    def activation_bytes(self, buckets: Buckets) -> int:
        """An upper estimate of what a step holds at a time: the states of the model, the head's layer, its logits."""
        c, item = self.head.config.layer, jnp.dtype(self._place.dtype).itemsize
        states = 2 * (len(self.head.config.states) + 1) * c.hidden_size * item
        heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        layer = 4 * (6 * c.hidden_size + 3 * c.intermediate_size) + 2 * item * heads
        logits = 4 * (self.head.config.draft_vocab_size + 12 * c.vocab_size)
        return buckets.tokens[-1] * (states + layer) + buckets.requests[-1] * logits

    def initialize(self, steps: StepPrograms, num_blocks: int, *, allocate: bool) -> HeadPrograms:
        """num_blocks: of the model's pool. allocate: false where only the programs are wanted. -> the programs."""
        c, self._shape = self.head.config.layer, steps.shape
        device = self._placement.devices[0]
        on_cpu = device.platform == "cpu"
        sizes = (num_blocks, self._config.block_size)
        if self._ops.cache_in_lines:
            spec = self._lines.abstract(*sizes, 1)
        else:
            spec = KVCache.abstract(*sizes, c.num_kv_heads, c.head_dim, self._cache_dtype, as_bits=on_cpu)
        cache = self._placement.cache(spec)
        hidden = jax.ShapeDtypeStruct((steps.shape.num_rows, c.hidden_size), self._place.dtype)
        state = HeadState(cache, self._placement.host(hidden))
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        if allocate:
            zeros = lambda shapes: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
            with jax.default_device(device):
                make = native.uninitialized if on_cpu and native.available() else zeros
                state = HeadState(make(cache), zeros(state.hidden))
        self.state = state
        programs = HeadPrograms(self.head, steps, self._ops, self._group, self._window, self._max_drafts)
        shardings = (places, self._placement.replicated)
        self._follow = jax.jit(programs.follow, donate_argnums=2, out_shardings=shardings)
        self._draft = jax.jit(programs.draft, donate_argnums=2, out_shardings=shardings)
        return programs

    def jobs(self, embedding: Any, made_up: Iterable[StepInputs], batch: PersistentBatch, buckets: Buckets) -> Jobs:
        """What warm-up compiles for these steps. embedding: the model's."""
        jobs: Jobs = {}
        for inputs in made_up:
            if not inputs.is_burst:
                jobs["follow", inputs.num_tokens] = self._follow_job(embedding, inputs)
        for size in buckets.requests:
            jobs["draft", size] = self._draft_job(embedding, pack_drafts({}, batch, size))
        return jobs

    def follow(self, embedding: Any, states: jax.Array, sampled: jax.Array, inputs: StepInputs) -> None:
        """Dispatches HeadPrograms.follow behind the sampler of a step. sampled: [L]."""
        key, job = ("follow", inputs.num_tokens), self._follow_job(embedding, inputs)
        self._clock.dispatching()
        arguments = (embedding, self.weights, self.state, states, sampled, inputs.forward, inputs.head)
        self.state, ended = self._programs.call(key, job, *arguments)
        self._clock.dispatched(ended)

    def draft(
        self, embedding: Any, wanted: dict[str, tuple[int, BlockIds]], batch: PersistentBatch, buckets: Buckets
    ) -> dict[str, list[int]]:
        """Drafts for requests whose tokens are all known; waits for them.

        wanted: how many, and blocks that the request got for them.
        """
        for request_id, (_, block_ids) in wanted.items():
            batch.extend(request_id, block_ids)
        counts = {request_id: count for request_id, (count, _) in wanted.items()}
        num_rows = pick(buckets.requests, len(counts))
        inputs = pack_drafts(counts, batch, num_rows)
        self._clock.dispatching()
        key, job = ("draft", num_rows), self._draft_job(embedding, inputs)
        arguments = (embedding, self.weights, self.state, inputs.forward, inputs.sample, inputs.state_rows)
        self.state, tokens = self._programs.call(key, job, *arguments)
        self._clock.dispatched(tokens)
        tokens.copy_to_host_async()
        self._clock.waiting()
        rows = np.asarray(tokens).T.tolist()
        self._clock.waited(tokens)
        return {request_id: row[:count] for (request_id, count), row in zip(counts.items(), rows)}

    def close(self) -> None:
        """Gives the device's memory back."""
        self.weights = self.state = self._follow = self._draft = None

    def _follow_job(self, embedding: Any, inputs: StepInputs) -> Callable[[], Any]:
        c, shape = self.head.config, self._shape
        assert shape is not None
        size = (inputs.num_tokens, len(c.states), c.layer.hidden_size)
        states = jax.ShapeDtypeStruct(size, self._place.dtype)
        sampled = jax.ShapeDtypeStruct((shape.num_logit_rows,), jnp.int32)
        packed = self._placement.host((states, sampled, inputs.forward, inputs.head))
        return lambda: self._follow.lower(embedding, self.weights, self.state, *packed)

    def _draft_job(self, embedding: Any, inputs: DraftInputs) -> Callable[[], Any]:
        packed = self._placement.host((inputs.forward, inputs.sample, inputs.state_rows))
        return lambda: self._draft.lower(embedding, self.weights, self.state, *packed)
