"""Names of what is made here."""

from __future__ import annotations

import uuid


def new_id(prefix: str, separator: str = "-") -> str:
    """/v1/responses writes them with "_"."""
    return f"{prefix}{separator}{uuid.uuid4().hex}"
