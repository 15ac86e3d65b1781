"""`noria run`: one prompt, one answer."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria.cli import options
from noria.cli.display import fetch, note, progress_bar, statistics
from noria.cli.hosts import follow_if_told
from noria.cli.main import UsageError
from noria.cli.structured import refuse_bad, structured_options, structured_outputs
from noria.config import EngineConfig, SamplingParams
from noria.engine.admission import Admission
from noria.errors import NoriaError, RequestError
from noria.text.chat import encode_chat
from noria.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from noria.engine.llm import LLM
    from noria.engine.logprobs import TokenLogprobs
    from noria.engine.outputs import CompletionOutput, RequestOutput
    from noria.spec.stats import SpeculationStats

_TEXT = """Answers one prompt: the text goes to stdout as it comes, everything else to stderr.

A model with a chat template gets the prompt as a message of a user, which is how a model that is tuned for
instructions expects a question. With --raw, and without a template, the prompt is a text to be continued."""


def main(args: Sequence[str]) -> int:
    begin = time.perf_counter()
    chosen = options.parse(
        "run",
        _TEXT,
        args,
        [
            options.model_argument(),
            options.optional_argument("text", "[PROMPT]", "the prompt; - reads it from stdin"),
            options.option("prompt", str | None, None, "the same as an option", "-p"),
            options.option("raw", bool, False, "continue the prompt as it stands, without the model's chat template"),
            options.option("json", bool, False, "print one JSON object instead of the text"),
        ],
        sampling=options.sampling_options(max_tokens=128, temperature=0.0),
        structured=structured_options(),
        engine=options.engine_options(max_num_seqs=8),
    )
    structured = structured_outputs(chosen.structured)
    params = options.sampling_params(chosen.sampling, structured_outputs=structured)
    config = EngineConfig(model=chosen.model, seed=params.seed, **options.values_of(chosen.engine))
    _check_logprobs(params, config, shown=chosen.json)
    prompt = _read_prompt(_the_one(chosen.text, chosen.prompt))
    path = fetch(config.model, config.revision)
    _refuse_long(prompt, config, path)
    if structured is not None:
        refuse_bad(structured, tokenizer_of(config, path))
    with start(config, path) as llm:
        start_s = time.perf_counter() - begin
        note(str(llm.stats.startup))
        templated = not chosen.raw and llm.tokenizer.chat_template is not None
        tokens: Any = encode_chat(llm.tokenizer, [{"role": "user", "content": prompt}]) if templated else prompt
        result = _answer(llm, tokens, params, quiet=chosen.json)
        stats = {"start_s": start_s, **_stats(llm, result)}
    if chosen.json:
        print(
            json.dumps(
                {"model": chosen.model, "chat_template": templated, **_json(result), "stats": stats}, ensure_ascii=False
            )
        )
    else:
        note(statistics(stats, result.usage))
    for output in result.outputs:
        if output.finish_reason == "error":
            raise NoriaError(str(output.stop_reason or "the request failed while it ran; the log above says why"))
    return 0


def _check_logprobs(params: SamplingParams, config: EngineConfig, *, shown: bool) -> None:
    """Before anything is compiled for what the engine would refuse, or nobody would see."""
    for name in ("logprobs", "prompt_logprobs"):
        value, flag = getattr(params, name), f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if not shown:
            raise UsageError(f"{flag} is shown with --json only; add it, or leave {flag} out")
        if value > config.max_logprobs:
            raise UsageError(f"{flag} ({value}) exceeds --max-logprobs ({config.max_logprobs}); raise that one")


def start(config: EngineConfig, path: Path) -> LLM:
    """The engine for a model that was fetched to `path`, started with progress bars.

    Raises Done on a host that follows another, when that has ended.
    """
    follow_if_told(config, path)
    from noria.engine.llm import LLM  # jax comes with it and takes a second, so errors of the options come first

    here = dataclasses.replace(config, model=str(path), revision=None)
    return LLM(**options.values_of(here), progress=progress_bar)


def tokenizer_of(config: EngineConfig, path: Path) -> Tokenizer:
    """path: where the model is."""
    return load_tokenizer(Path(config.tokenizer) if config.tokenizer else path, config.chat_template)


def _refuse_long(prompt: str, config: EngineConfig, path: Path) -> None:
    """Raises RequestError for a prompt of more than max_model_len tokens before a minute is spent on compiling.

    The engine checks again; so this looks only where it may matter, because loading a tokenizer takes a moment.
    """
    limit = config.max_model_len
    if limit is None or len(prompt.encode("utf-8", "surrogatepass")) < limit:  # no token is less than a byte
        return
    tokenizer = tokenizer_of(config, path)
    admission = Admission(tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=limit, eos_token_ids=(), seed=None)
    admission.tokenize(prompt)


def _the_one(text: str | None, prompt: str | None) -> str:
    """The prompt, which is given as an argument or as an option."""
    if text is not None and prompt is not None:
        raise UsageError(f"unexpected argument {text!r}: --prompt is there already; see noria run --help")
    given = prompt if text is None else text
    if given is None:
        raise UsageError("the prompt is missing; see noria run --help")
    return given


def _read_prompt(argument: str) -> str:
    """One line end after the last line is the file's, not the prompt's."""
    try:
        prompt = sys.stdin.read().removesuffix("\n") if argument == "-" else argument
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not {error.encoding} text: {error.reason} at byte {error.start}") from None
    try:
        prompt.encode("utf-8")  # bytes that are not UTF-8 come as lone surrogates, depending on the locale
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not UTF-8 text at character {error.start}") from None
    if not prompt:
        raise RequestError("the prompt is empty; give some text")
    return prompt


def _answer(llm: LLM, prompt: Any, params: SamplingParams, *, quiet: bool) -> RequestOutput:
    """Text is written while it comes; of several sequences (n > 1), which come at the same time, at the end."""
    streams = params.n == 1 and not quiet
    result: RequestOutput | None = None
    for part in llm.stream(prompt, params):
        if streams:
            print("".join(output.text for output in part.outputs), end="", flush=True)
        if result is None:
            result = part
        else:
            result.add(part)
    assert result is not None  # a stream ends with an output
    if streams:
        print(flush=True)
    elif not quiet:
        for output in result.outputs:
            print(f"[{output.index}] {output.text}", flush=True)
    return result


def _json(result: RequestOutput) -> dict[str, Any]:
    """Log-probabilities are there when they were asked for."""
    choices = [
        {
            "index": output.index,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        | ({} if output.logprobs is None else _logprobs(output))
        for output in result.outputs
    ]
    first = {key: value for key, value in choices[0].items() if key != "index"}
    answer = {**first, **({"choices": choices} if len(choices) > 1 else {}), "usage": result.usage}
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [_by_token(token) for token in result.prompt_logprobs]
    return answer


def _logprobs(output: CompletionOutput) -> dict[str, Any]:
    tokens = [_by_token(token) for token in output.logprobs or ()]
    return {"logprobs": tokens, "cumulative_logprob": output.cumulative_logprob}


def _by_token(token: TokenLogprobs | None) -> dict[int, dict[str, Any]] | None:
    if token is None:
        return None
    return {token_id: dataclasses.asdict(logprob) for token_id, logprob in token.items()}


def _stats(llm: LLM, result: RequestOutput) -> dict[str, Any]:
    """Seconds and tokens per second; a rate is None when there is nothing to divide by."""
    stats, metrics, usage = llm.stats, result.metrics, result.usage
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    first_s = metrics.first_token_time - metrics.arrival_time
    rest_s = metrics.finished_time - metrics.first_token_time
    later = usage["completion_tokens"] - len(result.outputs)  # the first token of each comes with the prompt
    return {
        "compiles_after_warmup": stats.compiles_after_warmup,
        "programs": stats.startup.programs,
        "programs_compiled": stats.startup.compiled,
        "load_s": stats.startup.load_s,
        "warmup_s": stats.startup.warmup_s,
        "time_to_first_token_s": first_s,
        "total_s": first_s + rest_s,
        "prefill_tok_s": (usage["prompt_tokens"] - usage["cached_tokens"]) / first_s if first_s > 0 else None,
        "decode_tok_s": later / rest_s if later > 0 and rest_s > 0 else None,
        "steps": stats.steps,
        "host_share": stats.times.host_share,
        "host_gap_s": stats.times.gap_s,
        "weights_bytes": stats.startup.memory.weights,
        "kv_cache_bytes": stats.startup.memory.cache,
        "speculation": speculation_figures(stats.speculation) if llm.config.speculation is not None else None,
    }


def speculation_figures(stats: SpeculationStats) -> dict[str, Any]:
    """What became of drafts, for JSON."""
    return {
        **dataclasses.asdict(stats),
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
    }
