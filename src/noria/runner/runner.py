"""The model runner: holds weights, cache and compiled programs, and runs the steps that schedules describe.

The verbs are the field's. A schedule is all it needs, whichever scheduler made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from noria.batch.buckets import Buckets
from noria.batch.inputs import BatchShape
from noria.batch.pack import StepInputs, pack
from noria.batch.persistent import PersistentBatch
from noria.cache.layout import BlockIds, CacheLayout, plan_layout
from noria.config import ResolvedConfig, SamplingParams
from noria.models.config import DecoderConfig
from noria.models.decoder import Decoder
from noria.models.eagle3 import Eagle3Head
from noria.observe.step_clock import StepClock
from noria.ops import native
from noria.ops.ragged_paged_attention.api import KVCache
from noria.ops.ragged_paged_attention.tpu_lines import Lines
from noria.parallel.ops import on_mesh
from noria.parallel.placement import Placement
from noria.parallel.rules import check_mesh, num_shards, on_one_device, with_kv_copies
from noria.runner.backends import choose_ops
from noria.runner.capture import (
    CaptureReport,
    MadeUpBlocks,
    Programs,
    lowering,
    made_up_step,
    made_up_steps,
    use_compile_cache,
)
from noria.runner.draft_head import HeadRunner
from noria.runner.forward import ForwardPasses, Passed
from noria.runner.memory import MemoryPlan, available_bytes, plan_memory
from noria.runner.pack_weights import MatrixForm
from noria.runner.results import SampledTokens
from noria.runner.shaper import Jobs, Shaper
from noria.runner.stored import StoredPrograms, origin_of
from noria.runner.weights import WeightPlace, check_rounding
from noria.runner.work import WorkModel
from noria.scheduler.schedule import GrammarMasks, Schedule
from noria.step.decode import DecodeProgram
from noria.step.programs import StepPrograms
from noria.weights.base import Checkpoint


class ModelRunner:
    """One model on the devices of a mesh.

    Call, in this order: load_model, initialize_kv_cache, capture_model; then steps.

    A step is execute_model followed by sample_tokens: between the two the device is at work and the host is free. Of a
    burst execute_model dispatches everything.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: Decoder,
        dtype: str,
        mesh: Mesh,
        num_valid_tokens: int,
        head: Eagle3Head | None = None,
    ) -> None:
        """dtype: of weights and activations. num_valid_tokens: ids the tokenizer knows. head: one that drafts.

        Raises ConfigError when the model cannot be split over the mesh, or an op cannot be had.
        """
        check_mesh(model.config, config, mesh)
        self.config = config
        self.placement = Placement(mesh, model.config)
        self._checkpoint_model = model  # KV heads as the checkpoint has them
        self.model = Decoder(with_kv_copies(model.config, mesh))
        self.platform = self.placement.devices[0].platform
        self.dtype = dtype
        self.cache_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        ops = choose_ops(config, self._model_on_one, dtype, self.cache_dtype, self.platform, mesh.size)
        self._ops = on_mesh(ops, self.placement)
        self._place = WeightPlace(MatrixForm(ops.linear.packed, config.quantization), dtype, self.placement)
        self.layout: CacheLayout = plan_layout(model.config.windows)
        self.buckets = Buckets.of(config)
        blocks = -(-config.max_model_len // config.block_size)
        rows = self.buckets.requests[-1]
        drafts = self.buckets.num_logit_rows - rows
        self.shape = BatchShape(rows, self.layout.num_groups, blocks, drafts, head is not None, config.num_ranks)
        if config.most_model_len is not None:
            self.shape = self.shape.divided(config.most_model_len, config.block_size)
        self.batch = PersistentBatch(self.shape, config.max_model_len)
        self._num_valid_tokens = min(num_valid_tokens, model.config.vocab_size)
        self._programs = Programs(config.strict_compile)
        self.clock = StepClock()
        self._weights: Any = None
        self._cache: KVCache | None = None
        self._sampled: Any = None  # [L] int32: tokens of the last step that sampled, on the device
        self._passed: Passed | None = None  # of the last step that was no burst
        self.head = head and HeadRunner(
            head, config, self.placement, dtype, self.layout, self.cache_dtype, self._programs, self.clock
        )
        self._shaper: Any = None
        self._passes: Any = None  # ForwardPasses
        self._sample: Any = None
        self._decode: Any = None
        # By execute_model, for sample_tokens: inputs, and hidden states or, of a burst, tokens.
        self._executed: tuple[StepInputs, jax.Array] | None = None
        use_compile_cache(config.compile_cache_dir or "")

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Of the model, and of a head."""
        return (self.placement.mesh, *((self.head.mesh,) if self.head else ()))

    @property
    def num_programs(self) -> int:
        return len(self._programs)

    @property
    def compiles_after_warmup(self) -> int:
        return self._programs.after_warmup.programs

    def load_model(self, checkpoint: Checkpoint | None, progress: Callable[[int, int], None] | None = None) -> None:
        """From a checkpoint, or, when there is none, random weights."""
        declaration = self._checkpoint_model.declaration()
        self._weights = self._place.load(declaration, checkpoint, self.config.seed or 0, progress)
        check_rounding(self.config, self._weights)

    def describe_model(self, checkpoint: Checkpoint | None) -> None:
        """In place of load_model where only the programs are wanted: the shapes of what it would load."""
        self._weights = self._place.describe(self._checkpoint_model.declaration(), checkpoint)
        check_rounding(self.config, self._weights)

    def profile_run(self, available: int | None = None) -> MemoryPlan:
        """How a device's memory is divided. Raises ConfigError when one request of max_model_len does not fit.

        May be called before load_model, when the weights count as if none stayed packed. available: bytes that a
        device has for the engine; None: those that are free now, of which memory_utilization is a share.
        """
        shapes, head = self._weights, self.head
        if shapes is None:
            shapes = self._place.plain_shapes(self._checkpoint_model.declaration())
        if available is None:
            known = jax.tree.leaves((self._weights, head and head.weights))
            loaded = [leaf for leaf in known if isinstance(leaf, jax.Array)]
            free = available_bytes(self.placement.local_devices) + self.placement.bytes_on_one(loaded)
            available = int(free * self.config.memory_utilization)
        return plan_memory(
            self.config,
            self._model_on_one,
            self.layout,
            available=available,
            weights=self.placement.bytes_on_one(shapes) + (head.weight_bytes if head else 0),
            activation_dtype_bytes=jnp.dtype(self.dtype).itemsize,
            cache_dtype=self.cache_dtype,
            on_cpu=self.platform == "cpu",
            layer_block_bytes=None if self._lines is None else self._lines.bytes_per_block(self.config.block_size),
            head_block_bytes=head.block_bytes if head else 0,
            head_activations=head.activation_bytes(self.buckets) if head else 0,
        )

    @property
    def _lines(self) -> Lines | None:
        """How the cache lies where the attention wants it in lines."""
        c = self._model_on_one
        lines = Lines(c.num_kv_heads, c.head_dim, self.cache_dtype, c.cache_planes)
        return lines if self._ops.cache_in_lines else None

    @property
    def _model_on_one(self) -> DecoderConfig:
        return on_one_device(self.model.config, self.placement.mesh)

    def get_kv_cache_spec(self, num_blocks: int) -> KVCache:
        """Shapes of the cache arrays, with their places. num_blocks: of a rank."""
        rows = self.shape.num_ranks * self.layout.slots * num_blocks
        if self._lines is not None:
            devices = num_shards("kv_heads", self.placement.mesh)
            return self.placement.cache(self._lines.abstract(rows, self.config.block_size, devices))
        c = self.model.config
        sizes = (rows, self.config.block_size, c.num_kv_heads, c.head_dim)
        form = {"planes": c.cache_planes, "as_bits": self.platform == "cpu"}
        return self.placement.cache(KVCache.abstract(*sizes, self.cache_dtype, **form))

    def initialize_kv_cache(self, num_blocks: int, *, allocate: bool = True) -> None:
        """num_blocks: of the pool of a rank, the null block included. allocate: false where only the programs are
        wanted."""
        spec, whole = self.get_kv_cache_spec(num_blocks), self.placement.replicated
        self._sampled = jax.ShapeDtypeStruct((self.shape.all_logit_rows,), jnp.int32, sharding=whole)
        if not allocate:
            self._cache = spec
        else:
            zeros = lambda shapes: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
            self._sampled = zeros(self._sampled)
            on_cpu = self.platform == "cpu" and native.available() and not self.placement.is_parallel
            with jax.default_device(self.placement.local_devices[0]):
                self._cache = native.uninitialized(spec) if on_cpu else zeros(spec)
        steps = StepPrograms(
            model=self.model,
            shape=self.shape,
            layout=self.layout,
            num_blocks=num_blocks,
            num_valid_tokens=self._num_valid_tokens,
            ops=self._ops,
            max_logprobs=self.config.max_logprobs,
            processed_logprobs=self.config.logprobs_mode == "processed_logprobs",
            wanted_states=self.head.head.config.states if self.head else (),
        )
        head = self.head and self.head.initialize(steps, num_blocks, allocate=allocate)
        self._shaper = Shaper(steps, self._programs, self.placement, self.dtype, self.clock)
        places = jax.tree.map(lambda leaf: leaf.sharding, spec)
        self._passes = ForwardPasses(steps, self._programs, self.placement, self.dtype, self.clock, spec)
        self._sample = lowering(steps.sample, out_shardings=whole)
        # Rounded up, because to compile takes long: neighbouring values of the option share their programs.
        max_steps = max(8, 1 << (self.config.num_scheduler_steps - 1).bit_length())
        decode = DecodeProgram(steps, max_steps, head).decode
        head_places = self.head.places if self.head else whole
        self._decode = lowering(decode, donate_argnums=(1, 5), out_shardings=(places, whole, whole, head_places))

    @property
    def origin(self) -> dict[str, Any]:
        """What the programs are made by and for, see StoredPrograms."""
        others = {"dtype": self.dtype, "kv_cache_dtype": self.cache_dtype, "number of tokens": self._num_valid_tokens}
        if self.head:
            others["draft head"] = self.head.digest
        return origin_of(self.config, self._checkpoint_model.config, self.placement.devices, **others)

    def capture_model(
        self, progress: Callable[[int, int], None] | None = None, stored: StoredPrograms | None = None
    ) -> CaptureReport:
        """Compiles every program that the buckets allow, or fetches them. Raises ConfigError when one is not there."""
        load = None if stored is None else stored.loader(self.placement.devices)
        return self._programs.capture(self.jobs(), self.config.compile_threads, progress, load)

    def jobs(self) -> Jobs:
        """By name and bucket, functions that lower one program each: all that serving needs."""
        c, jobs = self.config, Jobs()
        sizes = (c.max_model_len, c.max_num_batched_tokens // c.num_ranks, c.num_scheduler_steps)
        steps = list(made_up_steps(self.shape, self.buckets, *sizes))
        for inputs in steps:
            if inputs.is_burst:
                jobs["decode", inputs.num_rows] = self._decode_job(inputs)
            else:
                jobs |= self._passes.jobs(self._weights, self._cache, self._sampled, inputs)
                jobs["sample", inputs.num_rows] = self._sample_job(inputs)
        if self.head:
            jobs |= self.head.jobs(self._weights.embedding, steps, self.batch, self.buckets)
        return jobs | self._shaper.jobs(self._weights, steps)

    def execute_model(self, schedule: Schedule) -> tuple[str, ...]:
        """Dispatches the forward pass of a step, or the whole of a burst; its tokens come from sample_tokens.

        Returns the ids of requests that sample under a grammar in this step: sample_tokens wants their masks.
        """
        self.batch.apply(schedule)
        self._shaper.apply(self.batch.take_edits())
        inputs = pack(schedule, self.batch, self.buckets)
        self._executed = (inputs, self.decode(inputs) if inputs.is_burst else self.forward(inputs))
        structured = inputs.rows[inputs.samples & self.batch.is_structured[inputs.rows]]
        return tuple(self.batch.request_ids[row] or "" for row in structured)

    def sample_tokens(self, masks: GrammarMasks | None = None) -> SampledTokens:
        """Dispatches head and sampler of the step that execute_model began, unless it was a burst.

        masks: of requests that follow a grammar; the others, and those that it lacks, may get any token.
        """
        assert self._executed is not None, "execute_model comes first"
        inputs, outputs = self._executed
        self._executed = None
        request_ids = tuple(self.batch.request_ids[row] or "" for row in inputs.rows)
        sources, expected, scores = np.flatnonzero(inputs.samples), None, None
        if not len(sources):
            outputs = self._sampled
        else:
            if inputs.shaping is not None:
                mask = None if masks is None else self._mask(request_ids, inputs, masks)
                outputs, scores = self._shaper.sample(self._weights, outputs, self._sampled, inputs, mask)
            elif not inputs.is_burst:
                outputs = self.sample(inputs, outputs)
            if not inputs.is_burst and not inputs.has_drafts:  # with drafts the next step has all tokens from the host
                self._sampled = outputs
            outputs.copy_to_host_async()
            places = sources if inputs.places is None else inputs.places[0, sources]
            expected = self.batch.expect(inputs.rows[sources], places, inputs.steps[sources])
        passed, self._passed = None if inputs.is_burst else self._passed, None
        if self.head and passed is not None:
            self.head.follow(self._weights.embedding, passed.wanted, outputs, inputs)
        parts = () if passed is None else passed.prompts
        prompt = tuple(self._shaper.score_prompt(self._weights, states, part) for part, states in parts)
        places = None if inputs.places is None else inputs.places[:, sources]
        told = scores, inputs.num_logprobs, prompt, places
        return SampledTokens(self.batch, request_ids, sources, expected, outputs, self.clock, *told)

    def _mask(self, request_ids: tuple[str, ...], inputs: StepInputs, masks: GrammarMasks) -> np.ndarray:
        """In the order of the rows of the head pass."""
        mask = np.full((inputs.num_rows, self._shaper.mask_width), -1, np.int32)
        first = range(len(request_ids)) if inputs.places is None else inputs.places[0].tolist()
        places = dict(zip(request_ids, first))
        for request_id, words in zip(masks.request_ids, masks.bitmask, strict=True):
            mask[places[request_id]] = words
            places[request_id] += 1
        return mask

    def forward(self, inputs: StepInputs) -> jax.Array:
        """Dispatches the forward passes alone: they write the cache and yield hidden states [L, E]."""
        passed = self._passed = self._passes.run(self._weights, self._cache, self._sampled, inputs)
        self._cache = passed.cache
        return passed.hidden

    def sample(self, inputs: StepInputs, hidden: jax.Array) -> jax.Array:
        """Dispatches the program of head and sampler alone: token ids [L]."""
        key, job = ("sample", inputs.num_rows), self._sample_job(inputs)
        self.clock.dispatching()
        token_ids = self._programs.call(key, job, self._weights, hidden, inputs.sample)
        self.clock.dispatched(token_ids)
        return token_ids

    def decode(self, inputs: StepInputs) -> jax.Array:
        """Dispatches a whole burst: token ids [DecodeProgram.max_steps, max_num_seqs]."""
        key, job = ("decode", inputs.num_rows), self._decode_job(inputs)
        arguments = (self._weights, self._cache, self._sampled, inputs.forward, inputs.sample)
        if self.head:
            arguments += (self.head.state, self.head.weights, inputs.head)
        self.clock.dispatching()
        self._cache, self._sampled, token_ids, state = self._programs.call(key, job, *arguments)
        self.clock.dispatched(token_ids)
        if self.head:
            self.head.state = state
        return token_ids

    def draft(self, wanted: dict[str, tuple[int, BlockIds]]) -> dict[str, list[int]]:
        """See HeadRunner.draft."""
        assert self.head is not None
        return self.head.draft(self._weights.embedding, wanted, self.batch, self.buckets)

    def made_up_step(self, counts: Sequence[int], num_computed: int = 0, num_steps: int = 1) -> StepInputs:
        """Inputs of greedy requests with blocks of their own, for measurements with forward, sample and decode.

        They overwrite the cache of requests that run, so none may. counts, num_steps: see capture.made_up_step.
        """
        assert self._cache is not None, "initialize_kv_cache comes first"
        num_blocks = self._cache.data.shape[0] // (self.layout.slots * self.shape.num_ranks)
        blocks = MadeUpBlocks(num_blocks, self.config.block_size)
        params = SamplingParams(temperature=0)
        return made_up_step(
            counts,
            self.shape,
            self.buckets,
            self.config.max_model_len,
            num_computed=num_computed,
            num_steps=num_steps,
            blocks=blocks,
            params=params,
        )

    def work_model(self) -> WorkModel:
        """What a device must read and compute at least in the steps of this model. After load_model."""
        c = self._model_on_one
        sizes = (self.config.block_size, c.num_kv_heads, c.head_dim)
        block = KVCache.bytes_per_block(*sizes, self.cache_dtype, c.cache_planes)
        weights = self.placement.shapes_on_one(self._weights)
        return WorkModel(c, weights, block / self.config.block_size, self.config.attention_data_parallel_size)

    def close(self) -> None:
        """Gives the device's memory back."""
        self._programs.close()
        if self._shaper is not None:
            self._shaper.close()
        if self.head:
            self.head.close()
        self._weights = self._cache = self._sampled = self._passed = self._executed = None
        self._passes = self._sample = self._decode = None

    def _decode_job(self, inputs: StepInputs) -> Callable[[], Any]:
        packed = self.placement.by_rank(inputs.forward), self.placement.by_copy(inputs.sample)
        head = self.head.decode_arguments(inputs) if self.head else ()
        return lambda: self._decode(self._weights, self._cache, self._sampled, *packed, *head)

    def _sample_job(self, inputs: StepInputs) -> Callable[[], Any]:
        rows = self._hidden_states(self.shape.all_logit_rows)
        packed = self.placement.by_copy(inputs.sample)
        return lambda: self._sample(self._weights, rows, packed)

    def _hidden_states(self, rows: int) -> jax.ShapeDtypeStruct:
        return self.placement.by_token((rows, self.model.config.hidden_size), self.dtype)
