"""Durations, sizes and numbers in words."""

_TIMES = (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))
# What is less, but has 1 in three digits.
_ROUNDED_UP = 0.9995
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def seconds(duration_s: float) -> str:
    """A duration with a fitting unit, in two or three digits."""
    for unit, factor in _TIMES:
        if duration_s * factor >= _ROUNDED_UP:
            return f"{duration_s:.2f} s" if unit == "s" else f"{duration_s * factor:.3g} {unit}"
    return "0 s"


def counted(count: int, one: str, many: str = "") -> str:
    """A number of things; ``many`` is their name where it is not that of one and an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def size(nbytes: float) -> str:
    """A number of bytes with a fitting unit."""
    for factor, unit in _SIZES:
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"
