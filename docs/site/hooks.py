"""What the site does with links that leave `docs/`: a file of the checkout is named, as the site has no copy of it."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave the text of a link to a file outside, without the link."""
    return _OUTSIDE.sub(r"\1", markdown)
