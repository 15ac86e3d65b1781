"""A draft head: it follows the model on the device (`runner/draft_head.py`), and is asked here for drafts.

Of sequences it keeps nothing on the host: its cache lies in the blocks of the model's, so what holds for those,
prefixes and preemption included, holds for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from noria.cache.layout import BlockIds
from noria.config import EngineConfig, cache_home
from noria.errors import ConfigError, WeightsError
from noria.models.config import DecoderConfig
from noria.models.eagle3 import Eagle3Head, build_head
from noria.runner.runner import ModelRunner
from noria.spec.proposer import DraftRequest
from noria.weights.base import Checkpoint
from noria.weights.checkpoint import open_checkpoint
from noria.weights.hub import resolve_model

# Makes room for so many drafts of each of these requests: how many each may have, and its new blocks; those are left
# out for which there is none.
Reserve = Callable[[Mapping[str, int]], dict[str, tuple[int, BlockIds]]]


class Eagle3Proposer:
    def __init__(self, runner: ModelRunner, reserve: Reserve) -> None:
        """runner: the model's, with a head."""
        self._runner = runner
        self._reserve = reserve

    def may_propose(self, request: DraftRequest) -> bool:
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        wanted = self._reserve({request.request_id: request.num_drafts for request in requests})
        drafts = self._runner.draft(wanted) if wanted else {}
        return [_known(drafts.get(request.request_id, [])) for request in requests]

    def forget(self, key: Hashable) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

    def close(self) -> None:
        pass


def _known(drafts: list[int]) -> list[int]:
    """Those before the first that the head could not make, because its numbers went wrong."""
    end = next((place for place, token_id in enumerate(drafts) if token_id < 0), len(drafts))
    return drafts[:end]


class HeadFiles:
    """The files of the head that the options name, until they are closed."""

    def __init__(self, name: str, checkpoint: Checkpoint) -> None:
        self._name = name
        self._checkpoint = checkpoint

    def build(self, target: DecoderConfig) -> Eagle3Head:
        """Raises ConfigError when it does not belong to the model."""
        with _named(self._name):
            return build_head(self._checkpoint.config, target)

    def load(self, runner: ModelRunner, *, programs_only: bool) -> None:
        """Into a runner that has the head. Raises ConfigError when something is missing or does not fit."""
        assert runner.head is not None
        source = None if runner.config.load_format == "dummy" else self._checkpoint
        with _named(self._name):
            if programs_only:
                runner.head.describe(source)
            else:
                runner.head.load(source)


def open_head(config: EngineConfig, files: ExitStack) -> HeadFiles | None:
    """None where no head is asked for. files: closes it. Raises ConfigError when there is none of that name."""
    options = config.speculation
    if options is None or options.method != "eagle3":
        return None
    assert options.model is not None
    with _named(options.model):
        path: Path = resolve_model(options.model, options.revision, cache_home())
        if not path.is_dir():
            raise ConfigError("it is no folder; name one with config.json and *.safetensors")
        checkpoint = files.enter_context(open_checkpoint(path, config_only=config.load_format == "dummy"))
    return HeadFiles(options.model, checkpoint)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, WeightsError) as error:
        raise ConfigError(f"speculative_config: the draft head {name}: {error}") from None
