"""Numbers that YAML takes for others than they look: 010 is 8 to it, and 1:30 is 90."""

import re
from collections.abc import Iterator

import yaml

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_FORMS = {"octal": re.compile(r"[-+]?0[\d_]+"), "base 60": re.compile(r"[-+]?\d[\d_]*(:[\d_.]+)+")}
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def misread_number(text: str, key: str = "") -> str | None:
    """Return what is wrong with the first such number of a YAML text, by its dotted key; `key` is that of the text."""
    root = yaml.compose(text, Loader=_Loader)
    for name, node in _scalars(root, key, set()) if root is not None else ():
        for form, pattern in _FORMS.items():
            if node.tag in _NUMBERS and not node.style and pattern.fullmatch(node.value):
                meant = yaml.safe_load(node.value)
                return f"{name}={node.value} is {meant} to YAML ({form}); write {meant}, or text in quotes"
    return None


def _scalars(node: yaml.Node, key: str, seen: set[int]) -> Iterator[tuple[str, yaml.ScalarNode]]:
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        yield key, node
    elif isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            yield from _scalars(entry, key, seen)
    elif isinstance(node, yaml.MappingNode):
        for name, entry in node.value:
            yield from _scalars(entry, f"{key}.{name.value}" if key else str(name.value), seen)
