"""The offline front: an engine in this process, driven by whoever asks for results."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np

from noria.config import EngineConfig, ResolvedConfig, SamplingParams
from noria.engine.admission import Prompt
from noria.engine.front import EngineFront
from noria.engine.interrupts import deferred_interrupts
from noria.engine.outputs import RequestOutput
from noria.engine.startup import Engine, ProgressBar, StartupReport, start
from noria.errors import RequestError
from noria.observe.step_clock import StepTimes
from noria.scheduler.scheduler import SchedulerStats
from noria.spec.stats import SpeculationStats
from noria.text.chat import encode_chat
from noria.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EngineStats:
    steps: int  # a burst of forward passes is one
    compiles_after_warmup: int  # 0 unless something is wrong
    scheduler: SchedulerStats
    startup: StartupReport
    times: StepTimes  # of all steps: how long there was work, and how long the device waited for the host
    speculation: SpeculationStats

    @classmethod
    def of(cls, engine: Engine) -> EngineStats:
        core = engine.core
        return cls(
            core.num_steps,
            core.runner.compiles_after_warmup,
            core.scheduler.stats,
            engine.report,
            core.times,
            core.speculation.stats,
        )


class LLM:
    """A language model that answers prompts.

    >>> llm = LLM("smollm2-135m-instruct", max_model_len=2048)
    >>> [answer] = llm.generate("Water wheels are", SamplingParams(max_tokens=32))
    >>> answer.outputs[0].text
    """

    def __init__(self, model: str | os.PathLike[str], *, progress: ProgressBar | None = None, **options: Any) -> None:
        """model: a folder, a .gguf file, a Hub id, or a name that `noria pull` knows. options: see EngineConfig.

        progress: how to show what takes long at start. Raises ConfigError or WeightsError.
        """
        config = EngineConfig.from_options(model=model, **options)
        self._front = EngineFront(start(config, progress))
        self._ids = itertools.count()
        self._outbox: dict[str, deque[RequestOutput]] = {}  # by request id, of everybody who waits
        self._abandoned: deque[str] = (
            deque()
        )  # streams that were dropped; the garbage collector may say so at any moment
        self._lock = threading.Lock()  # one thread at a time turns the wheel, for all that wait

    @property
    def config(self) -> ResolvedConfig:
        """With every size that was left open filled in."""
        return self._front.engine.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._front.engine.tokenizer

    @property
    def stats(self) -> EngineStats:
        return EngineStats.of(self._front.engine)

    @property
    def engine(self) -> Engine:
        """What lies behind this front, for measurements and tests. Its loop belongs to the LLM."""
        return self._front.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Answers all prompts, in order. A prompt is a text, token ids (a list of integers, a row of a numpy array), or
        a dictionary with one of the keys prompt and prompt_token_ids; sampling_params is one for all or one for each.
        cache_salt: only requests of one salt share cached prefixes. priority: the lowest comes first, with the
        scheduling policy "priority".
        Several threads may call this at a time; Ctrl-C ends the call and leaves the engine usable.

        Raises RequestError, before anything runs, when one of them cannot be served; EngineDeadError when the engine
        was closed or a step failed before.
        """
        prompts = _listed(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
            kind = type(sampling_params).__name__
            raise RequestError(f"sampling_params must be a SamplingParams or a list of them, not {kind}")
        if len(sampling_params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts need as many sampling_params, not {len(sampling_params)}")
        ids: list[str] = []
        try:
            for prompt, params in zip(prompts, sampling_params):
                ids.append(self._submit(prompt, params, cache_salt=cache_salt, priority=priority))
            return [self._collect(request_id) for request_id in ids]
        finally:
            for request_id in ids:
                self._withdraw(request_id)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """Answers one prompt part by part: each output holds what is new. Leaving the loop early aborts the request.

        Raises RequestError at once, not at the first part.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        request_id = self._submit(prompt, params, cache_salt=cache_salt, priority=priority)
        parts = self._parts(request_id)
        # A generator that nobody begins is dropped without running its `finally`.
        weakref.finalize(parts, self._abandon, request_id).atexit = False
        return parts

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers conversations (one, or a list of them) through the model's chat template.

        A message is a dictionary with role and content: a text, or a list of parts like {"type": "text", "text": ...}.
        template_options: tools, add_generation_prompt and continue_final_message as in the server's API, and variables
        for the template, which may also come as a dictionary called chat_template_kwargs.
        """
        return self.generate(self.chat_prompts(messages, **template_options), sampling_params)

    def chat_prompts(self, messages: Messages | Sequence[Messages], **template_options: Any) -> list[list[int]]:
        """Token ids of conversations, ready for generate or stream."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        options = _template_options(**template_options)
        return [encode_chat(self.tokenizer, conversation, **options) for conversation in conversations]

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, so that the next prompts are computed from their first token."""
        with self._lock:
            self._front.engine.core.reset_prefix_cache()

    def close(self) -> None:
        """Gives the device's memory back. Nothing can be asked of the engine afterwards."""
        self._front.engine.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, prompt: Prompt, params: SamplingParams, **options: Any) -> str:
        request_id = str(next(self._ids))
        group = self._front.prepare(request_id, prompt, params, **options)
        if params.structured_outputs is not None:
            self._front.grammars.validate(params.structured_outputs)
        with self._lock, deferred_interrupts():
            self._front.submit(group)
            self._outbox[request_id] = deque()
        return request_id

    def _withdraw(self, request_id: str) -> None:
        with self._lock, deferred_interrupts():
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._front.abort(request_id)
        self._outbox.pop(request_id, None)

    def _abandon(self, request_id: str) -> None:
        """Called by the garbage collector, so perhaps in the middle of a step: then the next one sees to it."""
        self._abandoned.append(request_id)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_abandoned()
            finally:
                self._lock.release()

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            self._drop(self._abandoned.popleft())

    def _turn(self, box: deque[RequestOutput]) -> None:
        """One step, unless another thread's step has meanwhile filled the box."""
        with self._lock, deferred_interrupts():
            self._drop_abandoned()
            if box:
                return
            for output in self._front.step():
                if output.request_id in self._outbox:
                    self._outbox[output.request_id].append(output)

    def _parts(self, request_id: str) -> Iterator[RequestOutput]:
        box = self._outbox[request_id]
        try:
            while True:
                while not box:
                    self._turn(box)
                yield (part := box.popleft())
                if part.finished:
                    return
        finally:
            self._withdraw(request_id)

    def _collect(self, request_id: str) -> RequestOutput:
        parts = self._parts(request_id)
        result = next(parts)
        for part in parts:
            result.add(part)
        return result


def _template_options(chat_template_kwargs: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Raises RequestError for what a template would silently not look at, because it is no variable of any."""
    for name in ("chat_template", "chat_template_content_format", "lora_request", "use_tqdm"):
        if options.get(name) not in (None, False):
            hint = "give it to LLM(chat_template=...)" if name == "chat_template" else "leave it out"
            raise RequestError(f"{name} is not supported here; {hint}")
        options.pop(name, None)
    return {**options, **(chat_template_kwargs or {})}


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; a list of integers is one prompt of token ids, and so is a row of an array."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a string, token ids, or a list of prompts, not {type(prompts).__name__}")
    if prompts and all(isinstance(item, (int, np.integer)) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
