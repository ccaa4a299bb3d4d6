"""The environment of other processes, read by a thread of its own.

The kernel reads it out of the process's memory, and waits for as long as somebody else changes the
map of that memory: a process that hangs in a driver call may do so for ever. Then this thread
hangs, nothing more is known of any environment, and everybody else goes on.
"""

import queue
import threading
from pathlib import Path

MOST_BYTES = 1 << 18
WAITING = 256  # questions that the thread may be behind
PATIENCE_SECONDS = 0.01  # for an answer at once, as it is where nothing hangs

Question = tuple[int, bytes]  # process id, and when it started
Answer = dict[bytes, bytes]


class Environments:
    """Answers what was asked for earlier; {} is that of a process whose we may not read."""

    def __init__(self, procfs: Path) -> None:
        self._procfs = procfs
        self._questions: queue.Queue[Question] = queue.Queue(WAITING)
        self._answers: dict[Question, Answer] = {}
        self._asked: set[Question] = set()
        self._answered = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, question: Question) -> Answer | None:
        """Return the environment once it is there, None until then: ask again."""
        if question not in self._asked and not self._questions.full():
            self._asked.add(question)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            prompt = self._questions.empty()
            self._answered.clear()
            self._questions.put(question)
            if prompt:
                self._answered.wait(PATIENCE_SECONDS)
        answer = self._answers.pop(question, None)
        if answer is not None:
            self._asked.discard(question)
        return answer

    def forget(self, kept: set[Question]) -> None:
        """Forget what nobody asks for any more: the process has ended."""
        self._asked &= kept
        for question in list(self._answers):
            if question not in kept:
                del self._answers[question]

    def _work(self) -> None:
        while True:
            question = self._questions.get()
            self._answers[question] = self._read(question[0])
            self._answered.set()

    def _read(self, pid: int) -> Answer:
        try:
            with (self._procfs / str(pid) / "environ").open("rb") as file:
                text = file.read(MOST_BYTES)
        except OSError:  # it has ended, or is not ours to read
            return {}
        pairs = (entry.partition(b"=") for entry in text.split(b"\0"))
        return {name: value for name, equals, value in pairs if equals}
