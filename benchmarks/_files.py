"""Writes results so that a program that is killed meanwhile leaves the earlier ones."""

from __future__ import annotations

import json
from pathlib import Path


def write_json(path: Path, value: object) -> None:
    """Replace a file by a value as JSON."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)
