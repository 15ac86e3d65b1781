"""What the offline and the async front share: admission, the text of running requests, and outputs."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass

from noria.config import SamplingParams
from noria.engine.admission import Admission, Prompt
from noria.engine.logprobs import TokenLogprobs
from noria.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, SequenceText
from noria.engine.request import FinishReason, Request
from noria.engine.startup import Engine
from noria.errors import RequestError
from noria.grammar.compiler import GrammarCompiler

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestGroup:
    """The sequences of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: dict[str, tuple[Request, SequenceText]]  # unfinished ones, by request id
    indices: dict[str, int]
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # for the next output

    def output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=not self.sequences,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            prompt_logprobs=prompt_logprobs,
        )


class EngineFront:
    """Prompts in, RequestOutputs out, one step at a time. Only `prepare` may be called from several threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.admission = Admission(
            engine.tokenizer,
            vocab_size=engine.vocab_size,
            max_model_len=engine.config.max_model_len,
            eos_token_ids=engine.eos_token_ids,
            seed=engine.config.seed,
            max_logprobs=engine.config.max_logprobs,
        )
        self._serial = itertools.count()
        self._groups: dict[str, RequestGroup] = {}
        self._group_of: dict[str, RequestGroup] = {}  # by id of a sequence

    @property
    def has_unfinished(self) -> bool:
        return self.engine.core.scheduler.has_unfinished

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Admits a prompt, or raises RequestError and changes nothing."""
        self.submit(self.prepare(request_id, prompt, params, cache_salt=cache_salt, priority=priority))

    @property
    def grammars(self) -> GrammarCompiler:
        return self.engine.core.structured.compiler

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> RequestGroup:
        """Checks and tokenizes a prompt. Touches nothing that runs, so any thread may do it. Raises RequestError."""
        _check_types(request_id, params, cache_salt, priority)
        text, token_ids = self.admission.tokenize(prompt)
        # The core's ids are never used twice, so a result that is late can never reach a request of the same name.
        core_id = f"{request_id}:{next(self._serial)}"
        requests = self.admission.requests(core_id, token_ids, params, cache_salt=cache_salt, priority=priority)
        return RequestGroup(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            sequences={r.request_id: (r, SequenceText(self.engine.tokenizer, r)) for r in requests},
            indices={r.request_id: index for index, r in enumerate(requests)},
            metrics=RequestMetrics(time.perf_counter()),
        )

    def submit(self, group: RequestGroup) -> None:
        """Queues what prepare made. Raises RequestError when its id is in use."""
        if group.request_id in self._groups:
            raise RequestError(f"request id {group.request_id} is in use; choose another or abort that request first")
        for request, _ in group.sequences.values():
            self.engine.core.add(request)
            self._group_of[request.request_id] = group
        self._groups[group.request_id] = group

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends all sequences of a prompt; returns its last output. None when there is no such request (any more)."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        ended = self.engine.core.abort(list(group.sequences))
        outputs = [
            self._finish(group, request, CompletionOutput(group.indices[request.request_id])) for request in ended
        ]
        del self._groups[request_id]
        return group.output(outputs)

    def step(self) -> list[RequestOutput]:
        """Runs one step; one output for every prompt that has news."""
        news: dict[str, list[CompletionOutput]] = {}
        for request, token_ids in self.engine.core.step():
            group = self._group_of[request.request_id]
            news.setdefault(group.request_id, []).append(self._take(group, request, token_ids))
        results = [self._groups[request_id].output(outputs) for request_id, outputs in news.items()]
        for result in results:
            if result.finished:
                del self._groups[result.request_id]
        return results

    def _take(self, group: RequestGroup, request: Request, token_ids: list[int]) -> CompletionOutput:
        """The news of one sequence. A failure here is this request's own: it ends, the others go on."""
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = time.perf_counter()
            group.metrics.scheduled_time = request.scheduled_time
            group.num_cached_tokens = request.num_cached_tokens
        output = CompletionOutput(group.indices[request.request_id])
        was_finished = request.is_finished
        before = request.num_output_tokens - len(token_ids)
        text = group.sequences[request.request_id][1]
        try:
            output.text = text.push(token_ids)
            output.logprobs = text.logprobs.take(before, request.num_output_tokens)
            if output.logprobs is not None:
                output.cumulative_logprob = text.logprobs.cumulative
            if (prompt_logprobs := text.logprobs.take_prompt()) is not None:
                group.prompt_logprobs = prompt_logprobs
        except Exception:
            _log.exception("request %s failed while its text was made", request.request_id)
            request.finish(FinishReason.ERROR)
        output.token_ids = request.output_token_ids[before:]
        if request.is_finished:
            if not was_finished:
                self.engine.core.abort([request.request_id])
            self._finish(group, request, output)
        return output

    def _finish(self, group: RequestGroup, request: Request, output: CompletionOutput) -> CompletionOutput:
        output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
        del group.sequences[request.request_id], self._group_of[request.request_id]
        if not group.sequences:
            group.metrics.finished_time = time.perf_counter()
        return output


def _check_types(request_id: object, params: object, cache_salt: object, priority: object) -> None:
    """A wrong one must not get as far as the scheduler, where it would fail in the middle of everybody's step."""
    if not isinstance(request_id, str):
        raise RequestError(f"request_id must be a string, not {request_id!r}")
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params must be a SamplingParams, not {type(params).__name__}")
    if not (cache_salt is None or isinstance(cache_salt, str)):
        raise RequestError(f"cache_salt must be a string or None, not {cache_salt!r}")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority must be an integer, not {priority!r}")
