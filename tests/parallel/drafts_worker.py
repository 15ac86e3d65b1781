"""As shards_worker.py, for engines that draft: it also compares the drafts themselves with those of one device.

Its argument is that of shards_worker.py. Prints the answers of each engine, what became of its drafts, and how many of
them, of sequences for which the engine `drafting` has made some, are others than there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from shards_worker import PROMPTS, engine_options, plain, shaped, told

from noria import LLM, SamplingParams
from noria.engine.draft_model import DraftModelProposer
from noria.spec.proposer import DraftLength, DraftRequest, Proposer

Heard = dict[tuple[Any, ...], list[int]]  # drafts by the tokens known, and how they are sampled


class Listening:
    """Another proposer, and what it proposed."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.drafts: Heard = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        found = self._proposer.propose(requests)
        for request, drafts in zip(requests, found):
            key = (request.random_key, request.sampling_params.temperature, *request.token_ids)
            self.drafts[key] = max(drafts, self.drafts.get(key, []), key=len)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)


def often(length: DraftLength, num_tokens: int) -> int:
    """In place of DraftLength.wanted: as many as may be, whatever became of those before, now and then none."""
    return length.most if num_tokens % 5 else 0


def hot() -> list[SamplingParams]:
    """Where noise decides, random weights are often right."""
    return [SamplingParams(temperature=4, seed=index, max_tokens=30, ignore_eos=True) for index in range(7)]


def check_books(llm: LLM, proposer: Any) -> None:
    """Everything is given back, and nothing was compiled."""
    llm.engine.core.scheduler.check_integrity()
    assert llm.engine.core.runner.compiles_after_warmup == 0
    if isinstance(proposer, DraftModelProposer):
        assert not proposer._sequences
        assert proposer._runner.compiles_after_warmup == 0
        for cache in proposer._caches:
            cache.check_integrity()
            assert cache.stats.num_used == 0


def different(drafts: Heard, expected: Heard) -> tuple[int, int]:
    """Of the sequences that both know, how many there are, and how many have other drafts."""
    same = [key for key in drafts.keys() & expected.keys() if drafts[key] and expected[key]]
    begins = lambda one, two: all(a == b for a, b in zip(one, two))
    return len(same), sum(not begins(drafts[key], expected[key]) for key in same)


def main(job: dict[str, Any]) -> dict[str, Any]:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found, heard = {}, dict[str, Heard]()
    for name, options in job["engines"].items():
        with patch.object(DraftLength, "wanted", often), LLM(**engine_options(job) | options) as llm:
            speculation = llm.engine.core.speculation
            proposer = speculation._proposer
            if proposer is not None:
                speculation._proposer = listening = Listening(proposer)
                heard[name] = listening.drafts
            every = (hot(),) if job["few"] else (shaped(job["speaks"]), shaped(job["speaks"]), plain(), hot())
            answers = [told(llm.generate(prompts, params)) for params in every]
            stats = llm.stats
            check_books(llm, proposer)
        found[name] = {
            "answers": answers,
            "drafts": stats.speculation.num_draft_tokens,
            "accepted": stats.speculation.num_accepted_tokens,
            "preemptions": stats.scheduler.num_preemptions,
        }
        if name in heard and "drafting" in heard:
            found[name]["known"], found[name]["different"] = different(heard[name], heard["drafting"])
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
