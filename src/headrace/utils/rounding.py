"""Integer rounding."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    if multiple < 1:
        raise ValueError(f"multiple={multiple}; expected 1 or more")
    return -(-value // multiple) * multiple
