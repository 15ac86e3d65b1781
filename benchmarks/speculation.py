"""Single-stream decode with speculation and without, on prompts whose answers repeat them and on one that does not.

Run: python benchmarks/speculation.py --model MODEL.gguf --speculative-config '{"method": "ngram", ...}'

Both engines are in this process and answer each prompt in turn, `--rounds` times; the answers must be the same. A
figure is the median over the rounds of the tokens after the first by the time they took. In repetitive tasks (an edit,
code, JSON, a summary of sentences taken over) the answer repeats the prompt; the plain one is a story told at random,
in which the last words come up again only by chance: there speculation must not cost anything.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path
from typing import Any

from noria import LLM, SamplingParams
from noria.cli.bench.machine import versions
from noria.observe.machine import processor

CODE = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def moved(self, dx, dy):
        return Point(self.x + dx, self.y + dy)

    def scaled(self, factor):
        return Point(self.x * factor, self.y * factor)
"""
PEOPLE = [{"name": name, "city": city, "active": True} for name, city in (("Ada", "London"), ("Emmy", "Göttingen"))]
WHEEL = """The wheel turns by the river. The wheel lifts the water in twelve buckets, and each bucket of the wheel \
empties into a channel of wood. Farmers come to the wheel in spring, when the river is high, and again in autumn."""
BOAT = """The boat lies by the bridge. The boat carries forty people and their bicycles, and the captain of the boat \
has known the river since he was a child. Tourists come to the boat in summer, when the days are long."""
TOWER = """The tower stands on the hill. The tower was built of grey stone by three brothers, and the door of the \
tower opens to the south. Children come to the tower on Sundays, when the guard is away, and look at the sea. From the \
tower they see the harbour, the market and the old school, and the ships that go to the islands."""


def edited(text: str) -> str:
    return text.replace("river", "lake")


def short(text: str) -> str:
    sentences = text.split(". ")
    return f"{sentences[0]}. {sentences[2]}"


# Prompt, length of the answer, temperature.
PROMPTS = {
    "code": (f"Before:\n{CODE}\nAfter:\n{CODE}\nBefore:\n{CODE.replace('Point', 'Vector')}\nAfter:\n", 80, 0.0),
    "json": (f"Copy the records.\n{json.dumps(PEOPLE * 3)}\nThe same records again:\n", 96, 0.0),
    "edit": (
        f"Text: {WHEEL}\nEdited: {edited(WHEEL)}\nText: {BOAT}\nEdited: {edited(BOAT)}\nText: {TOWER}\nEdited:",
        80,
        0.0,
    ),
    "summary": (
        f"Text: {WHEEL}\nSummary: {short(WHEEL)}\nText: {BOAT}\nSummary: {short(BOAT)}\nText: {TOWER}\nSummary:",
        80,
        0.0,
    ),
    "plain": ("Once upon a time", 128, 1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speculative-config", default='{"method": "ngram", "num_speculative_tokens": 7}')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", help="a file that the lines are appended to")
    args = parser.parse_args()
    options = {"model": args.model, "dtype": args.dtype, "max_model_len": 1024, "max_num_seqs": 1}
    options["enable_prefix_caching"] = False  # every round computes the prompt
    about = {
        "date": datetime.date.today().isoformat(),
        "processor": processor().name,
        "versions": versions(),
        "model": Path(args.model).name,
        "speculative_config": json.loads(args.speculative_config),
        "dtype": args.dtype,
    }
    with LLM(**options) as plain, LLM(**options, speculative_config=args.speculative_config) as speculating:
        for name in PROMPTS:
            line = json.dumps({**about, "prompt": name, **compare(plain, speculating, name, args.rounds)})
            print(line, flush=True)
            if args.output:
                with open(args.output, "a") as file:
                    print(line, file=file)


def compare(plain: LLM, speculating: LLM, name: str, rounds: int) -> dict[str, Any]:
    prompt, length, temperature = PROMPTS[name]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=length, ignore_eos=True)
    rates: dict[str, list[float]] = {"plain": [], "speculating": []}
    before = speculating.stats.speculation
    for _ in range(rounds + 1):
        answers = []
        for name, llm in (("plain", plain), ("speculating", speculating)):
            rate, token_ids = measure(llm, prompt, params)
            rates[name].append(rate)
            answers.append(token_ids)
        if answers[0] != answers[1]:
            raise SystemExit("the answers differ")
    after = speculating.stats.speculation
    proposed = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    without, with_drafts = (
        statistics.median(rates[name][1:]) for name in ("plain", "speculating")
    )  # the first warms up
    return {
        "tok_s_without": round(without, 1),
        "tok_s_with": round(with_drafts, 1),
        "times": round(with_drafts / without, 2),
        "drafts_per_answer": round(proposed / (rounds + 1), 1),
        "accepted_per_answer": round(accepted / (rounds + 1), 1),
    }


def measure(llm: LLM, prompt: str, params: SamplingParams) -> tuple[float, list[int]]:
    """Tokens a second after the first, and the answer."""
    token_ids: list[int] = []
    first = 0.0
    for part in llm.stream(prompt, params):
        first = first or time.perf_counter()
        token_ids += part.outputs[0].token_ids
    return (len(token_ids) - 1) / (time.perf_counter() - first), token_ids


if __name__ == "__main__":
    main()
