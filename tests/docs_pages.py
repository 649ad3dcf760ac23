"""The documents as tests read them: pages, their fenced blocks, their links, and the commands in them."""

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
_FENCE = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block; `name` is that of the file that it stands for, where it says one."""

    page: Path
    language: str
    name: str | None
    text: str


@dataclass(frozen=True)
class Command:
    """A command line of a page, as words; variables that are set before it are left out."""

    page: Path
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        return shlex.join(self.words)


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    return tuple(Block(page, *match.groups()) for match in _FENCE.finditer(page.read_text(encoding="utf-8")))


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[Command]:
    """Return what a page's blocks of `bash` ask to be typed."""
    found = []
    for block in blocks(page):
        for line in block.text.replace("\\\n", " ").splitlines() if block.language == "bash" else ():
            for part in line.split(" && "):
                words = shlex.split(part, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words and words[0] not in ("for", "done"):
                    found.append(Command(page, tuple(words)))
    return found


def named_commands(page: Path) -> list[Command]:
    """Return the command lines that the prose of a page names as code, up to what goes on (`...`) or goes to a file."""
    lines = re.findall(r"`((?:headrace|make|pip|python|torchrun) [^`]*)`", prose(page))
    return [Command(page, tuple(shlex.split(re.split(r" (?:>|\.\.\.)", line)[0]))) for line in lines]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site name them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures that are not addresses of the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]
