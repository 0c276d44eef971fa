#!/usr/bin/env python3
"""m02: KV cache memory and paged attention.

To generate a token, a transformer attends to the keys and values of all the tokens before it. A
server keeps them instead of computing them again: the KV cache. The weights are read once a step,
for all sequences together; KV belongs to one sequence and grows with every token. So once the
weights are loaded, KV memory bounds how many sequences run at once. Six blocks build that argument,
up to what the bound is worth. Their formulas:

    1  KV of a token    2 x layers x KV heads x head_dim x bytes a value
    2  slots            KV budget // (tokens reserved x KV of a token)
    3  pages            ceil(tokens / tokens a page)
    4  saved            (n - 1) x prefix / (n x (prefix + what is private, on average))
    5  break-even       KV of a token x FLOP/s / (2 x parameters)
    6  a step           max(weights / bandwidth, tokens x 2 x parameters / FLOP/s)
                        + tokens held x KV of a token / bandwidth

Read it from top to bottom (a page is what vLLM calls a block, its size the block_size):

    constants and workload   the model, the card, the tiers, and 4,000 seeded requests
    the harness              how a block of the lesson is registered, run and shown
    1 What a token costs     kv_bytes_per_token
    2 Contiguous allocation  contiguous: how many slots
    3 Paged allocation       PagePool: allocate, append (with copy-on-write), fork, release; paged
    4 Sharing a prefix       shared_prefix: fork, then append; expected_saving
    5 Fetch or recompute     break_even, from flop_per_token
    6 Preemption             serve: admit, generate, finish, grow or preempt the newest
    assembly and parts       the blocks wired together; every mechanism by name, for a REPL

There the lesson ends. What follows holds it to its word, and to yours:

    verify                   every claim derived a second time, and every mechanism graded
    your own model           what a config.json says of KV
    sizing                   size: from a config.json, a card and lengths to a setting; traffic
    predict                  six questions to answer before reading
    arguments                what each parameter may be; here the bare mechanisms get their guard
    command line             no argument, --block N, --quiet, --verify, --model FILE, --predict
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import math
import operator
import random
import re
import signal
import sys
import textwrap
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from itertools import accumulate, count, islice
from typing import Any, NamedTuple, NoReturn, cast

__all__ = [
    "CARDS", "DENSE_FLOPS_PER_GPU", "DTYPE", "GIB", "HEAD_DIM", "KV_BUDGET_GIB", "KV_HEADS",
    "KV_PER_TOKEN", "LAYERS", "N_PARAMS", "Q_HEADS", "TIERS", "Allocation", "OutOfPages",
    "PagePool", "Sequence", "Served", "assembly", "break_even", "budget_share", "budget_tokens",
    "contiguous", "expected_saving", "fetch_seconds", "kv_bytes", "kv_bytes_per_token", "kv_gib",
    "paged", "parts", "preempted_tokens", "prefixed_lengths", "recompute_seconds",
    "resident_tokens", "seq_lengths", "serve", "shared_prefix", "shortest_fetch", "size",
    "step_seconds", "traffic", "verify",
]  # fmt: skip

# ------------------------------------------------------------------------ constants and workload

GIB = 2**30

# A 70B model with grouped-query attention (GQA-8), as in Llama-3.1 70B's config.json.
LAYERS = 80
KV_HEADS = 8
HEAD_DIM = 128
DTYPE = 2  # bytes a value: fp16 or bf16
Q_HEADS = 64  # what KV_HEADS would be without GQA
N_PARAMS = 70e9
# KV_PER_TOKEN follows from these: block 1 derives it.

# What a replica, 4 x H100-80G that serve the model together, has left for KV: see block 1.
KV_BUDGET_GIB = 172.5

# H100 SXM, BF16, dense. The datasheet's 1,979e12 counts 2:4 sparsity, which no LLM here has.
DENSE_FLOPS_PER_GPU = 989.5e12

# What KV can be read from, in GB/s (1e9 bytes): one GPU's own memory, or one link or drive.
TIERS = {
    "GPU HBM": 3350,
    "host DRAM over PCIe5": 64,
    "RDMA / 200 GbE": 25,
    "local NVMe": 7,
    "object storage": 1,
}


def lognormal_pairs(n: int, seed: int, mu: float, sigma: float) -> list[tuple[int, int]]:
    """n pairs of tokens, first ~ lognormal(mu, sigma), second ~ lognormal(5.5, 0.8), in turn."""
    draw = random.Random(seed).lognormvariate
    return [(int(draw(mu, sigma)), int(draw(5.5, 0.8))) for _ in range(n)]


def seq_lengths(n: int, seed: int = 5) -> list[tuple[int, int]]:
    """The workload: n requests as (prompt tokens, output tokens), the same for the same seed.

    Lengths are log-normal: most prompts are short (the median of the first 4,000 is 600 tokens) and
    a few are very long.

    >>> seq_lengths(2)
    [(1361, 72), (560, 281)]
    """
    return lognormal_pairs(n, seed, 6.4, 1.0)


# ------------------------------------------------------------------------------------ the harness

Parts = dict[str, Any]  # mechanisms by name: what a block returns, and what later blocks receive


class Block(NamedTuple):
    """One step of the lesson: its heading, the blocks it builds on, and the function to run."""

    number: int
    title: str
    teaches: str
    needs: tuple[int, ...]
    run: Callable[[Parts, bool], Parts]


BLOCKS: dict[int, Block] = {}


def block(
    number: int, title: str, teaches: str, needs: tuple[int, ...] = ()
) -> Callable[[Callable[[Parts, bool], Parts]], Callable[[Parts, bool], Parts]]:
    """Register a function `bN(s, show)` as block `number`.

    A block calls its own mechanisms by their names, and those of the blocks before it through `s`.
    With `show` it prints its lesson. Either way it returns the mechanisms it is about, by name.
    """

    def register(run: Callable[[Parts, bool], Parts]) -> Callable[[Parts, bool], Parts]:
        BLOCKS[number] = Block(number, title, teaches, needs, run)
        return run

    return register


def prerequisites(number: int) -> list[int]:
    """The blocks that must run before block `number`, in order."""
    needed: set[int] = set()
    for need in BLOCKS[number].needs:
        needed.update(prerequisites(need), (need,))
    return sorted(needed)


def collect(numbers: Iterable[int], show: bool = False, s: Parts | None = None) -> Parts:
    """Run the blocks in the order given, each on the parts of those before it (first `s`)."""
    gathered = dict(s or {})
    for number in numbers:
        if show:
            heading(f"Block {number}. {BLOCKS[number].title}", BLOCKS[number].teaches)
        gathered.update(BLOCKS[number].run(gathered, show))
    return gathered


def heading(title: str, teaches: str) -> None:
    """Print a title between rules, its lesson under it."""
    print(f"{'=' * 80}\n{title}\n  {teaches}\n{'-' * 80}")


def wrapped(text: str, first: str = "  ") -> str:
    """`text` as lines of at most 80 columns, set in as far as `first`, which starts line one."""
    return textwrap.fill(
        " ".join(text.split()),
        width=80,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )


def say(paragraph: str) -> None:
    """Print a paragraph of prose under what was printed last."""
    print(f"\n{wrapped(paragraph)}")


class Spread(NamedTuple):
    """Where a figure lies that a seed decides: over so many seeds, from 0 on."""

    least: float
    median: float
    most: float


# ---------------------------------------------------------------------- block 1: what a token costs


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype_bytes: float) -> int:
    """Bytes of KV cache that one token holds, over all layers.

    Every layer keeps one key and one value vector of `head_dim` values for each of its KV heads,
    hence the 2. Query heads keep nothing, which is what grouped-query attention lives on (Ainslie
    et al. 2023, "GQA"). `dtype_bytes` may be a fraction (llama.cpp's q8_0: 1.0625).

    >>> kv_bytes_per_token(layers=80, kv_heads=8, head_dim=128, dtype_bytes=2)
    327680
    """
    return math.ceil(2 * layers * kv_heads * head_dim * dtype_bytes)


KV_PER_TOKEN = kv_bytes_per_token(LAYERS, KV_HEADS, HEAD_DIM, DTYPE)


def kv_gib(tokens: int, kv_per_token: int = KV_PER_TOKEN) -> float:
    """GiB of KV cache that `tokens` tokens hold."""
    return tokens * kv_per_token / GIB


def budget_share(gib: float, budget_gib: float = KV_BUDGET_GIB) -> float:
    """Share of a replica's KV budget that `gib` GiB take (1.0: all of it).

    >>> budget_share(kv_gib(131_072, kv_per_token=327_680), budget_gib=80)
    0.5
    """
    return gib / budget_gib


CONTEXTS = (1024, 4096, 32_768, 131_072)

GPUS, GPU_GIB = 4, 79.65  # a replica's cards, and what each of them shows of its 80 GB


@block(1, "What a token costs", "the one number the whole design follows from")
def b1(s: Parts, show: bool) -> Parts:
    """Price a token, then contexts."""
    if show:
        print(
            f"  2 (K and V) x {LAYERS} layers x {KV_HEADS} kv-heads"
            f" x {HEAD_DIM} head-dim x {DTYPE} B"
        )
        print(f"  = {KV_PER_TOKEN:,} B/token = {KV_PER_TOKEN / 1024:.0f} KiB per token\n")
        print("     context   KV per sequence   % of a replica")
        for context in CONTEXTS:
            gib = kv_gib(context)
            print(f"{context:>12,}{gib:>15.2f} GiB{budget_share(gib):>17.1%}")
        say(
            f"""A layer computes a key and a value vector of each token, and every later token
            attends to them; so they are kept, in every layer. As long as its sequence runs, a token
            occupies {KV_PER_TOKEN // 1024} KiB. {1 / budget_share(kv_gib(131_072)):.1f} requests of
            128k tokens fill the replica's KV budget, whatever its GPUs could still compute."""
        )
        visible, weights = GPUS * GPU_GIB, N_PARAMS * DTYPE / GIB
        rest = visible - weights - KV_BUDGET_GIB
        say(
            f"""That budget, {KV_BUDGET_GIB} GiB, is given: {GPUS} x H100 show {visible:.1f} GiB and
            fp16 weights take {weights:.1f}, so {rest:.1f} are left for activations, CUDA graphs and
            communication buffers. vLLM by default uses 92% of each card; with the same {rest:.1f}
            it would have {0.92 * visible - weights - rest:.1f} for KV."""
        )
        without_gqa = kv_bytes_per_token(LAYERS, Q_HEADS, HEAD_DIM, DTYPE)
        say(
            f"""GQA is why it is not worse: with a KV head for each of the {Q_HEADS} query heads a
            token would cost {without_gqa // 1024:,} KiB, {without_gqa // KV_PER_TOKEN}x as much.
            (A what-if: Llama-2 70B has {KV_HEADS} KV heads too.) For another model, --model
            config.json prints these sizes, also where less than two vectors of every token are kept
            for each head."""
        )
    return {
        "kv_bytes_per_token": kv_bytes_per_token,
        "kv_gib": kv_gib,
        "budget_share": budget_share,
        "kv_bytes": kv_bytes,
    }


# ------------------------------------------------------------------ block 2: contiguous allocation


class Allocation(NamedTuple):
    """How far an allocator got through a workload; all three allocators return one."""

    batch: int  # sequences admitted
    held_tokens: int  # tokens of memory reserved or allocated for them
    logical_tokens: int  # prompt + output tokens of all of them, as if nothing were shared
    misfits: int = 0  # admitted sequences that are longer than what is reserved for each

    @property
    def waste(self) -> float:
        """Share of the held memory that the admitted tokens do not need (0.0 if none is held).

        It is negative when they need more than is held: because tokens are shared (block 4), or
        because sequences do not fit what was reserved for them (block 2).
        """
        return 1 - self.logical_tokens / self.held_tokens if self.held_tokens else 0.0

    @property
    def saved(self) -> float:
        """Share of the logical tokens that need no memory, being shared (block 4)."""
        return 1 - self.held_tokens / self.logical_tokens if self.logical_tokens else 0.0


def budget_tokens(budget_gib: float = KV_BUDGET_GIB, kv_per_token: int = KV_PER_TOKEN) -> int:
    """Whole tokens of KV cache that fit the budget.

    >>> budget_tokens(16, kv_per_token=57_344) // 16  # Qwen2.5 7B in 16 GiB: 16-token pages
    18724
    """
    return int(budget_gib * GIB) // kv_per_token


def contiguous(
    requests: Iterable[tuple[int, int]],
    reserve: int,
    budget_gib: float = KV_BUDGET_GIB,
    kv_per_token: int = KV_PER_TOKEN,
) -> Allocation:
    """Admit requests in order, each into one contiguous slot of `reserve` tokens.

    This is what servers did before paging: nobody knows how long an answer will get, so the longest
    allowed length is reserved (Kwon et al. 2023, "Efficient memory management for large language
    model serving with PagedAttention", section 3.1). The budget decides the number of slots, and a
    request takes one whatever its length, even one that does not fit it: `misfits` counts those.

    >>> contiguous([(600, 200), (900, 400), (100, 100)], 1024, budget_gib=1, kv_per_token=2**19)
    Allocation(batch=2, held_tokens=2048, logical_tokens=2100, misfits=1)
    """
    slots = budget_tokens(budget_gib, kv_per_token) // reserve
    lengths = [prompt + output for prompt, output in islice(requests, slots)]
    misfits = sum(length > reserve for length in lengths)
    return Allocation(len(lengths), len(lengths) * reserve, sum(lengths), misfits)


WASTE_AT_8192 = Spread(0.779, 0.839, 0.888)  # seeds 0 to 199 of seq_lengths(4000)


@block(2, "Contiguous allocation", "reserve max_tokens per sequence and watch it evaporate", (1,))
def b2(s: Parts, show: bool) -> Parts:
    """Sweep the reservation over the workload."""
    if show:
        requests, gib = seq_lengths(4000), s["kv_gib"]
        sweep = {reserve: contiguous(requests, reserve) for reserve in (2048, 4096, 8192, 32_768)}
        print("     reserve   batch    reserved   actually used   wasted")
        for reserve, row in sweep.items():
            print(
                f"{reserve:>12,}{row.batch:>8}{gib(row.held_tokens):>9.1f} GiB"
                f"{gib(row.logical_tokens):>13.1f} GiB{row.waste:>9.1%}"
            )
        misfits = "; ".join(
            f"{row.misfits} of {row.batch} ({row.misfits / row.batch:.0%}) at {reserve:,}"
            for reserve, row in sweep.items()
        )
        small = contiguous(requests, 512)
        say(
            f"""A reservation is for prompt and answer together. The table flatters small ones, for
            a sequence is admitted whether or not it fits. Longer than what is reserved for them are
            {misfits}. At 512 tokens the "waste" is {small.waste:.0%}: the {small.batch:,} admitted
            need {small.logical_tokens / small.held_tokens:.2f}x the memory that is there."""
        )
        cut = {
            reserve: contiguous([(min(sum(pair), reserve), 0) for pair in requests], reserve)
            for reserve in (512, *sweep)
        }
        wasted = ", ".join(f"{row.waste:.1%} at {reserve:,}" for reserve, row in cut.items())
        say(
            f"""Cut off at the reservation, sequences leave unused: {wasted}. A large reservation is
            mostly empty, and a small one cuts answers off or refuses prompts. (One draw: over seeds
            0 to 199 the table's 8,192 wastes {WASTE_AT_8192.least:.1%} to
            {WASTE_AT_8192.most:.1%}.)"""
        )
        rest = KV_BUDGET_GIB - gib(sweep[32_768].held_tokens)
        say(
            f"""Three wastes, by their names: reserved is what waits for tokens still to come,
            internal what no token will ever use, external what is free in holes too small for
            anybody. The table counts each sequence at its final length, so what it shows is
            internal; and slots of one size leave only a rest ({rest:.1f} GiB at 32,768)."""
        )
    return {
        "seq_lengths": seq_lengths,
        "budget_tokens": budget_tokens,
        "contiguous": contiguous,
    }


# ----------------------------------------------------------------------- block 3: paged allocation


def pages_for(tokens: int, page_tokens: int) -> int:
    """ceil(tokens / page_tokens): the pages that hold so many tokens, the last perhaps in part."""
    return -(-tokens // page_tokens)


class OutOfPages(Exception):
    """The pool has too few free pages. The call that raised this has changed nothing."""


class Sequence:
    """One sequence's block table: the pages that hold its tokens, in the order of the tokens.

    Token i lives in page `table[i // page_tokens]`, at slot `i % page_tokens`. Made by a PagePool,
    and only its pool may change it.
    """

    __slots__ = ("pool", "table", "tokens")

    def __init__(self, pool: PagePool, table: list[int], tokens: int) -> None:
        self.pool: PagePool | None = pool  # None once it is released
        self.table = table
        self.tokens = tokens

    def __repr__(self) -> str:
        return f"<Sequence tokens={self.tokens} table={self.table}>"

    def __reduce__(self) -> NoReturn:
        # A copy would hold pages that nobody has counted.
        raise TypeError("sequence cannot be copied; fork it")


class PagePool:
    """KV memory as pages of `page_tokens` tokens: a free list, reference counts, block tables.

    A sequence holds ceil(tokens / page_tokens) pages, anywhere in the pool: its block table says
    where. A page may stand in the tables of several sequences; it is free again when the last of
    them lets go of it (Kwon et al. 2023, sections 4.2 to 4.4). vLLM's pool today counts references
    in the same way, but for plain attention shares full pages only, and so need not copy one.

    `pages` and `page_tokens` are its size, `free` and `held` count its pages. Each call does all of
    its work or, when it refuses (OutOfPages, ValueError, TypeError), nothing.

    >>> pool = PagePool(pages=8, page_tokens=16)
    >>> parent = pool.allocate(40)
    >>> child = pool.fork(parent, 40)
    >>> pool.append(child, 1)
    >>> parent.table, child.table, pool.held, pool.free
    ([0, 1, 2], [0, 1, 3], 4, 4)
    """

    def __init__(self, pages: int, page_tokens: int = 16) -> None:
        self.pages = whole("pages", pages, least=1)
        self.page_tokens = whole("page_tokens", page_tokens, least=1)
        self.free = self.pages
        # A page that was never used joins the free list when it is needed, so that a pool of any
        # size costs nothing. A free page keeps a count of 1, for whoever takes it.
        self._free_list: list[int] = []
        self._ref_counts: list[int] = []  # of each page used so far

    @property
    def held(self) -> int:
        """How many pages stand in at least one block table; a shared page counts once."""
        return self.pages - self.free

    def references(self, page: int) -> int:
        """In how many block tables `page` stands (0: it is free)."""
        page = whole("page", page, most=self.pages - 1)
        free = page >= len(self._ref_counts) or page in self._free_list
        return 0 if free else self._ref_counts[page]

    def allocate(self, tokens: int) -> Sequence:
        """A new sequence of `tokens` tokens, on pages of its own; or OutOfPages."""
        if tokens.__class__ is not int or not 0 <= tokens <= MANY:
            tokens = whole("tokens", tokens)
        return Sequence(self, self._take(pages_for(tokens, self.page_tokens)), tokens)

    def append(self, sequence: Sequence, n: int = 1) -> None:
        """Write `n` more tokens at the end of `sequence`; or OutOfPages.

        A page is taken only when the last one is full. If the last one has room but is shared, it
        is copied first, and the copy is written: copy-on-write. (Only tables and counts are kept
        here; an engine copies the page's K and V too.)
        """
        if n.__class__ is not int or not 0 <= n <= MANY:
            n = whole("n", n)
        if getattr(sequence, "pool", None) is not self:
            refuse(sequence)
        table = sequence.table
        room = len(table) * self.page_tokens - sequence.tokens  # in the last page
        copies = 1 if n and room and self._ref_counts[table[-1]] > 1 else 0
        if n > room or copies:
            needed = pages_for(sequence.tokens + n, self.page_tokens)
            taken = self._take(needed - len(table) + copies)
            if copies:  # the first of the pages taken replaces the shared one
                self._ref_counts[table.pop()] -= 1
            table += taken
        sequence.tokens += n

    def fork(self, sequence: Sequence, tokens: int) -> Sequence:
        """A new sequence that shares the first `tokens` tokens of `sequence`. Copies nothing."""
        if getattr(sequence, "pool", None) is not self:
            refuse(sequence)
        tokens = whole("tokens", tokens, most=sequence.tokens)
        table = sequence.table[: pages_for(tokens, self.page_tokens)]
        for page in table:
            self._ref_counts[page] += 1
        return Sequence(self, table, tokens)

    def release(self, sequence: Sequence) -> None:
        """End `sequence`: the pages that no other table holds are free again."""
        if getattr(sequence, "pool", None) is not self:
            refuse(sequence)
        shared = 0
        for page in sequence.table:
            if self._ref_counts[page] == 1:
                break  # forks share from the start of a table: all from here on are its own
            self._ref_counts[page] -= 1
            shared += 1
        private = sequence.table[shared:] if shared else sequence.table
        self._free_list += private
        self.free += len(private)
        sequence.pool, sequence.table, sequence.tokens = None, [], 0

    def _take(self, n: int) -> list[int]:
        """n pages off the end of the free list; or OutOfPages."""
        if n > self.free:
            raise OutOfPages(f"{n:,} pages needed, {self.free:,} of {self.pages:,} free")
        missing = n - len(self._free_list)
        if missing > 0:
            used = len(self._ref_counts)
            longer = [*range(used, used + missing), *self._free_list]
            self._ref_counts += [1] * missing
            self._free_list = longer
        kept = len(self._free_list) - n
        taken = self._free_list[kept:]
        del self._free_list[kept:]
        self.free -= n
        return taken

    def __reduce__(self) -> NoReturn:
        # A copy would hold pages of sequences that belong to this one.
        raise TypeError("pool cannot be copied")


def paged(
    requests: Iterable[tuple[int, int]],
    page_tokens: int = 16,
    budget_gib: float = KV_BUDGET_GIB,
    kv_per_token: int = KV_PER_TOKEN,
) -> Allocation:
    """Admit requests in order, each on ceil((prompt + output) / page_tokens) pages of a PagePool.

    It stops at the first request that does not fit. A sequence wastes only the empty end of its
    last page: about half a page on average, a page less one token at most.

    >>> paged([(605, 190), (900, 300), (100, 100)], 16, budget_gib=1, kv_per_token=2**19)
    Allocation(batch=2, held_tokens=2000, logical_tokens=1995, misfits=0)
    """
    pages = budget_tokens(budget_gib, kv_per_token) // page_tokens
    if not pages:
        return Allocation(0, 0, 0)
    pool, lengths = PagePool(pages, page_tokens), []
    for prompt, output in requests:
        try:
            pool.allocate(prompt + output)
        except OutOfPages:
            break
        lengths.append(prompt + output)
    return Allocation(len(lengths), pool.held * page_tokens, sum(lengths))


def trace(call: str, sequence: Sequence, pool: PagePool, remark: str) -> None:
    """Print what a call on a small pool left behind."""
    held = f"{pool.held} of {pool.pages} held"
    print(f"    {call:<18} table {sequence.table!s:<13} {held}   {remark}")


BATCH_IN_PAGES = Spread(378, 422, 470)  # seeds 0 to 199 of seq_lengths(4000), pages of 16 tokens
PAGES_OVER_8192 = Spread(5.5, 6.1, 6.8)  # over the batch with 8,192 reserved, same seeds


@block(3, "Paged allocation", "the same idea as virtual memory, and the same payoff", (2,))
def b3(s: Parts, show: bool) -> Parts:
    """A sequence growing on a small pool, then the page sizes on the workload."""
    if show:
        pool = PagePool(pages=8, page_tokens=16)
        print("  A pool of 8 pages, 16 tokens each, and a sequence a that grows:")
        a = pool.allocate(20)
        trace("a = allocate(20)", a, pool, "two pages")
        b = pool.allocate(16)
        trace("b = allocate(16)", b, pool, "somebody else's page")
        pool.append(a, 12)
        trace("append(a, 12)", a, pool, "the last page had room")
        pool.append(a, 6)
        trace("append(a, 6)", a, pool, "a page, anywhere")
        pool.release(b)
        trace("release(b)", b, pool, "free for anybody")
        page, slot = a.table[37 // pool.page_tokens], 37 % pool.page_tokens
        print(f"  Token 37 of a lives in page table[37 // 16] = {page}, at slot 37 % 16 = {slot}.")
        print("\n  The workload on the whole budget:")
        requests, gib = s["seq_lengths"](4000), s["kv_gib"]
        baseline = s["contiguous"](requests, 8192)
        sweep = {page: paged(requests, page) for page in (1, 8, 16, 32, 128)}
        print("    page size   batch  pages held  internal waste  vs contiguous")
        for page, row in sweep.items():
            print(
                f"{page:>11} t{row.batch:>8}{gib(row.held_tokens):>9.1f} GiB"
                f"{row.waste:>16.2%}{row.batch / baseline.batch:>14.1f}x"
            )
        fine, usual = sweep[1], sweep[16]
        empty = (usual.held_tokens - usual.logical_tokens) / usual.batch
        say(
            f"""Contiguous is an 8,192-token reservation here, which holds {baseline.batch}; over
            seeds 0 to 199 pages of 16 hold {BATCH_IN_PAGES.least:.0f} to {BATCH_IN_PAGES.most:.0f},
            {PAGES_OVER_8192.least}x to {PAGES_OVER_8192.most}x as many. Any free page is as good as
            any other, as in virtual memory. What is left of the waste is the empty end of each last
            page: {empty:.1f} tokens of 16 on average here, at most a page less one token."""
        )
        saved, entries = fine.batch - usual.batch, usual.held_tokens // 16
        say(
            f"""Why 16? Pages of one token admit {saved} more, and their tables would still be small
            ({fine.held_tokens:,} entries of 4 bytes, against {entries:,}). But smaller pages read
            too little at a time to keep a GPU busy, and larger ones waste more and share less (Kwon
            et al., section 7.2). vLLM's default is 16, TensorRT-LLM's 32; SGLang has shipped 1."""
        )
        say(
            f"""But paged is told each final length, as no server is; with the same oracle and no
            holes contiguous memory would admit {fine.batch}. What pages really add is that nobody
            need know: a sequence takes a page when it needs one. Block 6 runs such a server."""
        )
    return {"PagePool": PagePool, "OutOfPages": OutOfPages, "paged": paged}


# ----------------------------------------------------------------------- block 4: sharing a prefix


def prefixed_lengths(n: int, prefix: int, seed: int = 9) -> list[tuple[int, int]]:
    """A workload of n requests whose prompts start with the same `prefix` tokens.

    Each prompt is the prefix and a suffix of its own, so the pairs are (prefix + suffix, output).
    """
    return [(prefix + suffix, output) for suffix, output in lognormal_pairs(n, seed, 5.0, 0.9)]


def shared_prefix(
    requests: Iterable[tuple[int, int]],
    prefix: int,
    page_tokens: int = 16,
    budget_gib: float = KV_BUDGET_GIB,
    kv_per_token: int = KV_PER_TOKEN,
    copy_on_write: bool = False,
) -> Allocation:
    """Admit requests in order, as `paged` does, on a pool that stores their common prefix once.

    A request shares min(prefix, prompt) tokens: a prompt shorter than the prefix is taken to be the
    start of it. The rest is its own. The prefix is stored first and stays, whoever shares it.

    Where a request's own tokens start in the middle of a shared page, they are counted on a fresh
    page. With `copy_on_write` the sequence copies the shared page and writes on, as the paper does
    (section 4.4); vLLM, which for plain attention shares full pages only, prefills the rest of that
    page again and so holds as many. Either takes as many pages as the default or one more per
    sequence.

    >>> requests = [(40, 8), (30, 0), (40, 8)]
    >>> shared_prefix(requests, 40, page_tokens=16, budget_gib=1, kv_per_token=2**23)
    Allocation(batch=3, held_tokens=80, logical_tokens=126, misfits=0)
    """
    pages = budget_tokens(budget_gib, kv_per_token) // page_tokens
    if not pages or pages_for(prefix, page_tokens) > pages:
        return Allocation(0, 0, 0)
    pool, lengths = PagePool(pages, page_tokens), []
    stored = pool.allocate(prefix)
    for prompt, output in requests:
        shared = min(prefix, prompt)
        private = prompt + output - shared
        start = shared if copy_on_write else shared - shared % page_tokens
        try:
            pool.append(pool.fork(stored, start), private)
        except OutOfPages:
            break
        lengths.append(prompt + output)
    return Allocation(len(lengths), pool.held * page_tokens, sum(lengths))


# What a request keeps to itself, by the mean of a log-normal, exp(mu + sigma^2 / 2), of suffix and
# output; each is rounded down, by half a token on average.
MEAN_PRIVATE = math.exp(5.0 + 0.9**2 / 2) + math.exp(5.5 + 0.8**2 / 2) - 1


def expected_saving(n: int, prefix: int, private: float = MEAN_PRIVATE) -> float:
    """Share of the KV of n requests that need not be stored, the prefix being stored once.

    `private` is what a request keeps to itself, on average; the default is that of
    `prefixed_lengths`. Counted in tokens. Of no tokens at all it is 0.0.

    >>> round(expected_saving(64, 4096), 3)
    0.866
    """
    tokens = n * (prefix + private)
    return (n - 1) * prefix / tokens if tokens else 0.0


SAVED_BEHIND_4096 = Spread(0.835, 0.866, 0.890)  # seeds 0 to 199 of prefixed_lengths(64, 4096)
EXTRA_BEHIND_4096 = Spread(6.0, 7.5, 9.1)  # naive over shared, same seeds


@block(4, "Sharing a prefix", "copy-on-write, and where the real win is", (3,))
def b4(s: Parts, show: bool) -> Parts:
    """A fork and its first write on a small pool, then 64 requests behind one prefix."""
    if show:
        pool = s["PagePool"](pages=8, page_tokens=16)
        print("  A pool of 8 pages, 16 tokens each; b shares 40 tokens of a:")
        a = pool.allocate(40)
        trace("a = allocate(40)", a, pool, "the prefix, once")
        b = pool.fork(a, 40)
        trace("b = fork(a, 40)", b, pool, "nothing copied yet")
        pool.append(b, 1)
        trace("append(b, 1)", b, pool, "a shared page: copied")
        pool.append(a, 1)
        trace("append(a, 1)", a, pool, "its own page: written")
        print("\n  64 requests with a common prefix, counted token by token:")
        gib = s["kv_gib"]
        print("    shared prefix    naive KV   shared KV    saved  extra batch")
        for prefix in (0, 256, 1024, 4096, 16_384):
            row = shared_prefix(prefixed_lengths(64, prefix), prefix, page_tokens=1)
            print(
                f"{prefix:>15,} t{gib(row.logical_tokens):>9.2f} GiB"
                f"{gib(row.held_tokens):>9.2f} GiB{row.saved:>9.1%}"
                f"{row.logical_tokens / row.held_tokens:>12.2f}x"
            )
        pages = shared_prefix(prefixed_lengths(64, 4096), 4096)
        say(
            f"""Counted as the pool does, in whole 16-token pages, it is a little more: at 4,096 it
            is {gib(pages.held_tokens):.2f} GiB, which saves {pages.saved:.1%}. "Extra batch" is
            naive over shared: how many such groups, each sharing a prefix of its own, fit where one
            fits without sharing."""
        )
        say(
            f"""The draw is a lucky one. A request keeps {MEAN_PRIVATE:.1f} tokens to itself on
            average, so {expected_saving(64, 4096):.1%} is to be expected behind 4,096; seeds 0 to
            199 give {SAVED_BEHIND_4096.least:.1%} to {SAVED_BEHIND_4096.most:.1%}, and
            {EXTRA_BEHIND_4096.least}x to {EXTRA_BEHIND_4096.most}x. More requests save more, and
            barely: behind 512 tokens expect {expected_saving(64, 512):.1%} of 64 and
            {expected_saving(256, 512):.1%} of 256. The ceiling is prefix / (prefix + private)."""
        )
        say(
            """Time is won too: of 64 prefills of the prefix 63 are not done. To find a shared
            prefix, vLLM hashes each full page together with all before it; SGLang and TensorRT-LLM
            search a radix tree. What is shared is memory: attention still reads the prefix for
            every sequence in every step, unless its kernel knows about the sharing too."""
        )
    return {
        "prefixed_lengths": prefixed_lengths,
        "shared_prefix": shared_prefix,
        "expected_saving": expected_saving,
    }


# --------------------------------------------------------------------- block 5: fetch or recompute


def flop_per_token(
    prefix: int, n_params: float, attention: bool, layers: int, q_heads: int, head_dim: int
) -> float:
    """FLOP of a forward pass for one token, averaged over a prefix.

    A multiply and an add for each parameter (Kaplan et al. 2020, "Scaling laws for neural language
    models", section 2.1, who leave embeddings out; of a mixture of experts, `n_params` is what a
    token passes through). With `attention`, each query head also multiplies with the key and adds
    up the value of every earlier token: half the prefix, on average.
    """
    earlier = prefix / 2 if attention else 0
    return 2 * n_params + 4 * layers * q_heads * head_dim * earlier


def fetch_seconds(prefix: int, gb_per_s: float, kv_per_token: float = KV_PER_TOKEN) -> float:
    """Seconds to load the KV of `prefix` tokens from a tier of `gb_per_s` GB/s (1e9 bytes)."""
    return prefix * kv_per_token / (gb_per_s * 1e9)


def recompute_seconds(
    prefix: int,
    n_params: float = N_PARAMS,
    flops_per_gpu: float = DENSE_FLOPS_PER_GPU,
    tp: int = 4,
    mfu: float = 1.0,
    attention: bool = False,
    layers: int = LAYERS,
    q_heads: int = Q_HEADS,
    head_dim: int = HEAD_DIM,
) -> float:
    """Seconds to prefill `prefix` tokens again on `tp` GPUs of `flops_per_gpu` FLOP/s each.

    A token costs 2 FLOP per parameter; `attention` adds what depends on the tokens before it, from
    layers, q_heads and head_dim. `mfu` is the share of the peak FLOP/s that prefill reaches.
    """
    flop = prefix * flop_per_token(prefix, n_params, attention, layers, q_heads, head_dim)
    return flop / (tp * flops_per_gpu * mfu)


def break_even(
    kv_per_token: float = KV_PER_TOKEN,
    n_params: float = N_PARAMS,
    flops_per_gpu: float = DENSE_FLOPS_PER_GPU,
    tp: int = 4,
    mfu: float = 1.0,
    attention: bool = False,
    prefix: int = 1,
    layers: int = LAYERS,
    q_heads: int = Q_HEADS,
    head_dim: int = HEAD_DIM,
) -> float:
    """GB/s at which fetching a prefix takes as long as recomputing it; a faster tier wins.

    Both times grow with the length of the prefix, so it cancels. It does not cancel with
    `attention`: then `prefix` is the length, and the rest is as in `recompute_seconds`.

    >>> round(break_even(kv_per_token=327_680, n_params=70e9, flops_per_gpu=989.5e12, tp=4), 2)
    9.26
    >>> round(break_even(attention=True, prefix=131_072), 2)
    4.16
    """
    flop = flop_per_token(prefix, n_params, attention, layers, q_heads, head_dim)
    return kv_per_token * (tp * flops_per_gpu * mfu) / flop / 1e9


def shortest_fetch(gb_per_s: float) -> int:
    """Shortest prefix, in tokens and at TP4, that is fetched at `gb_per_s` faster than recomputed.

    With attention counted the break-even falls as the prefix grows, so bisection finds it.

    >>> shortest_fetch(7)
    34546
    """
    recomputed, fetched = 0, MANY
    while fetched - recomputed > 1:
        middle = (recomputed + fetched) // 2
        if break_even(attention=True, prefix=middle) < gb_per_s:
            fetched = middle
        else:
            recomputed = middle
    return fetched


@block(5, "Fetch or recompute", "the break-even bandwidth, and it deletes a tier", (1,))
def b5(s: Parts, show: bool) -> Parts:
    """The break-even by tensor parallelism, and what it says of each tier."""
    if show:
        lead = """TPn is a replica of n GPUs, tensor-parallel; a model of N parameters prefills at
            2N FLOP a token. To fetch a token takes as long as to compute it at: break-even = KV
            bytes a token x FLOP/s / 2N."""
        print(f"{wrapped(lead)}\n")
        print("    config   prefill/token   break-even BW")
        for tp in (1, 2, 4, 8):
            per_token = recompute_seconds(1, tp=tp)
            print(f"{f'TP{tp}':>10}{per_token * 1e6:>13.1f} us{break_even(tp=tp):>13.2f} GB/s")
        print()
        print("  tier                         bandwidth  vs break-even  verdict")
        threshold = break_even()
        for tier, gb_per_s in TIERS.items():
            wins = fetch_seconds(1, gb_per_s) < recompute_seconds(1)
            verdict = "use it" if wins else "SLOWER THAN RECOMPUTE"
            print(f"  {tier:<28}{gb_per_s:>7} GB/s{gb_per_s / threshold:>14.1f}x  {verdict}")
        lengths = (1, 4096, 131_072)
        bars = [f"{fetch_seconds(n, 1.0) / recompute_seconds(n):.2f} at {n:,}" for n in lengths]
        say(
            f"""The tiers are judged at TP4, as one link or drive that feeds the whole replica. With
            a link for each GPU, which then loads its part of the KV, the break-even of a link is
            {break_even(tp=1):.2f} GB/s at any TP, up to as many GPUs as KV heads. (TP1 is for the
            pattern only: it does not hold a 70B in fp16.) The length of the prefix cancels; fetch
            time at 1 GB/s over recompute time: {", ".join(bars)} tokens."""
        )
        fp8 = break_even(s["kv_bytes_per_token"](LAYERS, KV_HEADS, HEAD_DIM, 1))
        sparse = break_even(flops_per_gpu=1979e12)
        say(
            f"""With FP8 KV the break-even is {fp8:.2f} GB/s, and an NVMe drive clears it. (The
            datasheet's 1,979 TFLOP/s in BF16 are with 2:4 sparsity, and would make it
            {sparse:.1f}.)"""
        )
        drive, half = TIERS["local NVMe"], 0.5
        slower = [tier for tier, gb_per_s in TIERS.items() if gb_per_s < break_even(mfu=half)]
        say(
            f"""The verdicts hold at the dense peak, for one drive, and at the links' nominal rates.
            Prefill never reaches the peak: below {drive / threshold:.1%} MFU (the share that it
            reaches) one {drive} GB/s drive wins, and at {half:.0%}, where the break-even is
            {break_even(mfu=half):.2f} GB/s, only {" and ".join(slower)} is slower. Two drives,
            striped, give {2 * drive} GB/s and win at any MFU. And attention costs more the longer
            the prefix, so that with it the length does not cancel:"""
        )
        print("\n      prefix   break-even BW with attention")
        for prefix in (1024, 4096, 16_384, 32_768, 131_072):
            print(f"{prefix:>12,}{break_even(attention=True, prefix=prefix):>26.2f} GB/s")
        say(
            f"""From {shortest_fetch(drive):,} tokens on the one drive wins, even at the full peak.
            And a fetch leaves the GPUs free, while a recompute takes them: block 4's 63 prefills of
            4,096 tokens, {recompute_seconds(63 * 4096):.1f} s of the replica."""
        )
    return {
        "break_even": break_even,
        "fetch_seconds": fetch_seconds,
        "recompute_seconds": recompute_seconds,
        "shortest_fetch": shortest_fetch,
    }


# ------------------------------------------------- block 6: preemption is a cliff, not a slope


def preempted_tokens(occupancy: float, n: int = 2000, seed: int = 3) -> int:
    """Tokens that n steps at this occupancy (0 to 1) of the pool would prefill a second time.

    An ASSUMED curve, not a measured one: a step preempts with probability
    ((occupancy - 0.85) / 0.15)**2 above 0.85, and below that not at all. The victim's prompt,
    log-normal as in `seq_lengths`, is then computed again.

    >>> preempted_tokens(0.85)
    0
    """
    probability = max(0.0, (occupancy - 0.85) / 0.15) ** 2
    rng = random.Random(seed)
    tokens = 0
    for _ in range(n):
        if rng.random() < probability:
            tokens += int(rng.lognormvariate(6.4, 1.0))
    return tokens


# That curve is the foil. What happens instead can be computed: sequences grow, a scheduler admits.


def step_seconds(
    tokens: float,
    held_tokens: float,
    kv_per_token: float = KV_PER_TOKEN,
    n_params: float = N_PARAMS,
    flops_per_gpu: float = DENSE_FLOPS_PER_GPU,
    gb_per_s: float = TIERS["GPU HBM"],
    tp: int = 4,
    mfu: float = 1.0,
    mbu: float = 1.0,
    active_params: float | None = None,
    weight_bytes: float = DTYPE,
) -> float:
    """Seconds of a forward pass over `tokens` tokens that reads the KV of `held_tokens` tokens.

    The roofline of `tp` GPUs: the 2 bytes of each parameter are read once for all tokens, while 2
    FLOP a parameter are computed for each, and the longer of the two counts; then each sequence
    reads its own KV. `gb_per_s` is one GPU's memory (Pope et al. 2022, "Efficiently scaling
    transformer inference"; Austin et al. 2025, "How to scale your model", on inference).

    Up to the ridge, 295 tokens a step on an H100 at its peak, one more token uses only FLOP that
    would lie idle. Left out: communication between GPUs, the FLOP of attention, launches and
    sampling, and that a kernel may read a shared prefix once for all.

    >>> round(step_seconds(0, 0) * 1000, 2), round(step_seconds(417, 563_455) * 1000, 1)
    (10.45, 28.5)
    """
    bandwidth, flop_per_s = tp * gb_per_s * 1e9 * mbu, tp * flops_per_gpu * mfu
    active = n_params if active_params is None else active_params
    weights = max(weight_bytes * n_params / bandwidth, tokens * 2 * active / flop_per_s)
    return weights + held_tokens * kv_per_token / bandwidth


def ridge_tokens(
    n_params: float = N_PARAMS,
    active_params: float | None = None,
    flops_per_gpu: float = DENSE_FLOPS_PER_GPU,
    gb_per_s: float = TIERS["GPU HBM"],
    mfu: float = 1.0,
    mbu: float = 1.0,
    weight_bytes: float = DTYPE,
) -> float:
    """Stub."""
    active = n_params if active_params is None else active_params
    flop_per_byte = flops_per_gpu * mfu / (gb_per_s * 1e9 * mbu)
    return flop_per_byte * weight_bytes * n_params / (2 * active)


def step_fills(requests: Iterable[tuple[int, int]], max_batched_tokens: int) -> float:
    """Stub."""
    p = o = 0
    for prompt, output in requests:
        p += prompt
        o += output
    return max_batched_tokens / (1 + p / o)


def resident_tokens(requests: Iterable[tuple[int, int]], page_tokens: int = 16) -> float:
    """Tokens that a running sequence holds, averaged over time: E[p x o + o^2 / 2] / E[o].

    Each request is there for `output` steps, and holds its prompt and, on average, half its output.
    The pool is full, on average, with its tokens / resident_tokens(requests) sequences. Where those
    are hundreds, nine tenths of them is a `max_num_seqs` that on most draws leaves room for the
    swing; a smaller pool swings more.

    >>> round(resident_tokens(seq_lengths(4000)), 1)
    1291.3
    """
    token_steps = steps = 0.0
    for prompt, output in requests:
        token_steps += prompt * output + output**2 / 2
        steps += output
    if not steps:
        raise ValueError("requests must generate something, not 0 tokens in all")
    return token_steps / steps + page_tokens / 2


class Served(NamedTuple):
    """What it took to serve a workload to the end, and how its steady state looked.

    The last four figures leave out the first flood and the drain at the end. They are over the
    steps that begin with somebody waiting and half of the requests admitted before; 0 without any.
    """

    steps: int  # forward passes: each gives every running sequence one token
    generated: int  # output tokens
    prefilled: int  # tokens prefilled, repeats included
    reprefilled: int  # of these, for sequences that had been preempted
    preempted: int  # how often a sequence lost its pages
    peak_pages: int  # pages held at the fullest moment
    running: float  # steady state: sequences in a step, on average
    held: float  # steady state: share of the pages held, on average
    again: float  # steady state: tokens admitted again, over those admitted for the first time
    tokens_per_s: float  # steady state: tokens generated, over the sum of the step times


def serve(
    requests: Iterable[tuple[int, int]],
    pages: int,
    page_tokens: int = 16,
    watermark: float = 0.0,
    max_running: int | None = None,
    max_batched_tokens: int | None = None,
    step_seconds: Callable[[float, float], float] = step_seconds,
) -> Served:
    """Serve all requests on one replica with `pages` pages of KV, and count what it took.

    All wait in a queue from the start. One may enter if its prompt and next token fit and leave
    `watermark` of all pages free (unless nothing runs), and if fewer than `max_running` run. A step
    computes `max_batched_tokens` tokens at most (one more where those that run take them all): one
    for each running sequence, then prefill that is owed; while what is owed fills a step, nobody
    enters. When no page is left, the newest sequence is preempted: its pages are released, and it
    goes to the front of the queue, to be prefilled again with what it had generated. The steady
    state is timed by `step_seconds(tokens computed, tokens that the held pages have room for)`.

    So vLLM's V1 engine admits and preempts. Its max_num_seqs is 1,024 and its
    max_num_batched_tokens 8,192 for a server on an H100, its watermark 0. Simplified: all wait from
    the start; a sequence generates while its prefill is still owed; what a preempted one still owes
    is computed all the same. Left out: prefix caching (on by default in vLLM), so that
    `reprefilled` is an upper bound.

    An output below 1 and a request longer than the pool raise ValueError before anything runs.

    >>> serve([(4, 6), (4, 6)], pages=4, page_tokens=4)[:6]
    (8, 12, 16, 8, 1, 4)
    """
    waiting = deque(servable(requests, pages, page_tokens))  # (prompt, output, done before)
    kept_free = int(watermark * pages)
    most_running, most_tokens = max_running or math.inf, max_batched_tokens or math.inf
    # What preempts is the number of pages, so they are counted here and not named (a PagePool gives
    # the same, tens of times as slowly). Running sequences by number of admission, the newest last:
    # (prompt, output, offset). At the end of step n one is offset + n tokens long, so it fills a
    # page whenever n % page_tokens is -offset % page_tokens; `filling` counts them by that.
    admissions = count()
    running: dict[int, tuple[int, int, int]] = {}
    filling: defaultdict[int, int] = defaultdict(int)
    finishing: defaultdict[int, list[int]] = defaultdict(list)  # by step; may be preempted by then
    step = held = peak_pages = entered = 0
    generated = prefilled = reprefilled = preempted = 0
    owed: float = 0  # prefill that is admitted and not computed
    half = len(waiting) / 2
    steady: list[tuple[float, ...]] = []

    def leave(offset: int) -> None:
        nonlocal held
        filling[-offset % page_tokens] -= 1
        held -= pages_for(offset + step, page_tokens)

    while waiting or running:
        counts = bool(waiting) and entered >= half
        new = again = 0

        # Admit from the head of the queue, each with room for its next token.
        while waiting and len(running) < most_running:
            prompt, output, done = waiting[0]
            tokens = prompt + done
            need = pages_for(tokens + 1, page_tokens)
            if held + need + (kept_free if running else 0) > pages:
                break
            if running and owed >= most_tokens - len(running):
                break
            waiting.popleft()
            if done:
                again += tokens
            else:
                new += tokens
                entered += 1
            held += need
            owed += tokens
            offset, sequence = tokens - step, next(admissions)
            running[sequence] = prompt, output, offset
            filling[-offset % page_tokens] += 1
            finishing[prompt + output - offset].append(sequence)
        prefilled += new + again
        reprefilled += again
        peak_pages = max(peak_pages, held)

        # Generate a token for each that runs, and prefill as much as the step has room for.
        generated += len(running)
        computed = min(owed, max(1, most_tokens - len(running)))
        owed -= computed
        if counts:
            steady.append((len(running), computed, held, new, again))
        step += 1

        # Finish: those that have their whole output release their pages.
        for sequence in finishing.pop(step, ()):
            if sequence in running:
                leave(running.pop(sequence)[2])

        # Grow: each whose last page is full takes another, the oldest first. While there are too
        # few for all of them, preempt the newest of all that run; if it was to grow, one less does.
        full = step % page_tokens
        while filling[full] > pages - held:
            _, (prompt, output, offset) = running.popitem()
            leave(offset)
            waiting.appendleft((prompt, output, offset + step - prompt))
            preempted += 1
            peak_pages = pages  # the older ones took what was free before this one had to go
        held += filling[full]

    return Served(
        step, generated, prefilled, reprefilled, preempted, peak_pages,
        *steady_state(steady, pages, page_tokens, step_seconds),
    )  # fmt: skip


def steady_state(
    steps: list[tuple[float, ...]],
    pages: int,
    page_tokens: int,
    step_seconds: Callable[[float, float], float],
) -> tuple[float, float, float, float]:
    """The last four figures of Served, from (running, prefill, held, new, again) of each step."""
    if not steps:
        return 0.0, 0.0, 0.0, 0.0
    seconds = 0.0
    for running, prefill, held, _, _ in steps:
        took = step_seconds(running + prefill, held * page_tokens)
        seconds += number("what step_seconds returns", took)
    running, _, held, new, again = map(sum, zip(*steps))
    return (
        running / len(steps),
        held / len(steps) / pages,
        again / new if new else 0.0,
        running / seconds,
    )


STEP_TOKENS = 8192  # vLLM's max_num_batched_tokens, serving on an H100
SWEEP = ((350, 0), (400, 0), (425, 0), (450, 0), (500, 0), (500, 0.01), (500, 0.05))


def mixes(requests: Iterable[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
    """Chat, the workload as it is; long, its pairs swapped and its answers cut at 4,096 tokens."""
    chat = list(requests)
    return {"chat": chat, "long": [(output, min(prompt, 4096)) for prompt, output in chat]}


# What the seed decides. Over seeds 0 to 199: the table's tokens at 95%. Over seeds 0 to 9 of
# seq_lengths(4000), in percent: `again` for each row of the sweep, the tokens/s that 500 running
# lose to the best row with nothing kept free, and one standard deviation of `held` where 400 run.
REPREFILLED_AT_95 = Spread(782_182, 882_596.5, 976_033)
AGAIN = {
    "chat": (
        Spread(0, 0, 0), Spread(0, 0.1, 0.9), Spread(0.5, 2.5, 3.2), Spread(4.3, 8.0, 8.9),
        Spread(7.6, 9.5, 10.9), Spread(0, 0, 0), Spread(0, 0, 0),
    ),
    "long": (
        Spread(0, 0, 0), Spread(0, 0, 8.4), Spread(0, 21.1, 40.6), Spread(47.8, 70.5, 100.7),
        Spread(124.2, 158.2, 167.2), Spread(4.6, 8.9, 11.6), Spread(0, 0, 0),
    ),
}  # fmt: skip
LOSS = {"chat": Spread(4.6, 5.4, 6.5), "long": Spread(17.1, 20.7, 21.4)}
SWING = Spread(1.8, 3.2, 5.0)

# vLLM's pull request 44594: the watermarks, preemptions and output tokens/s measured there; and
# what `serve` preempts on 100 draws of its workload (5% to 95%), without anything fitted.
WATERMARKS = (0, 0.02, 0.05, 0.10, 0.15)
MEASURED = (1065, 400, 187, 168, 168)
MEASURED_RATES = (11_582, 12_134, 12_167, 11_835, 11_635)
FIRST_TOKEN_S = (6.6, 11.8)  # median, at the first two watermarks
SIMULATED = ((943, 1217), (342, 417), (190, 240), (133, 196), (134, 181))


def show_assumed_curve(s: Parts) -> None:
    """The assumed curve as a table, and what it assumes."""
    print("    occupancy   preempted  tokens re-prefilled  wasted GPU-ms @TP4")
    for occupancy in (0.60, 0.85, 0.90, 0.95, 0.99):
        tokens = preempted_tokens(occupancy)
        milliseconds = s["recompute_seconds"](tokens) * 1000
        print(
            f"{occupancy:>13.0%}{'yes' if tokens else 'no':>12}{tokens:>21,}{milliseconds:>19.0f}"
        )
    say(
        f"""The curve is an assumption: 2,000 steps, each preempting with probability
        ((occupancy - 0.85) / 0.15)^2 above 85%, and below that not at all. It prices the victims'
        prompts, in milliseconds of the whole replica at its peak. (Other seeds give
        {REPREFILLED_AT_95.least:,} to {REPREFILLED_AT_95.most:,} tokens at 95%.)"""
    )


def show_cliff(s: Parts) -> None:
    """Both mixes, with more and more sequences allowed to run, in the steady state."""
    pages = s["budget_tokens"]() // 16
    workloads = mixes(s["seq_lengths"](4000))
    resident = {mix: resident_tokens(requests) for mix, requests in workloads.items()}
    full = {mix: pages * 16 / tokens for mix, tokens in resident.items()}
    say(
        f"""Derived instead: a server that learns each length as it comes, with {pages:,} pages,
        {STEP_TOKENS:,} tokens a step and 4,000 requests that wait. Chat is the workload; long swaps
        prompts and outputs, its answers cut at 4,096. A running sequence holds
        {resident["chat"]:,.0f} and {resident["long"]:,.0f} tokens, averaged over time, so
        {full["chat"]:.0f} and {full["long"]:.0f} fill the pool."""
    )
    print("\n   mix at most kept free  running   held  preempted   again    seeds 0-9   tok/s")
    for mix, requests in workloads.items():
        for (most, free), spread in zip(SWEEP, AGAIN[mix]):
            row = serve(requests, pages, 16, free, most, STEP_TOKENS)
            seeds = f"{spread.least:g}-{spread.most:g}%"
            print(
                f"{mix:>6}{most:>8}{free:>10.0%}{row.running:>9.1f}{row.held:>7.1%}"
                f"{row.preempted:>11,}{row.again:>8.1%}{seeds:>13}{row.tokens_per_s:>8,.0f}"
            )
    cliff, slope = (
        ", ".join(f"{spread.median:g}" for spread in AGAIN[mix][1:5]) for mix in ("long", "chat")
    )
    say(
        f"""All but "preempted" leave out the first half of the admissions and the end, when nobody
        waits. "Again" is tokens prefilled again over tokens prefilled first. Its onset is a cliff
        for long answers: at 400, 425, 450 and 500 it is {cliff}% (medians of ten draws); chat
        slides, {slope}%. The cost is a step down: of the best tok/s with nothing kept free 500 lose
        {LOSS["long"].least} to {LOSS["long"].most}% in long and {LOSS["chat"].least} to
        {LOSS["chat"].most}% in chat, and more would lose little more."""
    )
    say(
        f"""It begins near 90% of the pool on average, for "held" swings (by {SWING.least} to
        {SWING.most} points, one standard deviation, at 400) and a pool overflows by its peaks; a
        smaller one swings more. Here 5% kept free, or a tenth fewer than fill the pool, gives back
        all but 0 to 3% of the tok/s, and 1% free nearly as much. All this is overload: somebody
        always waits."""
    )


def show_engine(s: Parts) -> None:
    """The same preemptions as they were measured in an engine, and why it recomputes."""
    inside = sum(low <= n <= high for n, (low, high) in zip(MEASURED, SIMULATED))
    say(
        f"""An engine was measured in vLLM's pull request 44594: 450 long answers of Qwen2.5-7B, at
        most 128 running. Its preemptions, and those of serve, with nothing fitted, on 100 draws of
        that workload (5% to 95% of them; {inside} of {len(MEASURED)} lie inside):"""
    )
    print("\n   watermark" + "".join(f"{kept:>12.2f}" for kept in WATERMARKS))
    print("    measured" + "".join(f"{preempted:>12,}" for preempted in MEASURED))
    print("       serve" + "".join(f"{f'{low:,}-{high:,}':>12}" for low, high in SIMULATED))
    best = max(MEASURED_RATES) / MEASURED_RATES[0] - 1
    to_host = TIERS["host DRAM over PCIe5"] / s["break_even"]()
    copied = KV_PER_TOKEN * 16 // LAYERS // GPUS // 1024
    say(
        f"""The best watermark was worth {best:.0%} more tokens/s there, and the median wait for a
        first token rose from {FIRST_TOKEN_S[0]} to {FIRST_TOKEN_S[1]} s at 0.02. Why recompute,
        when block 5 finds host memory {to_host:.1f}x as fast? A swap goes out and in again,
        {to_host / 2:.1f}x at best, in copies of {copied} KiB (a layer, page and GPU): Kwon et al.
        (section 7.3) measured the two as comparable with pages of 16 to 64 tokens. vLLM's V1 has no
        swap; unless KV offloading is on, it recomputes."""
    )


@block(6, "Preemption is a cliff, not a slope", "why KV exhaustion degrades non-linearly", (3, 5))
def b6(s: Parts, show: bool) -> Parts:
    """The assumed curve and its price; then a scheduler, and where the cliff really is."""
    if show:
        show_assumed_curve(s)
        show_cliff(s)
        show_engine(s)
    return {
        "preempted_tokens": preempted_tokens,
        "step_seconds": step_seconds,
        "resident_tokens": resident_tokens,
        "serve": serve,
        "size": size,
        "traffic": traffic,
    }


# ------------------------------------------------------------------------------ assembly and parts


RIDGE = DENSE_FLOPS_PER_GPU / (TIERS["GPU HBM"] * 1e9)  # FLOP a byte, and so tokens a step

# Over seeds 0 to 199: tokens/s in decode of pages, and of 2,048 reserved, over 8,192 reserved; the
# batch behind a shared 2k prefix; and the batches with 2k in front of each prompt. Over seeds 0 to
# 9: tokens/s of pages with 5% kept free, over 69 running, with prefill in the same steps.
WORTH_OF_PAGES = Spread(2.6, 2.7, 2.9)
WORTH_OF_2048 = Spread(2.4, 2.6, 2.8)
BATCH_BEHIND_2K = Spread(916, 1075.5, 1214)
BATCH_2K_EACH, BATCH_2K_ONCE = Spread(155, 167, 179), Spread(376, 420, 468)
WORTH_WITH_PREFILL = Spread(1.54, 1.55, 1.60)


def assembly(s: Parts) -> None:
    """Run the workload through the four allocators and sum the lesson up, from the parts in `s`."""
    heading("Assembly. Four allocators, one workload", f"{KV_BUDGET_GIB} GiB, 4,000 requests")
    requests = s["seq_lengths"](4000)
    rows = {
        "contiguous, reserve 8k": s["contiguous"](requests, 8192),
        "contiguous, reserve 2k": s["contiguous"](requests, 2048),
        "paged, 16-token pages": s["paged"](requests, 16),
        "paged + shared 2k prefix": s["shared_prefix"](requests, 2048),
    }
    show_allocators(s, requests, rows)
    in_decode = show_rates(s, rows)
    with_prefill = show_rates_with_prefill(s, requests, rows)
    show_interview(s, rows, in_decode, with_prefill)


def show_allocators(s: Parts, requests: list[tuple[int, int]], rows: dict[str, Allocation]) -> None:
    """How many sequences each allocator holds, and what its last row assumes."""
    reserved, _, _, behind_prefix = rows.values()
    print("  allocator                     batch      held   logical  held/logical vs baseline")
    for name, row in rows.items():
        print(
            f"  {name:<26}{row.batch:>9}{s['kv_gib'](row.held_tokens):>7.0f} G"
            f"{s['kv_gib'](row.logical_tokens):>8.0f} G"
            f"{row.held_tokens / row.logical_tokens:>13.2f}x{row.batch / reserved.batch:>11.1f}x"
        )
    copied = s["shared_prefix"](requests, 2048, copy_on_write=True)
    inside = sum(prompt <= 2048 for prompt, _ in requests[: behind_prefix.batch])
    say(
        f"""The last row ({BATCH_BEHIND_2K.least:,} to {BATCH_BEHIND_2K.most:,} over seeds 0 to 199)
        starts each request's own tokens on a fresh page. Real copy-on-write copies the page that a
        short prompt diverges in, and then the batch is {copied.batch:,}
        ({copied.batch / reserved.batch:.1f}x). And it takes each prompt for a part of the prefix,
        as far as that reaches: {inside} of the {behind_prefix.batch:,} lie inside it altogether.
        Put 2k in front of a whole prompt, and the batch is another:"""
    )
    ahead = [(2048 + prompt, output) for prompt, output in requests]
    print("\n  2k in front of each prompt    batch   seeds 0-199")
    for stored, row, spread in (
        ("stored with each request", s["paged"](ahead, 16), BATCH_2K_EACH),
        ("stored once", s["shared_prefix"](ahead, 2048), BATCH_2K_ONCE),
    ):
        print(f"  {stored:<26}{row.batch:>9}{f'{spread.least}-{spread.most}':>14}")


def show_rates(s: Parts, rows: dict[str, Allocation]) -> float:
    """What the batch buys in decode; returns the tokens/s of pages over those of 8k slots."""
    reserved, small, in_pages, behind_prefix = rows.values()
    say("What the batch buys, in decode alone, every sequence at its final length, at the peaks:")
    print("\n  allocator                     batch       step       tok/s   for each user")
    rates: list[float] = []
    for name, row in rows.items():
        seconds = s["step_seconds"](row.batch, row.logical_tokens)
        rates.append(row.batch / seconds)
        print(
            f"  {name:<26}{row.batch:>9}{seconds * 1000:>8.1f} ms{rates[-1]:>12,.0f}"
            f"{1 / seconds:>16.1f}"
        )
    slots_rate, small_rate, pages_rate, _ = rates
    read_once = s["step_seconds"](behind_prefix.batch, behind_prefix.held_tokens)
    say(
        f"""{in_pages.batch / reserved.batch:.1f}x the batch is {pages_rate / slots_rate:.1f}x the
        tokens/s ({WORTH_OF_PAGES.least}x to {WORTH_OF_PAGES.most}x over seeds 0 to 199), and
        {small.batch / reserved.batch:.0f}x was {small_rate / slots_rate:.1f}x already
        ({WORTH_OF_2048.least}x to {WORTH_OF_2048.most}x, misfits counted whole). Up to the ridge,
        {RIDGE:.0f} tokens a step, FLOPs lie idle while the weights are read, and one more sequence
        costs only the reading of its KV; beyond it more batch buys waiting. (Where a kernel reads
        the shared prefix once for all, the last row takes {read_once * 1000:.0f} ms.)"""
    )
    say(
        f"""So in decode, at both peaks, KV memory is the limit only while it keeps the batch under
        the ridge: above {s["budget_tokens"]() / RIDGE:,.0f} tokens that a running sequence holds,
        averaged over time. Prefill in the same steps counts against the ridge too, and moves that
        up."""
    )
    return pages_rate / slots_rate


def show_rates_with_prefill(
    s: Parts, requests: list[tuple[int, int]], rows: dict[str, Allocation]
) -> float:
    """The same with prefill in the same steps; returns pages over as many as 8k slots hold."""
    reserved, small, *_ = rows.values()
    pages = s["budget_tokens"]() // 16
    few, more, many = (
        s["serve"](requests, pages, 16, watermark, most, STEP_TOKENS).tokens_per_s
        for watermark, most in ((0, reserved.batch), (0, small.batch), (0.05, 500))
    )
    say(
        f"""With prefill in the same steps (block 6's server, chat, steady state) {reserved.batch}
        at once make {few:,.0f} tok/s, {small.batch} make {more:,.0f}, and as many as fit with 5% of
        the pages kept free {many:,.0f}. That is {many / few:.1f}x of {reserved.batch}
        ({WORTH_WITH_PREFILL.least:.2f}x to {WORTH_WITH_PREFILL.most:.2f}x over seeds 0 to 9), and
        {small.batch} are worth nearly as much, in pages: of slots of 2,048 tokens, {small.misfits}
        would be too small."""
    )
    return float(many / few)


def show_interview(
    s: Parts, rows: dict[str, Allocation], in_decode: float, with_prefill: float
) -> None:
    """What to say, in order, and what the lesson did not build."""
    reserved, _, in_pages, _ = rows.values()
    per_token = s["kv_bytes_per_token"](LAYERS, KV_HEADS, HEAD_DIM, DTYPE)
    behind_4k = s["shared_prefix"](s["prefixed_lengths"](64, 4096), 4096, page_tokens=1)
    print("\n  What to say in an interview, in this order:")
    points = (
        f"""KV is {per_token // 1024} KiB a token, so one 128k request holds
        {s["budget_share"](s["kv_gib"](131_072)):.0%} of a replica's KV budget. KV memory bounds
        the batch.""",
        f"""Reserving 8k tokens a sequence wastes {reserved.waste:.0%} here, and over seeds
        {WASTE_AT_8192.least:.0%} to {WASTE_AT_8192.most:.0%}. Pages of 16 waste
        {in_pages.waste:.2%} and hold {in_pages.batch / reserved.batch:.1f}x the batch
        ({PAGES_OVER_8192.least}x to {PAGES_OVER_8192.most}x). Nobody need know how long an answer
        gets.""",
        f"""The batch is not the throughput: that is {in_decode:.1f}x the tokens/s in decode, and
        with prefill in the same steps {with_prefill:.1f}x. Beyond {RIDGE:.0f} tokens a step, more
        batch buys waiting.""",
        f"""Pages can be shared. 64 requests behind one 4k prefix store {behind_4k.saved:.0%} less
        here, {s["expected_saving"](64, 4096):.1%} by expectation, and 63 prefills are not done.""",
        f"""Fetching KV is quicker than recomputing it above {s["break_even"]():.1f} GB/s (TP4,
        fp16, at peak FLOPs), above {s["break_even"](mfu=0.5):.1f} GB/s at 50% MFU, and above less
        for long prefixes; and it leaves the GPUs to others.""",
        f"""When pages run out, the newest sequence is preempted and recomputed. In overload that
        begins near 90% of this pool, and costs {LOSS["chat"].median:.0f}% of the tokens/s, or
        {LOSS["long"].median:.0f}% with long answers (medians of ten draws). Keep 5% free, or run a
        tenth fewer than fill the pool: the first token comes later, and the tokens/s come back.""",
    )
    for i, point in enumerate(points, 1):
        print(wrapped(point, first=f"  {i}. "))
    say(
        """Not built here: the attention kernel that reads through a block table, finding shared
        prefixes and evicting them, arrivals over time, a preempted sequence offloaded to the host,
        quantized KV with its scales, more than one replica."""
    )


def parts() -> Parts:
    """Every mechanism of the lesson by name, ready to use: `help(parts()["paged"])`."""
    return collect(BLOCKS)


# ------------------------------------------------------------------------- the lesson ends here


# ---------------------------------------------------------------------------------------- verify

# Each block's claims, and what else its mechanisms must do. This shares with the lesson the
# definition of the two workloads and nothing more: every figure below is derived a second time.


class Check(NamedTuple):
    """A call of a mechanism, and what it must give."""

    mechanism: str  # its name in parts(); "" for a constant
    call: str  # as a reader would write it, and on what
    derived: Any  # a number; pairs of them; or a dict: the attributes of what is returned
    ask: Callable[[], Any]
    tolerance: float = 1e-9  # relative, where a number need not be whole


class Claim(NamedTuple):
    """A sentence of the lesson, its figure, and the calls that this figure comes from."""

    statement: str
    stated: str  # the figure to the character, as the lesson states it
    figure: str  # the figure as it is derived here
    holds: bool  # whether the statement is true of what is derived here
    checks: list[Check]


def check(
    s: Parts, name: str, derived: Any, *args: Any, call: str = "", on: str = "", **options: Any
) -> Check:
    """Check that `s[name](*args, **options)` gives what is derived.

    Every call has lists and dicts of its own, whatever the mechanism does to them. The options are
    not spelled out where `on` says in words what they amount to.
    """
    if not call:
        spelled = [repr(argument) for argument in args]
        spelled += [f"{x}={options[x]!r}" for x in options if not (on or callable(options[x]))]
        call = f"{name}({', '.join(spelled)})"

    def ask() -> Any:
        own = [type(x)(x) if isinstance(x, (list, dict)) else x for x in args]
        try:
            return s[name](*own, **options)
        except TypeError:
            missing = missing_parameter(s[name], parts()[name], len(args), options)
            if missing:
                raise Fault(f"{name} {missing}") from None
            raise

    return Check(name, call + on, derived, ask)


def constants(**derived: Any) -> list[Check]:
    """Check constants of the module."""
    return [Check("", name, x, partial(globals().get, name)) for name, x in derived.items()]


def claims_of_block_1(s: Parts) -> Iterator[Claim | Check]:
    """One token, then contexts."""
    must = partial(check, s)
    kv, multi_head = 2 * 80 * 8 * 128 * 2, 2 * 80 * 64 * 128 * 2
    budget = 345 * 2**29  # 172.5 GiB
    gib, share = 131_072 * kv / 2**30, 131_072 * kv / budget
    yield Claim(
        "KV is 320 KiB per token for a 70B, GQA-8, fp16",
        "327,680 B = 320 KiB", f"{kv:,} B = {kv // 2**10} KiB", kv == 320 * 2**10,
        [
            must("kv_bytes_per_token", kv, 80, 8, 128, 2),
            *constants(LAYERS=80, KV_HEADS=8, HEAD_DIM=128, DTYPE=2, KV_PER_TOKEN=kv),
        ],
    )  # fmt: skip
    yield Claim(
        "one 128k-context request is ~23% of a 4xH100 replica's KV budget",
        "23.2% of 172.5 GiB", f"{share:.1%} of {budget / 2**30} GiB", round(share, 2) == 0.23,
        [
            must("kv_gib", gib, 131_072), must("budget_share", share, gib),
            *constants(KV_BUDGET_GIB=172.5, GIB=1024**3),
        ],
    )  # fmt: skip
    yield Claim(
        "GQA is an 8x reduction",
        "2,560 KiB/token without it", f"{multi_head // 2**10:,} KiB/token without it",
        multi_head == 8 * kv,
        [must("kv_bytes_per_token", multi_head, 80, 64, 128, 2), *constants(Q_HEADS=64)],
    )  # fmt: skip
    yield must("kv_bytes_per_token", 2, 1, 1, 1, 1)
    yield must("kv_bytes_per_token", 2 * 3 * 5 * 7 * 4, 3, 5, 7, 4)
    yield must("kv_bytes_per_token", 139_264, 64, 8, 128, 34 / 32)  # 32 values in 34 bytes
    yield must("kv_bytes_per_token", 17, 3, 1, 5, 18 / 32)  # 16.875 bytes, rounded up once
    yield must("kv_gib", 1.5, 3, kv_per_token=2**29)
    yield must("budget_share", 0.25, 3, budget_gib=12)
    gqa = {  # Llama-3.1 8B
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "torch_dtype": "bfloat16",
    }  # fmt: skip
    mha = {name: x for name, x in gqa.items() if name != "num_key_value_heads"}
    mla = {**mha, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    window = {**gqa, "sliding_window": 4096}
    every_other = {**window, "layer_types": ["sliding_attention", "full_attention"] * 16}
    for name, config, derived, tokens, options in (
        ("Llama-3.1 8B", gqa, 32 * 2 * 8 * 128 * 2, 1, {}),
        ("Llama-3.1 8B", gqa, 7 * 32 * 2 * 8 * 128, 7, {"dtype_bytes": 1}),
        ("Llama-3.1 8B", gqa, 32 * 2 * 8 * 128 * 18 // 32, 1, {"dtype_bytes": 18 / 32}),
        ("Llama-3.1 8B", gqa, 3 * 32 * 2 * 2 * 128 * 2, 3, {"tp": 4}),
        ("Llama-3.1 8B", gqa, 32 * 2 * 1 * 128 * 2, 1, {"tp": 16}),  # no head is split
        ("multi-head", mha, 32 * 2 * 32 * 128 * 2, 1, {}),
        ("heads of 160", {**gqa, "head_dim": 160}, 32 * 2 * 8 * 160 * 2, 1, {}),
        ("a window", window, 4095 * 32 * 2 * 8 * 128 * 2, 4095, {}),
        ("a window", window, 4096 * 32 * 2 * 8 * 128 * 2, 9000, {}),
        ("a window in half", every_other, (4096 + 9000) * 16 * 2 * 8 * 128 * 2, 9000, {}),
        ("a latent", mla, 5 * 32 * (512 + 64) * 2, 5, {"tp": 8}),  # all of it on each GPU
    ):  # fmt: skip
        spelled = "".join(f", {option}={value}" for option, value in options.items())
        call = f"kv_bytes(<{name}>, {tokens}{spelled})"
        yield must("kv_bytes", derived, config, tokens, call=call, **options)


Requests = list[tuple[int, int]]  # (prompt, output) of each


def draw(n: int, seed: int, mu: float, sigma: float, prefix: int = 0) -> Requests:
    """A workload, by its definition."""
    lognormal = random.Random(seed).lognormvariate
    return [(prefix + int(lognormal(mu, sigma)), int(lognormal(5.5, 0.8))) for _ in range(n)]


def small_cases() -> Iterator[tuple[Requests, int, Parts]]:
    """Small workloads, with so many tokens of room, and the options that make such a room.

    They are the same on every Python: nothing but random() is promised to be.
    """
    rng = random.Random(2023)
    for _ in range(40):
        longest, n = 1 + int(40 * rng.random()), int(9 * rng.random())
        lengths = [int(longest * rng.random()) for _ in range(2 * n)]
        room, kv = 16 + int(200 * rng.random()), 2**20 * (1 + int(9 * rng.random()))
        spare = int(kv * rng.random())  # bytes, too few for one more token
        options = {"budget_gib": (room * kv + spare) / 2**30, "kv_per_token": kv}
        yield list(zip(lengths[:n], lengths[n:])), room, options


def fitting(requests: Requests, needs: list[int], room: int, held: int = 0) -> Parts:
    """What an Allocation must say: requests in order, that need so many tokens of the room each."""
    batch = bisect_right(list(accumulate(needs)), room - held)
    held += sum(needs[:batch])
    logical = sum(prompt + output for prompt, output in requests[:batch])
    waste = 1 - logical / held if held else 0.0
    return {"batch": batch, "held_tokens": held, "logical_tokens": logical, "waste": waste}


def in_slots(requests: Requests, reserve: int, room: int) -> Parts:
    """Requests in slots of `reserve` tokens, whatever they need."""
    derived = fitting(requests, [reserve] * len(requests), room)
    longer = [prompt + output > reserve for prompt, output in requests[: derived["batch"]]]
    return {**derived, "misfits": sum(longer)}


def claims_of_block_2(s: Parts) -> Iterator[Claim | Check]:
    """Slots."""
    must = partial(check, s)
    requests, room = seq_lengths(4000), 345 * 2**29 // 327_680
    slots = room // 8192
    waste = 1 - sum(prompt + output for prompt, output in requests[:slots]) / (slots * 8192)

    def reserving(n: int) -> Check:
        derived, call = in_slots(requests, n, room), f"contiguous(seq_lengths(4000), {n})"
        return must("contiguous", derived, requests, n, call=call)

    yield Claim(
        "an 8k reservation wastes over 80% of the budget",
        "82.3% wasted, batch 69", f"{waste:.1%} wasted, batch {slots}", waste > 0.80,
        [must("seq_lengths", requests, 4000), reserving(8192)],
    )  # fmt: skip
    yield must("seq_lengths", draw(9, 5, 6.4, 1.0), 9)
    yield must("seq_lengths", draw(3, 11, 6.4, 1.0), 3, seed=11)
    yield must("seq_lengths", [], 0)
    yield must("budget_tokens", 565_248)
    yield must("budget_tokens", 299_593, budget_gib=16, kv_per_token=57_344)
    three = [(10, 16)] * 3
    half: Parts = {"budget_gib": 0.5, "kv_per_token": 2**24}  # 32 tokens
    yield must("contiguous", in_slots(three, 16, 32), three, 16, **half)
    for reserve in (282_624, 282_625):  # half the budget, and a token more
        yield must("contiguous", in_slots(three, reserve, 565_248), three, reserve)
    yield from map(reserving, (2048, 512, 32_768))
    for few, room, options in small_cases():
        reserve, on = 1 + room // (1 + len(few)), f" on {room} tokens"
        yield must("budget_tokens", room, **options)
        yield must("contiguous", in_slots(few, reserve, room), few, reserve, on=on, **options)


def on_pages(
    requests: Requests, page: int, pages: int, prefix: int = 0, copies: bool = False
) -> Parts:
    """Requests on pages, token by token, behind a prefix that is stored once.

    A sequence takes each page that a token of its own lies on. These tokens start afresh, or where
    the shared ones end, if the page that they end in is copied.
    """
    stored = len({token // page for token in range(prefix)})
    if stored > pages:
        return fitting([], [], 0)
    needs = []
    for prompt, output in requests:
        shared = min(prefix, prompt)
        start = shared if copies else 0
        own = range(start, start + prompt + output - shared)
        needs.append(page * len({token // page for token in own}))
    return fitting(requests, needs, page * pages, page * stored)


def claims_of_block_3(s: Parts) -> Iterator[Claim | Check]:
    """Pages of 16 tokens, of one token, and a pool that is written and read."""
    must = partial(check, s)
    requests, room = seq_lengths(4000), 345 * 2**29 // 327_680
    lengths = [prompt + output for prompt, output in requests]
    slots = room // 8192
    pages_of_16 = fitting(requests, [16 * math.ceil(n / 16) for n in lengths], room)
    pages_of_1 = fitting(requests, lengths, room)
    waste, batch, finest = pages_of_16["waste"], pages_of_16["batch"], pages_of_1["batch"]
    drawn = must("seq_lengths", requests, 4000)
    derived, call = in_slots(requests, 8192, room), "contiguous(seq_lengths(4000), 8192)"
    reserved = must("contiguous", derived, requests, 8192, call=call)
    paged_16 = must("paged", pages_of_16, requests, 16, call="paged(seq_lengths(4000), 16)")
    paged_1 = must("paged", pages_of_1, requests, 1, call="paged(seq_lengths(4000), 1)")
    yield Claim(
        "16-token pages keep internal waste under 1%",
        "0.54%", f"{waste:.2%}", waste < 0.01,
        [drawn, paged_16],
    )  # fmt: skip
    yield Claim(
        "and multiply the batch ~6x over an 8k reservation",
        "batch 69 -> 417 = 6.0x", f"batch {slots} -> {batch} = {batch / slots:.1f}x",
        round(batch / slots) == 6,
        [drawn, reserved, paged_16],
    )  # fmt: skip
    yield Claim(
        "below 16 tokens a page the batch barely improves",
        "batch 417 at 16 tokens vs 420 at 1", f"batch {batch} at 16 tokens vs {finest} at 1",
        batch <= finest < 1.01 * batch,
        [drawn, paged_16, paged_1],
    )  # fmt: skip
    one, three = [(10, 16)], [(10, 16)] * 3
    half: Parts = {"budget_gib": 0.5, "kv_per_token": 2**24}  # 32 tokens
    yield must("paged", on_pages(one, 16, 2), one, on=" on 2 pages of 16 tokens", **half)
    yield must("paged", on_pages(three, 16, 2), three, 16, **half)
    yield must("paged", on_pages(three, 16, 4), three, 16, budget_gib=1, kv_per_token=2**24)
    yield must("paged", on_pages(one, 64, 0), one, 64, **half)
    for tokens, batch in ((565_248, 1), (565_249, 0)):  # the budget, and a token more
        yield must("paged", {"batch": batch}, [(tokens, 0)])
    for few, room, options in small_cases():
        for page in (1, 1 + room % 7, 16):
            on = f" on {room // page} pages of {page} tokens"
            yield must("paged", on_pages(few, page, room // page), few, page, on=on, **options)
    call, ask = "paged([(10, 16)])", lambda: getattr(s["paged"](one), "misfits", 0)
    yield Check("paged", f"{call}.misfits", 0, ask)
    yield from checks_of_a_pool(s)


# A pool is graded by using it as an engine does: every token is written where the block table says,
# and all tokens are read back after every call.

STORIES = (  # on room for 128 tokens
    "a = allocate(20); b = allocate(16); append(a, 11); append(a); append(a, 1); release(b);"
    " b = allocate(80); append(a, 16); append(a, 15); append(a, 1); append(b, 1); release(a);"
    " append(b, 49); append(b, 48); a = allocate(1)",
    "a = allocate(40); b = fork(a, 40); c = fork(a, 20); append(b, 0); append(b, 1); append(a, 1);"
    " append(b, 8); append(c, 13); d = fork(b, 40); release(a); append(d, 40); append(d, 9);"
    " release(b); append(d, 9); a = fork(d, 37); append(a, 1); release(c); release(d);"
    " append(a, 80); release(a); a = allocate(0); b = fork(a, 0); append(b, 128)",
    "a = allocate(120); b = fork(a, 120); append(b, 1); append(a, 8); release(a); append(b, 8)",
    "c = allocate(33); a = allocate(40); b = fork(a, 40); append(b, 1); release(a); release(b);"
    " release(c); a = allocate(128)",
)
POOL = ("allocate", "release", "append", "fork", "held", "free", "references")


def use_pool(s: Parts, page: int, story: str) -> list[str]:
    """Make the calls of a story; raise Fault where one goes wrong. Returns what the pool lacks."""
    pages = 128 // page
    pool = s["PagePool"](pages, page)
    lacks = [name for name in POOL if not hasattr(pool, name)]
    errors = [x for x in (s["OutOfPages"], OutOfPages) if isinstance(x, type)]
    full = tuple(error for error in errors if issubclass(error, Exception))
    sequences: dict[str, Any] = {}
    written: dict[str, list[int]] = {}  # the tokens of each sequence, each a number of its own
    memory = [[0] * page for _ in range(pages)]
    held, numbers = 0, count(1)

    def expect(form: str, derived: int, yours: Any) -> None:
        if not same(derived, yours):
            also = f"; it lacks {', '.join(lacks)}" if lacks else ""
            raise Fault(f"after {call}: {in_words(form, derived, yours)}{also}")

    for call in story.split("; "):
        new, verb, old, digits = re.findall(r"(?:(.) = )?(\w+)\(([a-d]?)(?:, )?(\d*)", call)[0]
        if verb in lacks or (old and old not in sequences):
            continue  # a reader's pool may be half done
        name, n, tokens = new or old, int(digits or 1), written.get(old, [])
        table = list(sequences[old].table) if old else []
        others = {page for x in sequences.keys() - {name} for page in sequences[x].table}
        need = 0
        if verb in ("allocate", "append"):
            copies = n > 0 and len(tokens) % page > 0 and table[-1] in others
            need = math.ceil((len(tokens) + n) / page) - len(table) + copies
        right, outcome = "OutOfPages" if held + need > pages else "no error", "no error"
        given = ([sequences[old]] if old else []) + ([n] if digits else [])
        try:
            returned = getattr(pool, verb)(*given)
        except full:
            outcome = "OutOfPages"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise Fault(f"{call} raises {described(error)}") from None
        if outcome != right:
            raise Fault(f"{call} with {pages - held} pages free: {right}, yours {outcome}")
        if verb == "release":
            held -= len(set(table) - others)
            del sequences[name], written[name]
        elif right == "no error":
            held += need
            sequence = sequences[name] = returned if new else sequences[name]
            if not (hasattr(sequence, "table") and hasattr(sequence, "tokens")):
                raise Fault(
                    f"{call} must return what has table and tokens, not {described(returned)}"
                )
            written[name] = tokens[:n] if verb == "fork" else [*tokens, *islice(numbers, n)]
            after = sequence.table
            if set(after) - set(range(pages)):
                raise Fault(f"after {call}: pages 0 to {pages - 1}, yours {described(after)}")
            for copied, copy in zip(table, after) if verb == "append" else ():
                memory[copy] = list(memory[copied])
            for i in range(len(tokens), min(len(written[name]), len(after) * page)):
                memory[after[i // page]][i % page] = written[name][i]
        for name, tokens in written.items():
            table = sequences[name].table
            expect(f"{name} has {{}} tokens", len(tokens), sequences[name].tokens)
            expect(f"{name} has {{}} pages", math.ceil(len(tokens) / page), len(table))
            for i, token in enumerate(tokens):
                if memory[table[i // page]][i % page] != token:
                    raise Fault(f"after {call}: {name} reads its token {i}, yours another one")
        tables = [page for sequence in sequences.values() for page in sequence.table]
        expect("{} pages held", held, len(set(tables)))
        expect("{} pages held", held, getattr(pool, "held", held))
        expect("{} pages free", pages - held, getattr(pool, "free", pages - held))
        for one in range(pages) if "references" not in lacks else ():
            expect(f"{{}} references to page {one}", tables.count(one), pool.references(one))
    return lacks


def misuse_pool(s: Parts) -> bool:
    """Use a pool wrongly; raise Fault if it bears that, or if anything has changed by it."""
    pool = s["PagePool"](8, 16)
    a, b = pool.allocate(40), pool.allocate(16)
    pool.release(b)
    for call, method, *wrong in (
        ("release(b), released before", pool.release, b),
        ("append(b, 1), released before", pool.append, b, 1),
        ("fork(b, 0), released before", pool.fork, b, 0),
        ("fork(a, 41) of 40 tokens", pool.fork, a, 41),
        ("append(a, -1)", pool.append, a, -1),
        ("allocate(-1)", pool.allocate, -1),
        ("PagePool(0, 16)", s["PagePool"], 0, 16),
        ("PagePool(8, 0)", s["PagePool"], 8, 0),
    ):
        if not raises(method, *wrong):
            raise Fault(f"{call}: an error, yours none")
        if not same(3, pool.held):
            raise Fault(f"{call}: 3 pages held, yours {described(pool.held)}")
    return True


def raises(function: Callable[..., Any], *args: Any, **options: Any) -> bool:
    """Whether a call is refused with an error."""
    try:
        function(*args, **options)
    except Exception:
        return True
    return False


def checks_of_a_pool(s: Parts) -> Iterator[Check]:
    """Its stories, what it must refuse, its defaults, and the error that it raises."""

    def use() -> bool:
        lacks = [use_pool(s, page, story) for page in (16, 2, 5) for story in STORIES].pop()
        if lacks:
            raise Fault(f"lacks {', '.join(lacks)}; what it has is right")
        return True

    def is_raised() -> bool:
        raised = OutOfPages if s["PagePool"] is PagePool else s["OutOfPages"]
        return issubclass(raised, s["OutOfPages"]) and issubclass(raised, Exception)

    yield Check("PagePool", "PagePool(8, 16)", True, use)
    yield Check("PagePool", "PagePool(8, 16)", True, partial(misuse_pool, s))
    yield check(s, "PagePool", {"page_tokens": 16, "pages": 3}, 3)
    yield Check("OutOfPages", "is an exception that PagePool raises", True, is_raised)


def claims_of_block_4(s: Parts) -> Iterator[Claim | Check]:
    """The prefix once, the rest 64 times."""
    must = partial(check, s)
    requests = prefixed_lengths(64, 4096)
    private = [prompt + output - 4096 for prompt, output in requests]
    stored, alone = 4096 + sum(private), 64 * 4096 + sum(private)
    saved = 1 - stored / alone
    derived = {"batch": 64, "held_tokens": stored, "logical_tokens": alone, "saved": saved}
    call = "shared_prefix(64 requests, 4096, 1)"
    yield Claim(
        "a 4k prefix shared by 64 requests is ~89% of the KV",
        "89.0% saved by storing it once", f"{saved:.1%} saved by storing it once",
        round(saved, 2) == 0.89,
        [
            must("prefixed_lengths", requests, 64, 4096),
            must("shared_prefix", derived, requests, 4096, 1, call=call),
        ],
    )  # fmt: skip
    yield must("prefixed_lengths", draw(9, 9, 5.0, 0.9, 256), 9, 256)
    yield must("prefixed_lengths", draw(3, 4, 5.0, 0.9), 3, 0, seed=4)
    yield must("prefixed_lengths", [], 0, 7)

    def sharing(few: Requests, prefix: int, page: int, room: int, **options: Any) -> Check:
        copies = options.get("copy_on_write", False)
        derived = on_pages(few, page, room // page, prefix, copies)
        held, logical = derived["held_tokens"], derived["logical_tokens"]
        derived["saved"] = 1 - held / logical if logical else 0.0
        del derived["waste"]
        on = f"{', copy_on_write=True' * copies} on {room // page} pages of {page} tokens"
        return must("shared_prefix", derived, few, prefix, page, on=on, **options)

    three = [(40, 8), (30, 0), (40, 8)]
    half: Parts = {"budget_gib": 0.5, "kv_per_token": 2**23}  # 64 tokens
    yield sharing(three, 40, 16, 64, **half)
    yield sharing(three, 40, 16, 64, **half, copy_on_write=True)
    yield sharing(three, 65, 16, 64, **half)  # the prefix alone is too long
    yield sharing(three, 0, 128, 64, **half)  # there is no page
    for few, room, options in small_cases():
        for page in (1, 1 + room % 7, 16):
            yield sharing(few, room // (1 + len(few)), page, room, **options)
            yield sharing(few, room // (1 + len(few)), page, room, **options, copy_on_write=True)
    for n, prefix, mine in ((1, 9, 9), (2, 300, 100), (64, 4096, 558.5)):
        less = 1 - (prefix + n * mine) / (n * (prefix + mine))  # one prefix and all that is private
        yield must("expected_saving", less, n, prefix, private=mine)
    yield must("expected_saving", 0.0, 3, 0, private=0)
    mean = math.exp(5 + 0.9**2 / 2) + math.exp(5.5 + 0.8**2 / 2) - 1  # of two log-normals
    yield must("expected_saving", 63 * 4096 / (64 * (4096 + mean)), 64, 4096)
    # The assembly's row: as much of a prompt as lies in the first 2,048 tokens is shared.
    requests = seq_lengths(4000)
    split = [(prompt + output, min(prompt, 2048)) for prompt, output in requests]
    fresh = [16 * math.ceil((length - shared) / 16) for length, shared in split]
    copied = [16 * (math.ceil(length / 16) - shared // 16) for length, shared in split]
    for copies, needs in ((False, fresh), (True, copied)):
        derived = {"batch": fitting(requests, needs, 565_248, held=2048)["batch"]}
        call = f"shared_prefix(seq_lengths(4000), 2048, copy_on_write={copies})"
        yield must("shared_prefix", derived, requests, 2048, call=call, copy_on_write=copies)


def claims_of_block_5(s: Parts) -> Iterator[Claim | Check]:
    """Time against time."""
    must = partial(check, s)
    kv, flops, flop_per_token = 327_680, 989.5e12, 2 * 70e9
    even = {tp: kv * tp * flops / flop_per_token / 1e9 for tp in (1, 2, 4, 8)}
    spans = (1, 4096, 131_072)
    fetched = {n: n * kv / 1e9 for n in spans}  # seconds, at 1 GB/s
    computed = {n: n * flop_per_token / (4 * flops) for n in spans}
    at_span = {f"{fetched[n] / computed[n]:.2f} GB/s" for n in spans}
    dense = 132 * 4096 * 1.83e9
    yield Claim(
        "break-even at TP4 is ~9.3 GB/s",
        "9.26 GB/s", f"{even[4]:.2f} GB/s", round(even[4], 1) == 9.3,
        [must("break_even", even[4]), *constants(N_PARAMS=70e9, DENSE_FLOPS_PER_GPU=flops)],
    )  # fmt: skip
    yield Claim(
        "it does not depend on prefix length (at 2N FLOP a token)",
        "9.26 GB/s at 1, 4,096 and 131,072 tokens",
        f"{' or '.join(sorted(at_span))} at 1, 4,096 and 131,072 tokens", len(at_span) == 1,
        [
            *(must("fetch_seconds", fetched[n], n, 1.0) for n in spans),
            *(must("recompute_seconds", computed[n], n) for n in spans),
        ],
    )  # fmt: skip
    yield Claim(
        "one local NVMe drive at 7 GB/s is below it",
        "7 GB/s vs 9.26 GB/s break-even", f"7 GB/s vs {even[4]:.2f} GB/s break-even", even[4] > 7,
        [must("break_even", even[4]), Check("", "TIERS", [3350, 64, 25, 7, 1], TIERS.values)],
    )  # fmt: skip
    yield Claim(
        "FP8 KV halves it",
        "4.63 GB/s -- NVMe becomes viable", f"{even[4] / 2:.2f} GB/s -- NVMe becomes viable",
        even[4] / 2 < 7,
        [
            must("kv_bytes_per_token", kv // 2, 80, 8, 128, 1),
            must("break_even", even[4] / 2, kv_per_token=kv // 2),
        ],
    )  # fmt: skip
    yield Claim(
        "TP8 raises it",
        "TP4 9.3 -> TP8 18.5 GB/s", f"TP4 {even[4]:.1f} -> TP8 {even[8]:.1f} GB/s",
        even[8] > even[4],
        [must("break_even", even[tp], tp=tp) for tp in even],
    )  # fmt: skip
    roughly = [
        *constants(DENSE_FLOPS_PER_GPU=dense),
        must("recompute_seconds", flop_per_token / dense, 1, tp=1),
    ]
    yield Claim(
        "the datasheet's 1,979 TFLOP/s is the with-sparsity figure",
        "132 SMs x 4,096 FLOP/clock x 1.83 GHz = 989.4 dense, x2 sparse = 1,979",
        f"132 SMs x 4,096 FLOP/clock x 1.83 GHz = {dense / 1e12:.1f} dense,"
        f" x2 sparse = {2 * dense / 1e12:,.0f}", round(2 * dense / 1e12) == 1979,
        [claimed._replace(tolerance=1e-3) for claimed in roughly],
    )  # fmt: skip
    yield must("fetch_seconds", 0.0, 0, 7)
    yield must("fetch_seconds", 3000 * 2e5 / 25e9, 3000, 25, kv_per_token=200_000)
    for shape in ({}, {"layers": 60}, {"q_heads": 32}, {"head_dim": 96}):
        width = 4 * shape.get("layers", 80) * shape.get("q_heads", 64) * shape.get("head_dim", 128)
        for tp, mfu, n, attention in (
            (4, 1.0, 1, True), (2, 0.5, 1, False), (8, 0.25, 5000, False), (1, 0.8, 5000, True),
        ):  # fmt: skip
            flop = n * flop_per_token + attention * n * width * n / 2  # half of n, on average
            seconds = flop / (tp * flops * mfu)
            options: Parts = {"tp": tp, "mfu": mfu, "attention": attention, **shape}
            yield must("recompute_seconds", seconds, n, **options)
            options.update({} if n == 1 else {"prefix": n})
            yield must("break_even", n * kv / 1e9 / seconds, **options)
    small: Parts = {"n_params": 8e9, "flops_per_gpu": 1e15}
    yield must("recompute_seconds", 9 * 16e9 / 4e15, 9, **small)
    yield must("break_even", 5e5 * 4e15 / 16e9 / 1e9, kv_per_token=5e5, **small)
    for gb_per_s in (7, 1, 4.16, 9, 25):
        # A fetch is faster from that length on at which its FLOP, attention's among them, are more.
        flop = kv * 4 * flops / (gb_per_s * 1e9)
        longest = math.floor((flop - flop_per_token) / (4 * 80 * 64 * 128 / 2))
        yield must("shortest_fetch", max(0, longest) + 1, gb_per_s)


def roofline(tokens: float, held_tokens: float) -> float:
    """Seconds of a pass of the lesson's model, on its four cards."""
    weights = max(140e9 / (4 * 3350e9), tokens * 140e9 / (4 * 989.5e12))
    return weights + held_tokens * 327_680 / (4 * 3350e9)


def scheduled(
    requests: Requests, pages: int, page: int = 16, watermark: float = 0.0,
    max_running: float = math.inf, max_batched_tokens: float = math.inf,
    step_seconds: Callable[[float, float], float] = roofline,
) -> Parts:  # fmt: skip
    """What `serve` must say, one token and one page at a time, with nothing clever in it."""
    queue = [{"prompt": p, "output": o, "made": 0, "pages": 0} for p, o in requests]
    running: list[dict[str, int]] = []
    total = dict.fromkeys(("steps", "generated", "prefilled", "reprefilled", "preempted"), 0)
    steady: list[tuple[float, ...]] = [(0, 0, 0)]  # running, pages held, seconds
    admitted = owed = peak = first = again = 0

    def held() -> int:
        return sum(sequence["pages"] for sequence in running)

    def needed(sequence: dict[str, int]) -> int:
        return math.ceil((sequence["prompt"] + sequence["made"] + 1) / page)

    while queue or running:
        counts = bool(queue) and 2 * admitted >= len(requests)
        while queue and len(running) < max_running:
            kept_free = math.floor(watermark * pages) if running else 0
            if held() + needed(queue[0]) + kept_free > pages:
                break
            if running and owed >= max_batched_tokens - len(running):
                break
            sequence = queue.pop(0)
            sequence["pages"] = needed(sequence)
            running.append(sequence)
            tokens, repeated = sequence["prompt"] + sequence["made"], sequence["made"] > 0
            owed += tokens
            total["prefilled"] += tokens
            total["reprefilled"] += tokens * repeated
            admitted += not repeated
            first += tokens * (counts and not repeated)
            again += tokens * (counts and repeated)
        peak = max(peak, held())
        computed = int(min(owed, max(1, max_batched_tokens - len(running))))
        owed -= computed
        if counts:
            took = step_seconds(len(running) + computed, page * held())
            steady.append((len(running), held(), took))
        total["steps"] += 1
        total["generated"] += len(running)
        for sequence in running:
            sequence["made"] += 1
        running = [sequence for sequence in running if sequence["made"] < sequence["output"]]
        for sequence in list(running):
            while sequence in running and sequence["pages"] < needed(sequence):
                if held() < pages:
                    sequence["pages"] += 1
                    peak = max(peak, held())
                else:
                    queue.insert(0, running.pop())
                    total["preempted"] += 1
    ran, held_in_all, seconds = map(sum, zip(*steady))
    n = max(1, len(steady) - 1)
    return {
        **total, "peak_pages": peak, "running": ran / n, "held": held_in_all / pages / n,
        "again": again / first if first else 0.0, "tokens_per_s": ran / seconds if seconds else 0.0,
    }  # fmt: skip


def claims_of_block_6(s: Parts) -> Iterator[Claim | Check]:
    """No claim, for its curve is an assumption; but a pass, an average, and a scheduler."""
    must = partial(check, s)
    for occupancy, n, seed in (
        (0.6, 50, 3), (0.85, 50, 3), (0.9, 2000, 3), (0.99, 900, 7), (1.0, 2000, 3), (1.0, 9, 1),
    ):  # fmt: skip
        rng, tokens = random.Random(seed), 0
        for _ in range(n):
            if rng.random() < max(0, (occupancy - 0.85) / 0.15) ** 2:
                tokens += int(rng.lognormvariate(6.4, 1.0))
        options: Parts = {} if (n, seed) == (2000, 3) else {"n": n, "seed": seed}
        yield must("preempted_tokens", tokens, occupancy, **options)
    for computed, held in ((0, 0), (69, 91_000), (295, 0), (296, 0), (1000.5, 565_248)):
        yield must("step_seconds", roofline(computed, held), computed, held)
    card: Parts = {"kv_per_token": 2**17, "n_params": 8e9, "flops_per_gpu": 1e15, "tp": 2}
    for computed in (1, 10_000):  # below and beyond the ridge
        weights = max(16e9 / (2 * 2e12), computed * 16e9 / (2 * 1e15 * 0.5))
        derived = weights + 10**6 * 2**17 / (2 * 2e12)
        yield must("step_seconds", derived, computed, 10**6, **card, gb_per_s=2000, mfu=0.5)
    for few in ([(0, 1)], [(10, 4)], [(600, 100), (5, 300), (70, 0)], seq_lengths(400)):
        # In each of its steps a sequence holds its prompt and what it has, half a token more.
        resident = [prompt + i + 0.5 for prompt, output in few for i in range(output)]
        yield must("resident_tokens", sum(resident) / len(resident), few)

    def serving(few: Requests, *sizes: Any, **options: Any) -> Check:
        return must("serve", scheduled(few, *sizes, **options), few, *sizes, **options)

    timed: set[tuple[float, float]] = set()  # what is timed of a workload, by its derivation

    def clock(tokens: float, held_tokens: float, /) -> float:
        timed.add((tokens, held_tokens))
        return 1.0 + tokens**2 + 3 * held_tokens

    def strict_clock(tokens: float, held_tokens: float, /) -> float:
        if (tokens, held_tokens) not in timed:
            raise Fault(f"serve times step_seconds({tokens}, {held_tokens}), which does not count")
        return clock(tokens, held_tokens)

    yield serving([(4, 6), (4, 6)], 4, 4)
    yield serving([(4, 6)] * 6, 6, 4)
    yield serving([(0, 20)] * 3, 2)
    yield serving([(0, 1)] * 3, 3)
    yield serving([], 1)
    yield serving([(0, 2)] * 300 + [(300, 3)] * 3, 340)  # more than any small limit
    rng = random.Random(2023)
    for _ in range(60):
        page, pages = 1 + int(5 * rng.random()), 2 + int(12 * rng.random())
        few = []
        for _ in range(int(12 * rng.random())):
            output = 1 + int(rng.random() * pages * page)
            few.append((int(rng.random() * (pages * page - output + 1)), output))
        limits: Parts = {
            "watermark": (0, 0, 0.125, 0.25, 0.5)[int(5 * rng.random())],
            "max_running": (0, 0, 1, 2, 4)[int(5 * rng.random())],
            "max_batched_tokens": (0, 0, 1, 5, 20)[int(5 * rng.random())],
        }
        options = {name: limit for name, limit in limits.items() if limit}
        timed.clear()  # so that each serving has to be graded before the next
        served = scheduled(few, pages, page, **options, step_seconds=clock)
        yield must("serve", served, few, pages, page, **options, step_seconds=strict_clock)


# How a figure is shown, by the attribute that it is or the mechanism that gives it.
FORMS = {
    "kv_bytes_per_token": "{:,} B", "kv_bytes": "{:,} B", "kv_gib": "{:.2f} GiB",
    "budget_share": "{:.1%}", "batch": "batch {:,}", "held_tokens": "{:,} tokens held",
    "logical_tokens": "{:,} logical tokens", "contiguous waste": "{:.1%} wasted",
    "waste": "{:.2%} wasted", "saved": "{:.1%} saved", "break_even": "{:.2f} GB/s",
    "fetch_seconds": "{:.6g} s", "recompute_seconds": "{:.6g} s", "step_seconds": "{:.6g} s",
    "resident_tokens": "{:,.1f} tokens", "expected_saving": "{:.2%}", "running": "{:.1f} running",
    "held": "{:.1%} held", "again": "{:.1%} again", "tokens_per_s": "{:,.0f} tok/s",
}  # fmt: skip


class Fault(Exception):
    """What is wrong with a mechanism, in words."""


def missing_parameter(mine: Any, model: Any, positional: int, options: Parts) -> str:
    """What a call needs that the lesson's mechanism takes, and a reader's own does not; or ""."""
    code = getattr(mine, "__code__", None)
    if code is None or hasattr(mine, "__self__"):
        return ""
    of_model = getattr(model, "__wrapped__", model).__code__
    names = of_model.co_varnames[: of_model.co_argcount]
    own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    lacking: list[str] = []
    if not code.co_flags & 0x04:  # no *args
        lacking += names[code.co_argcount : positional]
    if not code.co_flags & 0x08:  # no **kwargs
        lacking += [option for option in options if option not in own]
    return f"lacks {lacking[0]}: its parameters are {', '.join(names)}" if lacking else ""


def described(value: Any) -> str:
    """`shown`, even of a value whose repr raises what is no Exception."""
    try:
        return shown(value)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return f"<a {type(value).__name__}>"


def same(derived: Any, asked: Any, tolerance: float = 1e-9) -> bool:
    """Whether two numbers are the same, or two pairs of them."""
    try:
        if isinstance(derived, tuple):
            return len(derived) == len(asked) and all(map(same, derived, asked))
        slack = 0.0 if isinstance(derived, int) else tolerance
        return math.isclose(derived, asked, rel_tol=slack, abs_tol=slack / 1000)
    except (TypeError, ValueError, OverflowError):  # no number at all
        return False


def in_words(form: str, derived: Any, asked: Any) -> str:
    """Both figures at the printed precision, or in full where that does not tell them apart."""
    number = form[form.index("{") : form.index("}") + 1]
    if isinstance(derived, bool) or not isinstance(derived, (int, float)):
        return f"{form.replace(number, '{}').format(derived)}, yours {described(asked)}"
    if not isinstance(asked, (int, float)) or not abs(asked) < 1e300:
        return f"{form.format(derived)}, yours {described(asked)}"
    if number.format(derived) == number.format(asked):
        form, number = form.replace(number, "{!r}"), "{!r}"
    return f"{form.format(derived)}, yours {number.format(asked)}"


def fault_of(check: Check) -> str:
    """What is wrong with what a mechanism gives; nothing if it is right."""
    name, call, derived = check.mechanism, check.call, check.derived
    try:
        asked = check.ask()
        figures: dict[str, tuple[Any, Any]] = {"": (derived, asked)}
        if isinstance(derived, dict):
            if not hasattr(asked, "saved"):  # which an allocation of a reader's own need not have
                derived = {x: figure for x, figure in derived.items() if x != "saved"}
            if not all(hasattr(asked, attribute) for attribute in derived):
                kind = {"serve": "a Served", "PagePool": "a pool"}.get(name, "an Allocation")
                wanted = f"{kind}, or anything with {', '.join(derived)}"
                return f"{name} must return {wanted}, not {described(asked)}"
            figures = {x: (derived[x], getattr(asked, x)) for x in derived}
        elif isinstance(derived, list):
            if not isinstance(asked, Iterable):
                return f"{name} must return (prompt, output) pairs, not {described(asked)}"
            items = list(islice(asked, len(derived) + 1))
            if len(items) != len(derived):
                return f"{call}: {len(derived):,} pairs, yours {len(items):,}"
            figures = {f"[{i}]": pair for i, pair in enumerate(zip(derived, items))}
        for which, (figure, yours) in figures.items():
            if not same(figure, yours, check.tolerance):
                if which.startswith("["):
                    return f"{call}{which}: {in_words('{:,}', figure, yours)}"
                form = f"{{:,}} {which.replace('_', ' ')}".rstrip()
                form = FORMS.get(f"{name} {which}") or FORMS.get(which or name, form)
                return f"{call}: {in_words(form, figure, yours)}"
    except KeyboardInterrupt:
        raise
    except Fault as fault:
        return str(fault) or f"{call} raises Fault"
    except BaseException as error:  # a reader's mechanism may do anything
        return f"{call} raises {described(error)}"
    return ""


def fault_of_claim(claim: Claim, known: dict[Any, str]) -> str:
    """What is wrong with a claim: with its own figure, or with a mechanism's; or nothing."""
    if not claim.holds:
        return f"not true of the derived figures: {claim.figure}"
    if claim.figure != claim.stated:
        return f"derived {claim.figure}, but the lesson states {claim.stated}"
    for check in claim.checks:
        if check.ask not in known:  # claims may come from the same call
            known[check.ask] = fault_of(check)
        if known[check.ask]:
            return known[check.ask]
    return ""


def failing(start: str, fault: str) -> str:
    """A line that says FAIL, in ASCII and of at most 160 columns."""
    line = f"  [FAIL] {start}{ascii_line(fault)}"
    return line if len(line) <= 160 else f"{line[:157]}..."


def verify(parts_override: Parts | None = None) -> int:
    """Print the 14 claims, each PASS or FAIL with its figure. Returns 0 if all is right, else 1.

    Every figure is derived a second time, and compared with the stated one and with what the
    mechanisms give. A claim fails for the mechanisms that its figure comes from. Whatever else is
    wrong with a mechanism has a line of its own, below the claims.

    `parts_override` puts your mechanisms in place of the lesson's, by their names in `parts()`:
    `verify({"paged": my_paged})` grades yours. Required parameters (and `page_tokens` and `tokens`)
    are given by position, so that you may name your own; all others by keyword.
    """
    s = parts()
    if not isinstance(parts_override, (dict, type(None))):
        raise TypeError(f"parts_override must be a dict, not {shown(parts_override)}")
    for name in parts_override or {}:
        if name not in s:
            raise ValueError(f"parts_override must name parts of the lesson, not {shown(name)}")
    s.update(parts_override or {})
    claims: list[tuple[int, Claim, str]] = []
    known: dict[Any, str] = {}
    wrong: dict[str, tuple[int, str]] = {}  # mechanism: its block, and its first fault
    for number, block_claims in enumerate(
        (
            claims_of_block_1, claims_of_block_2, claims_of_block_3, claims_of_block_4,
            claims_of_block_5, claims_of_block_6,
        ), 1,
    ):  # fmt: skip
        for item in block_claims(s):
            if isinstance(item, Claim):
                claims.append((number, item, fault_of_claim(item, known)))
            elif item.mechanism not in wrong and (fault := fault_of(item)):
                wrong[item.mechanism] = number, fault
    column = max(len(claim.statement) for _, claim, _ in claims)
    for number, claim, fault in claims:
        start = f"B{number}  {claim.statement:<{column}}   "
        print(failing(start, fault) if fault else f"  [PASS] {start}{claim.stated}")
    for name, (number, fault) in wrong.items():
        print(failing(f"B{number}  {name}: ", fault.removeprefix(f"{name} ")))
    passed = sum(not fault for _, _, fault in claims)
    others = f", {len(wrong)} mechanism{'s' * (len(wrong) > 1)} wrong" if wrong else ""
    print(f"  {passed}/{len(claims)} claims verified{others}")
    return 0 if passed == len(claims) and not wrong else 1


def ascii_line(text: str) -> str:
    """`text` on one line and in ASCII, whatever an exception may say."""
    return " ".join(text.split()).encode("unicode_escape").decode()


# --------------------------------------------------------------------------------- your own model

# The same price for any other model. Half of it stands in the model's config.json, in many
# spellings; the other half in the class that its model_type names: which layers keep every token,
# and what holds where the file is silent. TABLE was read from the classes of transformers 5.24 and
# vLLM 0.33, and from older ones of vLLM for a few that both have dropped. What is not in it is
# refused: better no answer than a wrong one.

SPELLINGS = {  # one setting, as the families write it; errors use the first name
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": (
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads",
        "num_attention_groups",
    ),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "window": ("sliding_window", "attention_window_size"),
    "dtype": ("torch_dtype", "dtype"),
}  # fmt: skip
DECODERS = ("text_config", "llm_config", "language_config", "thinker_config")  # where it may be
GROUPS = ("attn_config", "linear_attn_config", "sparse_attention_config")  # of settings
WAY_OUT = "kv_bytes_per_token takes layers, KV heads and head_dim directly"

# What a layer keeps: every token, a window of them, the chunk they are in, nothing, or every token
# and one more key to find it by. Configs have many words for it.
FULL, WINDOW, CHUNK, NOTHING, INDEXED = "F", "W", "C", "-", "I"
KINDS: dict[Any, str] = {
    "full_attention": FULL, "attention": FULL, "*": FULL, "G": FULL, 1: FULL,
    "sliding_attention": WINDOW, "L": WINDOW, "chunked_attention": CHUNK,
    "linear_attention": NOTHING, "mamba": NOTHING, "conv": NOTHING, "moe": NOTHING, "mlp": NOTHING,
    "M": NOTHING, "E": NOTHING, "-": NOTHING, 0: NOTHING,
}  # fmt: skip

# layers, to be repeated (after a slash: others that a config may name) | model types
#     | what holds where the config is silent (kv_heads=0: as many as heads) | what else it may say
TABLE = """
F | llama | layers=32 heads=32 kv_heads=0 hidden=4096
F | apertus aquila arcee aria_text baichuan bloom chatglm codegen cohere | kv_heads=0
F | deepseek flex_olmo gpt2 gpt_neox gptj granite granitemoe granitemoeshared | kv_heads=0
F | hf_olmo hyperclovax internlm InternLM internlm2 jais jais2 minicpm molmo nanochat | kv_heads=0
F | nemotron olmo olmo2 olmoe opt orion persimmon phi phi-msft qwen | kv_heads=0
F | stablelm_epoch xverse | kv_heads=0
F | arctic bailing_moe bailing_moe_v2 bitnet emu3_text_model ernie4_5_moe ernie4_5_moe_vl
F | ernie4_5_vl_moe_text exaone falcon_h1 git glm4_moe glm4v_moe_text glm4v_text glm_ocr_text
F | chameleon hunyuan_vl_text phi3small qwen3_omni_moe_text qwen3_vl_moe_text stablelm
F | cosmos3_edge_text ernie4_5 glm glm4 helium hy_v3 internlm3 iquestcoder | head_dim=128
F | molmo2_text paddleocr_vl paddleocr_vl_text qwen3_vl_text seed_oss solar_open | head_dim=128
F | gemma step3_text | head_dim=256
F | falcon gpt_bigcode RefinedWebModel | kv_heads=0 multi_query=true
F | RefinedWeb | new_decoder_architecture=true
F | mpt | kv_heads=0 | attn_config
F | dbrx | | attn_config
F | llava llava_llama minicpmo minicpmv qwen2_moe qwen3_moe smollm3 | use_sliding_window=false
F/- | hunyuan hunyuan_v1_dense hunyuan_v1_moe | kv_heads=0 | use_cla cla_share_factor
W | mistral | layers=32 heads=32 kv_heads=8 hidden=4096 window=4096
W | ministral3 | head_dim=128
W | mixtral phi3 phi3_v phi4_multimodal phi4mm phimoe starcoder2
W | qwen2 | layers=32 heads=32 kv_heads=32 hidden=4096 use_sliding_window=false max_window_layers=28
W | dots_ocr mimo qwen2_5_omni_text | use_sliding_window=false max_window_layers=28
W | qwen2_5_vl qwen2_vl | use_sliding_window=false max_window_layers=80
W | qwen2_5_vl_text qwen2_vl_text | use_sliding_window=false max_window_layers=80
W | qwen3 | head_dim=128 use_sliding_window=false max_window_layers=28
W | dots1 | window=4096 max_window_layers=62
W | ministral | window=4096
WF | gpt_oss | head_dim=64 window=128
WF | gemma2 vaultgemma | head_dim=256 window=4096
WWWF | cohere2 exaone4 exaone_moe olmo3 | window=4096
WWWF | afmoe | head_dim=128 window=1024 | global_attn_every_n_layers
WWWWF | gemma3n_text | head_dim=256 window=512 num_kv_shared_layers=15 | num_kv_shared_layers
WWWWWF | gemma3 gemma3_text | layers=26 heads=8 kv_heads=4 hidden=2304 head_dim=256 window=4096
WWWWWF | gemma4_text gemma4_unified_text | head_dim=256 window=512 global_head_dim=512 \
    | global_head_dim num_global_key_value_heads num_kv_shared_layers use_bidirectional_attention
FWWW | cwm | head_dim=128 window=8192
FWWW | granite_swa granitemoe_swa | window=128
F/W | laguna mellum | head_dim=128
/FW | step3p5 step3p7 | | attention_other_setting
CCCF | llama4_text | head_dim=128 attention_chunk_size=8192 | attention_chunk_size \
    no_rope_layers no_rope_layer_interval
---F | qwen3_5_moe_text qwen3_5_text qwen3_next | head_dim=256 | full_attention_interval
---F | olmo_hybrid
F- | minimax
F/- | minimax_m1 minimax_text_01 | | attn_type_list
F | minimax_m2 | head_dim=128 | attn_type_list
/F- | jamba | attn_layer_period=8 attn_layer_offset=4 | attn_layer_period layers_block_type
/F- | bamba | | attn_layer_indices layers_block_type
/F- | granitemoehybrid
/F- | lfm2 lfm2_moe | | full_attn_idxs
/F- | nemotron_h | head_dim=128 | hybrid_override_pattern layers_block_type
/F- | kimi_linear | | linear_attn_config full_attn_layers kv_lora_rank
-----F | bailing_hybrid | | layer_group_size kv_lora_rank
F | axk1 glm4_moe_lite minicpm3 mistral4 youtu | | kv_lora_rank
F | deepseek_v2 deepseek_v3 deepseek_vl_v2 kimi_k2 | kv_lora_rank=512 qk_rope_head_dim=64 \
    | kv_lora_rank
F | longcat_flash | caches_a_layer=2 \
    | kv_lora_rank attention_method mla_scale_q_lora zero_expert_num
/FI | minimax_m3 minimax_m3_text minimax_m3_vl | head_dim=128 \
    | sparse_attention_config sparse_attention_freq
W/F- | (none) | kv_heads=0 | full_attention_interval kv_lora_rank
"""


# Families that publish no model_type, by their architectures.
UNTYPED = {
    "['LongcatFlashForCausalLM']": "longcat_flash",
    "['LongcatFlashNgramForCausalLM']": "longcat_flash",
}

Config = Mapping[str, Any]


class Family(NamedTuple):
    """A row of the table."""

    layers: str
    others: str
    silent: dict[str, Any]
    reads: list[str]


def families() -> dict[str, Family]:
    """The rows of the table by model_type."""
    found = {}
    for row in TABLE.strip().splitlines():
        (layers,), names, silent, reads, *_ = (cell.split() for cell in f"{row} | |".split("|"))
        pattern, _, others = layers.partition("/")
        filled = {what: json.loads(value) for what, value in (pair.split("=") for pair in silent)}
        found.update(dict.fromkeys(names, Family(pattern, others, filled, reads)))
    return found


FAMILIES = families()


def setting(config: Config, what: str) -> tuple[str, Any]:
    """The name under which a config gives a setting, and its value (None: it does not)."""
    names = SPELLINGS.get(what, (what,))
    name, *others = [name for name in names if config.get(name) is not None] or names[:1]
    for other in others:
        if config[other] != config[name]:
            raise ValueError(
                f"{name} = {shown(config[name])} contradicts {other} = {shown(config[other])}"
            )
    return name, config.get(name)


def dimension(config: Config, what: str, least: int = 1) -> int:
    """A number of layers, heads, values or tokens, which the config or its class must give."""
    name, value = setting(config, what)
    if value is None:
        raise ValueError(f"config lacks {name}")
    return whole(name, value, least, most=10**7)


def flag(config: Config, name: str) -> bool:
    """A setting that is true or not."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


# The settings that choose the layers: a number n, after which layer i keeps
BY_NUMBER: dict[str, Callable[[int, int], str]] = {
    "full_attention_interval": lambda n, i: NOTHING if (i + 1) % n else FULL,
    "layer_group_size": lambda n, i: NOTHING if (i + 1) % n else FULL,
    "sliding_window_pattern": lambda n, i: WINDOW if (i + 1) % n else FULL,
    "global_attn_every_n_layers": lambda n, i: WINDOW if (i + 1) % n else FULL,
    "no_rope_layer_interval": lambda n, i: CHUNK if (i + 1) % n else FULL,
    "max_window_layers": lambda n, i: FULL if i < n else WINDOW,
    "cla_share_factor": lambda n, i: NOTHING if i % n else FULL,
    "attn_layer_period": lambda n, i: NOTHING if i % n else FULL,  # counted from an offset
}
# or a word for each layer, a 1 for those of a kind, the numbers of the full ones (from 0 or 1).
BY_WORD = ("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list")
BY_MARK = {"no_rope_layers": CHUNK, "sparse_attention_freq": INDEXED}
BY_PLACE = {"full_attn_idxs": 0, "attn_layer_indices": 0, "full_attn_layers": 1}
CHOOSING = {*BY_NUMBER, *BY_WORD, *BY_MARK, *BY_PLACE}
# Every class may say these; what else chooses layers, or is listed here, tells of another class,
# unless its row has it.
WINDOWED = ("sliding_window_pattern", "max_window_layers")
HARMLESS = {*WINDOWED, "layer_types", "no_rope_layers", "no_rope_layer_interval"}
TELLTALES = """
    add_cross_attention attention_chunk_size attention_method attention_other_setting
    attention_types block_configs mla_scale_q_lora rswa_window type_vocab_size zero_expert_num
    block_types cross_attention_layers global_attn_idx global_head_dim hybrid_layer_ids index_topk
    interleaved_sliding_window is_encoder_decoder kv_lora_rank kv_reuse_group linear_attn_config
    mamba_step mb_per_layer num_global_key_value_heads num_key_value_heads_per_layer
    num_kv_shared_layers per_layer_config sparse_attention_config swa_head_dim
    swa_num_key_value_heads use_bidirectional_attention use_cla window_sizes
"""


def decoder_of(config: Config) -> tuple[str, dict[str, Any]]:
    """The part of a config that is about the decoder, after where it stands ("": outside)."""
    where, part = "", dict(config)
    while not flag(part, "is_encoder_decoder") and where.count(".") < 9:
        name = next((name for name in DECODERS if part.get(name) is not None), "")
        if not name:
            return where, part
        if not isinstance(part[name], Mapping):
            raise TypeError(f"{name} must be a dict, not {shown(part[name])}")
        outer, part, where = part, dict(part[name]), f"{where}.{name}".lstrip(".")
        part.setdefault("model_type", outer.get("model_type"))
        if setting(part, "dtype")[1] is None:
            part["torch_dtype"] = setting(outer, "dtype")[1]
    what = "is_encoder_decoder" if part.get("is_encoder_decoder") else where
    raise ValueError(f"config has {what}: its architecture is not supported; {WAY_OUT}")


def family_of(config: Config) -> Family:
    """The row of a config's model_type, unless a setting tells of another architecture."""
    kind = config.get("model_type")
    if kind is None:
        kind = UNTYPED.get(str(config.get("architectures")), "(none)")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type {shown(kind)} is not one of those known here; {WAY_OUT}")
    row = FAMILIES[kind]
    for name in sorted({*CHOOSING, *TELLTALES.split()} - {*HARMLESS, *row.reads}):
        unused = name == "kv_lora_rank" and config.get("use_mla") is False
        if config.get(name) and not unused:
            value = shown(config[name])
            raise ValueError(
                f"config has {name}: its architecture is not supported (it is {value}); {WAY_OUT}"
            )
    return row


def filled(config: Config, row: Family) -> dict[str, Any]:
    """A config with what holds where it is silent, and with the settings of its groups."""
    full = dict(config)
    for group in {*GROUPS}.intersection(row.reads):
        if isinstance(config.get(group), Mapping):
            full = {**config[group], **full}
    for what, value in row.silent.items():
        names = SPELLINGS.get(what, (what,))
        if what in ("kv_heads", "window", "attention_chunk_size", "kv_lora_rank"):  # null counts
            given = any(name in full for name in names)
        else:
            given = any(full.get(name) is not None for name in names)
        if not given:
            full[names[0]] = None if what == "kv_heads" and value == 0 else value
    if "hybrid_override_pattern" in row.reads and setting(full, "layers")[1] is None:
        listed = next((full[name] for name in BY_WORD if full.get(name)), None)
        if isinstance(listed, (list, str)):  # Nemotron's newest name their layers and no number
            full["num_hidden_layers"] = len(listed)
    return full


def told_by(config: Config, name: str, layers: int) -> str:
    """What each layer keeps, by one setting."""
    value = config[name]
    if name == "sliding_window_pattern" and isinstance(value, str) and value:
        value = (value * layers)[:layers]  # LLLG, as EXAONE has it
    elif name in BY_NUMBER:
        n = dimension(config, name, least=int(name != "max_window_layers"))
        if name == "cla_share_factor" and not flag(config, "use_cla"):
            n = 1
        if name == "layer_group_size" and layers % n:  # engines disagree about the rest
            raise ValueError(f"{name} = {n} does not divide the {layers} layers")
        first = dimension(config, "attn_layer_offset", 0) if name == "attn_layer_period" else 0
        return "".join(BY_NUMBER[name](n, i - first) for i in range(layers))
    elif name in BY_PLACE and isinstance(value, list):
        full = {whole(f"a layer in {name}", i, 0, layers) - BY_PLACE[name] for i in value}
        return "".join(FULL if i in full else NOTHING for i in range(layers))
    extra = config.get("num_nextn_predict_layers") or 0  # layers for speculative decoding
    whole("num_nextn_predict_layers", extra)
    if not isinstance(value, (list, str)) or len(value) - layers not in (0, extra):
        raise ValueError(f"{name} must list {layers} layers, not {shown(value)}")
    kinds: dict[Any, str] = {1: BY_MARK[name], 0: FULL} if name in BY_MARK else KINDS
    for kind in value:
        if not isinstance(kind, (str, int)) or isinstance(kind, bool) or kind not in kinds:
            raise ValueError(f"{name} has {shown(kind)}, which is not supported")
    return "".join(kinds[kind] for kind in value[:layers])


def layers_of(config: Config, row: Family) -> str:
    """What each layer keeps. Configs say so in several ways, which must not disagree."""
    layers = dimension(config, "layers")
    window, size = setting(config, "window")
    patterned = config.get("sliding_window_pattern") is not None and window not in config
    slides = size is not None or patterned  # a window of null is none, whatever the pattern
    if config.get("use_sliding_window") is not None:
        slides = flag(config, "use_sliding_window")
    if slides and WINDOW not in row.layers + row.others:
        raise ValueError(f"{window} = {shown(size)} is not supported for its model_type")
    ways = [*(WINDOWED if slides else ()), *row.reads]
    told = {
        name: told_by(config, name, layers)
        for name in ("layer_types", *ways)
        if name in CHOOSING and config.get(name) not in (None, [])
    }
    if not told and not row.layers:
        raise ValueError(f"config lacks {(*row.reads, 'layer_types')[0]}")
    first = next(iter(told), "")
    for name, kept in told.items():
        if kept != told[first]:
            raise ValueError(f"{name} contradicts {first}")
        if WINDOW in kept and not slides:
            raise ValueError(f"{name} has sliding layers, but {window} is absent or not in use")
        if not set(kept) <= {FULL, *row.layers, *row.others}:
            raise ValueError(f"{name} has layers of a kind that its model_type does not have")
    kept = told[first] if told else (row.layers * layers)[:layers]
    if "global_head_dim" in row.reads:  # Gemma 4
        masked = config.get("use_bidirectional_attention")
        if masked not in (None, False, "vision") or kept[-1] != FULL:
            raise ValueError(
                f"use_bidirectional_attention = {shown(masked)} or a last layer with a window is"
                f" not supported; {WAY_OUT}"
            )
    if config.get("num_kv_shared_layers"):  # the last ones read the KV of others
        kept = kept[: -whole("num_kv_shared_layers", config["num_kv_shared_layers"], 1, layers - 1)]
    return kept if slides else kept.replace(WINDOW, FULL)


def kv_heads_of(config: Config, heads: int) -> int:
    """How many KV heads serve the query heads: as many (MHA), fewer (GQA) or one (MQA)."""
    name, value = setting(config, "kv_heads")
    if value is None and not any(name in config for name in SPELLINGS["kv_heads"]):
        raise ValueError(f"config lacks {name}")
    if flag(config, "multi_query_attention"):  # as ChatGLM says
        name, value = "multi_query_group_num", config.get("multi_query_group_num", value)
        if value is None:
            raise ValueError(f"config lacks {name}")
    kv_heads = heads if value is None else whole(name, value, 1, 10**7)
    single = flag(config, "multi_query") and not flag(config, "new_decoder_architecture")
    told = (config.get("attention_head_type"), config.get("attn_type"))  # SantaCoder, MPT
    if single or "multiquery" in told or "multiquery_attention" in told:
        if kv_heads not in (1, heads):  # Falcon 7B gives all its heads here, and has one
            raise ValueError(f"{name} = {kv_heads} contradicts multi_query")
        return 1
    if heads % kv_heads:
        raise ValueError(f"{name} = {kv_heads} does not divide the {heads} query heads")
    return kv_heads


def head_dim_of(config: Config, heads: int) -> int:
    """Values in a head: what the config says, and hidden size / query heads only if it does not."""
    if setting(config, "head_dim")[1] is not None:
        return dimension(config, "head_dim")
    hidden = dimension(config, "hidden")
    if hidden % heads:
        message = f"hidden_size = {hidden} is no multiple of {heads} query heads"
        raise ValueError(f"config lacks head_dim, and {message}")
    return hidden // heads


def values_of(config: Config, row: Family, kind: str, tp: int) -> int:
    """Values of KV that a layer keeps of a token, on each of `tp` GPUs."""
    if kind == NOTHING:
        return 0
    unused = row is FAMILIES["(none)"] and config.get("kv_lora_rank") is None
    if row is FAMILIES["(none)"] and not unused and config.get("num_hidden_layers") is None:
        raise ValueError("config lacks model_type: with num_layers, a layer may keep two latents")
    if "kv_lora_rank" in row.reads and config.get("use_mla") is not False and not unused:
        latent = dimension(config, "kv_lora_rank") + dimension(config, "qk_rope_head_dim")
        return latent * int(row.silent.get("caches_a_layer", 1))
    heads = dimension(config, "heads")
    kv_heads, head_dim = kv_heads_of(config, heads), head_dim_of(config, heads)
    if kind == FULL and "global_head_dim" in row.reads:  # Gemma 4's global layers
        head_dim = dimension(config, "global_head_dim")
        if flag(config, "attention_k_eq_v") and config.get("num_global_key_value_heads"):
            kv_heads = dimension(config, "num_global_key_value_heads")
    other = config.get("attention_other_setting")  # of Step's layers with a window
    if isinstance(other, Mapping) and setting(other, "kv_heads")[1] not in (None, kv_heads):
        raise ValueError("attention_other_setting has another number of KV heads")
    if isinstance(other, Mapping) and setting(other, "head_dim")[1] not in (None, head_dim):
        raise ValueError("attention_other_setting has another head_dim")
    if config.get("v_head_dim") not in (None, 0, head_dim):
        raise ValueError(f"v_head_dim = {shown(config['v_head_dim'])} is not the {head_dim} of K")
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(f"tp = {tp} neither divides the {kv_heads} KV heads nor is a multiple")
    index = dimension(config, "sparse_index_dim") if kind == INDEXED else 0
    return 2 * max(1, kv_heads // tp) * head_dim + index


def value_bytes(config: Config) -> int:
    """Bytes of one value, from the dtype that a config names: bfloat16, float8_e4m3fn, ...

    Engines run float32 models, and those that name no dtype, in 16 bits.
    """
    name, dtype = setting(config, "dtype")
    if dtype in (None, "auto"):
        return 2
    text = dtype if isinstance(dtype, str) else ""
    bits = re.fullmatch(r"(torch\.)?b?f(loat|p)?(8(?=\Z|_)|16\Z|32\Z|64\Z)(_\w+)?", text)
    if not bits:
        raise ValueError(f"{name} = {shown(dtype)} is not supported; dtype_bytes stands in for it")
    return {"8": 1, "64": 8}.get(bits[3], 2)


def kv_bytes(config: Config, tokens: int = 1, dtype_bytes: float | None = None, tp: int = 1) -> int:
    """Bytes of KV cache that one sequence of `tokens` tokens holds, from a model's config.json.

    `config` is the file read as a dict; where it nests the decoder (`text_config`, `llm_config`,
    `language_config`, `thinker_config`), that counts. A value takes `dtype_bytes` bytes (fp8: 1;
    llama.cpp's q8_0: 1.0625; int4: 0.5), or as many as the config's dtype, 2 if that is float32 or
    not named. The total is rounded up to whole bytes. With `tp` it is the bytes on each GPU: KV
    heads are split, and repeated where there are more GPUs than heads; a latent is whole on each.

    - Full attention: 2 x KV heads x head_dim values a layer and token (MHA, GQA and MQA).
    - Multi-head latent attention: kv_lora_rank + qk_rope_head_dim values a layer and token, once
      for all heads and for both K and V (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).
    - Layers with a window or in chunks hold no more tokens than that (an engine, a prefill chunk
      more), linear-attention and state-space layers no KV; their state is not counted.

    A config that lacks a setting, contradicts itself or is of an architecture not known here raises
    ValueError or TypeError, and names the setting.

    >>> config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    ...     "hidden_size": 4096, "torch_dtype": "bfloat16"}
    >>> kv_bytes(config), kv_bytes(config, tokens=1000, dtype_bytes=1), kv_bytes(config, tp=4)
    (131072, 65536000, 32768)
    """
    where, part = decoder_of(config)
    try:
        row = family_of(part)
        part = filled(part, row)
        layers = layers_of(part, row)
        values = 0
        for kind in sorted(set(layers)):
            most = {WINDOW: "window", CHUNK: "attention_chunk_size"}.get(kind)
            held = min(tokens, dimension(part, most)) if most else tokens
            values += layers.count(kind) * values_of(part, row, kind, tp) * held
        return math.ceil(values * (value_bytes(part) if dtype_bytes is None else dtype_bytes))
    except (TypeError, ValueError) as error:
        raise type(error)(f"in {where}: {error}" if where else str(error)) from None


LARGEST = 2**24  # bytes of a config.json; real ones have thousands


def contents(option: str, path: str, largest: int) -> bytes:
    """All bytes of the file at `path` (-: standard input), or UsageError."""
    try:
        if path == "-":
            stdin = getattr(sys.stdin, "buffer", sys.stdin)
            text = cast(bytes, stdin.read(largest + 1)) if stdin else b""
        else:
            with open(path, "rb") as file:
                text = file.read(largest + 1)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None
    if len(text) > largest:
        raise UsageError(f"{option} {path}: too large, more than {largest:,} bytes")
    return text


def config_at(path: str) -> dict[str, Any]:
    """The config.json at `path`, which may be - (standard input), or UsageError."""
    try:
        config: dict[str, Any] = json.loads(contents("--model", path, LARGEST))
    except (MemoryError, RecursionError):
        raise UsageError(f"--model {path}: too large or nested too deeply") from None
    except UnicodeDecodeError:
        raise UsageError(f"--model {path}: not JSON: no text in UTF-8, UTF-16 or UTF-32") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise UsageError(f"--model {path}: not JSON: wrong at {where}") from None
    except ValueError as error:  # a number of too many digits
        raise UsageError(f"--model {path}: {error}") from None
    return config


def model_table(path: str, config: Any, budget_gib: float | None, s: Parts) -> None:
    """Print the bytes of a token and of sequences; with `budget_gib` also what it holds."""
    per_token = s["kv_bytes"](config)
    sizes = {context: s["kv_bytes"](config, context) for context in CONTEXTS}
    print(f"  {ascii_line(path)}")
    print(f"  = {per_token:,} B/token = {per_token / 1024:,.10g} KiB per token\n")
    budget = int(budget_gib * GIB) if budget_gib and per_token else 0
    share = f"{f'% of {budget_gib:g} GiB':>18}   sequences" if budget else ""
    print(f"     context   KV per sequence{share}")
    for context, size in sizes.items():
        fits = f"{size / budget:>18.1%}{budget // size:>12,}" if budget else ""
        print(f"{context:>12,}{size / GIB:>14.3f} GiB{fits}")
    if not per_token:
        say("No layer of it keeps KV.")
    if sizes[CONTEXTS[-1]] < CONTEXTS[-1] * per_token:
        say("Layers with a window or a chunk stop growing there, so later tokens cost less.")
    if budget:
        pages = budget // per_token // 16
        say(f"{budget_gib:g} GiB are {pages:,} pages of 16 tokens that every layer keeps.")
    say(
        """One copy of the KV, in GiB of 2^30 bytes, at the width that the dtype names; where it
        names none or float32, 2 bytes a value, as engines run those. A GPU of a tensor-parallel
        replica holds less, and repeats what it cannot split: kv_bytes(config, tp=...) says."""
    )


# ---------------------------------------------------------------------------------------- sizing

# From a model, cards and lengths to a setting. Everything but the rest is arithmetic of blocks 1, 2
# and 6, and recipe() prints it so that a pencil can follow.


class Card(NamedTuple):
    """One GPU: what it has, reads and computes."""

    gib: float  # as the runtime reports it: what an engine's utilization applies to
    gb_per_s: float
    tflops: float  # BF16, without sparsity


# GB/s and TFLOP/s are the vendors' (their sparse TFLOP/s halved); GiB are "total capacity" and
# "total_gpu_memory" in public logs, 0.3 to 0.7 less than nvidia-smi shows, and 0.2 with the driver.
CARDS = {
    "A100-40G": Card(39.38, 1555, 312),  # vLLM issue 16570
    "A100-80G": Card(79.15, 2039, 312),  # SXM; 79.25 in kvcached issue 110
    "H100-SXM": Card(79.11, TIERS["GPU HBM"], DENSE_FLOPS_PER_GPU / 1e12),  # vLLM issue 27508
    "H100-PCIe": Card(79.11, 2000, 756.5),  # GiB of the SXM card
    "H200": Card(139.80, 4800, DENSE_FLOPS_PER_GPU / 1e12),  # PyTorch's out-of-memory messages
    "B200": Card(178.35, 8000, 2250),  # the same; at 1,000 W
    "L40S": Card(44.39, 864, 362),  # the same; 44.52 in vLLM issue 14011
    "L4": Card(22.03, 300, 121),  # the same
    "A10G": Card(21.99, 600, 70),  # Unsloth's banner; an A10 computes 125
    "RTX-4090": Card(23.53, 1008, 165.2),  # the same; with FP32 accumulation
    "MI300X": Card(191.98, 5300, 1307),  # PyTorch's out-of-memory messages
}
REST_SHARE = 0.05  # of a card, for all but weights and KV: in block 1 it is 15.7 of 318.6 GiB
UTILIZATION = 0.92  # vLLM's default
KEPT_FREE = 0.05  # the watermark of block 6's rule
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
REACHED = {"peak": (1.0, 1.0), "50%, 80%": (0.5, 0.8)}  # of FLOP/s and of bandwidth

Range = tuple[float, ...]  # a figure at each of REACHED


class Deployment(NamedTuple):
    """A replica sized for its traffic, in the order in which a pencil gets there."""

    memory_gib: float  # of all its GPUs, as the runtime reports it
    weights_gib: float
    rest_gib: float  # activations, CUDA graphs, communication: assumed, unless given
    budget_gib: float  # what is left for KV
    bytes_on_each: int  # KV of a token on one GPU
    kv_per_token: int  # and on all of them
    tokens: int  # that fit the budget
    resident: float  # tokens that a running sequence holds
    fill_pool: float  # sequences that fill the pool, on average
    fill_step: float  # sequences whose decode and prefill fill a step of 8,192 tokens
    limit: str  # the lesser of the two
    max_num_seqs: int  # with 5% of the pages kept free
    max_num_seqs_alone: int  # for an engine that cannot keep pages free
    running: float  # sequences, with 5% kept free
    step_tokens: float  # what they compute in a step
    ridge: Range  # tokens a step from which computing takes longer than reading the weights
    weights_s: Range  # seconds of reading the weights
    step_s: Range  # seconds of a step
    tokens_per_s: Range
    per_user: Range  # tokens/s of one sequence
    first_token_s: Range  # seconds to the first token of a mean prompt, on an idle server


def size(
    config: Config,
    requests: Iterable[tuple[int, int]],
    card: Card,
    n_params: float,
    tp: int = 1,
    active_params: float | None = None,
    weight_bytes: float = DTYPE,
    dtype_bytes: float | None = None,
    utilization: float = UTILIZATION,
    rest_gib: float | None = None,
) -> Deployment:
    """Size a replica of `tp` cards for a model's config.json and (prompt, output) requests.

    `card` is a name in CARDS or (GiB, GB/s, dense TFLOP/s). `active_params` are those that a token
    uses; a mixture of experts must say. Parameters take `weight_bytes` bytes, values of KV
    `dtype_bytes` (None: what the config says). An engine may use `utilization` of the memory, and
    needs `rest_gib` of each GPU for more than weights and KV (None: 5% of the card, as in block 1).

    The setting follows block 6: keep 5% of the pages free, and let as many run as fill the pool or
    the step. Where an engine cannot keep pages free, n - 2 sqrt(n) of the n that fill the pool.
    Times are step_seconds at the peak, and at 50% MFU and 80% of the bandwidth.

    >>> llama = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    ...     "num_key_value_heads": 8, "hidden_size": 4096}
    >>> l4 = size(llama, [(2000, 500)], card="L4", n_params=8.03e9)
    >>> l4.tokens, round(l4.fill_pool, 1), l4.limit
    (34480, 15.3, 'KV memory')
    """
    gib, gb_per_s, tflops = card
    if active_params is None and experts(config):
        raise ValueError(f"active_params is missing: config has {experts(config)}, and uses a few")
    if active_params is not None and active_params > n_params:
        raise ValueError(f"active_params = {active_params:g} is more than all {n_params:g}")
    requests = list(requests)
    resident = resident_tokens(requests)
    prompt = sum(prompt for prompt, _ in requests) / len(requests)

    memory = tp * gib
    weights = n_params * weight_bytes / GIB
    rest = tp * (REST_SHARE * gib if rest_gib is None else rest_gib)
    budget = memory * utilization - weights - rest
    if budget <= 0:
        raise ValueError(
            f"no memory is left for KV: {memory:.2f} GiB x {utilization:g}"
            f" - {weights:.2f} of weights - {rest:.2f} for the rest = {budget:.2f}"
        )
    length = math.ceil(resident)  # where layers have a window, a longer sequence costs less a token
    on_each = math.ceil(kv_bytes(config, length, dtype_bytes, tp) / length)
    if not on_each:
        raise ValueError("no layer keeps KV: its memory is never the limit")
    tokens = budget_tokens(budget, tp * on_each)
    longest = max(prompt + output for prompt, output in requests)
    if longest > tokens:
        raise ValueError(f"a request of {longest:,} tokens never fits a pool of {tokens:,}")

    fill_pool, fill_step = tokens / resident, step_fills(requests, STEP_TOKENS)
    running = max(1, min((1 - KEPT_FREE) * fill_pool, fill_step))
    step_tokens = running * STEP_TOKENS / fill_step
    speeds: list[Parts] = [
        {
            "n_params": n_params, "active_params": active_params, "weight_bytes": weight_bytes,
            "flops_per_gpu": tflops * 1e12, "gb_per_s": gb_per_s, "mfu": mfu, "mbu": mbu,
        }
        for mfu, mbu in REACHED.values()
    ]  # fmt: skip

    def seconds(tokens: float, held_tokens: float) -> Range:
        kv = tp * on_each
        return tuple(step_seconds(tokens, held_tokens, kv, tp=tp, **speed) for speed in speeds)

    step_s = seconds(step_tokens, running * resident)
    return Deployment(
        memory, weights, rest, budget, on_each, tp * on_each, tokens, resident,
        fill_pool, fill_step, "KV memory" if fill_pool <= fill_step else "the step",
        max(1, math.ceil(min(fill_pool, fill_step))),
        max(1, int(min(fill_pool - 2 * math.sqrt(fill_pool), fill_step))),
        running, step_tokens,
        ridge=tuple(ridge_tokens(**speed) for speed in speeds),
        weights_s=seconds(0, 0),
        step_s=step_s,
        tokens_per_s=tuple(running / step for step in step_s),
        per_user=tuple(1 / step for step in step_s),
        first_token_s=seconds(prompt, prompt),
    )  # fmt: skip


def experts(config: Config) -> str:
    """What a config says of a mixture of experts, or nothing."""
    for part in (config, *config.values()):
        for name in EXPERTS if isinstance(part, Mapping) else ():
            if isinstance(part.get(name), int) and part[name] > 1:
                return f"{name} = {part[name]}"
    return ""


def card_of(name: str, value: Any) -> Card:
    """A card by its name, or from its GiB, GB/s and dense TFLOP/s."""
    if isinstance(value, str):
        found = {known.lower(): card for known, card in CARDS.items()}.get(value.lower())
        if found is None:
            raise ValueError(
                f"{name} must be GiB,GB/s,TFLOP/s (dense) or {', '.join(CARDS)}, not {value!a}"
            )
        return found
    try:
        gib, gb_per_s, tflops = value
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be (GiB, GB/s, TFLOP/s), not {shown(value)}") from None
    return Card(
        number(f"{name} GiB", gib, 1e-3, 1e6),
        number(f"{name} GB/s", gb_per_s, 1e-3, 1e9),
        number(f"{name} TFLOP/s", tflops, 1e-3, 1e9),
    )


def bytes_in_words(config: Config, width: float, tp: int, on_each: int) -> str:
    """How a token's bytes on one GPU come about, where plain settings of the config say it."""
    nested = (part for part in config.values() if isinstance(part, dict) and "hidden_size" in part)
    said: Any = next(nested, config)
    layers = said.get("num_hidden_layers")
    with contextlib.suppress(Exception):
        if said.get("kv_lora_rank"):
            latent, rope = said["kv_lora_rank"], said["qk_rope_head_dim"]
            values, words = layers * (latent + rope), f"{layers} layers x ({latent} + {rope})"
        else:
            heads = max(1, said["num_key_value_heads"] // tp)
            head_dim = said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"]
            values = 2 * layers * heads * head_dim
            words = f"2 x {layers} layers x {heads} KV heads x {head_dim}"
        if values * width == on_each:
            return f"{words} x {width:g} B"
    return f"kv_bytes(config, tp={tp}), from its class"


def recipe(config: Config, given: Parts, d: Deployment) -> None:
    """Print how `d` = size(config, **given) comes about: a line for each number, its name first."""
    gib, gb_per_s, tflops = given["card"]
    tp, each, rest = given["tp"], given["weight_bytes"], given["rest_gib"]
    params = billions(given["n_params"])
    active = billions(given["active_params"] or given["n_params"])
    prompt, output = (f"{sum(column) / len(column):,.6g}" for column in zip(*given["requests"]))
    same = len(set(given["requests"])) == 1
    share, pool = f"(1 + {prompt} / {output})", f"{d.fill_pool:,.1f}"
    used, held = d.memory_gib * given["utilization"], d.running * d.resident

    def line(name: str, formula: str, result: str) -> None:
        print(f"  {name:<18} = {formula:<41} = {result}")

    def both(name: str, formula: str, results: Range, scale: float = 1) -> None:
        columns = "".join(f"{figure(scale * result):>11}" for result in results)
        print(f"  {name:<18} = {formula:<37} ={columns}")

    print(f"  each: {gib:g} GiB, {gb_per_s / 1000:g} TB/s, {tflops:g} TFLOP/s", end=" ")
    print("(what is printed is rounded)\n")
    line("memory shown", f"{tp} x {gib:.2f}", f"{d.memory_gib:.2f} GiB")
    line("of it in use", f"{d.memory_gib:.2f} x {given['utilization']:g}", f"{used:.2f} GiB")
    line("weights", f"{params} x {each:g} B / 2^30", f"{d.weights_gib:.2f} GiB")
    if rest is None:
        line("the rest, assumed", f"{d.memory_gib:.2f} x {REST_SHARE}", f"{d.rest_gib:.2f} GiB")
    else:
        line("the rest, given", f"{tp} x {rest:g}", f"{d.rest_gib:.2f} GiB")
    left = f"{used:.2f} - {d.weights_gib:.2f} - {d.rest_gib:.2f}"
    line("KV budget", left, f"{d.budget_gib:.2f} GiB")
    words = bytes_in_words(config, given["dtype_bytes"] or DTYPE, tp, d.bytes_on_each)
    line("a token, each GPU", words, f"{d.bytes_on_each:,} B")
    line("a token, in all", f"{tp} x {d.bytes_on_each:,}", f"{d.kv_per_token:,} B")
    line("tokens that fit", f"{d.budget_gib:.2f} x 2^30 / {d.kv_per_token:,}", f"{d.tokens:,}")
    life = f"{prompt} + {output} / 2" if same else "E[p x o + o^2 / 2] / E[o]"
    line("a sequence holds", f"{life} + 16 / 2", f"{d.resident:,.1f} tokens")
    line("fill the pool", f"{d.tokens:,} / {d.resident:,.1f}", f"{pool} sequences")
    line("fill a step", f"{STEP_TOKENS:,} / {share}", f"{d.fill_step:,.1f} sequences")
    line("the limit", "the lesser of the two", d.limit)

    print(f"\n  THE SETTING, with max_num_batched_tokens {STEP_TOKENS:,}")
    line("watermark", "pages kept free, where the engine can", f"{KEPT_FREE}")
    line("max_num_seqs", "the lesser of the two, rounded up", f"{d.max_num_seqs:,}")
    most = f", at most {d.fill_step:,.1f}" if d.limit == "the step" else ""
    alone = f"{pool} - 2 x sqrt({pool}){most}"
    line("without watermark", alone, f"max_num_seqs {d.max_num_seqs_alone:,}")
    line("so there run", f"{1 - KEPT_FREE:g} x {pool}{most}", f"{d.running:,.1f} sequences")
    line("a step computes", f"{d.running:,.1f} x {share}", f"{d.step_tokens:,.1f} tokens")
    line("a step reads KV of", f"{d.running:,.1f} x {d.resident:,.1f}", f"{held:,.0f} tokens")

    print("\n" + " " * 62 + "".join(f"{name:>11}" for name in REACHED))
    ridge, bandwidth = f"{tflops:g} / {gb_per_s / 1000:g}", f"({tp} x {gb_per_s / 1000:g}e12)"
    wider = f" x {each:g} / 2" if each != DTYPE else ""
    sparse = f" x {params} / {active}" if active != params else ""
    both("ridge, tokens", ridge + wider + sparse, d.ridge)
    both("read weights, ms", f"{params} x {each:g} / {bandwidth}", d.weights_s, 1000)
    compute = tuple(s * d.step_tokens / ridge for s, ridge in zip(d.weights_s, d.ridge))
    both("compute, ms", f"{d.step_tokens:,.1f} / ridge x that", compute, 1000)
    kv = tuple(s - max(both) for s, *both in zip(d.step_s, d.weights_s, compute))
    both("read KV, ms", f"{held:,.0f} x {d.kv_per_token:,} / {bandwidth}", kv, 1000)
    both("a step, ms", "the longer of the first two, + KV", d.step_s, 1000)
    both("tokens/s", f"{d.running:,.1f} / a step", d.tokens_per_s)
    both("tokens/s, a user", "1 / a step", d.per_user)
    both("first token, ms", f"a step of {prompt} tokens: idle server", d.first_token_s, 1000)
    say(
        """Left, the hardware's peak; right, 50% MFU and 80% of the bandwidth. Communication between
        GPUs and the FLOP of attention are in neither."""
    )
    if rest is None:
        say(
            f"""The rest (activations, CUDA graphs, communication) is assumed: {REST_SHARE:.0%} of
            what is shown, as in block 1. In engines' logs it is 0.4 to 8 GiB a GPU. Yours prints the
            tokens that fit (vLLM: GPU KV cache size); --rest GIB corrects the guess."""
        )
    if same:
        say("Where lengths differ, sequences hold more, for long answers stay longer: --trace.")
    if each < DTYPE:
        say("Arithmetic is taken in 16 bits; --card GIB,GB/S,TFLOP/S may say another rate.")
    if active != params:
        say("Every expert is read in every step: true of large steps, too slow for small ones.")
    if d.kv_per_token > kv_bytes(config, 1, given["dtype_bytes"]):
        say(
            """A latent, or a KV head where there are more GPUs, is whole on each GPU: the tokens
            that fit are what the budget of one GPU holds."""
        )
    if d.bytes_on_each < kv_bytes(config, 1, given["dtype_bytes"], tp):
        say(f"Layers with a window keep less: a token's share of {d.resident:,.0f} is counted.")


def billions(params: float) -> str:
    """A number of parameters, as people write it."""
    return f"{params / 1e9:.6g}e9"


def figure(result: float) -> str:
    """Three digits or more."""
    return f"{result:,.{0 if result >= 999.5 else 1 if result >= 10 else 2}f}"


class Traffic(NamedTuple):
    """What pages are worth to requests of these lengths, on the lesson's own server."""

    requests: int
    prompt: float  # mean tokens
    output: float
    fill_pool: float  # sequences that fill the pool, on average
    fill_step: float  # and a step of 8,192 tokens
    least: float  # of these two and vLLM's 1,024
    slots_per_s: float  # tokens/s with as many as 8,192-token slots hold
    pages_per_s: float  # with pages, 5% kept free
    again: float  # prefill computed again, over what is computed for the first time

    @property
    def ratio(self) -> float:
        """How often pages make as many tokens/s as slots."""
        return self.pages_per_s / self.slots_per_s


MAX_NUM_SEQS = 1024  # vLLM's, serving on an H100


def traffic(requests: Iterable[tuple[int, int]]) -> Traffic:
    """What pages are worth to these requests: the lesson's model, GPUs and 35,328 pages.

    Both servers prefill in the same steps, of 8,192 tokens at most. All requests wait from the
    start, in the order given.
    """
    requests = list(requests)
    pages = budget_tokens() // 16
    slots = contiguous(requests, 8192).batch
    fill_pool = budget_tokens() / resident_tokens(requests)
    fill_step = step_fills(requests, STEP_TOKENS)
    in_slots = serve(requests, pages, max_running=slots, max_batched_tokens=STEP_TOKENS)
    in_pages = serve(
        requests, pages, watermark=KEPT_FREE, max_running=MAX_NUM_SEQS,
        max_batched_tokens=STEP_TOKENS,
    )  # fmt: skip
    prompt, output = (sum(column) / len(requests) for column in zip(*requests))
    return Traffic(
        len(requests), prompt, output,
        fill_pool, fill_step, min(fill_pool, fill_step, MAX_NUM_SEQS),
        in_slots.tokens_per_s, in_pages.tokens_per_s, in_pages.again,
    )  # fmt: skip


def traffic_table(row: Traffic) -> None:
    """Print a row of real traffic under its heading."""
    print(f"{'mean tokens':>23}{'sequences that fill':>29}{'tokens/s with':>17}")
    print("  requests prompt output ratio   pool   step  least  slots  pages worth  again")
    print(
        f"{row.requests:>10,}{row.prompt:>7,.0f}{row.output:>7,.0f}{row.prompt / row.output:>6.1f}"
        f"{row.fill_pool:>7,.0f}{row.fill_step:>7,.0f}{row.least:>7,.0f}{row.slots_per_s:>7,.0f}"
        f"{row.pages_per_s:>7,.0f}{row.ratio:>5.2f}x{row.again:>7.1%}"
    )
    say(
        f"""The pool is {budget_tokens():,} tokens, a step {STEP_TOKENS:,}; the least is of these two
        and the {MAX_NUM_SEQS:,} that vLLM runs. In slots of 8,192 tokens {budget_tokens() // 8192}
        run; pages keep {KEPT_FREE:.0%} free. Again: prefill that preempted sequences repeat."""
    )


COLUMNS = ("ContextTokens", "GeneratedTokens")  # of a trace, as in Azure's


def requests_at(path: str) -> list[tuple[int, int]]:
    """The (prompt, output) requests of the trace at `path`, or UsageError."""
    text = contents("--trace", path, 2**28)
    try:
        rows = csv.DictReader(io.StringIO(text.decode("utf-8-sig"), newline=""))
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise UsageError(f"--trace {path}: no column {missing[0]} in the first line")
        requests = []
        for row in rows:
            prompt, output = (int(row[name] or "") for name in COLUMNS)
            if prompt < 0 or output < 1:
                raise ValueError
            requests.append((prompt, output))
    except UnicodeDecodeError:
        raise UsageError(f"--trace {path}: no text in UTF-8") from None
    except csv.Error as error:
        raise UsageError(f"--trace {path}: line {rows.line_num}: {error}") from None
    except ValueError:
        message = f"line {rows.line_num}: {COLUMNS[0]} must be 0 or more, {COLUMNS[1]} 1 or more"
        raise UsageError(f"--trace {path}: {message}") from None
    if not requests:
        raise UsageError(f"--trace {path}: no requests")
    return requests


def deploy(mode: argparse.Namespace, config: Config, s: Parts) -> None:
    """Size the deployment that the command line describes, and print the recipe."""
    mapping("config", config)
    lengths = mode.trace is not None or None not in (mode.prompt, mode.output)
    asked = {
        "--params N": mode.params, "--gpus N": mode.gpus, "--card NAME": mode.card,
        "--prompt N and --output N, or --trace FILE": lengths or None,
    }  # fmt: skip
    missing = [option for option, value in asked.items() if value is None]
    if mode.active is None and experts(config):
        missing.append(f"--active N (parameters that a token uses: {experts(config)})")
    if missing:
        raise UsageError(f"to size a deployment, add {'; '.join(missing)}")
    given = {
        "requests": requests_at(mode.trace) if mode.trace else [(mode.prompt, mode.output)],
        "card": mode.card, "n_params": mode.params, "tp": mode.gpus,
        "active_params": mode.active, "weight_bytes": mode.weights or DTYPE,
        "dtype_bytes": mode.kv, "utilization": mode.utilization or UTILIZATION,
        "rest_gib": mode.rest,
    }  # fmt: skip
    sized = s["size"](config, **given)
    print(f"  {ascii_line(mode.model)} on {mode.gpus} GPU{'s' if mode.gpus > 1 else ''}")
    recipe(config, given, sized)


# --------------------------------------------------------------------------------------- predict


class Question(NamedTuple):
    """One of the six predictions, with the mechanism's answer."""

    block: int  # where it is explained
    answer: float
    units: dict[str, float]  # what a guess may be in, and how much of the answer's unit that is
    printed: str  # the answer as the lesson prints it
    learned: str  # what it comes to, in a few words
    text: str
    why: dict[float, str]  # well-known wrong answers, and what is wrong with them


SIZES = {"": 1, "b": 1, "byte": 1, "bytes": 1, "k": 2**10, "kb": 1e3, "kib": 2**10}
SIZES.update({"m": 2**20, "mb": 1e6, "mib": 2**20, "gb": 1e9, "gib": 2**30})
SHARES = {"": 1, "%": 0.01, "percent": 0.01, "pct": 0.01, "points": 0.01}
FACTORS = {"": 1, "x": 1, "times": 1, "fold": 1, "%": 0.01}
RATES = {"": 1, "gb/s": 1, "gb": 1, "gib/s": 2**30 / 1e9, "mb/s": 1e-3, "tb/s": 1e3}
RATES["gbit/s"] = 1 / 8
DEPENDS = "And does it, so counted, depend on the length of the prefix? (yes or no)"


def questions(s: Parts) -> list[Question]:
    """The six predictions, answered by the mechanisms in `s`."""
    requests = s["seq_lengths"](4000)
    token = s["kv_bytes_per_token"](LAYERS, KV_HEADS, HEAD_DIM, DTYPE)
    share = s["budget_share"](s["kv_gib"](131_072))
    reserved, in_pages = s["contiguous"](requests, 8192), s["paged"](requests, 16)
    factor = in_pages.batch / reserved.batch
    drawn = s["shared_prefix"](s["prefixed_lengths"](64, 4096), 4096, page_tokens=1).saved
    saved = s["expected_saving"](64, 4096)
    bar = s["break_even"]()
    vectors = "That is one vector for each head; K and V are both kept."
    return [
        Question(
            1, token, SIZES, f"{token:,} B = {token // 1024} KiB",
            f"a token holds {token // 1024} KiB",
            f"""How many bytes of KV does one token of a 70B model hold? ({LAYERS} layers,
            {Q_HEADS} query heads, {KV_HEADS} KV heads of {HEAD_DIM}, fp16)""",
            {
                token / 2: vectors, token * 2: "A value in fp16 takes 2 bytes.",
                token * Q_HEADS / KV_HEADS: "That counts query heads; only KV heads keep anything.",
                token / LAYERS: "That is one layer of it.",
            },
        ),
        Question(
            1, share, SHARES, f"{share:.1%}", f"128k tokens fill {share:.1%} of the replica",
            f"""What share of a 4 x H100 replica's KV budget ({KV_BUDGET_GIB} GiB) does one request
            of 128k tokens hold?""",
            {share / 2: vectors},
        ),
        Question(
            2, reserved.waste, SHARES, f"{reserved.waste:.1%}",
            f"8k reservations waste {reserved.waste:.1%}",
            """Chat: prompts and answers of any length, most of them short. If every sequence
            reserves 8,192 tokens, what percentage of the budget is never used? (Just guess.)""",
            {1 - reserved.waste: "That is what is used."},
        ),
        Question(
            3, factor, FACTORS, f"{factor:.1f}x ({reserved.batch} -> {in_pages.batch})",
            f"pages hold {factor:.1f}x the batch",
            """By what factor is the batch larger with 16-token pages than with those
            reservations?""",
            {},
        ),
        Question(
            4, saved, SHARES,
            f"{saved:.1%} by expectation ({drawn:.1%} in the lesson's lucky draw)",
            f"sharing a 4k prefix saves {saved:.1%}",
            """64 chats share a 4,096-token prefix, and each adds a prompt and an answer of its own.
            What share of their KV disappears when the prefix is stored once?""",
            {63 / 64: "That is of the prefixes alone.", 1 - saved: "That is what stays."},
        ),
        Question(
            5, bar, RATES, f"{bar:.2f} GB/s", f"a tier below {bar:.2f} GB/s loses to recomputing",
            f"""Above how many GB/s is it faster to load a prefix's KV than to recompute it, on 4
            GPUs of {DENSE_FLOPS_PER_GPU / 1e12} TFLOP/s at 2 FLOP per parameter and token?""",
            {
                bar / 4: "That is for one GPU; four recompute four times as fast.",
                bar * 2: "That counts one FLOP per parameter and token.", bar / 2: vectors,
                bar * 8: "That is in Gbit/s.",
            },
        ),
    ]  # fmt: skip


WORDS = {  # of numbers, which people may type
    "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10", "half": "/2", "third": "/3", "thirds": "/3",
    "quarter": "/4", "quarters": "/4", "fifth": "/5", "fifths": "/5", "tenth": "/10",
}  # fmt: skip
NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?"
TERM = rf"{NUMBER}(?:\s*[*/]\s*{NUMBER})*"
GUESS = re.compile(  # not the 4 of "TP4", but the 6 of "x6"; perhaps a range; a unit
    rf"(?<![a-wyz0-9.])({TERM})(?:\s*[x%]?\s*(?:-|to)\s*({TERM}))?[\s-]*(%|[a-z]+(?:/s)?)?"
)


def in_digits(typed: str) -> str:
    """`typed` in lower case and in digits: "a quarter" is 1/4, and 80 x 8 is 80*8."""
    text = re.sub(r"(?<=[kMGT])b(?=ps|/s)", "bit", typed).lower().replace("ps", "/s")
    text = re.sub(r"(?<=\d)[,_ ](?=\d{3}(?!\d))", "", text).replace(",", ".").replace("\u2013", "-")
    text = re.sub(r"[a-z]+", lambda word: WORDS.get(word[0], word[0]), text)
    text = re.sub(r"(?<![\d ])\s*/(?=\d)|^\s*/(?=\d)", " 1/", text)
    text = re.sub(r"(?<=\d)\s*[x\u00d7]\s*(?=[\d.])", "*", text)
    return re.sub(r"[. ]*\b(?:yes|no)\b", "", text.rpartition("=")[2])


def value_of(term: str) -> float:
    """What a product or quotient comes to; nan for a division by zero."""
    value = 1.0
    for sign, factor in re.findall(rf"([*/]?)\s*({NUMBER})", term):
        value = value / (float(factor) or math.nan) if sign == "/" else value * float(factor)
    return value


def guess_of(typed: str, question: Question) -> float | None:
    """The guess in the unit of the answer, of a range its middle; None if it cannot be read."""
    plain = in_digits(typed)
    found = GUESS.search(plain)
    if not found or set(plain[: found.start()]) & {"-", "\u2212"}:
        return None
    if re.search(r"\W\d", plain[found.end() :]):
        return None
    guess, unit = (value_of(found[1]) + value_of(found[2] or found[1])) / 2, found[3] or ""
    if question.units is SHARES and not unit and guess >= 1:
        unit = "%"
    if unit not in question.units or not math.isfinite(guess):
        return None
    return guess * question.units[unit]


def miss(guess: float, question: Question) -> float:
    """How far off a guess is: 1 is twice or half of the answer, or 35 points of a share."""
    if question.units is SHARES:
        return abs(guess - question.answer) / 0.35
    return abs(math.log2(guess) - math.log2(question.answer)) if guess > 0 else math.inf


def spot_on(off: float) -> bool:
    """Whether a guess that is so far off needs no reading: up to 1.05x, or 2.5 points."""
    return off < 0.071


def remark(guess: float, question: Question) -> str:
    """How far off a guess is, as a sentence, and what is wrong with it where that is known."""
    answer, off = question.answer, miss(guess, question)
    if question.units is SHARES:
        size = f"{off * 35:.1f} points" if off < 1e6 else "more than a million points"
    else:
        size = f"{2**off:,.2f}x" if off < 20 else "more than a million times"
    if spot_on(off):
        return f"Spot on ({size})."
    known = (why for x, why in question.why.items() if math.isclose(guess, x, rel_tol=0.02))
    return f"You are {size} too {'high' if guess > answer else 'low'}. {next(known, '')}".rstrip()


def ask(text: str, first: str, read: Callable[[str], Any], again: bool = True) -> tuple[str, Any]:
    """Print a question; return the line that is typed, and what `read` makes of it.

    A line that cannot be read is asked for once more. The end of the input is an EOFError.
    """
    print(wrapped(text, first))
    print("     your guess: ", end="", flush=True)
    try:
        typed = sys.stdin.readline() if sys.stdin is not None else ""
    except (OSError, ValueError):  # a terminal that has gone, or input in no known encoding
        typed = ""
    if not typed:
        raise EOFError
    typed = " ".join(typed.split())[:200] + "\n"  # no guess is longer, and reading it would be
    if not sys.stdin.isatty():
        print(ascii_line(typed))
    passes = not typed.strip() or re.search(r"\?|idea|know|sure", typed)
    if again and read(typed) is None and not passes:
        return ask("I cannot read that. Once more, or nothing to skip it:", "     ", read, False)
    return typed, read(typed)


def no_or_yes(typed: str) -> bool | None:
    """False for no, True for yes, None for neither, or for "no idea" and "not sure"."""
    said = set(re.findall(r"[a-z]+", typed.lower()))
    yes, no = said & {"y", "yes"}, said & {"n", "no"}
    return None if said & {"idea", "sure"} or bool(yes) == bool(no) else bool(yes)


def predict(s: Parts) -> int:
    """Ask for the six predictions, one at a time, and say how far off each is. Returns 0.

    It ends early, with the same summary, when the input ends or Ctrl-C is pressed (130).
    """
    print("  Six predictions, before you read. Type a guess, or nothing to skip one.\n")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte is no reason to stop
    misses: list[tuple[float, int, int]] = []  # (miss, question, block)
    learned: list[str] = []
    status = 0
    try:
        for i, question in enumerate(questions(s), 1):
            typed, guess = ask(question.text, f"  {i}. ", partial(guess_of, question=question))
            if guess is not None:
                misses.append((miss(guess, question), i, question.block))
                verdict = remark(guess, question)
            else:
                verdict = "I cannot read that as a guess." if typed.strip() else "No guess."
            print(wrapped(f"It is {question.printed}. {verdict}", "     "), end="\n\n")
            if guess is None or not spot_on(misses[-1][0]):
                learned.append(question.learned)
        # The second half of the last question, which may be answered along with the first.
        said = no_or_yes(typed) if guess is not None else None
        if said is None:
            _, said = ask(DEPENDS, "     ", no_or_yes)
        bars = [s["break_even"](attention=counted, prefix=131_072) for counted in (False, True)]
        verdict = {
            None: "", False: " You said so.",
            True: " You said yes; but both times grow with the length, so it cancels.",
        }[said]  # fmt: skip
        print(
            wrapped(
                f"""No: at 2 FLOP per parameter and token it is {bars[0]:.2f} GB/s at 131,072 tokens
                too.{verdict} (With attention counted it does; there it is {bars[1]:.2f} GB/s.)""",
                "     ",
            )
        )
    except EOFError:
        print("\n\n     (End of input.)")
    except KeyboardInterrupt:
        print("\n\n     (Stopped.)")
        status = 130
    print()
    if not misses:
        print("  No guess to judge. Run this without --predict and start at block 1.")
    elif spot_on(max(misses)[0]):
        print("  Every guess is spot on.")
    else:
        _, i, explained = max(misses, key=lambda missed: missed[0])
        print(f"  Your worst miss is question {i}: read --block {explained} first.")
    if learned:
        print(wrapped(f"Learned: {'; '.join(learned)}."))
    return status


# -------------------------------------------------------------------------------------- arguments


MANY = 2 * 10**18  # more than anybody counts here: 1e9 GiB have fewer bytes
TINY, HUGE = 1e-30, 1e30  # and less and more than anybody measures


def shown(value: Any) -> str:
    """What an error message says of a wrong value: its repr, if it has one, and not all of it."""
    try:
        text = repr(value)
    except Exception:
        text = f"<a {type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def converted(name: str, value: Any, kind: str, convert: Callable[[Any], Any], *bounds: Any) -> Any:
    """`value`, converted and in bounds, or an error that names the parameter and the value."""
    least, most = bounds
    try:
        if isinstance(value, (bool, str, bytes, bytearray)):
            raise TypeError
        result = convert(value)
    except OverflowError:
        result = math.inf
    except Exception:
        raise TypeError(f"{name} must be a {kind}, not {shown(value)}") from None
    if not least <= result <= most:
        raise ValueError(f"{name} must be from {least:,} to {most:,}, not {shown(value)}")
    return result


def as_int(value: Any) -> int:
    """What stands for a whole number, as a plain int and nothing derived from it."""
    return int(operator.index(value))


def whole(name: str, value: Any, least: int = 0, most: int = MANY) -> int:
    """`value` as an int in [least, most]; TypeError or ValueError if it is none."""
    integer: int = converted(name, value, "whole number", as_int, least, most)
    return integer


def number(name: str, value: Any, least: float = TINY, most: float = HUGE) -> float:
    """`value` as a float in [least, most]; TypeError or ValueError if it is none."""
    real: float = converted(name, value, "number", float, least, most)
    return real


def refuse(sequence: Any) -> NoReturn:
    """Say why `sequence` is none of the pool that is asked to change it."""
    if not isinstance(sequence, Sequence):
        raise TypeError(f"sequence must come from this pool, not {shown(sequence)}")
    if sequence.pool is None:
        raise ValueError("sequence was released before")
    raise ValueError(f"sequence belongs to another pool: {shown(sequence)}")


def truth(name: str, value: Any) -> bool:
    """`value` if it is True or False, otherwise TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")
    return value


def share_below_one(name: str, value: Any) -> float:
    """`value` as a share from 0 to less than 1, as the engine takes a watermark."""
    share = number(name, value, least=0, most=1)
    if share == 1:
        raise ValueError(f"{name} must be from 0 to less than 1, not {shown(value)}")
    return share


def width(name: str, value: Any) -> float:
    """Bytes of one value: an int where they are whole, so that products stay exact."""
    size = number(name, value, least=0.01, most=1000)
    return int(size) if size.is_integer() else size


def optional(name: str, value: Any, rule: Callable[[str, Any], Any]) -> Any:
    """None, or what the rule allows."""
    return None if value is None else rule(name, value)


def pairs(name: str, requests: Any) -> Iterator[tuple[int, int]]:
    """The requests, each checked when its turn comes: any iterable of pairs is a workload."""
    try:
        return map(pair, count(), requests)
    except TypeError:
        message = f"{name} must be (prompt, output) pairs, not {shown(requests)}"
        raise TypeError(message) from None


def pair(i: int, request: Any) -> tuple[int, int]:
    """Request number `i`, if it is a pair of whole numbers of tokens."""
    try:
        if isinstance(request, (str, bytes, bytearray, set, frozenset, dict)):
            raise TypeError
        prompt, output = request
    except (TypeError, ValueError):
        message = f"requests[{i}] must be a (prompt, output) pair, not {shown(request)}"
        raise TypeError(message) from None
    return whole(f"requests[{i}] prompt", prompt), whole(f"requests[{i}] output", output)


def servable(
    requests: Iterable[tuple[int, int]], pages: int, page_tokens: int
) -> Iterator[tuple[int, int, int]]:
    """The requests as (prompt, output, 0 generated), if each has an output and fits the pool."""
    for i, (prompt, output) in enumerate(requests):
        whole(f"requests[{i}] output", output, least=1)
        if prompt + output > pages * page_tokens:
            raise ValueError(
                f"requests[{i}] of {prompt + output:,} tokens never fits"
                f" {pages:,} pages of {page_tokens:,}"
            )
        yield prompt, output, 0


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """`value` if it is a dict or the like, otherwise TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, not {shown(value)}")
    return value


def function(name: str, value: Any) -> Callable[..., Any]:
    """`value` if it can be called, otherwise TypeError."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, not {shown(value)}")
    return cast(Callable[..., Any], value)


some = partial(whole, least=1)
anything = partial(number, least=0)

# What a parameter may be, by its name; some mean something else in one mechanism.
ALLOWED: dict[str, Callable[[str, Any], Any]] = {
    "layers": some, "kv_heads": some, "q_heads": some, "head_dim": some, "dtype_bytes": width,
    "kv_per_token": some, "reserve": some, "page_tokens": some, "pages": some, "tp": some,
    "tokens": whole, "prefix": whole, "requests": pairs, "config": mapping,
    "n": partial(whole, most=10**8), "seed": partial(whole, least=-MANY),
    "gib": anything, "private": anything, "budget_gib": partial(number, most=1e9),
    "gb_per_s": number, "n_params": number, "flops_per_gpu": number, "mfu": partial(number, most=1),
    "mbu": partial(number, most=1), "active_params": partial(optional, rule=number), "weight_bytes": width,
    "attention": truth, "copy_on_write": truth,
    "occupancy": partial(number, least=0, most=1), "watermark": share_below_one,
    "max_running": partial(optional, rule=some), "step_seconds": function,
    "max_batched_tokens": partial(optional, rule=some),
    "fetch_seconds kv_per_token": number, "break_even kv_per_token": number,
    "step_seconds kv_per_token": number, "step_seconds tokens": anything,
    "step_seconds held_tokens": anything, "break_even prefix": some,
    "shortest_fetch gb_per_s": partial(number, least=1e-3),
    "kv_bytes dtype_bytes": partial(optional, rule=width),
    "size dtype_bytes": partial(optional, rule=width), "card": card_of,
    "utilization": partial(number, most=1),
    "rest_gib": partial(optional, rule=partial(number, least=0, most=1e6)),
}  # fmt: skip


def guarded(bare: Callable[..., Any]) -> Callable[..., Any]:
    """The mechanism, but wrong arguments raise before its body runs, and name the parameter."""
    names = bare.__code__.co_varnames[: bare.__code__.co_argcount]
    rules = {name: ALLOWED.get(f"{bare.__name__} {name}") or ALLOWED[name] for name in names}

    @wraps(bare)
    def mechanism(*args: Any, **kwargs: Any) -> Any:
        by_position = [rules[name](name, value) for name, value in zip(names, args)]
        by_name = {name: rules.get(name, as_is)(name, value) for name, value in kwargs.items()}
        return bare(*by_position, *args[len(names) :], **by_name)

    return mechanism


def as_is(name: str, value: Any) -> Any:
    """What is given for a parameter that does not exist: the call itself will say so."""
    return value


for bare in (
    seq_lengths, kv_bytes_per_token, kv_gib, budget_share, kv_bytes, budget_tokens, contiguous,
    paged, prefixed_lengths, shared_prefix, expected_saving, fetch_seconds, recompute_seconds,
    break_even, shortest_fetch, preempted_tokens, step_seconds, resident_tokens, serve, ridge_tokens, step_fills,
    size, traffic,
):  # fmt: skip
    globals()[bare.__name__] = guarded(bare)


# ---------------------------------------------------------------------------------- command line

USAGE = """\
usage: m02_kv_cache [one of the following]

  (nothing)     every block, then the assembly
  --block N     block N alone, from 1 to 6; the blocks it needs run silently
  --quiet       the assembly only
  --verify      check the 14 claims; exit 1 if one fails
  --model FILE  block 1's table for a model's config.json (-: standard input);
                with --budget GIB also what fits into so much memory
  --model FILE --params N --gpus N --card NAME --prompt N --output N
                size a deployment, as a recipe. Instead of --prompt and --output:
                --trace FILE, a CSV with ContextTokens and GeneratedTokens.
                NAME: L4, A100-80G, H100-SXM, ... (a wrong one lists them), or
                GIB,GB/S,TFLOP/S of one GPU (dense, 16 bits).
                Also: --active N (parameters of a mixture of experts that a token
                uses), --weights BYTES and --kv BYTES (of a parameter, of a value),
                --utilization SHARE of the memory, --rest GIB of each GPU
  --trace FILE  what pages are worth to these lengths, on the lesson's server
  --predict     guess six numbers first, and see how far off you are
  --help        this text
"""
MODES = (
    "use nothing, --block N (N from 1 to 6), --quiet, --verify, --model FILE [--budget GIB],"
    " --trace FILE, --predict or --help"
)


class UsageError(Exception):
    """The command line asks for what cannot be done; the message says what."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse, but a wrong argument is an exception rather than an exit."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message."""
        raise UsageError(f"{message}; {MODES}")


def block_number(text: str) -> int:
    """The number of a block, as it is typed."""
    if text not in map(str, BLOCKS):
        raise argparse.ArgumentTypeError(f"no block {text!a}")
    return int(text)


def gib(text: str) -> float:
    """A number of GiB, as it is typed."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 1e-6 <= size <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!a} is not a number of GiB from 1e-6 to 1e9")
    return size


def typed(name: str, rule: Callable[[str, Any], Any]) -> Callable[[str], Any]:
    """How to read the number that is typed for an option, which `rule` allows or not."""

    def read(text: str) -> Any:
        try:
            value = float(text)
            return rule(name, int(value) if value.is_integer() else value)
        except (TypeError, ValueError) as error:
            reason = error if str(error).startswith(name) else f"{text!a} is not a number"
            raise argparse.ArgumentTypeError(str(reason)) from None

    return read


def card(text: str) -> Card:
    """A card, as it is typed: its name, or three numbers with commas between them."""
    try:
        return card_of("card", tuple(map(float, text.split(","))) if "," in text else text)
    except (TypeError, ValueError) as error:
        reason = error if str(error).startswith("card") else f"{text!a} is not GIB,GB/S,TFLOP/S"
        raise argparse.ArgumentTypeError(str(reason)) from None


SIZING: dict[str, Callable[[str], Any]] = {  # the options that size a deployment
    "params": typed("params", partial(number, least=1e6)),
    "active": typed("active", partial(number, least=1e6)),
    "gpus": typed("gpus", partial(whole, least=1, most=10**6)), "card": card,
    "weights": typed("weights", width), "kv": typed("kv", width),
    "utilization": typed("utilization", partial(number, most=1)),
    "rest": typed("rest", partial(number, least=0, most=1e6)),
    "prompt": typed("prompt", partial(whole, most=10**9)),
    "output": typed("output", partial(whole, least=1, most=10**9)), "trace": str,
}  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The mode that the command line asks for, or UsageError."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--block", type=block_number, action="append")
    modes.add_argument("--quiet", action="store_true")
    modes.add_argument("--verify", action="store_true")
    modes.add_argument("--model", action="append")
    modes.add_argument("--predict", action="store_true")
    modes.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--budget", type=gib, action="append")
    for name, kind in SIZING.items():
        parser.add_argument(f"--{name}", type=kind, action="append")
    mode = parser.parse_args(argv)
    for name, values in vars(mode).items():
        if isinstance(values, list):
            if len(values) > 1:
                parser.error(f"argument --{name}: given more than once")
            setattr(mode, name, values[0])
    sizing = [name for name in SIZING if getattr(mode, name) is not None]
    mode.sizes = bool(sizing) and mode.model is not None
    alone = not (mode.block or mode.quiet or mode.verify or mode.predict or mode.help)
    for name in [*(["budget"] if mode.budget else []), *sizing]:
        if mode.model is None and not (sizing == ["trace"] == [name] and alone):
            parser.error(f"argument --{name}: only with --model FILE")
    if mode.sizes and mode.budget:
        parser.error(f"argument --budget: not with --{sizing[0]}, which sizes the budget")
    if mode.trace is not None and (mode.prompt, mode.output) != (None, None):
        parser.error("argument --trace: not with --prompt or --output")
    return mode


def run(mode: argparse.Namespace) -> int:
    """Do what the command line asks for; returns the exit status."""
    if mode.help:
        print(USAGE, end="")
    elif mode.verify:
        return verify()
    elif mode.predict:
        return predict(parts())
    elif mode.quiet:
        assembly(parts())
    elif mode.model is not None:
        config = config_at(mode.model)
        try:
            if mode.sizes:
                deploy(mode, config, parts())
            else:
                model_table(mode.model, config, mode.budget, parts())
        except (TypeError, ValueError) as error:
            raise UsageError(f"--model {mode.model}: {error}") from None
    elif mode.trace is not None:
        requests = requests_at(mode.trace)
        try:
            row = traffic(requests)
        except ValueError as error:
            raise UsageError(f"--trace {mode.trace}: {error}") from None
        print(f"  {ascii_line(mode.trace)} on 4 x H100, a 70B model, 35,328 pages of 16 tokens\n")
        traffic_table(row)
    elif mode.block:
        first = prerequisites(mode.block)
        s = collect(first)
        if first:
            plural = "s" if len(first) > 1 else ""
            print(f"(Ran silently first: block{plural} {', '.join(map(str, first))}.)")
        collect([mode.block], show=True, s=s)
    else:
        assembly(collect(BLOCKS, show=True))
    return 0


def flush() -> None:
    """Write out what was printed, unless there was nothing to print on from the start."""
    if sys.stdout is not None:
        sys.stdout.flush()


def write_off(stream: Any) -> None:
    """Close a stream that cannot be written, or Python tries once more at exit, and complains."""
    with contextlib.suppress(OSError, KeyboardInterrupt):
        if stream is not None:
            stream.close()


def complain(message: object) -> None:
    """One line on standard error, if there is one."""
    if sys.stderr is not None:
        try:
            print(f"m02_kv_cache: {ascii_line(str(message))}", file=sys.stderr, flush=True)
        except OSError:
            write_off(sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (the process's own if None) and return the exit status."""
    status = 0
    try:
        try:
            status = run(parse(argv))
            flush()
        except UsageError as error:
            complain(error)
            status = 2
        except KeyboardInterrupt:
            status = 130
            flush()
    except KeyboardInterrupt:  # once more, while the last lines were written
        write_off(sys.stdout)
        return 130
    except OSError as error:
        write_off(sys.stdout)
        if isinstance(error, BrokenPipeError):  # whoever read has seen enough
            return status or 141
        complain(f"cannot write the output: {error.strerror}")
        return status or 1
    return status


if __name__ == "__main__":
    exit_status = main()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python ends: no traceback
    sys.exit(exit_status)
