"""Options of speculation, spelled as in vLLM: {"method": "ngram", "num_speculative_tokens": 5}."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from noria.checks import describe, hints, is_a
from noria.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 16  # of one request in one step
_OWN: Mapping[str, tuple[str, ...]] = MappingProxyType(  # options that have a meaning for some methods only
    {
        "prompt_lookup_min": ("ngram",),
        "prompt_lookup_max": ("ngram",),
        "model": ("draft_model", "eagle3"),
        "revision": ("draft_model", "eagle3"),
        "quantization": ("draft_model", "eagle3"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made."""

    method: Literal["ngram", "draft_model", "eagle3"]
    num_speculative_tokens: int  # most drafts of one request in one step
    prompt_lookup_min: int = 3  # ngram: the shortest match that is continued
    prompt_lookup_max: int = 5  # ngram: longer matches are not told apart
    # draft_model: a folder, a .gguf file, a Hub id, or a name that `noria pull` knows; eagle3: a folder or a Hub id
    model: str | None = None
    revision: str | None = None  # draft_model, eagle3: of a Hub id
    quantization: Literal["auto", "none", "int8"] = "auto"  # draft_model, eagle3: as the engine's, for the draft alone

    @classmethod
    def parse(cls, given: str | dict[str, Any]) -> SpeculativeConfig:
        """From JSON or a dictionary. Raises ConfigError, which names what is wrong."""
        options = _dictionary(given)
        known = hints(cls)
        for name, value in options.items():
            if name not in known:
                raise _error(f"unknown option {name}; known options: {', '.join(known)}")
            if not is_a(value, known[name]):
                raise _error(f"{name} must be {describe(known[name])}, not {value!r}")
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in options:
                raise _error(f"{field.name} is missing; add it, as in {_EXAMPLE}")
        for name, methods in _OWN.items():
            if name in options and options["method"] not in methods:
                raise _error(
                    f"{name} belongs to the method {' or '.join(methods)}, not to {options['method']}; leave it out"
                )
        config = cls(**options)
        if config.method == "draft_model" and not config.model:
            raise _error("the method draft_model needs a model; name one that has the same tokenizer")
        if config.method == "eagle3" and not config.model:
            raise _error("the method eagle3 needs a model; name the folder of a head that was made for the model")
        if not 1 <= config.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise _error(
                f"num_speculative_tokens must be 1 to {MAX_SPECULATIVE_TOKENS}, not {config.num_speculative_tokens}"
            )
        if not 1 <= config.prompt_lookup_min <= config.prompt_lookup_max:
            raise _error(
                f"prompt_lookup_min ({config.prompt_lookup_min}) must be at least 1 and at most prompt_lookup_max "
                f"({config.prompt_lookup_max})"
            )
        return config

    @property
    def text(self) -> str:
        """As JSON, for `parse`."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return json.dumps({name: value for name, value in dataclasses.asdict(self).items() if value != defaults[name]})

    def check(self, max_model_len: int, max_num_batched_tokens: int) -> None:
        """max_num_batched_tokens: of a rank. Raises ConfigError when a whole burst of drafts could never be
        verified."""
        for name, limit in (("max_model_len", max_model_len), ("max_num_batched_tokens", max_num_batched_tokens)):
            if self.num_speculative_tokens >= limit:
                raise _error(
                    f"num_speculative_tokens ({self.num_speculative_tokens}) must be less than {name} ({limit}), "
                    "because they are verified together with the token they follow; lower it"
                )


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 5}'


def _dictionary(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise _error(f"{error}; it must be JSON, as in {_EXAMPLE}") from None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise _error(f"it must be a JSON object, as in {_EXAMPLE}")
    return given


def _error(reason: str) -> ConfigError:
    return ConfigError(f"speculative_config: {reason}")
