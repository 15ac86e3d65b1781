"""Which replica a request goes to: the one that has seen its beginning, unless that one is much busier than others.

The beginning of a prompt picks an order of the replicas, always the same (rendezvous hashing; Thaler and Ravishankar,
"Using name-based mappings to increase hit rates", 1998): a replica that comes or goes moves only its own share. Of that
order the first comes that is not much busier than the least busy one (consistent hashing with bounded loads; Mirrokni,
Thorup and Zadimoghaddam 2018).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import msgspec

Replica = TypeVar("Replica", bound=Hashable)
_CHARACTERS = 256  # of a prompt without structure
_TOKENS = 64  # the same in ids
_OPENING_CHARACTERS = 8192  # of a conversation's opening
SLACK_REQUESTS = 8  # that a replica may have more than the least busy one...
SLACK_SHARE = 0.5  # ...and this share of what that one has


def routing_key(body: bytes) -> str | None:
    """What requests have in common whose prompts begin alike; None where the body says nothing of that.

    A conversation goes by its opening, which is everything up to the first message of the user: so all of its turns
    find each other, and conversations that share a system prompt are spread, because every replica soon has that one.
    """
    try:
        fields: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    salt = fields.get("cache_salt")  # nothing is shared across salts
    if (opening := _opening(fields)) is None:
        return None
    text = msgspec.json.encode([salt, opening])
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def preferred(key: str | None, loads: Mapping[Replica, int]) -> list[Replica]:
    """The replicas, best first. loads: requests that each has.

    Without a key the least busy one is the best.
    """
    least = min(loads.values(), default=0)
    limit = least + SLACK_REQUESTS + int(SLACK_SHARE * least)
    by_load = sorted(loads, key=lambda replica: (loads[replica], str(replica)))
    if key is None:
        return by_load
    ranked = sorted(by_load, key=lambda replica: _weight(key, replica), reverse=True)
    fit = [replica for replica in ranked if loads[replica] <= limit]
    return fit + [replica for replica in by_load if replica not in fit]


def _weight(key: str, replica: Hashable) -> bytes:
    return hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest()


def _opening(fields: dict[str, Any]) -> Any:
    """The beginning of a prompt, as JSON has it."""
    for name in ("messages", "input"):  # chats; responses, whose instructions come first
        if isinstance(turns := fields.get(name), list):
            users = [place for place, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user"]
            first = turns[: users[0] + 1] if users else turns[:1]
            return _text([fields.get("instructions"), first])[:_OPENING_CHARACTERS]
        if isinstance(turns, str):
            return _text([fields.get("instructions"), turns])[:_OPENING_CHARACTERS]
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # of several
    if isinstance(prompt, str):
        return prompt[:_CHARACTERS]
    return prompt[:_TOKENS] if isinstance(prompt, list) and prompt else None


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
