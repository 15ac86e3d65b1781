"""The programs behind penalties, biases and log-probabilities, and what they keep on the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noria.batch.edits import empty_edit
from noria.batch.pack import PromptPart, StepInputs
from noria.observe.step_clock import StepClock
from noria.parallel.placement import Placement
from noria.runner.capture import Programs, lowering
from noria.runner.results import PromptScores
from noria.step.programs import StepPrograms, pick_rows
from noria.step.shape import Tables, edit, mask_width

_PROMPT_ROWS = 32  # of one call: so many pass the head together
Jobs = dict[Hashable, Callable[[], Any]]


class Shaper:
    """For one model. Its tables are made when the first request needs them."""

    def __init__(
        self, steps: StepPrograms, programs: Programs, placement: Placement, dtype: str, clock: StepClock
    ) -> None:
        """dtype: of hidden states."""
        rows, self._config = steps.shape.all_rows, steps.model.config
        ranks, own_rows, vocab = steps.shape.num_ranks, steps.shape.num_rows, self._config.vocab_size
        self._programs = programs
        self._clock = clock
        self._dtype = dtype
        self._num_logit_rows = steps.shape.all_logit_rows
        self._prompt_rows = min(_PROMPT_ROWS, rows)
        self._placement = placement
        axes = (("vocab", vocab),) if ranks == 1 else ((None, own_rows), ("vocab", vocab))
        by_token = placement.split(("tokens", ranks) if ranks > 1 else (None, own_rows), *axes)
        shapes = Tables.abstract(own_rows, vocab, ranks)
        on_device = partial(jax.ShapeDtypeStruct, sharding=by_token)
        self._shapes: Tables = jax.tree.map(lambda shape: on_device(shape.shape, shape.dtype), shapes)
        self._sampled = placement.host(jax.ShapeDtypeStruct((steps.shape.all_logit_rows,), jnp.int32))
        self._tables: Tables | None = None
        self._open_masks: dict[int, jax.Array] = {}  # by request bucket
        self.mask_width = mask_width(self._config.vocab_size)
        tables, whole = jax.tree.map(lambda shape: shape.sharding, self._shapes), placement.replicated
        self._sample = lowering(steps.sample_shaped, donate_argnums=2, out_shardings=(tables, whole, whole))
        self._edit = lowering(edit, donate_argnums=0, out_shardings=tables)
        self._pick = lowering(pick_rows, out_shardings=whole)
        self._score = lowering(steps.score_prompt, out_shardings=whole)

    def jobs(self, weights: Any, made_up: Iterable[StepInputs]) -> Jobs:
        """What warm-up lowers and compiles for these steps."""
        jobs: Jobs = {
            "tables": self._tables_job,
            "edit": self._edit_job,
            "score prompt": self._score_job(weights),
        }
        for inputs in made_up:
            if inputs.shaping is not None:
                jobs["sample shaped", inputs.num_rows] = self._sample_job(weights, inputs)
            elif not inputs.is_burst:
                jobs["pick", inputs.num_tokens] = self._pick_job(inputs.num_tokens)
        return jobs

    def apply(self, edits: Iterable[np.ndarray]) -> None:
        """Dispatches the edits of the tables, see batch/edits.py."""
        for packed in edits:
            self._tables = self._programs.call("edit", self._edit_job, self._take_tables(), packed)

    def sample(
        self, weights: Any, hidden: jax.Array, sampled: jax.Array, inputs: StepInputs, mask: np.ndarray | None
    ) -> tuple[jax.Array, jax.Array]:
        """Dispatches StepPrograms.sample_shaped: token ids, and scores of the rows of the head pass.

        mask: int32 [R, W], see apply_mask; None where no row has a grammar.
        """
        key, job = ("sample shaped", inputs.num_rows), self._sample_job(weights, inputs)
        tables = self._take_tables()
        self._clock.dispatching()
        masks = self._open_mask(inputs.num_rows) if mask is None else mask
        arguments = (weights, hidden, tables, sampled, inputs.sample, inputs.shaping, masks)
        self._tables, token_ids, scores = self._programs.call(key, job, *arguments)
        self._clock.dispatched(token_ids)
        scores.copy_to_host_async()
        return token_ids, scores

    def score_prompt(self, weights: Any, states: jax.Array, part: PromptPart) -> PromptScores:
        """Dispatches the log-probabilities of tokens of prompts. states [T, E]: of all tokens of the step."""
        results, size = [], self._prompt_rows
        for start in range(0, part.num_tokens, size):
            packed = np.full((2, size), -1, np.int32)
            for line, values in zip(packed, (part.sources, part.token_ids)):
                line[: min(size, part.num_tokens - start)] = values[start : start + size]
            packed[0] = np.maximum(packed[0], 0)
            key, job = ("pick", states.shape[0]), self._pick_job(states.shape[0])
            self._clock.dispatching()
            hidden = self._programs.call(key, job, states, packed)
            scores = self._programs.call("score prompt", self._score_job(weights), weights, hidden, packed)
            self._clock.dispatched(scores)
            scores.copy_to_host_async()
            results.append(scores)
        return PromptScores(part, tuple(results))

    def close(self) -> None:
        """Gives the device's memory back."""
        self._tables = None
        self._open_masks.clear()

    def _open_mask(self, num_rows: int) -> jax.Array:
        """One that allows everything, kept on the device: steps without a grammar upload none."""
        if num_rows not in self._open_masks:
            ones = np.full((num_rows, self.mask_width), -1, np.int32)
            self._open_masks[num_rows] = self._placement.put_by_copy(ones)
        return self._open_masks[num_rows]

    def _take_tables(self) -> Tables:
        """For a program that they are donated to."""
        tables, self._tables = self._tables, None
        return self._programs.call("tables", self._tables_job) if tables is None else tables

    def _tables_job(self) -> Any:
        zeros = lambda: jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), self._shapes)
        places = jax.tree.map(lambda shape: shape.sharding, self._shapes)
        return lowering(zeros, out_shardings=places)()

    def _edit_job(self) -> Any:
        return self._edit(self._shapes, self._placement.host(empty_edit()))

    def _sample_job(self, weights: Any, inputs: StepInputs) -> Callable[[], Any]:
        mask = jax.ShapeDtypeStruct((inputs.num_rows, self.mask_width), jnp.int32)
        packed = [self._placement.by_copy(each) for each in (inputs.sample, inputs.shaping, mask)]
        arguments = (weights, self._states(self._num_logit_rows), self._shapes, self._sampled, *packed)
        return lambda: self._sample(*arguments)

    def _pick_job(self, num_tokens: int) -> Callable[[], Any]:
        return lambda: self._pick(self._states(num_tokens), self._prompt_places())

    def _score_job(self, weights: Any) -> Callable[[], Any]:
        hidden = self._placement.host(self._states(self._prompt_rows))
        arguments = (weights, hidden, self._prompt_places())
        return lambda: self._score(*arguments)

    def _states(self, rows: int) -> Any:
        return self._placement.by_token((rows, self._config.hidden_size), self._dtype)

    def _prompt_places(self) -> Any:
        return self._placement.host(np.zeros((2, self._prompt_rows), np.int32))
