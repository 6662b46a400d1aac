"""The documents that people read, and the commands in them: found by Markdown's own rules, not by guessing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if path.name != "CHANGELOG.md"
)  # the changelog has commands of its time
NOT_RUN = re.compile(r"<!-- not run here: (.+?) -->", re.DOTALL)
SHELLS = ("console", "bash", "sh")
COMMANDS = ("make", "epd-serve", "epd-bench", "python", "python3")
_ENDS = ("|", "||", "&&", "&", ";", ">", ">>", "<")


@dataclass(frozen=True)
class Command:
    """One command of a document.

    Attributes:
        words: the command's own words, `make` or `epd-bench` first.
        where: the file and its line.
        not_run: why it cannot be run by a test, as the document says; "" where it can.
    """

    words: tuple[str, ...]
    where: str
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.where} {shlex.join(self.words)}"


def commands(path: Path) -> list[Command]:
    """Returns the commands of one document, of code blocks and of inline code that is a whole command."""
    return list(_commands(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))))


def _commands(text: str, name: str) -> Iterator[Command]:
    reason = ""
    for token in MarkdownIt().enable("table").parse(text):
        where = f"{name}:{token.map[0] + 1 if token.map else 0}"
        if token.type == "html_block":
            marked = NOT_RUN.search(token.content)
            reason = " ".join(marked[1].split()) if marked else ""
            continue  # holds for the block that follows
        if token.type in ("fence", "code_block"):
            if token.info in SHELLS:
                yield from (Command(words, where, reason) for words in in_block(token.content))
            elif hidden := re.search(r"^(?:make|epd-serve|epd-bench|python3? -m) .*", token.content, re.MULTILINE):
                raise ValueError(f"{where}: {hidden[0]!r} is in a block that does not say that it is bash or console")
        elif token.type == "inline":
            yield from (Command(words, where, reason) for words in _inline(token))
        if token.level == 0 and token.nesting <= 0:
            reason = ""


def in_block(text: str) -> list[tuple[str, ...]]:
    """Returns our commands in a block of shell: lines joined at their backslashes and quotes, prompts taken off."""
    console = any(line.startswith("$ ") for line in text.splitlines())
    found, lines = [], iter(text.splitlines())
    for line in lines:
        if console and not line.startswith("$ "):
            continue  # output
        whole = line.removeprefix("$ ")
        while (words := split(whole)) is None:
            following = next(lines, None)
            if following is None:
                raise ValueError(f"an open quote or a trailing backslash: {whole}")
            whole += "\n" + following
        found += in_words(words)
    return found


def split(line: str) -> list[str] | None:
    """Returns the shell words of a line, or None where it goes on in the next one."""
    if line.endswith("\\"):
        return None
    shell = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=True)
    shell.whitespace_split = True
    try:
        return list(shell)
    except ValueError:
        return None


def in_words(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns our commands among the words of a line, at its beginning, or after `;`, `&&` and the like."""
    found: list[tuple[str, ...]] = []
    rest: list[str] = []
    for word in (*words, ";"):
        if word not in _ENDS:
            rest.append(word)
            continue
        while rest and re.fullmatch(r"[A-Z_0-9]+=.*", rest[0]):
            rest.pop(0)  # variables of this command
        if rest and (first := Path(rest[0]).name) in COMMANDS and _ours(first, rest):
            found.append((first, *rest[1:]))
        rest = []
        if word in (">", ">>", "<"):
            rest = ["a file's name"]  # what follows is one, not a command
    return found


def _ours(first: str, words: Sequence[str]) -> bool:
    """Whether it is a command of this project: of `python` only modules and files of ours."""
    if not first.startswith("python"):
        return True
    return len(words) > 2 and words[1] == "-m" and (ROOT / words[2].split(".")[0]).is_dir()


def _inline(token: Token) -> Iterator[tuple[str, ...]]:
    """Inline code that is a whole command: a name alone, such as `make`, is none, nor is what is left out by `…`."""
    for child in token.children or ():
        if child.type == "code_inline" and "…" not in child.content:
            words = split(child.content.replace("\\|", "|"))
            if words and len(words) > 1:
                yield from in_words(words)
