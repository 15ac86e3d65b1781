"""What a step has dispatched, and what the host makes of it when it asks."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from noria.batch.inputs import NOT_SAMPLED
from noria.batch.pack import PromptPart
from noria.batch.persistent import Expectation, PersistentBatch
from noria.observe.step_clock import StepClock
from noria.scheduler.schedule import StepResult, TokenLogprobs
from noria.step.scores import read_scores


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of tokens of prompts, on the device."""

    part: PromptPart
    packed: tuple[jax.Array, ...]  # of all tokens, see `score`; the last array ends in padding

    def read(self, request_ids: tuple[str, ...]) -> dict[str, tuple[int, list[TokenLogprobs]]]:
        """Waits. request_ids: of the step's rows. -> as in StepResult."""
        part = self.part
        packed = np.concatenate([np.asarray(array) for array in self.packed])[: part.num_tokens]
        num_top = [top for _, _, count, top in part.rows for _ in range(count)]
        scores = read_scores(packed, part.token_ids.tolist(), num_top)
        return {request_ids[row]: (first, [next(scores) for _ in range(count)]) for row, first, count, _ in part.rows}


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a step. They stay on the device until `result` asks for them."""

    batch: PersistentBatch
    request_ids: tuple[str, ...]  # of all rows of the step
    sources: np.ndarray  # rows of the step that sample
    expected: Expectation | None  # the same as places in the batch; None when no row samples
    token_ids: jax.Array  # of the rows of the head pass [at least rows], or of a burst [most passes, max_num_seqs]
    clock: StepClock = field(default_factory=StepClock)
    scores: jax.Array | None = None  # [rows, ...], see `score`; None unless the step was shaped
    num_logprobs: np.ndarray | None = None  # [rows]: how many are asked for; None where scores is
    prompt: PromptScores | None = None
    places: np.ndarray | None = None  # [most, sources]: rows of the head pass, as of StepInputs

    def result(self) -> StepResult:
        """Waits for the step, and makes its tokens known to the batch."""
        sampled: dict[str, list[int]] = {request_id: [] for request_id in self.request_ids}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        if self.expected is not None:
            self.clock.waiting()
            token_ids = self._by_source(np.asarray(self.token_ids))
            self.clock.waited(self.token_ids)
            self.batch.fulfil(self.expected, token_ids)
            for source, tokens in zip(self.sources.tolist(), token_ids.T.tolist()):
                sampled[self.request_ids[source]] += [token_id for token_id in tokens if token_id != NOT_SAMPLED]
            logprobs = self._logprobs(token_ids)
        if self.prompt is None:
            return StepResult(sampled, logprobs)
        self.clock.waiting()
        prompt_logprobs = self.prompt.read(self.request_ids)
        self.clock.waited(self.prompt.packed[-1])
        return StepResult(sampled, logprobs, prompt_logprobs)

    def _by_source(self, token_ids: np.ndarray) -> np.ndarray:
        """[most tokens of a row, sources], NOT_SAMPLED where there are fewer."""
        if self.places is None:
            return np.atleast_2d(token_ids)[:, self.sources]
        if token_ids.ndim == 2:
            return token_ids[:, self.places[0]]
        return np.where(self.places >= 0, token_ids[self.places], NOT_SAMPLED)

    def _logprobs(self, token_ids: np.ndarray) -> dict[str, list[TokenLogprobs]]:
        """token_ids: as of _by_source."""
        if self.scores is None or self.num_logprobs is None:
            return {}
        packed, logprobs = np.asarray(self.scores), {}
        places = self.sources[None] if self.places is None else self.places
        for index, source in enumerate(self.sources):
            if (num_top := int(self.num_logprobs[source])) >= 0:
                came = token_ids[:, index] != NOT_SAMPLED
                tokens = token_ids[came, index].tolist()
                scores = read_scores(packed[places[came, index]], tokens, [num_top] * len(tokens))
                logprobs[self.request_ids[source]] = list(scores)
        return logprobs
