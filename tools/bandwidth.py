"""How fast this machine's collectives are: GB/s of payload. Start it on N ranks.

    torchrun --standalone --nproc_per_node=2 tools/bandwidth.py
"""
import statistics
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch can do without
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

# both were renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

NUMBERS = 2**22  # of 4 bytes, or as many less as leaves equal parts for all ranks
TIMES = 9


def seconds(call):
    """The median of several calls."""
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    dist.init_process_group("gloo")
    part = torch.ones(NUMBERS // dist.get_world_size())
    whole = torch.ones(len(part) * dist.get_world_size())
    other = torch.empty_like(whole)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather(whole, part),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    rates = [f"{name} {whole.nbytes / seconds(call) / 1e9:.2f}" for name, call in calls.items()]
    if dist.get_rank() == 0:
        print(f"gloo moves {whole.nbytes / 1e6:.1f} MB at, in GB/s, {', '.join(rates)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
