"""Lives of combinations on several ranks, in a process that has eight devices.

Its arguments: a folder for models, one for compiled programs, the combination (a key of COMBOS), and a seed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from combo_table import AXES, Combo, Setting
from test_combos import QUICK, Alone, check_combo

RANKS_2 = Setting("ranks2", {"data_parallel_size": 2})
RANKS_4 = Setting("ranks4", {"data_parallel_size": 4})


def combo(ranks: Setting, *names: str) -> Combo:
    """The usual settings but those named; ops that several devices have, which sum in the same order on each."""
    wanted = {"xla-ops", *names}
    choose = lambda axis: next((setting for setting in axis if setting.name in wanted), axis[0])
    return Combo((*map(choose, AXES.values()), ranks))


COMBOS: Mapping[str, Combo] = MappingProxyType(
    {
        "hard": combo(RANKS_2, "gap", "tight", "priority", "burst4", "structured", "logprobs"),
        "drafts": combo(RANKS_2, "qwen2", "extra", "tight", "burst7", "ngram", "penalties"),
        "head": combo(RANKS_2, "extra", "tight", "burst4", "eagle3", "penalties"),
        "draft model": combo(RANKS_2, "qwen2", "gap", "tight", "burst4", "draft-model", "penalties"),
        "four": combo(RANKS_4, "qwen2", "16x96", "tight", "burst4", "block8"),
        "plain": combo(RANKS_4, "no-prefix", "16x96", "roomy", "plain", "n3"),
    }
)


if __name__ == "__main__":
    models, cache, name, seed = sys.argv[1:]
    references = Alone(Path(models), cache)
    check_combo(COMBOS[name], references, QUICK, int(seed))
    references.close()
