"""Text that is held out of training, and its batches: windows that lie end to end."""
from common import IGNORE, windows

HELD_OUT = 20  # the last 1/20 of the text is held out
BATCHES = 8  # are read at most


class HeldOut:
    """The end of a text, which is not trained on: one window at least.

    rest: what is left to train on. Raises ValueError if the text is too short.
    """

    def __init__(self, corpus, seq, batch):
        size = max(len(corpus) // HELD_OUT, seq + 1)
        if len(corpus) - size <= seq:
            raise ValueError(f"{len(corpus)} bytes of text are too few to hold out {seq} + 1")
        self.rest = corpus.between(0, len(corpus) - size)
        self.text = corpus.between(len(corpus) - size, len(corpus))
        self.seq = seq
        self.rows = batch
        self.windows = (len(self.text) - 1) // seq
        self.batches = min(BATCHES, -(-self.windows // batch))
        self.targets = min(self.windows, self.batches * batch) * seq  # of all batches

    def batch(self, k, rows=None):
        """Rows (default: all) of batch k -> inputs, targets (rows, T).

        Rows beyond the last window have no targets.
        """
        if rows is None:
            rows = range(self.rows)
        numbers = [k * self.rows + i for i in rows]
        # a row beyond the last window reads some other window, and all of its targets are ignored
        x, y = windows(self.text, self.seq, [self.seq * (i % self.windows) for i in numbers])
        for number, row in zip(numbers, y):
            if number >= self.windows:
                row[:] = IGNORE
        return x, y
