"""Writes a file of results so that a program killed meanwhile leaves the earlier results."""

from __future__ import annotations

import json
from pathlib import Path


def write_json(path: Path, value: object) -> None:
    """Replace a file's content with a value as JSON."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)
