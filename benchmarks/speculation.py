"""Single-stream decode with speculation and without, on prompts that repeat themselves and on one that does not.

Run: python benchmarks/speculation.py --model MODEL.gguf --speculative-config '{"method": "ngram", ...}'

Both engines are in this process and answer each prompt in turn, greedily, `--rounds` times; the answers must be the
same. A figure is the median over the rounds of the tokens after the first by the time they took. Repetitive
tasks (edit, code, JSON to be copied) let an answer repeat them; in the plain one an answer's end comes up again only by
chance, and speculation must not cost anything. The model decides what it answers: acceptance is printed beside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from noria import LLM, SamplingParams

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
PROMPTS = {
    "code": f"Repeat this code exactly, twice:\n```python\n{CODE}```\nHere it is:\n```python\n{CODE}```\n```python\n",
    "json": f"Copy the records.\n{json.dumps(PEOPLE * 3)}\nThe same records again:\n",
    "edit": "Rewrite the text with the word mill instead of wheel.\n"
    "Text: The wheel turns by the river, the wheel grinds the corn, and the wheel never rests.\n"
    "Rewritten: The mill turns by the river, the mill grinds the corn, and the mill never rests.\n"
    "Text: The wheel is old, the wheel is made of oak, and the wheel was built by hand.\nRewritten:",
    "plain": "Here is a list of unusual words, each of them only once, in no order: zephyr, quartz, fjord,",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speculative-config", default='{"method": "ngram", "num_speculative_tokens": 7}')
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0, help="of the plain prompt, which a loop would help")
    args = parser.parse_args()
    options = {"model": args.model, "max_model_len": 1024, "max_num_seqs": 1, "enable_prefix_caching": False}
    with LLM(**options) as plain, LLM(**options, speculative_config=args.speculative_config) as speculating:
        for name, prompt in PROMPTS.items():
            print(json.dumps({"prompt": name, **compare(plain, speculating, prompt, args)}), flush=True)


def compare(plain: LLM, speculating: LLM, prompt: str, args: argparse.Namespace) -> dict[str, Any]:
    temperature = args.temperature if prompt is PROMPTS["plain"] else 0.0
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {"plain": [], "speculating": []}
    before = speculating.stats.speculation
    for _ in range(args.rounds + 1):
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
        "drafts_per_answer": round(proposed / (args.rounds + 1), 1),
        "accepted_per_answer": round(accepted / (args.rounds + 1), 1),
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
