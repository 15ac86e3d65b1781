"""The access log: a line of JSON on stderr for every request."""

from __future__ import annotations

import logging


def show_access_log() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("noria.access")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
