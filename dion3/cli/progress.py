"""A one-line progress bar for a terminal, and now and then a line where there is none."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

__all__ = ["Progress"]

_WIDTH = 24


class Progress:
    """`label [#####-----] 40/100  loss 2.31  00:12 left`, redrawn in place.

    On a stream that is not a terminal (a log file, a pipe) a plain line is written at every tenth
    of the way instead. Use it as a context manager: leaving it ends the line.
    """

    def __init__(self, total: int, label: str = "", stream: TextIO | None = None) -> None:
        self.total = total
        self.label = label
        self.stream = sys.stderr if stream is None else stream
        self.start = time.monotonic()
        self._shown = 0.0
        self._tenth = 0
        self._length = 0
        self._tty = self.stream.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tty and self._length:
            self.stream.write("\n")
            self.stream.flush()

    def update(self, done: int, text: str = "") -> None:
        """Show that `done` of `total` are done, with `text` behind the bar."""
        now = time.monotonic()
        if self._tty:
            if done < self.total and now - self._shown < 0.1:
                return
            self._shown = now
        else:
            tenth = 10 * done // max(1, self.total)
            if tenth == self._tenth:
                return
            self._tenth = tenth
        line = self._line(done, text, now - self.start)
        padding = " " * max(0, self._length - len(line))
        self._length = len(line)
        self.stream.write(f"\r{line}{padding}" if self._tty else f"{line}\n")
        self.stream.flush()

    def _line(self, done: int, text: str, seconds: float) -> str:
        filled = _WIDTH * done // max(1, self.total)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        left = seconds * (self.total - done) / max(1, done)
        clock = f"{_clock(left)} left" if done < self.total else f"{_clock(seconds)} in all"
        parts = [f"{self.label} [{bar}] {done}/{self.total}".lstrip(), text, clock]
        return "  ".join(part for part in parts if part)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:02d}:{rest:02d}"
