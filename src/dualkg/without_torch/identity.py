"""The identity of a run, by which files that are derived from it are known to be of it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def hash_of(parts: Mapping[str, str | None]) -> str:
    """One hash of several, by name."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def identity_of(records: Mapping[str, Mapping[str, Any]], weights_checksum: str) -> str:
    """The hash of recipe, graph and weights by the records of the files of a run."""
    parts = {
        name: record["sha256"] for name, record in records.items() if not name.startswith("weights")
    }
    return hash_of({**parts, "weights": weights_checksum})
