"""One host of several: answers the requests of shards_worker.py on host 0, and follows on the others.

Its argument is JSON: what shards_worker.engine_options wants, options of the engine, and whether host 0 goes on
answering when it has printed its answers.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from shards_worker import PROMPTS, engine_options, plain, shaped, told

from noria import LLM, EngineConfig, follow


def answers(llm: LLM, speaks: bool) -> list[Any]:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [told(llm.generate(prompts, params)) for params in (shaped(speaks), shaped(speaks), plain())]


def main(job: dict[str, Any]) -> None:
    options = engine_options(job) | job["options"]
    if options["node_rank"]:
        follow(EngineConfig.from_options(**options), lambda text: print(text, file=sys.stderr, flush=True))
        return
    with LLM(**options) as llm:
        found = answers(llm, job["speaks"])
        preemptions, accepted = llm.stats.scheduler.num_preemptions, llm.stats.speculation.num_accepted_tokens
        print(json.dumps({"answers": found, "preemptions": preemptions, "accepted": accepted}), flush=True)
        while job["goes_on"]:
            answers(llm, job["speaks"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
