"""What is asked of an engine in the combination tests: random prompts with random sampling parameters."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

from combo_models import VOCAB_SIZE

from noria.config import SamplingParams, StructuredOutputsParams

MAX_MODEL_LEN = 320
MAX_PROMPT = 300


@dataclass(frozen=True)
class Job:
    """One request. Everything its answer may depend on is in here; when and beside whom it runs is not."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str | None = None  # may change what is found in the prefix cache, but not the answer
    priority: int = 0

    def with_params(self, **changes: object) -> Job:
        return dataclasses.replace(self, params=dataclasses.replace(self.params, **changes))


def make_jobs(count: int, seed: int) -> list[Job]:
    """Many prompts continue one of a few common beginnings, so that there is something to find in the cache; many are
    short and grow long, so that they get into each other's way and are preempted."""
    rng = random.Random(seed)
    beginnings = [_tokens(rng, length) for length in (16, 33, 48, 100, 200)]
    jobs = [Job(_prompt(rng, beginnings), _params(rng), _salt(rng), rng.randrange(3)) for _ in range(count)]
    # One of ten has several sequences.
    return [job.with_params(n=rng.choice([2, 3])) if rng.random() < 0.1 else job for job in jobs]


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(3, VOCAB_SIZE), k=count))


def _prompt(rng: random.Random, beginnings: list[tuple[int, ...]]) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(beginnings) + _tokens(rng, rng.randint(1, 60))
    if kind < 0.4:
        return rng.choice(beginnings)  # the whole prompt may be in the cache
    if kind < 0.85:
        return _tokens(rng, rng.randint(1, 24))
    return _tokens(rng, rng.randint(1, MAX_PROMPT))


def _params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice([1, rng.randint(1, 24), rng.randint(1, 24), 48])
    stops = rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1, 12]))
    ends = {"max_tokens": max_tokens, "stop_token_ids": stops, "ignore_eos": rng.random() < 0.3}
    if rng.random() < 0.3:
        ends["min_tokens"] = rng.randint(1, max_tokens)
    if rng.random() < 0.4:
        return SamplingParams(temperature=0.0, **ends)
    return SamplingParams(
        temperature=rng.choice([0.3, 0.8, 1.0, 1.5, 4.0]),
        top_k=rng.choice([0, 0, 1, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.2]),
        seed=rng.choice([0, 1, rng.getrandbits(64), -rng.getrandbits(62)]),
        **ends,
    )


def with_penalties(job: Job) -> Job:
    """Two of three jobs: penalties, biases and bans of all kinds."""
    rng = random.Random(f"penalties {job.prompt}")
    tokens = lambda count: rng.sample(range(3, VOCAB_SIZE), count)
    options = {
        "presence_penalty": rng.choice([0.0, 0.0, 0.7, -0.4]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.3, 1.1]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.2, 0.9]),
        "logit_bias": {token: rng.uniform(-4, 4) for token in tokens(rng.choice([0, 0, 8]))},
        "bad_token_ids": tokens(rng.choice([0, 0, 5])),
        "bad_words": _bad_words(rng) if rng.random() < 0.3 else [],
        "allowed_token_ids": tokens(80) if rng.random() < 0.2 else None,
    }
    return job.with_params(**options) if rng.random() < 0.67 else job


def _bad_words(rng: random.Random) -> list[str]:
    """For the tokenizer of `combo_life`. So many that some are begun."""
    return [" ".join(map(str, rng.choices(range(3, VOCAB_SIZE), k=rng.choice([1, 2, 2, 3])))) for _ in range(60)]


def with_grammar(job: Job) -> Job:
    """Half of the jobs. The text is that of the tokenizer that `combo_life` gives the grammars."""
    rng = random.Random(f"grammar {job.prompt}")
    kinds: list[dict[str, Any]] = [
        {"regex": rng.choice(["[a-m]{2,30}", "(ab|[0-9])+", "x", "[^a-z]{5}[a-z]*"])},
        {"choice": rng.sample(["red", "redder", "green", "a", "ab", "ba0 ba0 ba0"], 3)},
        {"grammar": 'start: "(" start ")" | /[a-f]/'},
        {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy", None]}},
                "required": ["a"],
            },
            "disable_any_whitespace": rng.random() < 0.5,
        },
    ]
    params = StructuredOutputsParams(**rng.choice(kinds))
    return job.with_params(structured_outputs=params) if rng.random() < 0.5 else job


def with_logprobs(job: Job) -> Job:
    """Half of the jobs, some of them for the prompt, too."""
    rng = random.Random(f"logprobs {job.prompt}")
    if rng.random() < 0.5:
        return job
    return job.with_params(
        logprobs=rng.choice([None, 0, 1, 5, 20]), prompt_logprobs=rng.choice([None, None, None, 0, 3])
    )


def _salt(rng: random.Random) -> str | None:
    return rng.choice([None, None, None, "a"])
