"""`noria batch`: many requests out of a file, their answers into another, in OpenAI's batch format."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noria.cli import options
from noria.cli.display import counting_bar, fetch, note
from noria.cli.hosts import follow_if_told
from noria.cli.main import UsageError
from noria.config import EngineConfig

if TYPE_CHECKING:
    from noria.server.batch.run import Tally

_TEXT = """Answers the requests in INPUT, one JSON object a line, and writes a line for each to OUTPUT.

Lines that OUTPUT has already are skipped, so an interrupted batch goes on with the same command. The exit status is 1
when a line of OUTPUT is an error."""


def main(args: Sequence[str]) -> int:
    chosen = options.parse(
        "batch",
        _TEXT,
        args,
        [
            options.argument("input", "INPUT", "JSON lines with custom_id, method, url and body"),
            options.argument("output", "OUTPUT", "file for the results; what is in it already is kept"),
            options.option("model", str, options.MISSING, "a folder, a .gguf file, a Hub id, or a known name"),
            options.repeated("served_model_name", str, "what bodies call the model; --model without it"),
            options.option(
                "max_concurrency", int | None, None, "lines at a time; twice max_num_seqs, which keeps the engine full"
            ),
        ],
        engine=options.engine_options(offer=("seed",)),
    )
    if chosen.max_concurrency is not None and chosen.max_concurrency < 1:
        raise UsageError(f"--max-concurrency must be at least 1, not {chosen.max_concurrency}")
    if not all(chosen.served_model_name):
        raise UsageError("--served-model-name must not be empty")
    config = EngineConfig(model=chosen.model, **options.values_of(chosen.engine))
    from noria.server.batch.files import Input, Output

    if config.node_rank:  # host 0 has the files
        follow_if_told(config, fetch(config.model, config.revision))
    source = Input.open(Path(chosen.input))
    path = fetch(config.model, config.revision)
    with Output(Path(chosen.output), source) as output:
        total, done = len(source.keys), len(output.done)
        note(f"{total:,} lines" + (f", {done:,} of them have a result already" if done else ""))
        failed = output.num_failed
        if done < total:
            from noria.server.batch.run import run_batch  # and with it FastAPI

            try:
                with counting_bar("answering", stays=True) as show:
                    tally = asyncio.run(
                        run_batch(
                            dataclasses.replace(config, model=str(path), revision=None),
                            chosen.served_model_name or (chosen.model,),
                            source,
                            output,
                            max_concurrency=chosen.max_concurrency,
                            note=note,
                            progress=lambda done: show(done, total),
                        )
                    )
            except KeyboardInterrupt:
                note("interrupted; the same command goes on from here")
                raise
            failed += tally.failed
            note(_summary(tally))
    if failed:
        note(f"{failed:,} of {total:,} results in {chosen.output} are errors")
    return 1 if failed else 0


def _summary(tally: Tally) -> str:
    rate = f"{tally.completion_tokens / tally.seconds:,.1f} output tokens/s" if tally.seconds else "no time"
    return (
        f"{tally.answered:,} answered, {tally.failed:,} failed in {tally.seconds:,.1f} s: "
        f"{tally.prompt_tokens:,} tokens in, {tally.completion_tokens:,} out, {rate}"
    )
