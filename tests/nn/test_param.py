"""Random weights of a declaration."""

from __future__ import annotations

import numpy as np

from noria.nn.param import Param, random_params


def test_every_seed_that_a_request_may_have_makes_weights() -> None:
    """numpy takes no negative ones."""
    declaration = Param((2, 3), ("embed", "embed"), "w")
    made = {seed: np.asarray(random_params(declaration, "float32", seed)) for seed in (-(2**63), -1, 0, 1, 2**64 - 1)}
    assert np.array_equal(made[-1], made[2**64 - 1])
    assert len({weights.tobytes() for weights in made.values()}) == 4
