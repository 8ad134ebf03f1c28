"""Every tuned threshold of the package, each with its unit and its reason.

A value that decides a trade-off (time, memory, quality of a search) is a field of `Tuning`, and the module that uses it
reads it from `TUNING`. A reason that ends with "a guess" was not measured. Lengths of printed tables, versions of file
formats, limits of torch and intervals of waiting for other ranks are no trade-offs and stay where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


def tuned(value: T, unit: str, reason: str, decision: int | None = None) -> T:
    """A field of `Tuning`. `decision`: the number of the decision record that has the measurements."""
    threshold: Any = field(default=value, metadata={"unit": unit, "reason": reason, "decision": decision})
    return threshold


@dataclass(frozen=True)
class Tuning:
    """The thresholds, in the order of the stages that read them."""

    # -- folding equal layers
    expand_rounds: int = tuned(4, "rounds", "ops of a decomposition may be decomposed in turn: a guess")
    fewest_layers: int = tuned(3, "layers", "steps of 2 and 3 layers are simulated: fewer cannot be extrapolated", 23)
    longest_period: int = tuned(8, "layers", "in a group of layers that repeats: a guess")
    dropped_layers: int = tuned(4, "tries", "first and last layers may differ from the others: a guess")
    # -- planning
    keep_gathered_bytes: int = tuned(64 << 20, "bytes", "small models gather once, large ones twice", 4)
    keep_sharded_factor: float = tuned(8.0, "x", "moving activations may cost as much more than gathering: a guess")
    smallest_sharded_vector_bytes: int = tuned(64 << 10, "bytes", "sharding less saves less than its collectives cost")
    # -- the integer program
    exposed_share: float = tuned(0.5, "share", "of communication that could overlap counts as waited for", 24)
    sum_of_streams_share: float = tuned(0.02, "share", "all streams count a little, so ties go away", 24)
    class_rounds: int = tuned(3, "rounds", "refine the classes of equal nodes by their neighbours", 24)
    close_gap: float = tuned(0.005, "share", "by which a solution may exceed the shortest step: a guess")
    rough_gap: float = tuned(0.02, "share", "the same, for one mesh of many: a guess")
    solved_budgets: tuple[float, ...] = tuned((1.0, 0.8), "x budget", "the model omits memory that ops need to run", 24)
    # -- traces that are repeated
    verify_share: float = tuned(0.02, "share", "of the run time that later traces may take: a guess")
    # -- Auto
    nodes_in_a_group: tuple[int, ...] = tuned((1, 8), "nodes", "sizes of hybrid groups that are tried", 20)
    sure_share: float = tuned(0.02, "share", "candidates as near to the best are simulated with all layers", 23)
    sure_bytes_share: float = tuned(0.35, "share", "extrapolated peaks were off by up to 27 %", 23)
    folded_layers: tuple[int, int] = tuned((2, 3), "layers", "of the two short steps that are simulated", 23)
    folded_buckets: int = tuned(3, "buckets", "that a short step fills: where a bucket closes matters little", 23)
    folded_share: float = tuned(0.5, "share", "of the layers that both short steps may have: a guess")
    nearly_fits: float = tuned(0.99, "x budget", "that extrapolated peaks aim at: a guess")
    search_seconds: float = tuned(0.02, "s", "at most, for each node and candidate of the first rank's search: a guess")
    pieces_growth: float = tuned(1.4, "x", "from one number of micro-batches that is tried to the next: a guess", 66)
    tiles_tried: tuple[int, ...] = tuned((4, 16, 64), "tiles", "of rows, that a search tries: a guess", 20)
    # -- orders of stages
    order_memory_share: float = tuned(
        0.1, "x pieces in flight", "above `1f1b`: what gradients of weights wait with is 8 % in a GPT", 104
    )
    # -- memory
    remat_stages: int = tuned(32, "stages", "of targets between the peak and the bytes of inputs: a guess")
    remat_least_us: float = tuned(0.01, "us", "of recomputing a view: among free ones, the larger goes first")
    hidden_gather_share: float = tuned(0.1, "share", "of a gather's time that counts, as computing hides most: a guess")
    remat_worth: float = tuned(0.998, "x peak", "choices that lower the peak by less are skipped: a guess")
    remat_near: float = tuned(0.01, "x budget", "the search stops between choices as near to each other: a guess")
    remat_tries: int = tuned(6, "programs", "made to find the true peaks of choices: a guess")
    fit_seconds: float = tuned(0.1, "s", "at most, for each node of a step that is fitted into a budget: a guess")
    bucket_parts: tuple[int, ...] = tuned((1, 8), "parts", "of the bucket size that a budget tries: a guess")
    # -- collectives
    first_bucket_bytes: int = tuned(1 << 20, "bytes", "starts the link early; as DDP")
    bucket_bytes: int = tuned(25 << 20, "bytes", "of `Bucket` without sizes; as DDP")
    smallest_bucket_bytes: int = tuned(256 << 10, "bytes", "however fast a start was measured: a guess")
    coalesced_bytes: int = tuned(512 << 20, "bytes", "of a bucket without copies: a layer of an 8B model", 28)
    most_summed_bytes: int = tuned(64 << 20, "bytes", "of an all-reduce where CPUs send: few are cheapest", 28)
    hidden_share: float = tuned(0.5, "share", "all-reduces double while computing hides no more of them", 28)
    buckets_in_flight: int = tuned(3, "buckets", "of gathers, and of reductions: a guess")
    slow_start_share: float = tuned(
        0.15, "x sending", "that starting takes in long rings, which get larger buckets", 28
    )
    bucket_memory_share: float = tuned(0.1, "x memory", "of a device, in flight at most, for long rings: a guess", 28)
    device_reserve_bytes: int = tuned(
        5 << 29,
        "bytes",
        "of a GPU for others than tensors: torch sees 79.1 GiB of an H100's 80, a CUDA context takes "
        "0.5, NCCL 0.3 to 0.5 for each of some communicators",
        69,
    )
    most_pieces_together: int = tuned(32, "ranks", "whose pieces one kernel copies: it takes 64 tensors", 17)
    gathered_in_flight_share: float = tuned(0.25, "share", "of re-gathered parameters, in flight at most: a guess")
    # -- cost model
    most_slowed_share: float = tuned(0.9, "share", "of computing that collectives take at most: a guess")
    split_k: tuple[int, ...] = tuned((1, 2, 4, 8), "parts", "of k, where few tiles do not fill the device", 19)
    # -- backends
    pooled_bytes: int = tuned(128 << 10, "bytes", "glibc keeps smaller memory itself (M_MMAP_THRESHOLD)", 27)
    pool_fit: float = tuned(1.25, "x size", "of the request that a buffer may have: a guess")
    pool_kept: float = tuned(2.0, "x use", "of the most bytes in use at once that a pool holds", 27)
    warm_calls: int = tuned(2, "calls", "run before a CUDA graph is recorded: libraries are set up", 52)
    most_recordings: int = tuned(8, "recordings", "of a program whose addresses change, one after the other", 52)
    fewest_fused: int = tuned(4, "ops", "that Inductor could fuse: a region with fewer runs as eager: a guess", 17)
    most_region_programs: int = tuned(4, "functions", "of a region, each for the sizes on one side of a comparison", 17)
    fewest_nodes_of_layer: int = tuned(24, "nodes", "of a repeat that is compiled by itself: a guess", 17)
    # -- measuring
    compute_rounds: int = tuned(9, "rounds", "of each probe: the median counts, not the best", 25)
    undisturbed_share: float = tuned(0.8, "share", "of a probe's time that its thread ran: else another process did")
    undisturbed_rounds: int = tuned(4, "rounds", "of a probe that are enough without the disturbed ones: a guess")
    link_few_bytes: int = tuned(4 << 10, "bytes", "of the collective whose start is timed: a guess")
    link_many_bytes: int = tuned(1 << 20, "bytes", "of the collective whose rate is timed", 25)
    copy_rounds: int = tuned(7, "rounds", "of copies out of received memory: a guess")
    beside_share: float = tuned(0.8, "share", "of a collective's time for which the rank computes beside it", 25)
    most_slower: float = tuned(4.0, "x", "that a collective may be beside computing: a guess")
    link_repeats: tuple[int, int] = tuned((1, 24), "calls, rows", "of the short collective; the least counts: a guess")
    message_bytes: tuple[int, int, int] = tuned(
        (4 << 10, 256 << 10, 1 << 20), "bytes", "of messages that are timed: links let some 256 KiB through at once", 25
    )
    message_rounds: int = tuned(6, "rounds", "of a message there and one back; the first does not count: a guess")
    message_gap_s: float = tuned(0.005, "s", "of computing between messages, as a block is: a link rests meanwhile", 25)
    # -- limits of a running step
    most_captures: int = tuned(16, "captures", "for one changing value, then it is refused", 7)
    kept_log: int = tuned(1024, "entries", "of a log of misses, or of the compile cache: a guess")
    kept_comparisons: int = tuned(256, "programs", "that ranks remember to have compared, the latest: a guess")
    guarded_call_bytes: int = tuned(4 << 20, "bytes", "of a call's integers that ranks exchange", 35)
    gathered_piece_bytes: int = tuned(64 << 20, "bytes", "of one all-gather of a whole tensor, held beside it: a guess")
    checksum_rounding: float = tuned(1e-2, "x largest", "by which values that each rank computes may differ: a guess")
    cached_files: int = tuned(256, "files", "of a compile cache that are kept: a guess")
    compared_files: int = tuned(16, "files", "read to name the nearest entry of a miss: a guess")


TUNING = Tuning()
