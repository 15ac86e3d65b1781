"""What a request may ask of the sampler and of the text: every parameter, and the check of them.

Plain Python without jax, so that a bad parameter is named before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import json as json_module
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from noria.checks import describe, hints, is_a
from noria.errors import RequestError

TokenIds = list[int] | tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of an answer must be: exactly one of the first six. Names and meanings are vLLM's.

    Whether a grammar is a good one is found out when it is compiled (`noria.grammar`). Raises RequestError when a name
    is unknown, a value of the wrong type, or the number of kinds is not one.
    """

    json: str | dict | None = None  # a JSON schema; kept as text
    regex: str | None = None  # of the whole text, in the syntax of Rust's regex crate
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None  # context-free: Lark, or the EBNF that llama.cpp calls GBNF
    json_object: bool | None = None  # any JSON object
    structural_tag: str | dict | None = None  # free text with structured parts, as JSON; kept as text
    disable_any_whitespace: bool = False  # with json and json_object: none between the tokens of JSON

    def __new__(cls, *positional: Any, **options: Any) -> Self:
        known = [f.name for f in dataclasses.fields(cls)]
        if positional:
            raise RequestError(f"structured outputs are given by name: {', '.join(known)}")
        for name in options:
            if name not in known:
                raise RequestError(f"structured_outputs: unknown option {name}; {hint(name, known)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field, kind in hints(StructuredOutputsParams).items():
            if not is_a(getattr(self, field), kind):
                raise RequestError(f"structured_outputs: {field} must be {describe(kind)}")
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        for field in ("json", "structural_tag"):
            if isinstance(value := getattr(self, field), dict):
                object.__setattr__(self, field, _as_json(field, value))
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if getattr(self, name) not in (None, False)]
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise RequestError("structured_outputs: choice must hold at least one text, and no empty one")
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"structured_outputs must have exactly one of {', '.join(kinds)}, not {found}")

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        return next(name for name in kinds if getattr(self, name) not in (None, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and meanings are vLLM's.

    Logits go through, in this order: what is not allowed, bad words and (before min_tokens) stop tokens, logit_bias,
    penalties (repetition, frequency, presence), temperature, top-k, top-p, min-p; tokens that tie with the last one
    kept are kept too. Raises RequestError when a name is unknown, or a value out of range or of the wrong type.
    """

    n: int = 1  # sequences to generate from the prompt
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: unpredictable unless the engine has a seed
    max_tokens: int | None = 16  # None: up to max_model_len
    min_tokens: int = 0  # no stop token before so many were generated
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were generated before; -2 to 2
    frequency_penalty: float = 0.0  # the same, once for each time they were; -2 to 2
    repetition_penalty: float = 1.0  # above 1: makes tokens of prompt and output less likely
    logit_bias: dict[int, float] | tuple[tuple[int, float], ...] | None = None  # token id -> -100 to 100, added to it
    allowed_token_ids: TokenIds = None  # no other token is sampled
    bad_words: list[str] | tuple[str, ...] | None = None  # texts that are not generated, as the tokenizer writes them
    bad_token_ids: TokenIds = None  # tokens that are not sampled
    logprobs: int | None = None  # log-probabilities of each token and of so many of the likeliest
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    structured_outputs: StructuredOutputsParams | None = None  # what the text must be

    def __new__(cls, *positional: Any, **options: Any) -> Self:
        """The generated __init__ would answer a wrong name with a TypeError about itself."""
        if positional:
            raise RequestError("sampling parameters are given by name, as in SamplingParams(temperature=0.8)")
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name in _UNSUPPORTED:
                raise RequestError(f"{name} is not supported; leave it out")
            if name not in known:
                raise RequestError(f"unknown sampling parameter {name}; {hint(name, known)}")
        return object.__new__(cls)

    @classmethod
    def from_options(cls, **options: Any) -> SamplingParams:
        """The constructor by the name that EngineConfig's has, for options of which not all need be known."""
        return cls(**options)

    def __post_init__(self) -> None:
        for field, kind in hints(SamplingParams).items():
            if not is_a(getattr(self, field), kind):
                raise RequestError(f"{field} must be {describe(kind)}, not {getattr(self, field)!r}")
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        for field in ("stop_token_ids", "bad_words", "bad_token_ids"):
            object.__setattr__(self, field, tuple(getattr(self, field) or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        bias = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias or ()
        object.__setattr__(self, "logit_bias", tuple(sorted(dict(bias).items())))
        self._check_ranges()
        self._check_shaping()

    def _check_ranges(self) -> None:
        for name in ("n", "top_k", "max_tokens", "min_tokens"):  # seed has its own check
            if not -(2**63) <= (getattr(self, name) or 0) < 2**63:
                raise RequestError(f"{name} must fit 64 bits; leave it out for no limit")
        checks = (
            (self.n >= 1, f"n must be at least 1, not {self.n}"),
            (
                math.isfinite(self.temperature) and self.temperature >= 0,
                f"temperature must be a finite number of at least 0, not {self.temperature}",
            ),
            (self.top_k >= -1, f"top_k must be at least 1, or 0 or -1 for no limit, not {self.top_k}"),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}"),
            (0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}"),
            (
                self.max_tokens is None or self.max_tokens >= 1,
                f"max_tokens must be at least 1, or None for no limit, not {self.max_tokens}",
            ),
            (self.min_tokens >= 0, f"min_tokens must be at least 0, not {self.min_tokens}"),
            (
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
            ),
            (
                self.seed is None or -(2**63) <= self.seed < 2**64,
                f"seed must fit 64 bits, not {self.seed}",
            ),
            (all(self.stop_strings), "stop must not contain an empty string"),
        )
        for good, message in checks:
            if not good:
                raise RequestError(message)

    def _check_shaping(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise RequestError(f"{name} must be in [-2, 2], not {getattr(self, name)}")
        if not 1e-6 <= self.repetition_penalty <= 1e6:  # beyond that, logits stop being numbers
            raise RequestError(f"repetition_penalty must be in [1e-6, 1e6], not {self.repetition_penalty}")
        for token_id, bias in self.biases:
            if not -100 <= bias <= 100:
                raise RequestError(f"logit_bias: the bias of token {token_id} must be in [-100, 100], not {bias}")
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids must hold at least one token id, or be None for all of them")
        if not all(word.strip() for word in self.bad_words or ()):
            raise RequestError("bad_words must not contain an empty string")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise RequestError(
                    f"{name} must be 0 to the engine's max_logprobs, or None for none, not {value}; "
                    "to get more of them raise max_logprobs"
                )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as pairs of token id and bias."""
        return typing.cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def is_penalized(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def is_shaped(self) -> bool:
        """Whether the sampler has to do more than choose: change logits by token, or report log-probabilities."""
        changes = self.logit_bias or self.bad_words or self.bad_token_ids or self.allowed_token_ids is not None
        asks = self.logprobs is not None or self.structured_outputs is not None
        return bool(self.is_penalized or changes or asks)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return typing.cast("tuple[str, ...]", self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


# Parameters of vLLM and OpenAI that have no meaning here.
_UNSUPPORTED = frozenset(
    {
        "best_of", "use_beam_search", "length_penalty", "early_stopping", "logits_processors", "guided_decoding",
        "truncate_prompt_tokens", "detokenize", "spaces_between_special_tokens", "flat_logprobs",
        "output_kind", "extra_args",
    }
)  # fmt: skip


def hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known options: {', '.join(known)}"


def _as_json(name: str, value: dict) -> str:
    try:
        return json_module.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"structured_outputs: {name} is not JSON: {error}") from None


def _as_tuple(stop: str | list[str] | tuple[str, ...] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
