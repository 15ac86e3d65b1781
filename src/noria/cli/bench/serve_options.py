"""What the options of `noria bench serve` ask for, checked before anything is sent."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria.bench import prompts
from noria.bench.figures import GOALS, METRICS
from noria.bench.load import Load
from noria.bench.records import Prompt, Question
from noria.cli.main import UsageError

if TYPE_CHECKING:
    from noria.bench.client import LoadClient

Write = Callable[[Sequence[int]], Prompt]
_POSITIVE = (
    "num_prompts",
    "custom_output_len",
    "random_input_len",
    "random_output_len",
    "prefix_repetition_suffix_len",
    "prefix_repetition_num_prefixes",
    "prefix_repetition_output_len",
)
_NOT_NEGATIVE = ("random_prefix_len", "prefix_repetition_prefix_len", "num_warmups")
_OWN = ("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "n")  # set by the benchmark


@dataclass(frozen=True)
class Plan:
    """values: the options; the other fields: what they mean."""

    values: Any
    loads: tuple[Load, ...]
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goals: dict[str, float]
    extra: dict[str, Any]
    from_file: list[Question] | None

    def __getattr__(self, name: str) -> Any:
        """All that needs no interpretation."""
        return getattr(self.values, name)

    async def find_format(self, client: LoadClient) -> Write:
        """How made-up prompts are sent, found out by asking for a token. Raises NoriaError when none comes."""
        from noria.bench.client import trial

        if self.from_file is not None:
            await trial(client, [self.from_file[0].prompt])
            return prompts.as_ids
        sample = prompts.random_ids(8, random.Random("trial"))
        formats: dict[str, Write] = {"ids": prompts.as_ids, "text": prompts.as_text}
        chat = client.endpoint.endswith("/chat/completions")
        names = ("text",) if chat else ("ids", "text") if self.prompt_format == "auto" else (self.prompt_format,)
        taken = await trial(client, [formats[name](sample) for name in names])
        return prompts.as_text if isinstance(taken, str) else prompts.as_ids

    def questions(self, number: int | str, count: int, write: Write) -> list[Question]:
        """Those of one run. Every run has its own: otherwise a server would answer from its prefix cache."""
        if self.from_file is not None:
            begin = number * count if isinstance(number, int) else 0
            return [self.from_file[(begin + index) % len(self.from_file)] for index in range(count)]
        values, source = self.values, random.Random(f"{self.seed}/{number}")
        if self.dataset_name == "prefix_repetition":
            return prompts.prefix_questions(
                count,
                source,
                write,
                prefix_len=values.prefix_repetition_prefix_len,
                suffix_len=values.prefix_repetition_suffix_len,
                num_prefixes=values.prefix_repetition_num_prefixes,
                output_len=values.prefix_repetition_output_len,
            )
        return prompts.random_questions(
            count,
            source,
            write,
            input_len=values.random_input_len,
            output_len=values.random_output_len,
            prefix_len=values.random_prefix_len,
            range_ratio=values.random_range_ratio,
        )


def plan(values: Any) -> Plan:
    """Raises UsageError, or NoriaError for what is wrong with a file of prompts."""
    for name, least in (*((name, 1) for name in _POSITIVE), *((name, 0) for name in _NOT_NEGATIVE)):
        if getattr(values, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(values, name)}")
    if not values.base_url.startswith(("http://", "https://")):
        raise UsageError(f"--base-url must begin with http:// or https://, not {values.base_url!r}")
    if not values.endpoint.endswith(("/completions", "/chat/completions")):
        raise UsageError(f"--endpoint must be /v1/completions or /v1/chat/completions, not {values.endpoint!r}")
    if not 0 <= values.random_range_ratio < 1:
        raise UsageError(f"--random-range-ratio must be at least 0 and less than 1, not {values.random_range_ratio:g}")
    if not 0 < values.request_timeout < math.inf:
        raise UsageError(f"--request-timeout must be positive, not {values.request_timeout:g}")
    if (values.dataset_name == "custom") != (values.dataset_path is not None):
        raise UsageError("--dataset-path and --dataset-name custom belong together")
    if values.prompt_format == "ids" and values.endpoint.endswith("/chat/completions"):
        raise UsageError("--prompt-format ids does not work with /v1/chat/completions; leave it out")
    if values.save_detailed and values.save_result is None:
        raise UsageError("--save-detailed needs --save-result FILE")
    for name in ("save_result", "plot"):
        _refuse_unwritable(name, getattr(values, name))
    from_file = None
    if values.dataset_path is not None:
        from_file = prompts.file_questions(values.dataset_path, values.custom_output_len)
        if values.endpoint.endswith("/chat/completions") and not all(isinstance(q.prompt, str) for q in from_file):
            raise UsageError(f"{values.dataset_path} has prompts of token ids, which only /v1/completions takes")
    metrics = _metrics(values.percentile_metrics)
    return Plan(
        values, _loads(values), metrics, _percentiles(values), _goals(values.goodput), _extra(values), from_file
    )


def _refuse_unwritable(name: str, path: Path | None) -> None:
    """Before the hour that the runs take."""
    if path is None:
        return
    target = path if path.exists() else path.parent
    if path.is_dir() or not target.exists() or not os.access(target, os.W_OK):
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(f"{flag} {path} cannot be written; name a file in a folder that exists and is yours")


def _loads(values: Any) -> tuple[Load, ...]:
    rates, limits = values.request_rate or (math.inf,), values.max_concurrency or (None,)
    if len(rates) > 1 and len(limits) > 1:
        raise UsageError("give several values of --request-rate or of --max-concurrency, not of both")
    if not all(rate > 0 for rate in rates):
        raise UsageError(f"--request-rate must be positive, not {min(rates):g}")
    if any(limit is not None and limit < 1 for limit in limits):
        raise UsageError("--max-concurrency must be at least 1")
    if not 0 < values.burstiness < math.inf:
        raise UsageError(f"--burstiness must be positive, not {values.burstiness:g}")
    return tuple(Load(rate, values.burstiness, limit) for rate in rates for limit in limits)


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in METRICS:
            raise UsageError(f"--percentile-metrics: there is no {name!r}; there are {', '.join(METRICS)}")
    return names


def _percentiles(values: Any) -> tuple[float, ...]:
    try:
        found = tuple(float(each) for each in values.metric_percentiles.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= each <= 100 for each in found):
        raise UsageError(
            f"--metric-percentiles must be numbers from 0 to 100, as in 90,99, not {values.metric_percentiles!r}"
        )
    return tuple(dict.fromkeys(found))


def _goals(texts: Sequence[str]) -> dict[str, float]:
    goals: dict[str, float] = {}
    for text in texts:
        name, _, most = text.partition(":")
        if name not in GOALS:
            raise UsageError(f"--goodput: there is no {name!r}; there are {', '.join(GOALS)}, as in ttft:200")
        if name in goals:
            raise UsageError(f"--goodput: {name} is given twice")
        try:
            goals[name] = float(most)
        except ValueError:
            goals[name] = math.nan
        if not goals[name] >= 0:
            raise UsageError(f"--goodput: {text!r} must be a metric and milliseconds, as in ttft:200")
    return goals


def _extra(values: Any) -> dict[str, Any]:
    extra: dict[str, Any] = {"temperature": values.temperature}
    if values.ignore_eos:
        extra["ignore_eos"] = True
    if values.extra_body is None:
        return extra
    try:
        given = json.loads(values.extra_body)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UsageError("--extra-body must be a JSON object, as in '{\"top_k\": 1}'")
    if taken := sorted(given.keys() & set(_OWN)):
        raise UsageError(f"--extra-body must not contain {taken[0]}, which the benchmark sets")
    return extra | given
