"""Prints as JSON what devices exchange in the programs of an engine: (kind, bytes, times) of each collective.

Its argument is JSON: a model folder, options of each engine by name, and the folder for compiled programs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from noria import LLM
from noria.aot.hlo import exchanges


def main(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in job["engines"].items():
        with LLM(
            model=job["model"],
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            max_model_len=96,
            max_num_seqs=8,
            max_num_batched_tokens=16,
            block_size=8,
            num_blocks_override=40,
            attention_backend="xla",
            linear_backend="xla",
            compile_cache_dir=job["compile_cache_dir"],
            **options,
        ) as llm:
            jobs = llm.engine.core.runner.jobs()
            texts = {
                kind: jobs[key]().compile().as_text()
                for kind, key in (("forward", ("forward", 16)), ("sample", ("sample", 8)))
            }
            found[name] = {
                kind: [dataclasses.astuple(each) for each in exchanges(text)] for kind, text in texts.items()
            }
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
