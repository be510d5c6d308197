"""One clock for all devices, which makes nothing wait while it runs."""
import time

import torch


class Clock:
    """Marks in the work of a device: on GPUs events in the current stream, on CPUs the seconds of a
    clock that never goes back.

    Nobody waits when a mark is made. Reading the time between two marks waits for the second.
    """

    def __init__(self, device):
        self.on_gpu = torch.device(device).type == "cuda"

    def mark(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start, end):
        """-> milliseconds from one mark to another."""
        if not self.on_gpu:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)
