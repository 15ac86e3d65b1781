"""The router against a plain loop, and to the last bit whatever the number of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria.nn.routing import Routing

EXPERTS = 12
CORRECTION = np.linspace(-0.2, 0.3, EXPERTS).astype(np.float32)[::-1]
WAYS = {
    "qwen3": {"renormalize": True},
    "shares of all": {"renormalize": False},
    "deepseek-v2": {"renormalize": False, "scale": 16.0, "groups": 4, "chosen_groups": 2},
    "deepseek-v3": {
        "renormalize": True,
        "scoring": "sigmoid",
        "scale": 2.5,
        "groups": 4,
        "chosen_groups": 2,
        "group_score": "best two",
    },
}


def logits(rows: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((rows, EXPERTS)).astype(np.float32) * 2


def plainly(row: np.ndarray, correction: np.ndarray, way: dict[str, Any]) -> dict[int, float]:
    """Of one token: its experts and their shares."""
    row = row.astype(np.float64)
    scores = 1 / (1 + np.exp(-row)) if way.get("scoring") == "sigmoid" else np.exp(row) / np.exp(row).sum()
    wanted, groups = scores + correction, way.get("groups", 1)
    if groups > 1:
        count = 2 if way.get("group_score") == "best two" else 1
        worth = [np.sort(group)[-count:].sum() for group in wanted.reshape(groups, -1)]
        best = np.argsort(worth)[-way["chosen_groups"] :]
        wanted = np.where(np.isin(np.arange(EXPERTS) // (EXPERTS // groups), best), wanted, -np.inf)
    chosen = np.argsort(wanted)[-3:]
    total = scores[chosen].sum() if way["renormalize"] else 1.0
    return {int(expert): way.get("scale", 1.0) * scores[expert] / total for expert in chosen}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("corrected", [False, True])
def test_routing(name: str, corrected: bool) -> None:
    way = WAYS[name]
    routing = Routing(experts=EXPERTS, chosen=3, **way)
    correction = CORRECTION if corrected else None
    found = jax.jit(routing)(logits(50), correction)
    for row, ids, shares in zip(logits(50), np.asarray(found.ids), np.asarray(found.shares), strict=True):
        expected = plainly(row, CORRECTION if corrected else np.zeros(EXPERTS), way)
        assert set(ids.tolist()) == set(expected)
        np.testing.assert_allclose(shares, [expected[expert] for expert in ids.tolist()], rtol=1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    routing = Routing(experts=EXPERTS, chosen=3, **WAYS[name])
    route = jax.jit(lambda values: routing(values, jnp.asarray(CORRECTION)))
    whole = route(logits(200))
    for rows in (2, 3, 16, 100):
        part = route(logits(200)[:rows])
        np.testing.assert_array_equal(part.ids, whole.ids[:rows])
        np.testing.assert_array_equal(part.shares, whole.shares[:rows])
