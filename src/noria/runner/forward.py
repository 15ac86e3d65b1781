"""The programs of the forward pass, and the passes of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from noria.batch.executions import Execution, PromptPart
from noria.batch.pack import StepInputs
from noria.observe.step_clock import StepClock
from noria.ops.ragged_paged_attention.api import KVCache
from noria.parallel.placement import Placement
from noria.runner.capture import Programs, lowering
from noria.step.programs import StepPrograms, merge

Jobs = dict[Hashable, Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Passed:
    """What the forward passes of a step leave, on the device."""

    cache: KVCache
    hidden: jax.Array  # [L, E]: of the rows of the head pass
    wanted: Any  # states of all tokens that a draft head wants, which follows steps of one pass; or None
    prompts: tuple[tuple[PromptPart, jax.Array], ...]  # and the hidden states [T, E] of the pass that they are parts of


class ForwardPasses:
    """For one model: a program per token bucket, and, where there is a long shape, a second one and one to merge."""

    def __init__(
        self,
        steps: StepPrograms,
        programs: Programs,
        placement: Placement,
        dtype: str,
        clock: StepClock,
        cache: KVCache,
    ) -> None:
        """dtype: of hidden states. cache: shapes, with their places."""
        self._programs = programs
        self._placement = placement
        self._clock = clock
        self._shape = steps.shape
        size = (self._shape.all_logit_rows, steps.model.config.hidden_size)
        self._hidden = placement.by_token(size, dtype)
        places, by_token = jax.tree.map(lambda leaf: leaf.sharding, cache), self._hidden.sharding
        outputs = (places, by_token, by_token, by_token)
        make = lambda steps: lowering(steps.forward, donate_argnums=1, out_shardings=outputs)
        self._forward = make(steps)
        if (long := self._shape.long) is not None:
            self._forward_long = make(dataclasses.replace(steps, shape=long))
        self._merge = lowering(merge, out_shardings=by_token)

    def jobs(self, weights: Any, cache: KVCache, sampled: Any, inputs: StepInputs) -> Jobs:
        """What warm-up lowers and compiles for this step. sampled: as of StepPrograms.forward."""
        jobs: Jobs = {_key(each): self._job(weights, cache, sampled, each) for each in inputs.executions}
        if self._shape.long is not None:
            jobs["merge"] = self._merge_job
        return jobs

    def run(self, weights: Any, cache: KVCache, sampled: jax.Array, inputs: StepInputs) -> Passed:
        """Dispatches them in their order. cache: donated."""
        merged, wanted, prompts = None, None, []
        for each in inputs.executions:
            job = self._job(weights, cache, sampled, each)
            self._clock.dispatching()
            arguments = (weights, cache, sampled, each.forward)
            cache, hidden, states, wanted = self._programs.call(_key(each), job, *arguments)
            self._clock.dispatched(hidden)
            merged = hidden if merged is None else self._merged(merged, hidden, each)
            if each.prompt is not None:
                prompts.append((each.prompt, states))
        assert merged is not None, "a step has a forward pass"
        return Passed(cache, merged, wanted, tuple(prompts))

    def _merged(self, before: jax.Array, hidden: jax.Array, execution: Execution) -> jax.Array:
        self._clock.dispatching()
        merged = self._programs.call("merge", self._merge_job, before, hidden, execution.owned)
        self._clock.dispatched(merged)
        return merged

    def _job(self, weights: Any, cache: KVCache, sampled: Any, execution: Execution) -> Callable[[], Any]:
        packed = self._placement.by_rank(execution.forward)
        program = self._forward_long if execution.is_long else self._forward
        return lambda: program(weights, cache, sampled, packed)

    def _merge_job(self) -> Any:
        owned = self._placement.host(np.zeros(self._hidden.shape[0], bool))
        return self._merge(self._hidden, self._hidden, owned)


def _key(execution: Execution) -> Hashable:
    return "forward long" if execution.is_long else "forward", execution.num_tokens
