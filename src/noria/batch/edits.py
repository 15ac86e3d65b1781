"""What the device keeps of a request from step to step, as edits of the tables in step/shape.py.

A request that is admitted or comes back writes its row of the tables anew, from its token ids and parameters alone: so
nothing has to be saved when it is preempted, and whatever the row's last request left does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from noria.config import SamplingParams

MAX_ENTRIES = 1024  # of one edit
HEADER = 3  # row, whether the row is to be cleared first, bits of the bias it is cleared with
PROMPT, OUTPUT, BIAS, NOTHING = range(4)  # kinds of entries


def empty_edit() -> np.ndarray:
    """int32 [HEADER + 3 * MAX_ENTRIES]: the header, token ids, kinds, and values: counts, or the bits of a bias."""
    edit = np.zeros(HEADER + 3 * MAX_ENTRIES, np.int32)
    edit[HEADER + MAX_ENTRIES : HEADER + 2 * MAX_ENTRIES] = NOTHING
    return edit


def biases_of(params: SamplingParams, bad_token_ids: Iterable[int]) -> dict[int, float]:
    """What is added to the logits of tokens. bad_token_ids: besides those that the parameters name.

    Tokens that are not in it keep theirs or, where the parameters say which are allowed, cannot be sampled.
    """
    biases = dict(params.biases)
    if params.allowed_token_ids is not None:
        biases = {token_id: biases.get(token_id, 0.0) for token_id in params.allowed_token_ids}
    return biases | dict.fromkeys((*(params.bad_token_ids or ()), *bad_token_ids), -np.inf)


def row_edits(
    row: int, params: SamplingParams, biases: dict[int, float], token_ids: list[int], num_prompt_tokens: int
) -> Iterator[np.ndarray]:
    """The edits that make `row` that of a request with these tokens, in the order in which they are to be made.

    biases: see biases_of.
    """
    tokens, kinds, values = _entries(params, biases, token_ids, num_prompt_tokens)
    clear = np.float32(0 if params.allowed_token_ids is None else -np.inf)
    for start in range(0, max(len(tokens), 1), MAX_ENTRIES):
        edit = empty_edit()
        edit[:HEADER] = row, start == 0, clear.view(np.int32)
        for place, part in enumerate((tokens, kinds, values)):
            part = part[start : start + MAX_ENTRIES]
            begin = HEADER + place * MAX_ENTRIES
            edit[begin : begin + len(part)] = part
        yield edit


def _entries(
    params: SamplingParams, biases: dict[int, float], token_ids: list[int], num_prompt_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, kinds and values; of each kind a token has at most one."""
    parts: list[tuple[np.ndarray, int, np.ndarray]] = []
    if params.is_penalized:
        prompt = np.unique(np.array(token_ids[:num_prompt_tokens], np.int32))
        parts.append((prompt, PROMPT, np.ones(len(prompt), np.int32)))
        output, counts = np.unique(np.array(token_ids[num_prompt_tokens:], np.int32), return_counts=True)
        parts.append((output, OUTPUT, counts.astype(np.int32)))
    tokens = np.fromiter(biases, np.int32, len(biases))
    parts.append((tokens, BIAS, np.fromiter(biases.values(), np.float32, len(biases)).view(np.int32)))
    kinds = np.repeat(np.array([kind for _, kind, _ in parts]), [len(ids) for ids, _, _ in parts])
    return np.concatenate([ids for ids, _, _ in parts]), kinds, np.concatenate([values for _, _, values in parts])
