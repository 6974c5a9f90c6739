"""What an error says, in one line that fits a terminal and a log, whatever a file or a caller put into it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

LIMIT = 1000  # characters of a message; a name or value in it may have come from a damaged file
LONGEST_ARGUMENT = 1024  # characters of a command line's argument


def one_line(text: object, limit: int = LIMIT) -> str:
    r"""`text` without line breaks, control characters and lone surrogates (written as escapes), the middle left out.

    >>> one_line("a\nb\ud800"), one_line("x" * 50, limit=20)
    ('a\\nb\\ud800', 'xxxxxxx [...] xxxxxx')
    """
    text = str(text)
    if len(text) > limit:
        half = limit - len(" [...] ")
        text = f"{text[: half - half // 2]} [...] {text[len(text) - half // 2 :]}"
    # escapes are longer than what they stand for: a text full of them is cut once more
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= limit else one_line(shown, limit)


class OneLineParser(argparse.ArgumentParser):
    """argparse whose refusals are one line on stderr with exit code 2.

    It also refuses what no path, number or name of ours holds, and what else would end in a traceback far from here: line
    breaks and other control characters, bytes that are no UTF-8, and more than LONGEST_ARGUMENT characters.
    """

    def parse_known_args(self, args: Sequence[str] | None = None, namespace=None):
        given = sys.argv[1:] if args is None else list(args)
        for word in given:
            if len(word) > LONGEST_ARGUMENT:
                self.error(
                    f"the argument {one_line(word, 60)} has {len(word)} characters; {LONGEST_ARGUMENT} are the most"
                )
            if any(
                c < " " or "\x7f" <= c < "\xa0" or c in "\u2028\u2029" or "\ud800" <= c < "\ue000"
                for c in word
            ):
                self.error(
                    f"the argument {one_line(word, 60)} holds a control character, or bytes that are no UTF-8"
                )
        return super().parse_known_args(given, namespace)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {one_line(message)} (--help shows the options)\n")
