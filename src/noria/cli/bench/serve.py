"""`noria bench serve`: how long the users of a running server wait, and how much it gets done meanwhile."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from noria.cli import options
from noria.cli.bench.report import Report
from noria.cli.bench.serve_options import Plan, plan
from noria.cli.display import counting_bar, note
from noria.errors import NoriaError

if TYPE_CHECKING:
    from noria.bench.client import LoadClient
    from noria.bench.load import Run
    from noria.bench.records import Question

_TEXT = """Sends requests to a server with OpenAI's API, streams the answers, and reports times, throughput and errors.

Options are called as in vllm bench serve. Several values of --max-concurrency or of --request-rate are a sweep.
The key is --api-key or OPENAI_API_KEY in the environment. The exit status is 1 when a request failed."""


def main(args: Sequence[str]) -> int:
    values = options.parse("bench serve", _TEXT, args, fields())
    key = values.api_key if values.api_key is not None else os.environ.get("OPENAI_API_KEY")
    return asyncio.run(_main(plan(values), key))


def fields() -> list[options.Field]:
    option = options.option
    return [
        option("base_url", str, "http://127.0.0.1:8000", "where the server is"),
        option("endpoint", str, "/v1/completions", "/v1/completions or /v1/chat/completions"),
        option("model", str | None, None, "the model to ask for; the first of /v1/models without it"),
        option("api_key", str | None, None, "sent as a bearer token"),
        option("num_prompts", int, 1000, "requests of a run"),
        option("request_rate", tuple[float, ...], (), "requests per second; inf, the default: all at once"),
        option("max_concurrency", tuple[int, ...], (), "requests at a time, the others wait here; any number without"),
        option("burstiness", float, 1.0, "of the arrivals: 1 is a Poisson process, less is burstier, more is steadier"),
        option(
            "dataset_name",
            Literal["random", "prefix_repetition", "custom"],
            "random",
            "random prompts, random ones with a few prefixes, or those of --dataset-path",
        ),
        option("dataset_path", Path | None, None, 'JSON lines: {"prompt": ..., "output_tokens": ...}'),
        option("custom_output_len", int, 256, "tokens to generate for a line that does not say how many"),
        option("random_input_len", int, 1024, "tokens of a random prompt"),
        option("random_output_len", int, 128, "tokens to generate for a random prompt"),
        option("random_prefix_len", int, 0, "tokens that all random prompts share, before their own"),
        option("random_range_ratio", float, 0.0, "lengths vary by this part of themselves, 0 to 1"),
        option("prefix_repetition_prefix_len", int, 256, "tokens of a prefix"),
        option("prefix_repetition_suffix_len", int, 256, "tokens after the prefix"),
        option("prefix_repetition_num_prefixes", int, 10, "different prefixes"),
        option("prefix_repetition_output_len", int, 128, "tokens to generate"),
        option(
            "prompt_format",
            Literal["auto", "ids", "text"],
            "auto",
            "how made-up prompts are sent; auto: token ids where the server takes them",
        ),
        option("seed", int, 0, "of prompts and arrivals"),
        option("num_warmups", int, 0, "requests before the first run that are not counted"),
        option("ignore_eos", bool, False, "send ignore_eos, so that every answer has its full length"),
        option("temperature", float, 0.0, "of the sampling; 0 is greedy"),
        option("extra_body", str | None, None, "further fields of every request, as a JSON object"),
        option("request_timeout", float, 600.0, "seconds after which an answer counts as failed"),
        option("percentile_metrics", str, "ttft,tpot,itl,e2el", "what is reported"),
        option("metric_percentiles", str, "90,99", "percentiles beside mean and median"),
        option(
            "goodput", tuple[str, ...], (), "METRIC:MILLISECONDS: count requests within these, as in ttft:200 tpot:50"
        ),
        option("save_result", Path | None, None, "write everything into this file as JSON"),
        option("save_detailed", bool, False, "with the times of every request"),
        option(
            "plot",
            Path | None,
            None,
            "write a picture into this file (SVG): latencies by percentile, of a sweep by throughput",
        ),
        option("json", bool, False, "print JSON lines instead of tables"),
    ]


async def _main(asked: Plan, key: str | None) -> int:
    from noria.bench.client import LoadClient  # and with it httpx, which takes a while

    async with LoadClient(
        asked.base_url,
        asked.endpoint,
        asked.model,
        api_key=key,
        extra=asked.extra,
        timeout_s=asked.request_timeout,
    ) as client:
        model = await client.find_model()
        write = await asked.find_format(client)
        report = Report(asked, model)
        report.begin()
        if asked.num_warmups:
            await _warm_up(asked, client, asked.questions("warm-up", asked.num_warmups, write))
        runs, results = list["Run"](), list[dict[str, Any]]()
        for number, load in enumerate(asked.loads):
            run = await _run(asked, client, number, asked.questions(number, asked.num_prompts, write))
            runs.append(run)
            results.append(report.show(load, run))
    if asked.save_result is not None:
        _write(asked.save_result, json.dumps(_document(asked, model, results, runs), indent=1, allow_nan=False) + "\n")
    if asked.plot is not None:
        _write(asked.plot, report.picture(runs, results))
    if failed := sum(result["failed"] for result in results):
        note(f"{failed} of {sum(len(run.records) for run in runs)} requests failed")
        return 1
    return 0


async def _warm_up(asked: Plan, client: LoadClient, questions: list[Question]) -> None:
    from noria.bench.load import Load, run

    most = max((load.max_concurrency or len(questions)) for load in asked.loads)
    await run(client.ask, questions, Load(max_concurrency=most), random.Random(0))


async def _run(asked: Plan, client: LoadClient, number: int, questions: list[Question]) -> Run:
    from noria.bench.load import run

    load = asked.loads[number]
    with counting_bar(str(load)) as progress:
        return await run(client.ask, questions, load, random.Random(f"{asked.seed}/arrivals"), progress)


def _document(asked: Plan, model: str, results: list[dict[str, Any]], runs: list[Run]) -> dict[str, Any]:
    from noria.bench.figures import details

    if asked.save_detailed:
        results = [{**result, **details(run)} for result, run in zip(results, runs)]
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"date": date, "base_url": asked.base_url, "endpoint": asked.endpoint, "model_id": model, "runs": results}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NoriaError(f"{path} cannot be written: {error.strerror or error}") from None
