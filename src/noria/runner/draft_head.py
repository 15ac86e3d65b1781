"""A draft head beside the model: its weights, its layer of cache, and its programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noria.batch.buckets import Buckets
from noria.batch.inputs import BatchShape
from noria.batch.pack import DraftInputs, StepInputs, pack_drafts
from noria.batch.persistent import PersistentBatch
from noria.cache.layout import BlockIds, CacheLayout
from noria.config import ResolvedConfig
from noria.errors import ConfigError
from noria.models.config import DecoderConfig
from noria.models.eagle3 import Eagle3Head
from noria.observe.step_clock import StepClock
from noria.ops import native
from noria.ops.ragged_paged_attention.api import FULL_ATTENTION, KVCache
from noria.ops.ragged_paged_attention.tpu_lines import Lines
from noria.parallel.mesh import regroup
from noria.parallel.ops import on_mesh
from noria.parallel.placement import Placement
from noria.parallel.rules import num_shards, on_one_device, shape_for_drafts, with_kv_copies
from noria.runner.backends import choose_ops
from noria.runner.capture import Programs, lowering
from noria.runner.pack_weights import MatrixForm
from noria.runner.stored import digest_of
from noria.runner.weights import WeightPlace
from noria.step.draft_head import HeadPrograms, HeadState
from noria.step.programs import StepPrograms
from noria.weights.base import Checkpoint

Jobs = dict[Hashable, Callable[[], Any]]


class HeadRunner:
    """Call, in this order: load or describe, initialize, jobs; then follow with every step, and draft.

    The head is split over the devices of the model as `shape_for_drafts` says; the model's embedding and hidden states
    come as they lie there.
    """

    def __init__(
        self,
        head: Eagle3Head,
        config: ResolvedConfig,
        target: Placement,
        dtype: str,
        layout: CacheLayout,
        cache_dtype: str,
        programs: Programs,
        clock: StepClock,
    ) -> None:
        """target, dtype, layout: of the model, its weights, and its cache. programs, clock: its runner's."""
        assert config.speculation is not None
        self._config = config
        self._target = target
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
        mesh = regroup(target.mesh, shape_for_drafts(layer, target.mesh))
        self.mesh = mesh
        self._placement = Placement(mesh, layer)
        self._checkpoint_head = head  # KV heads as the checkpoint has them
        self.head = Eagle3Head(dataclasses.replace(head.config, layer=with_kv_copies(layer, mesh)))
        platform = self._placement.devices[0].platform
        ops = choose_ops(config, self._layer_on_one, dtype, cache_dtype, platform, mesh.size)
        self._ops = on_mesh(ops, self._placement)
        self._place = WeightPlace(
            MatrixForm(ops.linear.packed, config.speculation.quantization), dtype, self._placement
        )
        self._max_drafts = config.speculation.num_speculative_tokens
        self.weights: Any = None
        self.state: HeadState | None = None
        self._follow: Any = None
        self._draft: Any = None
        self._shape: BatchShape | None = None

    def load(self, checkpoint: Checkpoint | None, progress: Callable[[int, int], None] | None = None) -> None:
        """From a checkpoint, or, when there is none, random weights. Raises WeightsError, or ConfigError when the head
        drafts tokens that the model does not have."""
        declaration = self._checkpoint_head.declaration()
        self.weights = self._place.load(declaration, checkpoint, self._config.seed or 0, progress)
        if (offsets := self.weights.offsets) is None:
            return
        tokens = np.arange(len(offsets)) + np.asarray(offsets)
        vocab = self.head.config.layer.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocab or len(np.unique(tokens)) < len(tokens):
            raise ConfigError(f"its tensor d2t does not name different tokens of the model's {vocab}; fetch it again")

    def describe(self, checkpoint: Checkpoint | None) -> None:
        """In place of load where only the programs are wanted."""
        self.weights = self._place.describe(self._checkpoint_head.declaration(), checkpoint)

    @property
    def digest(self) -> str:
        """Of the checkpoint's config."""
        return digest_of(self._checkpoint_head.config)

    @property
    def _layer_on_one(self) -> DecoderConfig:
        """What one device has of the layer."""
        return on_one_device(self.head.config.layer, self._placement.mesh)

    @property
    def weight_bytes(self) -> int:
        """On one device, loaded or not."""
        shapes = self.weights
        if shapes is None:
            shapes = self._place.plain_shapes(self._checkpoint_head.declaration())
        return self._placement.bytes_on_one(shapes)

    @property
    def block_bytes(self) -> int:
        """What a block of the pool takes more on one device than without a head."""
        c, size = self._layer_on_one, self._config.block_size
        if self._ops.cache_in_lines:
            return self._lines.bytes_per_block(size)
        return KVCache.bytes_per_block(size, c.num_kv_heads, c.head_dim, self._cache_dtype)

    @property
    def _lines(self) -> Lines:
        """How the cache lies where the attention wants it in lines."""
        c = self._layer_on_one
        return Lines(c.num_kv_heads, c.head_dim, self._cache_dtype)

    def activation_bytes(self, buckets: Buckets) -> int:
        """An upper estimate of what a step holds on one device at a time: the states of the model, the head's layer,
        its logits."""
        c, item = self._layer_on_one, jnp.dtype(self._place.dtype).itemsize
        states = 2 * (len(self.head.config.states) + 1) * c.hidden_size * item
        states *= self._config.attention_data_parallel_size  # ranks that have the states of each other
        heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        layer = 4 * (6 * c.hidden_size + 3 * c.intermediate_size) + 2 * item * heads
        logits = 4 * (self.head.config.draft_vocab_size + 12 * c.vocab_size)
        return buckets.tokens[-1] * (states + layer) + buckets.requests[-1] * logits

    @property
    def places(self) -> HeadState:
        """Shardings of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    def initialize(self, steps: StepPrograms, num_blocks: int, *, allocate: bool) -> HeadPrograms:
        """num_blocks: of the model's pool, of a rank. allocate: false where only the programs are wanted. -> the
        programs."""
        c, self._shape = self.head.config.layer, steps.shape
        placement, ranks = self._placement, steps.shape.num_ranks
        on_cpu = placement.devices[0].platform == "cpu"
        sizes = (ranks * num_blocks, self._config.block_size)
        if self._ops.cache_in_lines:
            spec = self._lines.abstract(*sizes, num_shards("kv_heads", placement.mesh))
        else:
            spec = KVCache.abstract(*sizes, c.num_kv_heads, c.head_dim, self._cache_dtype, as_bits=on_cpu)
        by_rank = placement.split(("ranks", ranks))
        hidden = jax.ShapeDtypeStruct((ranks, steps.shape.num_rows, c.hidden_size), self._place.dtype, sharding=by_rank)
        self.state = HeadState(placement.cache(spec), hidden)  # pyright: ignore[reportArgumentType]
        shardings = (self.places, placement.replicated)
        if allocate:
            zeros = lambda shapes: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
            is_native = on_cpu and native.available() and not placement.is_parallel
            with jax.default_device(placement.local_devices[0]):
                make = native.uninitialized if is_native else zeros
                self.state = HeadState(make(self.state.cache), zeros(hidden))
        programs = HeadPrograms(self.head, steps, self._ops, self._group, self._window, self._max_drafts)
        self._follow = lowering(programs.follow, donate_argnums=2, out_shardings=shardings)
        self._draft = lowering(programs.draft, donate_argnums=2, out_shardings=shardings)
        return programs

    def jobs(self, embedding: Any, made_up: Iterable[StepInputs], batch: PersistentBatch, buckets: Buckets) -> Jobs:
        """What warm-up compiles for these steps. embedding: the model's."""
        jobs: Jobs = {}
        for inputs in made_up:
            if not inputs.is_burst:
                jobs["follow", inputs.num_tokens] = self._follow_job(embedding, inputs)
        for size in buckets.requests:
            inputs = pack_drafts({}, batch, (size,))
            jobs["draft", inputs.num_rows] = self._draft_job(embedding, inputs)
        return jobs

    def decode_arguments(self, inputs: StepInputs) -> tuple[Any, ...]:
        """What DecodeProgram.decode is lowered with on top."""
        return self.state, self.weights, self._placement.by_rank(inputs.head)

    def follow(self, embedding: Any, states: jax.Array, sampled: jax.Array, inputs: StepInputs) -> None:
        """Dispatches HeadPrograms.follow behind the sampler of a step. sampled: [L]."""
        key, job = ("follow", inputs.num_tokens), self._follow_job(embedding, inputs)
        self._clock.dispatching()
        arguments = (embedding, self.weights, self.state, states, sampled, inputs.forward, inputs.head)
        self.state, ended = self._programs.call(key, job, *arguments)
        self._clock.dispatched(ended)

    def draft(
        self, embedding: Any, wanted: Mapping[str, tuple[int, BlockIds]], batch: PersistentBatch, buckets: Buckets
    ) -> dict[str, list[int]]:
        """Drafts for requests whose tokens are all known; waits for them.

        wanted: how many, and blocks that the request got for them.
        """
        for request_id, (_, block_ids) in wanted.items():
            batch.extend(request_id, block_ids)
        counts = {request_id: count for request_id, (count, _) in wanted.items()}
        inputs = pack_drafts(counts, batch, buckets.requests)
        self._clock.dispatching()
        key, job = ("draft", inputs.num_rows), self._draft_job(embedding, inputs)
        arguments = (embedding, self.weights, self.state, inputs.forward, inputs.sample, inputs.state_rows)
        self.state, tokens = self._programs.call(key, job, *arguments)
        self._clock.dispatched(tokens)
        tokens.copy_to_host_async()
        self._clock.waiting()
        rows = np.asarray(tokens).T.tolist()
        self._clock.waited(tokens)
        return {request_id: rows[inputs.places[request_id]][:count] for request_id, count in counts.items()}

    def close(self) -> None:
        """Gives the device's memory back."""
        self.weights = self.state = self._follow = self._draft = None

    def _follow_job(self, embedding: Any, inputs: StepInputs) -> Callable[[], Any]:
        c, shape, placement = self.head.config, self._shape, self._placement
        assert shape is not None
        states = self._target.by_token((inputs.num_tokens, len(c.states), c.layer.hidden_size), self._place.dtype)
        sampled = self._target.host(jax.ShapeDtypeStruct((shape.all_logit_rows,), jnp.int32))
        packed = placement.by_rank(inputs.forward), placement.by_rank(inputs.head)
        return lambda: self._follow(embedding, self.weights, self.state, states, sampled, *packed)

    def _draft_job(self, embedding: Any, inputs: DraftInputs) -> Callable[[], Any]:
        packed = tuple(map(self._placement.by_rank, (inputs.forward, inputs.sample, inputs.state_rows)))
        return lambda: self._draft(embedding, self.weights, self.state, *packed)
