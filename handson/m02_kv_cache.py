#!/usr/bin/env python3
"""m02: KV cache memory and paged attention.

To generate a token, a transformer attends to the keys and values of all tokens before it. A server
keeps them instead of computing them again: the KV cache. In a step, one pass through the model for
all sequences that run, the weights are read once for all. KV is not shared like that: each sequence
has its own, and it grows with every token. So, once the weights are loaded, KV memory bounds how
many sequences can run at once.

    1  KV of a token    2 x layers x KV heads x head_dim x bytes a value
    2  slots            KV budget // (tokens reserved x KV of a token)
    3  pages            ceil(tokens / tokens a page)
    4  saved            (n - 1) x prefix / (n x (prefix + private)): n requests share a prefix,
                        and private is what each keeps to itself, on average
    5  break-even       KV of a token x FLOP/s / (2 x parameters)
    6  a step           max(weights / bandwidth, tokens x 2 x parameters / FLOP/s)
                        + tokens held x KV of a token / bandwidth

Read it from top to bottom (a page is what vLLM calls a block, its size the block_size):

    constants and workload   the model, the card, the tiers, and 4,000 seeded requests
    1 What a token costs     kv_bytes_per_token
    2 Contiguous allocation  contiguous: how many slots
    3 Paged allocation       PagePool: allocate, append, fork, release; paged
    4 Sharing a prefix       copy_on_write; shared_prefix; expected_saving
    5 Fetch or recompute     break_even
    6 Preemption             Scheduler.step: those that run, those that wait, generate; serve
    assembly and parts       the blocks wired together; every mechanism by name, for a REPL

There the lesson ends. What follows serves it, and holds it to its word:

    printing                 a lesson's text, its tables
    the quick scheduler      the decisions of Scheduler, fast enough for millions of tokens
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
import gc
import io
import json
import math
import operator
import random
import re
import signal
import sys
import textwrap
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial, wraps
from itertools import count, cycle, islice, product
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

if sys.version_info < (3, 9):  # noqa: UP036 (whoever has an older one should be told so)
    sys.exit(f"m02_kv_cache: needs Python 3.9 or newer, not {sys.version.split()[0]}")

__all__ = [
    "CARDS", "DENSE_FLOPS_PER_GPU", "DTYPE", "GIB", "HEAD_DIM", "KV_BUDGET_GIB", "KV_HEADS",
    "KV_PER_TOKEN", "LAYERS", "N_PARAMS", "Q_HEADS", "TIERS", "Allocation", "OutOfPages",
    "PagePool", "Scheduler", "Sequence", "Served", "Step", "assembly", "break_even", "budget_share",
    "budget_tokens", "contiguous", "expected_saving", "fetch_seconds", "kv_bytes",
    "kv_bytes_per_token", "kv_gib", "paged", "parts", "preempted_tokens", "prefixed_lengths",
    "recompute_seconds", "resident_tokens", "ridge_tokens", "seq_lengths", "serve", "shared_prefix",
    "shortest_fetch", "size", "step_fills", "step_seconds", "traffic", "verify",
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


class Spread(NamedTuple):
    """Where a figure lies that a seed decides, over many seeds: least, median, most."""

    least: float
    median: float
    most: float


# A block is one step of the lesson. Its function `bN(s, show)` receives the mechanisms of the
# blocks before it in `s`, prints its lesson if `show`, and returns the mechanisms it is about.

Parts = dict[str, Any]  # mechanisms by name


class Block(NamedTuple):
    """A block's number and heading, the blocks it builds on, and its function."""

    number: int
    title: str
    teaches: str
    needs: tuple[int, ...]
    run: Callable[[Parts, bool], Parts]


BLOCKS: dict[int, Block] = {}


def block(
    number: int, title: str, teaches: str, needs: tuple[int, ...] = ()
) -> Callable[[Callable[[Parts, bool], Parts]], Callable[[Parts, bool], Parts]]:
    """Register a function as block `number` of the lesson."""

    def register(run: Callable[[Parts, bool], Parts]) -> Callable[[Parts, bool], Parts]:
        BLOCKS[number] = Block(number, title, teaches, needs, run)
        return run

    return register


# ---------------------------------------------------------------------- block 1: what a token costs


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype_bytes: float) -> int:
    """Bytes of KV cache that one token holds, over all layers.

    Every layer keeps one key and one value vector of `head_dim` values for each of its KV heads,
    hence the 2. Query heads keep nothing, so grouped-query attention, in which several share a KV
    head, saves memory (Ainslie et al. 2023, "GQA"). `dtype_bytes` may be a fraction (llama.cpp's
    q8_0: 1.0625).

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

# The budget's derivation. An H100 shows 79.65 GiB in nvidia-smi, and 79.11 to a program (vLLM's
# issue 27508), of which vLLM 0.33 uses 92% by default.
GPUS, GPU_GIB, RUNTIME_GIB, UTILIZATION = 4, 79.65, 79.11, 0.92
WEIGHTS_GIB = N_PARAMS * DTYPE / GIB
REST_GIB = GPUS * GPU_GIB - WEIGHTS_GIB - KV_BUDGET_GIB  # a remainder: assumed, not measured

LESSON_1 = """
  2 (K and V) x {LAYERS} layers x {KV_HEADS} kv-heads x {HEAD_DIM} head-dim x {DTYPE} B
  = {KV_PER_TOKEN:,} B/token = {token_kib:.0f} KiB per token

{contexts}

Every layer computes a key and a value vector of each token. With full attention every later token
attends to both, so a server keeps them for as long as the sequence runs.

Four H100s serve this model together: a replica. What is left of their memory for KV is the budget.
vLLM's default is stricter than the lesson's:

{budget}

"The rest" is activations (the values inside a forward pass), CUDA graphs (recorded launches) and
communication buffers. It is assumed: nobody measured it for this lesson.

Grouped-query attention (GQA) lets {group} query heads share one KV head. Without it a
token would cost {without_gqa_kib:,} KiB, {times}x as much. That is a what-if: Llama-2 70B has
{KV_HEADS} KV heads too. For another model, --model config.json prints these sizes.
"""


@block(1, "What a token costs", "the one number the whole design follows from")
def b1(s: Parts, show: bool) -> Parts:
    """Price a token, then contexts; derive the budget."""
    if show:
        token_kib = KV_PER_TOKEN / 1024
        contexts = table(
            "     context   KV per sequence   % of a replica",
            "{:>12,}{:>15.2f} GiB{:>17.1%}",
            ((n, kv_gib(n), budget_share(kv_gib(n))) for n in CONTEXTS),
        )
        default_gib = GPUS * RUNTIME_GIB * UTILIZATION - WEIGHTS_GIB - REST_GIB
        budget = table(
            "                                     the lesson   vLLM's default",
            "  {:<34}{:>13}{:>17}",
            [
                ("cards x GiB that each shows", f"{GPUS} x {GPU_GIB}", f"{GPUS} x {RUNTIME_GIB}"),
                ("x the share that is used", "1.00", f"{UTILIZATION:.2f}"),
                ("- weights, 70e9 x 2 bytes", f"{WEIGHTS_GIB:.1f}", f"{WEIGHTS_GIB:.1f}"),
                ("- the rest (assumed)", f"{REST_GIB:.1f}", f"{REST_GIB:.1f}"),
                ("= KV budget, GiB", f"{KV_BUDGET_GIB:.1f}", f"{default_gib:.1f}"),
            ],
        )
        without_gqa = kv_bytes_per_token(LAYERS, Q_HEADS, HEAD_DIM, DTYPE)
        times, without_gqa_kib = without_gqa // KV_PER_TOKEN, without_gqa // 1024
        group = Q_HEADS // KV_HEADS
        tell(LESSON_1, locals())
    return {
        "kv_bytes_per_token": kv_bytes_per_token,
        "kv_gib": kv_gib,
        "budget_share": budget_share,
        "kv_bytes": kv_bytes,
    }


# ------------------------------------------------------------------ block 2: contiguous allocation


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
    model serving with PagedAttention", section 3.1). A slot is the memory reserved for one request.
    A request that is longer than a slot is admitted all the same, and counted in `misfits`.

    >>> contiguous([(600, 200), (900, 400), (100, 100)], 1024, budget_gib=1, kv_per_token=2**19)
    <Allocation: batch 2, 2,048 tokens held for 2,100, -2.5% wasted, 1 too long>
    """
    slots = budget_tokens(budget_gib, kv_per_token) // reserve
    lengths = [prompt + output for prompt, output in islice(requests, slots)]
    misfits = sum(length > reserve for length in lengths)
    return Allocation(len(lengths), len(lengths) * reserve, sum(lengths), misfits)


class Allocation(NamedTuple):
    """How far an allocator got through a workload: `contiguous`, `paged`, `shared_prefix`."""

    batch: int  # sequences admitted
    held_tokens: int  # tokens of memory reserved or allocated for them
    logical_tokens: int  # prompt + output tokens of all of them, as if nothing were shared
    misfits: int = 0  # admitted sequences that are longer than what is reserved for each

    @property
    def waste(self) -> float:
        """Share of the held memory that the admitted tokens do not need (0.0 if none is held).

        Negative if they need more than is held: some are shared, or do not fit their slot.
        """
        return 1 - self.logical_tokens / self.held_tokens if self.held_tokens else 0.0

    @property
    def saved(self) -> float:
        """Share of the logical tokens that need no memory, being shared (block 4)."""
        return 1 - self.held_tokens / self.logical_tokens if self.logical_tokens else 0.0

    def __repr__(self) -> str:
        too_long = f", {self.misfits} too long" if self.misfits else ""
        return (
            f"<Allocation: batch {self.batch:,}, {self.held_tokens:,} tokens held for"
            f" {self.logical_tokens:,}, {self.waste:.1%} wasted{too_long}>"
        )


# Over seeds 0 to 199 of seq_lengths(4000): the waste, and how many are too long, by reservation.
WASTE_AT_2048, WASTE_AT_8192 = Spread(0.261, 0.349, 0.451), Spread(0.779, 0.839, 0.888)
TOO_LONG = {
    2048: Spread(27, 43.5, 59),
    4096: Spread(1, 5, 12),
    8192: Spread(0, 0, 3),
    32_768: Spread(0, 0, 0),
}

LESSON_2 = """
{sweep}

A slot is the memory reserved for one sequence, prompt and answer together. The allocator reserves
the longest length it allows, because nobody knows how long an answer will get.

(One draw of the workload decides the waste. Over seeds 0 to 199 it is {WASTE_AT_2048.least:.1%} to
{WASTE_AT_2048.most:.1%} at 2,048, and {WASTE_AT_8192.least:.1%} to {WASTE_AT_8192.most:.1%} at
8,192.)

Small slots look better than they are. The table admits a sequence whether or not it fits its slot:

{misfits}

A server with small slots would refuse those prompts or cut those answers off. Slots of 512 tokens
"waste" {small.waste:.0%}: their sequences need {overfull:.2f}x the memory that is there.

Three kinds of waste have names. Reserved memory waits for tokens that will come. Internal waste
will never hold a token. External waste is free, but in holes too small for anybody. The table
counts each sequence at its final length, so it shows internal waste.
"""


@block(2, "Contiguous allocation", "reserve max_tokens per sequence and watch it evaporate", (1,))
def b2(s: Parts, show: bool) -> Parts:
    """Sweep the reservation over the workload."""
    if show:
        requests, gib = seq_lengths(4000), s["kv_gib"]
        rows = {reserve: contiguous(requests, reserve) for reserve in (2048, 4096, 8192, 32_768)}
        sweep = table(
            "     reserve   batch    reserved   actually used   wasted",
            "{:>12,}{:>8}{:>9.1f} GiB{:>13.1f} GiB{:>9.1%}",
            (
                (reserve, row.batch, gib(row.held_tokens), gib(row.logical_tokens), row.waste)
                for reserve, row in rows.items()
            ),
        )
        misfits = table(
            "     reserve   too long for it   seeds 0-199",
            "{:>12,}{:>10} of {:<5}{:>6} to {}",
            (
                (reserve, row.misfits, row.batch, TOO_LONG[reserve].least, TOO_LONG[reserve].most)
                for reserve, row in rows.items()
            ),
        )
        small = contiguous(requests, 512)
        overfull = small.logical_tokens / small.held_tokens
        tell(LESSON_2, locals())
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

    Token i lives in page `table[i // page_tokens]`, at place `i % page_tokens`. Made by a PagePool,
    and only its pool may change it.
    """

    __slots__ = ("pool", "table", "tokens")

    def __init__(self, pool: PagePool, table: list[int], tokens: int) -> None:
        self.pool: PagePool | None = pool  # None once it is released
        self.table = table
        self.tokens = tokens

    def __repr__(self) -> str:
        if self.pool is None:
            return "<Sequence released>"
        return f"<Sequence of {self.tokens:,} tokens in pages {self.table}>"


class PagePool:
    """KV memory as pages of `page_tokens` tokens: a free list, reference counts, block tables.

    A sequence holds ceil(tokens / page_tokens) pages, anywhere in the pool: its block table says
    where. A page may stand in the tables of several sequences. It is free again when the last of
    them lets go of it (Kwon et al. 2023, sections 4.2 to 4.4).

    `pages` and `page_tokens` are its size, `free` and `held` count its pages. Each call does all of
    its work or, when it refuses (OutOfPages, ValueError, TypeError), nothing.

    >>> pool = PagePool(pages=8, page_tokens=16)
    >>> a = pool.allocate(20)
    >>> pool.append(a, 13)
    >>> a, pool
    (<Sequence of 33 tokens in pages [0, 1, 2]>, <PagePool: 3 of 8 pages held, 16 tokens each>)
    """

    def __init__(self, pages: int, page_tokens: int = 16) -> None:
        self.pages = pages
        self.page_tokens = page_tokens
        self.free_list = list(reversed(range(pages)))  # a stack: pages are taken off its end
        self.sharers = [0] * pages  # by page: in how many tables it stands besides the first

    def allocate(self, tokens: int) -> Sequence:
        """A new sequence of `tokens` tokens, on pages of its own; or OutOfPages."""
        return Sequence(self, self.take(pages_for(tokens, self.page_tokens)), tokens)

    def append(self, sequence: Sequence, n: int = 1) -> None:
        """Write `n` more tokens at the end of `sequence`; or OutOfPages.

        A page is taken only when the last one is full. If the last one is shared and has room, it
        is copied first (block 4).
        """
        table = sequence.table
        room = len(table) * self.page_tokens - sequence.tokens  # in the last page
        if n > 0 and room > 0 and self.sharers[table[-1]] > 0:
            *taken, own_page = self.take(pages_for(n - room, self.page_tokens) + 1)
            copy_on_write(self, sequence, own_page)
            table += taken
        elif n > room:
            table += self.take(pages_for(n - room, self.page_tokens))
        sequence.tokens += n

    def fork(self, sequence: Sequence, tokens: int) -> Sequence:
        """A new sequence that shares the first `tokens` tokens of `sequence`. Copies nothing."""
        table, sharers = sequence.table[: pages_for(tokens, self.page_tokens)], self.sharers
        for page in table:
            sharers[page] += 1
        return Sequence(self, table, tokens)

    def release(self, sequence: Sequence) -> None:
        """End `sequence`: the pages that no other table holds are free again."""
        table, shared = sequence.table, 0
        for page in table:
            if not self.sharers[page]:
                break  # forks share the first pages of a table: from here on none is shared
            self.sharers[page] -= 1
            shared += 1
        own = table[shared:]
        own.reverse()  # the first page is freed last, and taken first
        self.free_list += own
        sequence.pool, sequence.table, sequence.tokens = None, [], 0

    def take(self, n: int) -> list[int]:
        """n pages off the end of the free list; or OutOfPages."""
        kept = len(self.free_list) - n
        if kept < 0:
            raise OutOfPages(f"{n:,} pages needed, {self.free:,} of {self.pages:,} free")
        taken = self.free_list[kept:]
        del self.free_list[kept:]
        taken.reverse()
        return taken

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self.free_list)

    @property
    def held(self) -> int:
        """How many pages stand in at least one block table; a shared page counts once."""
        return self.pages - self.free

    def references(self, page: int) -> int:
        """In how many block tables `page` stands (0: it is free)."""
        return 0 if page in self.free_list else 1 + self.sharers[page]

    def __repr__(self) -> str:
        return (
            f"<PagePool: {self.held:,} of {self.pages:,} pages held,"
            f" {self.page_tokens:,} tokens each>"
        )


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
    <Allocation: batch 2, 2,000 tokens held for 1,995, 0.2% wasted>
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


BATCH_IN_PAGES = Spread(378, 422, 470)  # seeds 0 to 199 of seq_lengths(4000), pages of 16 tokens
PAGES_OVER_8192 = Spread(5.5, 6.1, 6.8)  # over the batch with 8,192 reserved, same seeds

LESSON_3 = """
A pool of 8 pages, 16 tokens each, and a sequence a that grows:

{story}
  Token 37 of a: 37 // 16 = {index}, so page table[{index}] = {page}; 37 % 16 = {place}, its place.

The workload on the whole budget:

{sweep}

Any free page is as good as any other, as in virtual memory. So nothing is external waste. Internal
waste is the empty end of each last page: {empty:.1f} tokens of 16 here, on average, and never a
whole page.

Pages of 16 hold {usual.batch} sequences where reserving 8,192 tokens holds {baseline.batch}.
(Over seeds 0 to 199: {BATCH_IN_PAGES.least} to {BATCH_IN_PAGES.most}, or {PAGES_OVER_8192.least}x
to {PAGES_OVER_8192.most}x as many.)

Why 16? Pages of one token admit only {finer} more. In 2023 a kernel (a program on the GPU) read
smaller pages too slowly (Kwon et al., section 7.2). Today the attention kernel decides: FlashMLA
wants 64 tokens, CUTLASS-MLA 128. SGLang measured pages of 1 within 3% of 16 (pull request 8593),
and 14% slower than 64 with another kernel (4832).

This table knows each final length, as no server does. An oracle could pack {fine.batch} without
pages. What pages really add is that nobody need know: a sequence takes a page when it needs one.
Block 6 runs such a server.
"""


@block(3, "Paged allocation", "the same idea as virtual memory, and the same payoff", (2,))
def b3(s: Parts, show: bool) -> Parts:
    """A sequence growing on a small pool, then the page sizes on the workload."""
    if show:
        pool, lines = PagePool(pages=8, page_tokens=16), []
        a = pool.allocate(20)
        lines.append(traced("a = allocate(20)", a, pool, "two pages"))
        b = pool.allocate(16)
        lines.append(traced("b = allocate(16)", b, pool, "the next page, for b"))
        pool.append(a, 12)
        lines.append(traced("append(a, 12)", a, pool, "the last page had room"))
        pool.append(a, 6)
        lines.append(traced("append(a, 6)", a, pool, "one more page"))
        pool.release(b)
        lines.append(traced("release(b)", b, pool, "its page is free"))
        story = "\n".join(lines)
        index, place = divmod(37, pool.page_tokens)
        page = a.table[index]
        requests, gib = s["seq_lengths"](4000), s["kv_gib"]
        baseline = s["contiguous"](requests, 8192)
        rows = {size: paged(requests, size) for size in (1, 8, 16, 32, 128)}
        sweep = table(
            "    page size   batch  pages held  internal waste  vs contiguous",
            "{:>11} t{:>8}{:>9.1f} GiB{:>16.2%}{:>14.1f}x",
            (
                (size, row.batch, gib(row.held_tokens), row.waste, row.batch / baseline.batch)
                for size, row in rows.items()
            ),
        )
        fine, usual = rows[1], rows[16]
        empty = (usual.held_tokens - usual.logical_tokens) / usual.batch
        finer = fine.batch - usual.batch
        tell(LESSON_3, locals())
    return {"PagePool": PagePool, "OutOfPages": OutOfPages, "paged": paged}


def traced(call: str, sequence: Sequence, pool: PagePool, remark: str) -> str:
    """A line that says what a call on a small pool left behind."""
    held = f"{pool.held} of {pool.pages} held"
    return f"    {call:<18} table {sequence.table!s:<13} {held}   {remark}"


# ----------------------------------------------------------------------- block 4: sharing a prefix


def copy_on_write(pool: PagePool, sequence: Sequence, own_page: int) -> None:
    """Leave the last page of `sequence` to the others that share it; `own_page` takes its place.

    `PagePool.append` calls this before it writes to a shared page. Only tables and counts change
    here; an engine also copies the K and V. vLLM has no such copy for plain attention: it shares
    full pages only, and nobody writes to a full page.

    >>> pool = PagePool(pages=8, page_tokens=16)
    >>> parent = pool.allocate(40)
    >>> child = pool.fork(parent, 40)
    >>> pool.append(child, 1)
    >>> parent.table, child.table
    ([0, 1, 2], [0, 1, 3])
    """
    pool.sharers[sequence.table[-1]] -= 1  # leave the shared page to the others
    sequence.table[-1] = own_page


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

    A request's own tokens start on a fresh page. Shared tokens after the last full page are counted
    once. That flatters: an engine that shares nothing but full pages computes and stores them again
    for each request. With `copy_on_write` the sequence copies that page and writes on, as the paper
    does (section 4.4).

    >>> requests = [(40, 8), (30, 0), (40, 8)]
    >>> shared_prefix(requests, 40, page_tokens=16, budget_gib=1, kv_per_token=2**23).held_tokens
    80
    """
    pages = budget_tokens(budget_gib, kv_per_token) // page_tokens
    if not pages or pages_for(prefix, page_tokens) > pages:
        return Allocation(0, 0, 0)
    pool, lengths = PagePool(pages, page_tokens), []
    stored = pool.allocate(prefix)
    for prompt, output in requests:
        shared = min(prefix, prompt)
        private = prompt + output - shared
        # Without copy-on-write only full pages are forked: what is behind them is counted once.
        forked = shared if copy_on_write else shared - shared % page_tokens
        try:
            pool.append(pool.fork(stored, forked), private)
        except OutOfPages:
            break
        lengths.append(prompt + output)
    return Allocation(len(lengths), pool.held * page_tokens, sum(lengths))


# What a request keeps to itself, on average: a suffix and an output. The mean of a log-normal is
# exp(mu + sigma^2 / 2), and rounding down takes half a token from each.
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


# Over seeds 0 to 199 of prefixed_lengths(64, 4096).
SAVED_BEHIND_4096, EXTRA_BATCH = Spread(0.835, 0.866, 0.890), Spread(6.0, 7.5, 9.1)

LESSON_4 = """
A pool of 8 pages, 16 tokens each; b shares 40 tokens of a:

{story}

Forking copies nothing. Only a write to a shared page copies it: copy-on-write.

64 requests with a common prefix, counted token by token:

{sweep}

"Extra batch" is naive KV divided by shared KV: how many such groups fit where one would fit
without sharing. In whole pages of 16 the prefix of 4,096 takes {pages_gib:.2f} GiB, which saves
{pages.saved:.1%}.

Every row is one draw, seed 9, and that is the luckiest of 2,000. With a prefix of 4,096 a saving of
{expected:.1%} is to be expected, which is an extra batch of {expected_batch:.1f}x. (Seeds 0 to 199:
{SAVED_BEHIND_4096.least:.1%} to {SAVED_BEHIND_4096.most:.1%}, and {EXTRA_BATCH.least:.1f}x to
{EXTRA_BATCH.most:.1f}x.)

From some dozens of requests on, more of them save barely more: with a prefix of 512 tokens, 64 save
{of_64:.1%} and 256 save {of_256:.1%}. The ceiling is prefix / (prefix +
private), where private is what a request keeps to itself: {MEAN_PRIVATE:.1f} tokens here.

Sharing wins time too: 63 of 64 prefills of the prefix are not done. Attention still reads the
prefix for every sequence in every step, unless its kernel knows that it is shared.

To find a shared prefix, vLLM hashes each full page together with all before it. SGLang and
TensorRT-LLM search a radix tree (sequences with a common start share a path). A preempted sequence
finds its own pages in this way too, if nobody has taken them: block 6 counts that.
"""


@block(4, "Sharing a prefix", "copy-on-write, and where the real win is", (3,))
def b4(s: Parts, show: bool) -> Parts:
    """A fork and its first write on a small pool, then 64 requests with one prefix."""
    if show:
        pool, lines = s["PagePool"](pages=8, page_tokens=16), []
        a = pool.allocate(40)
        lines.append(traced("a = allocate(40)", a, pool, "the prefix, once"))
        b = pool.fork(a, 40)
        lines.append(traced("b = fork(a, 40)", b, pool, "nothing copied yet"))
        pool.append(b, 1)
        lines.append(traced("append(b, 1)", b, pool, "a shared page: copied"))
        pool.append(a, 1)
        lines.append(traced("append(a, 1)", a, pool, "its own page: written"))
        story, gib = "\n".join(lines), s["kv_gib"]
        rows = {
            prefix: shared_prefix(
                prefixed_lengths(64, prefix), prefix, page_tokens=1, budget_gib=20
            )
            for prefix in (0, 256, 1024, 4096, 16_384)
        }
        sweep = table(
            "    shared prefix    naive KV   shared KV    saved  extra batch",
            "{:>15,} t{:>9.2f} GiB{:>9.2f} GiB{:>9.1%}{:>12.2f}x",
            (
                (prefix, gib(naive), gib(shared), row.saved, naive / shared)
                for prefix, row in rows.items()
                for naive, shared in [(row.logical_tokens, row.held_tokens)]
            ),
        )
        pages = shared_prefix(prefixed_lengths(64, 4096), 4096)
        pages_gib = gib(pages.held_tokens)
        expected, of_64, of_256 = (
            expected_saving(n, prefix) for n, prefix in ((64, 4096), (64, 512), (256, 512))
        )
        expected_batch = 1 / (1 - expected)
        tell(LESSON_4, locals())
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
    models", section 2.1, who leave embeddings out). Of a mixture of experts, `n_params` counts what
    a token passes through. With `attention`, each query head also multiplies with the key of every
    earlier token, and adds up its value: 2 FLOP each for every one of head_dim, hence the 4. There
    are as many earlier tokens as half the prefix, on average.
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
    layers, q_heads and head_dim. `mfu` (model FLOPs utilization) is the share of the peak FLOP/s
    that prefill reaches.
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
    `attention`: then `prefix` is the length. The other parameters are those of `recompute_seconds`.

    >>> round(break_even(kv_per_token=327_680, n_params=70e9, flops_per_gpu=989.5e12, tp=4), 2)
    9.26
    >>> round(break_even(attention=True, prefix=131_072), 2)
    4.16
    """
    flop = flop_per_token(prefix, n_params, attention, layers, q_heads, head_dim)
    seconds = flop / (tp * flops_per_gpu * mfu)  # to compute a token
    return kv_per_token / seconds / 1e9


def shortest_fetch(gb_per_s: float) -> int:
    """Shortest prefix, in tokens and at TP4, that is fetched at `gb_per_s` faster than recomputed.

    With attention counted the break-even falls as the prefix grows, so bisection finds it.

    >>> shortest_fetch(7)
    34546
    """
    too_short, long_enough = 0, MANY
    while long_enough - too_short > 1:
        middle = (too_short + long_enough) // 2
        if break_even(attention=True, prefix=middle) < gb_per_s:
            long_enough = middle
        else:
            too_short = middle
    return long_enough


LESSON_5 = """
TPn is a replica of n GPUs, tensor-parallel: each holds a part of every layer. A model of N
parameters prefills at 2N FLOP a token. Fetching a token's KV takes as long as computing it at
break-even = KV bytes a token x FLOP/s / 2N.

{by_tp}

{tiers}

The drive's verdict needs more than {mfu_of_drive:.1%} MFU (the share of the peak FLOP/s that
prefill reaches). Prefill hardly gets there: GPUs wait for each other's partial sums, and clocks
fall under load. At 50% MFU the break-even is {at_half:.2f} GB/s, and the drive wins.

7 GB/s is a PCIe 4 drive. A PCIe 5 drive reads 13 to 14.7 GB/s and wins here at any MFU, as two
striped PCIe 4 drives do. One stream from object storage is taken to be 1 GB/s. FP8 KV halves the
break-even to {fp8:.2f} GB/s.

Each tier is one link that feeds all four GPUs. If each GPU loads its part of the KV over its own
link, links and FLOP/s grow together: the break-even of a link is {by_link:.2f} GB/s at any TP, up
to as many GPUs as KV heads. (TP1 shows the pattern only: one card does not hold these weights.)

The prefix length cancels, at 2N FLOP a token. Fetch time at 1 GB/s divided by recompute time, by
tokens: {bars}.

Attention costs more the longer the prefix, so with it the length does not cancel:

{with_attention}

From {shortest:,} tokens on the {drive} GB/s drive wins at the full peak too. And a fetch leaves the
GPUs free. Block 4's 63 prefills of 4,096 tokens take {prefills:.1f} s of the replica at its peak.
"""


@block(5, "Fetch or recompute", "the break-even bandwidth, and it deletes a tier", (1,))
def b5(s: Parts, show: bool) -> Parts:
    """The break-even by tensor parallelism, and what it says of each tier."""
    if show:
        threshold, drive = break_even(), TIERS["local NVMe"]
        by_tp = table(
            "    config   prefill/token   break-even BW",
            "{:>10}{:>13.1f} us{:>13.2f} GB/s",
            (
                (f"TP{tp}", recompute_seconds(1, tp=tp) * 1e6, break_even(tp=tp))
                for tp in (1, 2, 4, 8)
            ),
        )
        tiers = table(
            "  tier                         bandwidth  vs break-even  verdict",
            "  {:<28}{:>7} GB/s{:>14.1f}x  {}",
            (
                (tier, gb_per_s, gb_per_s / threshold, verdict(gb_per_s))
                for tier, gb_per_s in TIERS.items()
            ),
        )
        with_attention = table(
            "      prefix   break-even BW with attention",
            "{:>12,}{:>26.2f} GB/s",
            (
                (prefix, break_even(attention=True, prefix=prefix))
                for prefix in (1024, 4096, 16_384, 32_768, 131_072)
            ),
        )
        bars = ", ".join(
            f"{fetch_seconds(n, 1.0) / recompute_seconds(n):.2f} at {n:,}"
            for n in (1, 4096, 131_072)
        )
        mfu_of_drive, at_half, by_link = drive / threshold, break_even(mfu=0.5), break_even(tp=1)
        fp8 = break_even(s["kv_bytes_per_token"](LAYERS, KV_HEADS, HEAD_DIM, 1))
        shortest, prefills = shortest_fetch(drive), recompute_seconds(63 * 4096)
        tell(LESSON_5, locals())
    return {
        "break_even": break_even,
        "fetch_seconds": fetch_seconds,
        "recompute_seconds": recompute_seconds,
        "shortest_fetch": shortest_fetch,
    }


def verdict(gb_per_s: float) -> str:
    """Whether a tier of so many GB/s is worth fetching from, at TP4 and the peak."""
    wins = fetch_seconds(1, gb_per_s) < recompute_seconds(1)
    return "use it" if wins else "SLOWER THAN RECOMPUTE"


# ------------------------------------------------- block 6: preemption is a cliff, not a slope


class Request:
    """A request on its way through a scheduler: how long it gets, and how far it is."""

    def __init__(self, prompt: int, output: int) -> None:
        self.length = prompt + output  # tokens when it is done; no decision looks ahead to it
        self.known = prompt  # tokens: the prompt, and what has been generated
        self.computed = 0  # of the known tokens, those whose K and V are stored
        self.decoding = False  # its prefill is done
        self.preempted = False  # it has lost its pages at some time
        self.sequence: Any = None  # its block table, while it runs


class Step(NamedTuple):
    """What a scheduler did in one step."""

    running: int  # sequences that run, those included that leave at the end of the step
    computed: int  # tokens computed: one for each that decodes, and prefill
    generated: int  # tokens generated
    held: int  # pages held, before those that leave release theirs
    preempted: int  # sequences that lost their pages
    prefilled: int  # of `computed`, tokens of sequences whose prefill is not done
    reprefilled: int  # of `prefilled`, tokens of sequences that had been preempted before
    entered: int  # sequences that entered for the first time


class Scheduler:
    """A server's scheduler, which decides as vLLM's does (V1, version 0.33), step for step.

    `add` puts a request into the queue, at any time. `step` computes at most `max_batched_tokens`
    tokens, for at most `max_running` sequences (None: no limit). When a sequence enters while
    others run, `watermark` x (pages + 1) pages stay free, rounded down: vLLM counts one page that
    it never uses. Prefix caching is off.

    >>> scheduler = Scheduler(pages=4, page_tokens=4)
    >>> scheduler.add(prompt=4, output=6)
    >>> scheduler.step()[:4]
    (1, 4, 1, 1)
    """

    def __init__(
        self,
        pages: int,
        page_tokens: int = 16,
        watermark: float = 0.0,
        max_running: int | None = None,
        max_batched_tokens: int | None = None,
    ) -> None:
        self.pool = PagePool(pages, page_tokens)
        self.kept_free = pages_kept_free(watermark, pages)
        self.max_running = max_running or MANY
        self.max_batched_tokens = max_batched_tokens or MANY
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they entered

    def add(self, prompt: int, output: int) -> None:
        """Let a request of `prompt` tokens wait, which will generate `output` tokens."""
        self.waiting.append(Request(prompt, output))

    def step(self) -> Step:
        """Make one step: those that run compute, those that wait may enter, then all generate.

        While too few pages are free for one that runs, the sequence that entered last is preempted.
        """
        pool, room = self.pool, self.max_batched_tokens
        scheduled: dict[Request, int] = {}  # how many tokens each computes
        preempted = entered = 0

        # Those that run, the oldest first: each computes what it knows and has not computed. While
        # there are too few pages for that, the newest of all is preempted, perhaps itself.
        for request in self.running:
            tokens = min(request.known - request.computed, room)
            while request.sequence is not None and not self.fits(request, tokens):
                self.preempt(self.running.pop())  # the newest: it has computed nothing in this step
                preempted += 1
            if request.sequence is not None:  # it was not the newest itself
                scheduled[request] = self.compute(request, tokens)
                room -= tokens

        # Those that wait, from the front of the queue, unless somebody was preempted. All known
        # tokens of the first must fit, even if this step has room to compute only some of them.
        while self.waiting and not preempted and room and len(self.running) < self.max_running:
            request = self.waiting[0]
            kept_free = self.kept_free if self.running else 0  # alone, it may have all pages
            if pages_for(request.known, pool.page_tokens) + kept_free > pool.free:
                break
            self.running.append(self.waiting.popleft())
            request.sequence = pool.allocate(0)
            tokens = min(request.known, room)
            scheduled[request] = self.compute(request, tokens)
            room -= tokens
            if not request.preempted:
                entered += 1
        running, held = len(self.running), pool.held
        prefilled = reprefilled = 0
        for request, tokens in scheduled.items():
            if not request.decoding:
                prefilled += tokens
                reprefilled += tokens if request.preempted else 0

        # Generate: one more token for each whose known tokens are now all computed. Whoever has its
        # whole output leaves, and its pages are free from the next step on.
        generated = 0
        for request in list(self.running):
            if request.computed == request.known:
                request.known += 1
                request.decoding = True
                generated += 1
                if request.known == request.length:
                    self.running.remove(request)
                    pool.release(request.sequence)

        computed = sum(scheduled.values())
        return Step(running, computed, generated, held, preempted, prefilled, reprefilled, entered)

    def fits(self, request: Request, tokens: int) -> bool:
        """Whether there are pages for `tokens` more tokens of a request that runs."""
        pages = pages_for(request.computed + tokens, self.pool.page_tokens)
        new_pages = pages - len(request.sequence.table)
        return new_pages <= self.pool.free

    def compute(self, request: Request, tokens: int) -> int:
        """Store the K and V of `tokens` more tokens, and take pages for those that do not fit."""
        self.pool.append(request.sequence, tokens)
        request.computed += tokens
        return tokens

    def preempt(self, victim: Request) -> None:
        """Take all pages of a request away. It keeps its tokens, and waits in front of all."""
        self.pool.release(victim.sequence)
        victim.sequence, victim.computed, victim.decoding = None, 0, False
        victim.preempted = True
        self.waiting.appendleft(victim)


def pages_kept_free(watermark: float, pages: int) -> int:
    """The pages that a watermark keeps free; vLLM counts one more page, which it never uses."""
    return int(watermark * (pages + 1))


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

    The roofline of `tp` GPUs: all weights are read once, while 2 FLOP a parameter are computed for
    each token, and the longer of the two counts. Then each sequence reads its own KV (Pope et al.
    2022, "Efficiently scaling transformer inference"; Austin et al. 2025, "How to scale your
    model", on inference). A mixture of experts reads the weights of `n_params` parameters, of
    `weight_bytes` bytes each, and computes with `active_params` of them (None: with all).

    `mfu` and `mbu` (model FLOPs and bandwidth utilization) are the shares that are reached of the
    peak FLOP/s and of `gb_per_s`, one GPU's memory bandwidth. Left out: communication between GPUs,
    the FLOP of attention, launches and sampling, and that a kernel may read a shared prefix once.

    >>> round(step_seconds(0, 0) * 1000, 2), round(step_seconds(417, 563_455) * 1000, 1)
    (10.45, 28.5)
    """
    bandwidth, flop_per_s = tp * gb_per_s * 1e9 * mbu, tp * flops_per_gpu * mfu
    reading = weight_bytes * n_params / bandwidth
    computing = tokens * 2 * (active_params or n_params) / flop_per_s
    return max(reading, computing) + held_tokens * kv_per_token / bandwidth


def ridge_tokens(
    n_params: float = N_PARAMS,
    active_params: float | None = None,
    flops_per_gpu: float = DENSE_FLOPS_PER_GPU,
    gb_per_s: float = TIERS["GPU HBM"],
    mfu: float = 1.0,
    mbu: float = 1.0,
    weight_bytes: float = DTYPE,
) -> float:
    """Tokens a step at which arithmetic takes as long as reading the weights: the ridge.

    Below it one more token uses FLOP that would lie idle. The parameters are those of
    `step_seconds`; the number of GPUs cancels.

    >>> round(ridge_tokens(), 1)
    295.4
    """
    flop = 2 * (active_params or n_params)
    return weight_bytes * n_params / (gb_per_s * 1e9 * mbu) * flops_per_gpu * mfu / flop


def resident_tokens(requests: Iterable[tuple[int, int]], page_tokens: int = 16) -> float:
    """Tokens of memory that a running sequence holds, averaged over time.

    E[prompt x output + output^2 / 2] / E[output]: each request is there for `output` steps, and
    holds its prompt and, on average, half its output. Half a page is empty at its end.

    >>> round(resident_tokens(seq_lengths(4000)), 1)
    1299.3
    """
    token_steps = steps = 0.0
    for prompt, output in requests:
        token_steps += prompt * output + output**2 / 2
        steps += output
    return token_steps / some_output(steps) + page_tokens / 2


def step_fills(requests: Iterable[tuple[int, int]], max_batched_tokens: float) -> float:
    """How many running sequences fill a step of so many tokens: B / (1 + E[prompt] / E[output]).

    Each needs one token of a step to decode, and E[prompt] / E[output] for the prefill of those
    that come after it.

    >>> round(step_fills(seq_lengths(4000), 1024), 1)
    265.8
    """
    prompts, outputs = map(sum, zip(*requests, (0, 0)))
    return max_batched_tokens / (1 + prompts / some_output(outputs))


class Served(NamedTuple):
    """What it took to serve a workload to the end, and how its steady state looked.

    The last four figures leave out the first flood and the drain at the end. They are of the steps
    at whose start somebody waits, and half of the requests have entered (0 if there is none).
    """

    steps: int  # forward passes
    generated: int  # output tokens
    prefilled: int  # tokens prefilled, repeats included
    reprefilled: int  # of these, for sequences that had been preempted
    preempted: int  # how often a sequence lost its pages
    peak_pages: int  # pages held in the fullest step
    running: float  # steady state: sequences in a step, on average
    held: float  # steady state: share of the pages held, on average
    again: float  # steady state: tokens prefilled again, over those prefilled for the first time
    tokens_per_s: float  # steady state: tokens generated, over the sum of the step times


def serve(
    requests: Iterable[tuple[int, int]],
    pages: int,
    page_tokens: int = 16,
    watermark: float = 0.0,
    max_running: int | None = None,
    max_batched_tokens: int | None = None,
    step_seconds: Callable[[float, float], float] = step_seconds,
    prefix_caching: bool = False,
) -> Served:
    """Serve all requests on one replica with `pages` pages of KV, and count what it took.

    It does not run `Scheduler`, but `quick_steps`, behind the lesson's end: the same steps in less
    time, as the tests compare. All requests wait from the start. The steady state is timed by
    `step_seconds(tokens computed, tokens that the held pages have room for)`. With `prefix_caching`
    (vLLM's default) a preempted sequence finds its full pages again, from the first one on, as far
    as nobody has taken them: pages that are no full page of anybody are taken first, then those
    that were released longest ago, the last page of a sequence before its first.

    vLLM's max_num_seqs is 1,024 and its max_num_batched_tokens 8,192 for a server on an H100, its
    watermark 0. A prompt or an output below 1 and a request longer than the pool raise ValueError
    before anything runs.

    >>> serve([(4, 6), (4, 6)], pages=4, page_tokens=4)[:6]
    (7, 12, 17, 9, 1, 4)
    """
    waiting = deque(QuickRequest(*pair) for pair in servable(requests, pages, page_tokens))
    half, output = len(waiting) / 2, sum(request.length - request.known for request in waiting)
    next_step = quick_steps(
        waiting, pages, page_tokens, pages_kept_free(watermark, pages), max_running or MANY,
        max_batched_tokens or MANY, prefix_caching,
    ).__next__  # fmt: skip
    steps = generated = prefilled = reprefilled = preempted = peak_pages = entered = 0
    steady = ran = held_pages = first = again = new = 0
    seconds = 0.0
    while generated < output:
        is_steady = entered >= half and bool(waiting)
        running, computed, tokens, held, lost, prefill, repeated, came = next_step()
        steps += 1
        generated += tokens
        preempted += lost
        if held > peak_pages:
            peak_pages = held
        if prefill:
            prefilled += prefill
            reprefilled += repeated
            entered += came
        if is_steady:
            steady += 1
            ran += running
            held_pages += held
            first += prefill - repeated
            again += repeated
            new += tokens
            seconds += step_seconds(computed, held * page_tokens)
    return Served(
        steps, generated, prefilled, reprefilled, preempted, peak_pages,
        running=ran / steady if steady else 0.0,
        held=held_pages / steady / pages if steady else 0.0,
        again=again / first if first else 0.0,
        tokens_per_s=new / seconds if seconds else 0.0,
    )  # fmt: skip


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


STEP_TOKENS = 8192  # vLLM's max_num_batched_tokens, serving on an H100
SWEEP = ((350, 0), (400, 0), (425, 0), (450, 0), (500, 0), (500, 0.01), (500, 0.05))


def mixes(requests: Iterable[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
    """Chat, the workload as it is; long, its pairs swapped and its answers cut at 4,096 tokens."""
    chat = list(requests)
    return {"chat": chat, "long": [(output, min(prompt, 4096)) for prompt, output in chat]}


# What the seed decides. Over seeds 0 to 49 of seq_lengths(4000), in percent: `again` for each row
# of the sweep, and the tokens/s that 500 running lose to the best row with nothing kept free.
AGAIN = {
    "chat": (
        Spread(0, 0, 0), Spread(0, 0.1, 2.7), Spread(0, 2.65, 8.3), Spread(0.4, 7.5, 11.0),
        Spread(6.7, 9.1, 11.5), Spread(0, 0, 0), Spread(0, 0, 0),
    ),
    "long": (
        Spread(0, 0, 0), Spread(0, 0, 10.2), Spread(0, 20.3, 56.2), Spread(32.5, 63.6, 133.5),
        Spread(73.1, 151.4, 173.1), Spread(2.6, 8.5, 14.7), Spread(0, 0, 0),
    ),
}  # fmt: skip
LOSS = {"chat": Spread(2.6, 5.1, 8.1), "long": Spread(12.1, 20.05, 22.2)}
LOSS_CACHED = {"chat": Spread(-0.2, 2.9, 5.3), "long": Spread(11.7, 19.2, 21.4)}

FILL_THE_POOL = Spread(406, 430, 454)  # of chat, over seeds 0 to 199 of seq_lengths(4000)

# What rules for leaving pages free cost: tokens computed again, and tokens/s lost against the best
# of the row, in percent, each the worst of seeds 0 to 49 of seq_lengths(4000). A row has a mix, a
# share of the lesson's pool, and how many sequences fill that (the median draw).
RULES_COST = {
    ("chat", 1 / 8, 54): ((33, 7.5), (6, 0.0), (0, 1.9), (11, 6.9)),
    ("chat", 1, 433): ((12, 7.1), (0, 1.6), (0, 1.8), (2, 2.7)),
    ("long", 1 / 8, 56): ((280, 8.4), (148, 3.3), (33, 0.0), (48, 7.8)),
    ("long", 1 / 2, 224): ((231, 21.6), (41, 3.3), (2, 0.4), (22, 4.2)),
    ("long", 1, 448): ((186, 23.3), (18, 3.6), (4, 1.8), (12, 1.8)),
}

# vLLM's pull request 44594: the watermarks, preemptions and output tokens/s measured there; and
# what `serve` preempts on 100 draws of its workload (5% to 95%), without anything fitted.
WATERMARKS = (0, 0.02, 0.05, 0.10, 0.15)
MEASURED = (1065, 400, 187, 168, 168)
MEASURED_RATES = (11_582, 12_134, 12_167, 11_835, 11_635)
SIMULATED = ((943, 1203), (343, 418), (192, 238), (134, 195), (130, 179))

# A burst of 500 into a server of long answers at 90% of its capacity, over seeds 0 to 49: how many
# wait after 40 minutes with nothing kept free. With 5% kept free nobody waits 400 s after it.
BURST_WAITING = Spread(3113, 3782, 4243)

# Over seeds 0 to 199: the assumed curve's tokens at 95%.
REPREFILLED_AT_95 = Spread(782_182, 882_596.5, 976_033)

LESSON_6 = """
Three sequences on a pool of 8 pages of 16 tokens. a (prompt 46, answer 5) and b (47 and 8) wait at
the start; c (15 and 6) comes before step 2. A line shows each after a step of Scheduler, as tokens
computed: pages.

{story}

If a token no longer fits the last page of its sequence, it takes another: the page that was freed
most recently. (A sequence frees its pages from the last to the first, so its first is taken first.)
If too few pages are free, the sequence that entered last is preempted, even if it is the one that
needs the page. It loses all its pages, and waits in front of all others. It enters again in a later
step, when all its tokens fit, and computes them all.

So vLLM decides (V1, version 0.33, first come first served). On 72 recorded workloads without prefix
caching this scheduler makes the same steps as the engine's; --verify repeats 15 of them. Other
engines choose otherwise: SGLang preempts the sequence with the fewest tokens generated.

Now 4,000 requests wait for {pages:,} pages, and a step computes at most {STEP_TOKENS:,} tokens
(vLLM's default for a server on an H100). Chat is the workload; long swaps prompts and answers, and
cuts answers at 4,096 tokens. "At most" is vLLM's max_num_seqs, "free" its watermark: the share of
the pages that is kept free when a sequence enters while others run.

{sweep}

"Again" is tokens prefilled again divided by tokens prefilled for the first time. "Preempted" counts
the whole run. The other results are the steady state, without the first flood and the end, when
nobody waits. Tok/s are the roofline's, at the hardware's peak.

For long answers the onset is a cliff, for chat a slope. Against the best row with nothing kept
free, allowing 500 costs long answers a fifth of the tokens/s, and chat a twentieth. (Seeds 0 to 49:
{LOSS[long].least:g}% to {LOSS[long].most:g}%, and {LOSS[chat].least:g}% to {LOSS[chat].most:g}%.)
For long answers seed 5 is a calm draw: at 425 the median is {AGAIN[long][2].median:.0f}%.

With prefix caching, vLLM's default, a preempted sequence finds those of its pages that nobody has
taken. With 500 allowed and nothing kept free:

{caching}

Chat gets back a part of what it lost. Long answers get back little: their pages are taken before
they return.

How many run? The least of three limits: max_num_seqs, the pool and the step. A running sequence
holds E[prompt x output + output^2 / 2] / E[output] tokens and half a page, averaged over time:
long answers stay longer, so they are found running more often. It needs 1 token of each step to
decode, and E[prompt] / E[output] for the prefill of its successor:

{limits}

In the last row the step is the least: the pool is never full, and nobody is preempted. (Over seeds
0 to 199, {FILL_THE_POOL.least} to {FILL_THE_POOL.most} fill the pool.)

How much to leave free? What the pool holds swings around its average, and a pool overflows by its
peaks. Two rules against none, on pools that n sequences fill on average: keep pages free, or cap at
0.9 n. A cell is the tokens computed again, then the tokens/s below the best of its row, each the
worst of 50 draws:

{rules}

For these two mixes keep 5% of the pages free (watermark 0.05). A cap of nine tenths of n costs more
where few fit, because there a tenth fewer sequences makes nearly a tenth fewer tokens/s. No rule
helps everywhere: a trace of book-length answers computes 23% again with 5% free (README, "Real
traffic").

An engine was measured in vLLM's pull request 44594, with prefix caching off: 450 long answers of
Qwen2.5-7B, at most 128 running. Its preemptions, and those of serve on 100 draws of that workload,
the five lowest and the five highest left out:

{measured}

The best watermark was worth {best_watermark:.0%} more tokens/s there. Nothing in serve was fitted
to it.

A server that preempts much may not come back. Long answers arrive at 90% of what the server can do,
and once 500 come at the same time. With nothing kept free, {BURST_WAITING.least:,} to
{BURST_WAITING.most:,} wait after 40 minutes, and the queue still grows. With 5% kept free the queue
is empty 400 seconds after the burst. (50 draws of 50, looked at every 200 seconds.) In the table
above, long at 500 makes {thrashing:.0%} of the tokens/s of its row with 5% free. The load of 90%
lies between that and 100%. So the calm server stays calm, and the stuck one stuck.

Why recompute, if fetching from host memory is {to_host:.1f}x as fast by block 5? A swap goes out
and in again, in small copies: {copied} KiB for a layer, page and GPU. Kwon et al. (section 7.3)
measured both as comparable with pages of 16 to 64 tokens. vLLM's V1 has no swap.

A popular picture of all this is a curve over occupancy. This one is an assumption: 2,000 steps,
each preempting with probability ((occupancy - 0.85) / 0.15)^2 above 85%, and never below:

{assumed}

It has no scheduler in it. It knows neither how long answers get nor what is kept free. (Seeds 0 to
199 give {REPREFILLED_AT_95.least:,} to {REPREFILLED_AT_95.most:,} tokens at 95%.)
"""


@block(6, "Preemption is a cliff, not a slope", "why KV exhaustion degrades non-linearly", (3, 5))
def b6(s: Parts, show: bool) -> Parts:
    """Six steps on a small pool; the sweep, and what decides it; the assumed curve as a foil."""
    if show:
        pages, workloads = s["budget_tokens"]() // 16, mixes(s["seq_lengths"](4000))
        served = {
            (mix, most, free): serve(requests, pages, 16, free, most, STEP_TOKENS)
            for mix, requests in workloads.items()
            for most, free in SWEEP
        }
        story, sweep = six_steps(), sweep_table(served)
        caching = caching_table(workloads, pages, served)
        limits = limits_table(workloads["chat"], pages, served)
        rules, measured = rules_table(), measured_table()
        best_watermark = max(MEASURED_RATES) / MEASURED_RATES[0] - 1
        calm, stuck = served["long", 500, 0.05], served["long", 500, 0]
        thrashing = stuck.tokens_per_s / calm.tokens_per_s
        to_host = TIERS["host DRAM over PCIe5"] / s["break_even"]()
        copied = KV_PER_TOKEN * 16 // LAYERS // GPUS // 1024
        assumed = table(
            "    occupancy   preempted  tokens re-prefilled  wasted GPU-ms @TP4",
            "{:>13.0%}{:>12}{:>21,}{:>19.0f}",
            (
                (x, "yes" if tokens else "no", tokens, s["recompute_seconds"](tokens) * 1000)
                for x in (0.60, 0.85, 0.90, 0.95, 0.99)
                for tokens in [preempted_tokens(x)]
            ),
        )
        tell(LESSON_6, locals())
    return {
        "Scheduler": Scheduler,
        "serve": serve,
        "step_seconds": step_seconds,
        "ridge_tokens": ridge_tokens,
        "resident_tokens": resident_tokens,
        "step_fills": step_fills,
        "preempted_tokens": preempted_tokens,
        "size": size,
        "traffic": traffic,
    }


def six_steps() -> str:
    """Three sequences on eight pages: one comes, one grows, one is preempted and comes back."""
    scheduler, lines = Scheduler(pages=8, page_tokens=16), []
    requests: dict[str, Request] = {}
    arrivals = {1: {"a": (46, 5), "b": (47, 8)}, 2: {"c": (15, 6)}}
    remarks = (
        "a and b enter", "c enters", "b's 49th token takes page 7",
        "a's 49th takes page 6 from c", "a ends; c can enter next step",
        "c enters, computes 15 + 2",
    )  # fmt: skip
    for step, remark in enumerate(remarks, 1):
        for name, (prompt, output) in arrivals.get(step, {}).items():
            scheduler.add(prompt, output)
            requests[name] = scheduler.waiting[-1]
        scheduler.step()
        cells = dict.fromkeys("abc", "")
        for name, request in requests.items():
            if request in scheduler.running:
                cells[name] = f"{request.computed}: {request.sequence.table}"
            elif request in scheduler.waiting:
                cells[name] = "waits"
        lines.append((step, *cells.values(), remark))
    return table(
        "    step  a                b                c          what happened",
        "{:>8}  {:<17}{:<17}{:<11}{}",
        lines,
    )


def sweep_table(served: dict[tuple[str, int, float], Served]) -> str:
    """Both mixes in the steady state, with more and more sequences allowed to run."""
    spreads = [spread for mix in AGAIN.values() for spread in mix]
    return table(
        "   mix  at most  free   running   held   preempted   again   seeds 0-49    tok/s",
        "{:>6}{:>9}{:>6.0%}{:>10.1f}{:>7.1%}{:>12,}{:>8.1%}{:>13}{:>9,.0f}",
        (
            (
                mix, most, free, row.running, row.held, row.preempted, row.again,
                f"{spread.least:g}-{spread.most:g}%", row.tokens_per_s,
            )
            for ((mix, most, free), row), spread in zip(served.items(), spreads)
        ),
    )  # fmt: skip


def caching_table(
    workloads: dict[str, list[tuple[int, int]]],
    pages: int,
    served: dict[tuple[str, int, float], Served],
) -> str:
    """What prefix caching brings back where 500 may run and nothing is kept free."""
    lines = []
    for mix, requests in workloads.items():
        cached = serve(requests, pages, 16, 0, 500, STEP_TOKENS, prefix_caching=True)
        for caching, row, lost in (
            ("off", served[mix, 500, 0], LOSS[mix]),
            ("on", cached, LOSS_CACHED[mix]),
        ):
            seeds = f"{lost.least:g} to {lost.most:g}%"
            lines.append((mix, caching, row.preempted, row.again, row.tokens_per_s, seeds))
    return table(
        "   mix  caching  preempted   again   tok/s   tok/s lost, seeds 0-49",
        "{:>6}{:>9}{:>11,}{:>8.1%}{:>8,.0f}{:>25}",
        lines,
    )


def limits_table(
    requests: list[tuple[int, int]], pages: int, served: dict[tuple[str, int, float], Served]
) -> str:
    """Two of the three limits in closed form, and what runs where 5% of the pages are kept free."""
    small_steps = serve(requests, pages, 16, 0.05, 500, 1024)
    fill_the_pool = pages * 16 / resident_tokens(requests)
    return table(
        "    tokens a step   fill the pool   fill a step   run, 5% kept free    held",
        "{:>17,}{:>16.0f}{:>14,.0f}{:>20.1f}{:>8.1%}",
        (
            (most, fill_the_pool, step_fills(requests, most), row.running, row.held)
            for most, row in ((STEP_TOKENS, served["chat", 500, 0.05]), (1024, small_steps))
        ),
    )


def rules_table() -> str:
    """What each rule costs, by the size of the pool."""
    return table(
        "   mix     n       nothing       1% free       5% free   at most 0.9 n",
        "{:>6}{:>6}{:>14}{:>14}{:>14}{:>16}",
        (
            (mix, n, *(f"{again}%, {lost}%" for again, lost in costs))
            for (mix, _, n), costs in RULES_COST.items()
        ),
    )


def measured_table() -> str:
    """The preemptions of pull request 44594, and those of `serve`."""
    return "\n".join(
        (
            "   watermark" + "".join(f"{kept:>12.2f}" for kept in WATERMARKS),
            "    measured" + "".join(f"{preempted:>12,}" for preempted in MEASURED),
            "       serve" + "".join(f"{f'{low:,}-{high:,}':>12}" for low, high in SIMULATED),
        )
    )


# ------------------------------------------------------------------------------ assembly and parts


# Over seeds 0 to 199: the batch of the assembly's last row; what pages are worth in decode, at the
# peak and below it; and the first lever's tokens/s for chat, with prefill.
BATCH_BEHIND_2K = Spread(916, 1075.5, 1214)
DECODE_AT_THE_PEAK, DECODE_BELOW_IT = Spread(2.57, 2.72, 2.89), Spread(1.98, 2.07, 2.19)
CHAT_WITH_PREFILL = Spread(5477, 5817, 6097)

# Over seeds 0 to 49: what pages with 5% kept free are worth over 69 running, with prefill in the
# same steps, at the peak and below it.
WORTH_AT_THE_PEAK, WORTH_BELOW_IT = Spread(1.50, 1.56, 1.60), Spread(1.26, 1.30, 1.34)
WORTH_IN_SMALL_STEPS = Spread(1.32, 1.36, 1.40)  # at the peak, with 512 tokens a step

MFU, MBU = 0.5, 0.8  # what a good server reaches of the peak FLOP/s and of the bandwidth: assumed
FP8_FLOPS_PER_GPU = 1979e12  # dense FP8 on an H100: as much as BF16 with 2:4 sparsity
H200_GIB, H200_GB_PER_S = 140.4, 4800  # what an H200 shows of its 141 GB; its FLOP/s are an H100's

# What pages (5% kept free) are worth over 69 running on real lengths: two Azure traces of 2023, as
# --trace measures them (the files are Azure's: README, "Real traffic").
AZURE_WORTH = {"chat": 1.31, "code": 1.00}

LESSON_ASSEMBLY = """
{allocators}

The same as bars, {KV_BUDGET_GIB} GiB wide; # is memory that holds tokens:

{bars}

In the last row a prompt counts as a part of the prefix, as far as that reaches: {inside} of
{behind_prefix.batch:,} lie inside it altogether. Own tokens start on a fresh page; with
copy-on-write the batch is {copied.batch:,} ({copied_factor:.1f}x). (Seeds 0 to 199:
{BATCH_BEHIND_2K.least:,} to {BATCH_BEHIND_2K.most:,}.) If each keeps its whole prompt after the
prefix, the batch is {after_prefix.batch}, and {unshared.batch} without sharing.

What the batch buys, in decode alone, each sequence at its final length. On the right at
{MFU:.0%} MFU and {MBU:.0%} of the memory bandwidth (assumed: a good server):

{rates}

{batch_factor:.1f}x the batch is {decode:.1f}x the tokens/s at the peak, and {decode_below:.1f}x on
the right. (Seeds 0 to 199: {DECODE_AT_THE_PEAK.least}x to {DECODE_AT_THE_PEAK.most}x, and
{DECODE_BELOW_IT.least}x to {DECODE_BELOW_IT.most}x.) Up to the ridge, {ridge:.0f} tokens a step for
a dense model at the peak, FLOPs lie idle while the weights are read. There one more sequence costs
only the reading of its KV. Beyond it, a larger batch adds waiting.

With prefill in the same steps (block 6's server, chat, 5% kept free) pages make {with_prefill:.1f}x
the tokens/s of {reserved.batch} running sequences at the peak, and {with_prefill_below:.1f}x at
{MFU:.0%} MFU and {MBU:.0%} of the bandwidth. (Seeds 0 to 49: {WORTH_AT_THE_PEAK.least:.2f}x to
{WORTH_AT_THE_PEAK.most:.2f}x, and {WORTH_BELOW_IT.least:.2f}x to {WORTH_BELOW_IT.most:.2f}x. Seed 5
lies near the top: the medians are {WORTH_AT_THE_PEAK.median:.2f}x and
{WORTH_BELOW_IT.median:.2f}x.) The size of a step moves the {with_prefill:.1f}x: with 512 tokens a
step instead of {STEP_TOKENS:,} it is {WORTH_IN_SMALL_STEPS.least:.2f}x to
{WORTH_IN_SMALL_STEPS.most:.2f}x.

Most real lengths are worth less: {AZURE_WORTH[chat]:.2f}x on Azure's chat trace of 2023, and
{AZURE_WORTH[code]:.2f}x on its code completions, whose prompts fill the step. (At the peak, on this
server; README, "Real traffic".)

When is KV memory the limit? In decode of a dense model at the peak, if sequences hold more than
{pool_tokens:,} / {ridge:.1f} = {threshold:,.0f} tokens on average. Ours hold {resident:,.0f}, so
more room alone gains nothing. Prefill in the same steps multiplies the threshold by 1 + E[prompt] /
E[output]: to {threshold_prefill:,.0f} for chat.

A mixture of experts reads all its weights, and computes with few of them. The weights of
DeepSeek-V3 (671e9 parameters, 37e9 active) have their ridge at {ridge_of_experts:,.0f} tokens on an
H100. KV memory is the limit there, if every GPU keeps the whole latent (README, "A latent").

What to pull first? Tokens/s of that server in closed form, at the peak, with as many running as
fill 95% of the pool (at most 1,024):

{levers}

Memory alone gains little beyond the ridge. FP8 weights leave {fp8_memory:.0f} GiB more for KV and
are read in half the time, and the tokens/s stay. With prefill, arithmetic in FP8 makes
{fp8_chat:.1f}x for chat. In decode, FP8 KV makes {fp8_kv_decode:.1f}x, because half as much is
read. (Chat with prefill, first row: {CHAT_WITH_PREFILL.least:,} to {CHAT_WITH_PREFILL.most:,} over
seeds 0 to 199, in the middle {CHAT_WITH_PREFILL.median:,}.)

What to say in an interview, in this order:

{sentences}

Not built here: the attention kernel that reads through a block table, finding shared prefixes and
evicting them, offloading to the host, quantized KV with its scales, more than one replica.
"""


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
    reserved, _, in_pages, behind_prefix = rows.values()
    allocators = table(
        "  allocator                     batch      held   logical  held/logical vs baseline",
        "  {:<26}{:>9}{:>7.0f} G{:>8.0f} G{:>13.2f}x{:>11.1f}x",
        (
            (
                name, row.batch, s["kv_gib"](row.held_tokens), s["kv_gib"](row.logical_tokens),
                row.held_tokens / row.logical_tokens, row.batch / reserved.batch,
            )
            for name, row in rows.items()
        ),
    )  # fmt: skip
    bars = memory_bars(s, rows)
    inside = sum(prompt <= 2048 for prompt, _ in requests[: behind_prefix.batch])
    copied = s["shared_prefix"](requests, 2048, copy_on_write=True)
    copied_factor = copied.batch / reserved.batch
    with_prefix = [(2048 + prompt, output) for prompt, output in requests]
    after_prefix, unshared = s["shared_prefix"](with_prefix, 2048), s["paged"](with_prefix, 16)

    at_the_peak, below = s["step_seconds"], partial(s["step_seconds"], mfu=MFU, mbu=MBU)
    rates = table(
        "  allocator                   batch   step     tok/s  each |   step     tok/s  each",
        "  {:<26}{:>7}{:>7.1f}{:>10,.0f}{:>6.1f} |{:>7.1f}{:>10,.0f}{:>6.1f}",
        (
            (name, row.batch, *rate(row, at_the_peak), *rate(row, below))
            for name, row in rows.items()
        ),
    )
    batch_factor = in_pages.batch / reserved.batch
    decode, decode_below = (
        rate(in_pages, clock)[1] / rate(reserved, clock)[1] for clock in (at_the_peak, below)
    )
    slots = rates_with_prefill(s, requests, 0, reserved.batch, at_the_peak, below)
    pages = rates_with_prefill(s, requests, 0.05, 500, at_the_peak, below)
    with_prefill, with_prefill_below = (many / few for few, many in zip(slots, pages))

    pool_tokens, ridge = s["budget_tokens"](), s["ridge_tokens"]()
    threshold, resident = pool_tokens / ridge, s["resident_tokens"](requests)
    threshold_prefill = threshold / s["step_fills"](requests, 1)
    ridge_of_experts = s["ridge_tokens"](n_params=671e9, active_params=37e9)
    changed = pull_levers(s, requests)
    levers = table(
        "                             KV budget      decode, tok/s    with prefill, tok/s\n"
        "                                   GiB      chat     long       chat        long",
        "  {:<26}{:>10.1f}{:>10,.0f}{:>9,.0f}{:>11,.0f}{:>12,.0f}",
        ((name, *lever) for name, lever in changed.items()),
    )
    plain, _, fp8, fp8_kv, _, _ = changed.values()
    fp8_memory, fp8_chat = fp8.kv_gib - plain.kv_gib, fp8.chat / plain.chat
    fp8_kv_decode = fp8_kv.chat_decode / plain.chat_decode
    sentences = "\n".join(
        wrapped(sentence, first=f"  {i}. ") for i, sentence in enumerate(interview(s, rows), 1)
    )
    tell(LESSON_ASSEMBLY, locals())


def rate(row: Allocation, step_seconds: Callable[[float, float], float]) -> tuple[float, ...]:
    """Milliseconds of a decode step of a batch, its tokens/s, and those of each sequence."""
    seconds = step_seconds(row.batch, row.logical_tokens)
    return seconds * 1000, row.batch / seconds, 1 / seconds


def rates_with_prefill(
    s: Parts,
    requests: list[tuple[int, int]],
    kept_free: float,
    max_running: int,
    *clocks: Callable[[float, float], float],
) -> list[float]:
    """Tokens/s of block 6's server by each of the clocks.

    It serves once, by a clock that notes what each step holds and calls it a second. Then each of
    the clocks times these steps: those of as many tokens together, at what they hold on average,
    because a step's seconds are linear in that.
    """
    held: defaultdict[float, list[float]] = defaultdict(list)  # in each step, by its tokens

    def one_second(tokens: float, held_tokens: float) -> float:
        held[tokens].append(held_tokens)
        return 1.0

    pages = s["budget_tokens"]() // 16
    served = s["serve"](requests, pages, 16, kept_free, max_running, STEP_TOKENS, one_second)
    generated = served.tokens_per_s * sum(map(len, held.values()))
    return [
        generated / sum(len(h) * clock(tokens, sum(h) / len(h)) for tokens, h in held.items())
        for clock in clocks
    ]


def memory_bars(s: Parts, rows: dict[str, Allocation]) -> str:
    """The first three allocators as bars: what of the budget holds tokens, and how many run."""
    lines = []
    for name, row in list(rows.items())[:3]:
        gib = s["kv_gib"](row.logical_tokens)
        bar = "#" * round(36 * s["budget_share"](gib))
        lines.append(f"  {name:<23} |{bar:.<36}| {gib:5.1f} GiB, {row.batch} run")
    return "\n".join(lines)


class Lever(NamedTuple):
    """What a server makes with one thing changed: its budget, and tokens/s by mix."""

    kv_gib: float
    chat_decode: float
    long_decode: float
    chat: float
    long: float


def pull_levers(s: Parts, requests: list[tuple[int, int]]) -> dict[str, Lever]:
    """Quantization and a larger card, one at a time and together, in closed form.

    `running` sequences that hold `resident` tokens each make running / step_seconds(running,
    running x resident) tokens/s in decode. With prefill a step computes more for each of them.
    """
    loads = [
        (s["resident_tokens"](lengths), s["step_fills"](lengths, 1))
        for lengths in mixes(requests).values()
    ]

    def pull(budget_gib: float, kv_per_token: int = KV_PER_TOKEN, **card: Any) -> Lever:
        clock = partial(s["step_seconds"], kv_per_token=kv_per_token, **card)
        tokens = s["budget_tokens"](budget_gib, kv_per_token)
        decode, with_prefill = [], []
        for resident, part in loads:  # `part` of the tokens of a step decode, the others prefill
            running = min(0.95 * tokens / resident, STEP_TOKENS * part, 1024)
            decode.append(running / clock(running, running * resident))
            with_prefill.append(running / clock(running / part, running * resident))
        return Lever(budget_gib, *decode, *with_prefill)

    fp8_gib = KV_BUDGET_GIB + WEIGHTS_GIB / 2
    h200_gib = KV_BUDGET_GIB + GPUS * (H200_GIB - GPU_GIB)
    fp8_kv = s["kv_bytes_per_token"](LAYERS, KV_HEADS, HEAD_DIM, 1)
    fp8: Parts = {"weight_bytes": 1, "flops_per_gpu": FP8_FLOPS_PER_GPU}
    return {
        "16-bit weights and KV": pull(KV_BUDGET_GIB),
        "FP8 weights alone": pull(fp8_gib, weight_bytes=1),
        "FP8 weights and arithmetic": pull(fp8_gib, **fp8),
        "FP8 KV": pull(KV_BUDGET_GIB, fp8_kv),
        "all of these": pull(fp8_gib, fp8_kv, **fp8),
        "an H200, 16 bits": pull(h200_gib, gb_per_s=H200_GB_PER_S),
    }


def interview(s: Parts, rows: dict[str, Allocation]) -> Iterator[str]:
    """Six sentences, each with one number and its condition."""
    reserved, _, in_pages, _ = rows.values()
    per_token = s["kv_bytes_per_token"](LAYERS, KV_HEADS, HEAD_DIM, DTYPE)
    yield f"A token of a 70B model with GQA-8 holds {per_token // 1024} KiB of KV in 16 bits."
    yield (
        f"Reserving 8k tokens for every sequence wastes {reserved.waste:.0%} of the KV memory,"
        " on this mix."
    )
    yield (
        f"Pages run {in_pages.batch / reserved.batch:.0f}x the sequences, on this mix, because"
        " memory is taken only when needed."
    )
    yield (
        f"Above {s['ridge_tokens']():.0f} tokens a step (dense model, H100, at the peak) a larger"
        " batch adds waiting, not tokens/s."
    )
    yield (
        f"Fetching KV beats recomputing it above {s['break_even']():.0f} GB/s, for this model on"
        " four H100s at the peak."
    )
    yield (
        "When pages run out vLLM preempts the newest sequence and recomputes it: in overload keep"
        " 5% free."
    )


def prerequisites(number: int) -> list[int]:
    """The blocks that must run before block `number`, in order."""
    needed: set[int] = set()
    for need in BLOCKS[number].needs:
        needed.update(prerequisites(need), (need,))
    return sorted(needed)


def collect(numbers: Iterable[int], shown: Collection[int] = ()) -> Parts:
    """Run blocks, each on the parts of those before it; those that are shown print their lesson."""
    s: Parts = {}
    for number in numbers:
        if number in shown:
            heading(f"Block {number}. {BLOCKS[number].title}", BLOCKS[number].teaches)
        s.update(BLOCKS[number].run(s, number in shown))
    return s


def parts() -> Parts:
    """Every mechanism of the lesson by name, ready to use: `help(parts()["paged"])`."""
    return collect(BLOCKS)


# ------------------------------------------------------------------------- the lesson ends here


# --------------------------------------------------------------------------------------- printing


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


def tell(lesson: str, figures: Parts) -> None:
    """Print a lesson: paragraphs are wrapped, and what starts with a blank is printed as it is.

    What stands in braces is one of `figures`, or a constant of the module.
    """
    names = {**globals(), **figures}
    for i, paragraph in enumerate(lesson.strip("\n").split("\n\n")):
        text = paragraph.format_map(names)
        print("\n" * (i > 0) + (text if text.startswith(" ") else wrapped(text)))


def table(headings: str, row: str, cells: Iterable[Iterable[Any]]) -> str:
    """A table as text: its headings, and a line for each row of cells, in the format of `row`."""
    return "\n".join([headings, *(row.format(*line) for line in cells)])


# ----------------------------------------------------------------------------- the quick scheduler


class QuickRequest:
    """A Request of the quick scheduler, which counts pages and names none."""

    __slots__ = ("cached", "computed", "known", "lag", "length", "preempted")

    def __init__(self, prompt: int, output: int) -> None:
        self.known = prompt
        self.length = prompt + output
        self.computed = 0
        self.lag = 0  # while it decodes: the step's number less its computed tokens
        self.preempted = False
        self.cached = NOTHING_CACHED  # after a preemption: how many of its first pages are free


NOTHING_CACHED = [0]  # one list for all, because making one for each takes time


class CountedPages:
    """The free pages of a pool, counted; with prefix caching, in the order of their taking."""

    def __init__(self, pages: int, page_tokens: int, prefix_caching: bool) -> None:
        self.free = pages
        self.page_tokens = page_tokens
        self.prefix_caching = prefix_caching
        self.full = 0  # of the free pages: full ones of a sequence, which may find them again
        self.by_sequence: deque[list[int]] = deque()  # these, longest ago first

    def take(self, n: int) -> None:
        """Take n free pages: those that nobody may find again go first."""
        self.free -= n
        while self.full > self.free:
            pages = self.by_sequence[0]
            taken = min(self.full - self.free, pages[0])  # a sequence's last pages before its first
            pages[0] -= taken
            self.full -= taken
            if not pages[0]:
                self.by_sequence.popleft()

    def release(self, tokens: int) -> list[int]:
        """Free the pages of a sequence; returns how many of its first pages may be found again."""
        self.free += pages_for(tokens, self.page_tokens)
        if not self.prefix_caching:
            return NOTHING_CACHED
        pages = [tokens // self.page_tokens]
        self.full += pages[0]
        self.by_sequence.append(pages)
        return pages

    def find(self, cached: list[int]) -> int:
        """Take what is left of the pages that a sequence released; returns how many."""
        found, cached[0] = cached[0], 0
        self.free -= found
        self.full -= found
        return found


def quick_steps(
    waiting: deque[QuickRequest],
    pages: int,
    page_tokens: int,
    kept_free: int,
    max_running: int,
    max_batched_tokens: int,
    prefix_caching: bool,
) -> Iterator[tuple[int, ...]]:
    """The records of Scheduler's steps, as plain tuples, for ever; requests may be added between.

    Every sequence that decodes computes one token a step. So the step's number less its computed
    tokens, its lag, stays as it is, and it takes a page whenever the step's number is its lag
    modulo page_tokens. `due` counts the sequences by that: a step in which nobody comes or goes
    costs as much for a thousand sequences as for one.
    """
    pool = CountedPages(pages, page_tokens, prefix_caching)
    running: dict[int, QuickRequest] = {}  # those that decode, by the number of their entry
    filling: QuickRequest | None = None  # in the middle of its prefill: the newest of all that run
    due: defaultdict[int, int] = defaultdict(int)
    finishing: defaultdict[int, list[int]] = defaultdict(list)  # by step; may be preempted by then
    entries = count()

    def preempt(victim: QuickRequest) -> None:
        victim.cached = pool.release(victim.computed)
        victim.computed, victim.preempted = 0, True
        waiting.appendleft(victim)

    for step in count():
        preempted = prefilled = reprefilled = entered = 0

        # Those that decode, the oldest first: some take a page. While there are too few, the oldest
        # take what is free, and the newest of all is preempted.
        growing = due[step % page_tokens]
        while growing > pool.free:
            growing -= pool.free
            pool.take(pool.free)
            if filling:
                victim, filling = filling, None
            else:
                victim = running.popitem()[1]
                victim.computed = step - victim.lag
                victim.known = victim.computed + 1
                due[victim.lag % page_tokens] -= 1
                if victim.computed % page_tokens == 0:
                    growing -= 1  # it was one of those that need a page
            preempt(victim)
            preempted += 1
        if growing:
            pool.take(growing)
        decoding = len(running)
        room = max_batched_tokens - decoding

        # The one that fills, then those that wait.
        entering: list[QuickRequest] = []
        if filling:
            tokens = min(filling.known - filling.computed, room)
            needed = pages_for(filling.computed + tokens, page_tokens)
            needed -= pages_for(filling.computed, page_tokens)
            if needed <= pool.free:
                pool.take(needed)
                filling.computed += tokens
                prefilled = tokens
                reprefilled = tokens * filling.preempted
                room -= tokens
                entering.append(filling)
            else:
                preempt(filling)
                preempted += 1
            filling = None
        while waiting and not preempted and room and decoding + len(entering) < max_running:
            request = waiting[0]
            needed = pages_for(request.known, page_tokens)
            if needed + (kept_free if running or entering else 0) > pool.free:
                break
            entering.append(waiting.popleft())
            found = 0
            if request.preempted:
                found = pool.find(request.cached)
            else:
                entered += 1
            tokens = request.known - found * page_tokens
            if tokens > room:
                tokens = room
                needed = pages_for(found * page_tokens + tokens, page_tokens)
            request.computed = found * page_tokens + tokens
            pool.take(needed - found)
            prefilled += tokens
            reprefilled += tokens * request.preempted
            room -= tokens
        ran, held = decoding + len(entering), pages - pool.free

        # Generate.
        for request in entering:
            if request.computed < request.known:
                filling = request
            else:
                number = next(entries)
                running[number] = request
                request.lag = step + 1 - request.computed
                due[request.lag % page_tokens] += 1
                finishing[step + request.length - request.known - 1].append(number)
        generated = len(running)
        if step in finishing:
            for number in finishing.pop(step):
                if number in running:
                    request = running.pop(number)
                    due[request.lag % page_tokens] -= 1
                    pool.release(step + 1 - request.lag)
        yield ran, decoding + prefilled, generated, held, preempted, prefilled, reprefilled, entered


# ---------------------------------------------------------------------------------------- verify

# One idea: a call is a line of Python. It is evaluated twice, with naive mechanisms and with the
# one that is graded, and one comparison says where they differ; what a failing line shows is what
# was run. Arguments are drawn, each parameter alone and with others, and left out too. A pool is
# told stories of such lines, and a scheduler is held to what vLLM's own did. A naive mechanism
# shares nothing with the lesson's but the definition of the workload, which it repeats.
#
# To add a check, write a call into KNOWN or REFUSED. To add a mechanism, write a naive one into
# NAIVE, and how its parameters are drawn into DRAWN.

Requests = list[tuple[int, int]]  # (prompt, output) of each
Fault = tuple[str, str]  # a call, and what is wrong with it


@lru_cache
def workload(n: int, seed: int, mu: float, sigma: float) -> tuple[tuple[int, int], ...]:
    """A workload by its definition."""
    draw = random.Random(seed).lognormvariate
    return tuple((int(draw(mu, sigma)), int(draw(5.5, 0.8))) for _ in range(n))


def admitted(needs: Iterable[tuple[int, int]], room: int, held: int = 0) -> Parts:
    """An Allocation of (length, memory) pairs, in order, as many as there is room for."""
    lengths: list[int] = []
    for length, memory in needs:
        if held + memory > room:
            break
        held += memory
        lengths.append(length)
    logical = sum(lengths)
    return {
        "batch": len(lengths), "held_tokens": held, "logical_tokens": logical,
        "waste": 1 - logical / held if held else 0.0,
        "saved": 1 - held / logical if logical else 0.0,
    }  # fmt: skip


def in_slots(requests: Requests, reserve: int, **card: Any) -> Parts:
    """A slot for each, whatever its length."""
    needs = [(prompt + output, reserve) for prompt, output in requests]
    derived = admitted(needs, NAIVE["budget_tokens"](**card))
    longer = [length > reserve for length, _ in needs[: derived["batch"]]]
    return {**derived, "misfits": sum(longer)}


def on_pages(
    requests: Requests, prefix: int, page_tokens: int = 16, copy_on_write: bool = False, **card: Any
) -> Parts:
    """The prefix once; then each page on which a request has a token of its own."""
    room = NAIVE["budget_tokens"](**card) // page_tokens * page_tokens
    stored = page_tokens * math.ceil(prefix / page_tokens)

    def needs() -> Iterator[tuple[int, int]]:
        for prompt, output in requests:
            shared = min(prefix, prompt)
            own = prompt + output - shared
            start = shared % page_tokens if copy_on_write and own else 0
            yield prompt + output, page_tokens * math.ceil((start + own) / page_tokens)

    return admitted(needs(), room, stored) if stored <= room > 0 else admitted([], 0)


def assumed_curve(occupancy: float, n: int = 2000, seed: int = 3) -> int:
    """The tokens of those of n steps that preempt."""
    rng, tokens, chance = random.Random(seed), 0, max(0, (occupancy - 0.85) / 0.15) ** 2
    for _ in range(n):
        if rng.random() < chance:
            tokens += int(rng.lognormvariate(6.4, 1.0))
    return tokens


def of_config(config: Parts, tokens: int = 1, dtype_bytes: float | None = None, tp: int = 1) -> int:
    """What each layer holds, of each token that it keeps."""
    window = config.get("sliding_window", tokens)
    layers = config.get("layer_types", ["sliding_attention"] * config["num_hidden_layers"])
    held = sum(tokens if kind == "full_attention" else min(tokens, window) for kind in layers)
    kv_heads = config.get("num_key_value_heads", 16)
    values: int = 2 * max(1, kv_heads // tp) * config.get("head_dim", config["hidden_size"] // 16)
    if "kv_lora_rank" in config:  # a latent: all of it on each GPU
        values = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    return math.ceil(held * values * (2 if dtype_bytes is None else dtype_bytes))


def sized(
    config: Parts, requests: Requests, card: tuple[float, float, float], n_params: float,
    tp: int = 1, active_params: float | None = None, weight_bytes: float = 2,
    dtype_bytes: float | None = None, utilization: float = 0.92, rest_gib: float | None = None,
) -> Parts:  # fmt: skip
    """A deployment, from its memory to the seconds of a step."""
    gib, gb_per_s, tflops = card
    memory, weights = tp * gib, n_params * weight_bytes / 1024**3
    rest = tp * (0.05 * gib if rest_gib is None else rest_gib)
    budget = memory * utilization - weights - rest
    resident = NAIVE["resident_tokens"](requests)
    length = math.ceil(resident)
    on_each = math.ceil(of_config(config, length, dtype_bytes, tp) / length)
    tokens = NAIVE["budget_tokens"](budget, tp * on_each)
    fill_pool, fill_step = tokens / resident, NAIVE["step_fills"](requests, 8192)
    running = max(1, min(0.95 * fill_pool, fill_step))
    n, prompts, outputs = len(requests), *map(sum, zip(*requests))
    prefilled, held = running * prompts / outputs, running * resident
    paces = []
    for mfu, mbu in ((1, 1), (0.5, 0.8)):
        token_ms = 2000 * (active_params or n_params) / (tp * tflops * 1e12 * mfu)
        byte_ms = 1000 / (tp * gb_per_s * 1e9 * mbu)
        weights_ms, prefill_ms = n_params * weight_bytes * byte_ms, prefilled * token_ms
        decode_ms, kv_ms = max(weights_ms, running * token_ms), held * tp * on_each * byte_ms
        step_ms = decode_ms + prefill_ms + kv_ms
        paces.append({
            "ridge": weights_ms / token_ms, "weights_ms": weights_ms, "decode_ms": decode_ms,
            "prefill_ms": prefill_ms, "kv_ms": kv_ms, "step_ms": step_ms,
            "tokens_per_s": 1000 * running / step_ms, "per_user": 1000 / step_ms,
            "requests_per_s": 1000 * running / step_ms / (outputs / n),
            "first_token_ms": max(weights_ms, prompts / n * token_ms),
        })  # fmt: skip
    return {
        "memory_gib": memory, "used_gib": memory * utilization, "weights_gib": weights,
        "rest_gib": rest, "budget_gib": budget, "bytes_on_each": on_each,
        "kv_per_token": tp * on_each, "tokens": tokens, "resident": resident,
        "fill_pool": fill_pool, "fill_step": fill_step,
        "least": min(fill_pool, fill_step),
        "limit": "KV memory" if fill_pool <= fill_step else "the step",
        "prompt": prompts / n, "output": outputs / n,
        "max_num_seqs": max(1, math.ceil(min(fill_pool, fill_step))),
        "cap": max(1, int(min(0.9 * fill_pool, fill_step))),
        "running": running, "prefill_tokens": prefilled, "held_tokens": held,
        **{name: [pace[name] for pace in paces] for name in paces[0]},
    }  # fmt: skip


def mean_lengths(requests: Requests) -> Parts:
    """Traffic, without its two servers."""
    n, prompts, outputs = len(requests), *map(sum, zip(*requests))
    fill_pool = 565_248 / NAIVE["resident_tokens"](requests)
    fill_step = NAIVE["step_fills"](requests, 8192)
    return {
        "requests": n, "prompt": prompts / n, "output": outputs / n, "again": 0.0,
        "prompt_per_output": prompts / outputs, "fill_pool": fill_pool, "fill_step": fill_step,
        "least": min(fill_pool, fill_step, 1024),
    }  # fmt: skip


PRIVATE = math.exp(5.0 + 0.9**2 / 2) + math.exp(5.5 + 0.8**2 / 2) - 1  # the means of what is drawn

# Each mechanism once more, naively, with defaults of its own.
NAIVE: dict[str, Callable[..., Any]] = {
    "kv_bytes_per_token": lambda layers, kv_heads, head_dim, dtype_bytes: (
        math.ceil((layers * kv_heads * head_dim + layers * kv_heads * head_dim) * dtype_bytes)
    ),
    "kv_gib": lambda tokens, kv_per_token=327_680: tokens * kv_per_token / 1024**3,
    "budget_share": lambda gib, budget_gib=172.5: gib / budget_gib,
    "kv_bytes": of_config,
    "seq_lengths": lambda n, seed=5: list(workload(n, seed, 6.4, 1.0)),
    "budget_tokens": lambda budget_gib=172.5, kv_per_token=327_680: (
        int(budget_gib * 1024**3) // kv_per_token
    ),
    "contiguous": in_slots,
    "paged": lambda requests, page_tokens=16, **card: on_pages(requests, 0, page_tokens, **card),
    "prefixed_lengths": lambda n, prefix, seed=9: [
        (prefix + suffix, output) for suffix, output in workload(n, seed, 5.0, 0.9)
    ],
    "shared_prefix": lambda *requests, **options: (
        {name: x for name, x in on_pages(*requests, **options).items() if name != "waste"}
    ),
    "expected_saving": lambda n, prefix, private=PRIVATE: (
        1 - (prefix + n * private) / (n * (prefix + private)) if n * (prefix + private) else 0.0
    ),
    "fetch_seconds": lambda prefix, gb_per_s, kv_per_token=327_680: (
        prefix * kv_per_token / 1e9 / gb_per_s
    ),
    "recompute_seconds": lambda prefix, n_params=70e9, flops_per_gpu=989.5e12, tp=4, mfu=1.0,
    attention=False, layers=80, q_heads=64, head_dim=128: (
        (2 * n_params * prefix + attention * 4 * layers * q_heads * head_dim * prefix**2 / 2)
        / tp / flops_per_gpu / mfu
    ),
    "break_even": lambda prefix=1, kv_per_token=327_680, **model: (
        prefix * kv_per_token / 1e9 / NAIVE["recompute_seconds"](prefix, **model)
    ),
    "shortest_fetch": lambda gb_per_s: 1 + max(0, math.floor(
        (327_680 * 4 * 989.5e12 / (gb_per_s * 1e9) - 2 * 70e9) / (4 * 80 * 64 * 128 / 2)
    )),
    "step_seconds": lambda tokens, held_tokens, kv_per_token=327_680, n_params=70e9,
    flops_per_gpu=989.5e12, gb_per_s=3350, tp=4, mfu=1.0, mbu=1.0, active_params=None,
    weight_bytes=2: (
        max(n_params * weight_bytes / (gb_per_s * 1e9 * mbu),
            2 * tokens * (active_params or n_params) / (flops_per_gpu * mfu))
        + held_tokens * kv_per_token / (gb_per_s * 1e9 * mbu)
    ) / tp,
    "ridge_tokens": lambda n_params=70e9, active_params=None, flops_per_gpu=989.5e12,
    gb_per_s=3350, mfu=1.0, mbu=1.0, weight_bytes=2: (
        n_params * weight_bytes / (gb_per_s * 1e9) / mbu
        / (2 * (active_params or n_params) / flops_per_gpu / mfu)
    ),
    "resident_tokens": lambda requests, page_tokens=16: page_tokens / 2 + sum(
        sum(range(prompt, prompt + output)) + output / 2 for prompt, output in requests
    ) / sum(output for _, output in requests),
    "step_fills": lambda requests, max_batched_tokens: (
        max_batched_tokens * sum(o for _, o in requests) / sum(p + o for p, o in requests)
    ),
    "preempted_tokens": assumed_curve,
    "size": sized,
    "traffic": mean_lengths,
}  # fmt: skip
NAMES = {**NAIVE, "math": math, "sys": sys}  # what a call may speak of


class Draw:
    """Arguments, by random() alone: all else may draw otherwise in another version of Python."""

    def __init__(self) -> None:
        self.random = random.Random(2023).random
        self.size = 1.0  # how far from the least a number may be

    def whole(self, least: int, most: int, divisor: int = 1) -> Any:
        """A whole number, often one of the edges; or one divided by another."""
        reach, chance = int((most - least) * self.size), self.random()
        between = int((reach + 1) * self.random())
        n = least + (0 if chance < 0.2 else reach if chance > 0.9 else between)
        return n if divisor == 1 else n / divisor

    def of(self, *choices: Any) -> Any:
        """One of these."""
        return choices[int(len(choices) * self.random())]

    def requests(self, least: int, *units: int) -> Requests:
        """A few requests, with a prompt and an output of at least so many tokens."""
        unit, n = self.of(*units), self.whole(least, 9)
        lengths = [least + unit * self.whole(0, 40) for _ in range(2 * n)]
        return list(zip(lengths[:n], lengths[n:]))

    def config(self) -> Parts:
        """A config.json; of one that does not state its KV heads or their size, these follow."""
        layers, window = self.whole(1, 40), {"sliding_window": self.whole(1, 5000)}
        kinds = [self.of("full_attention", "sliding_attention") for _ in range(layers)]
        kv_heads = {"num_key_value_heads": self.of(1, 2, 4, 8, 16)}
        shape = {**kv_heads, "head_dim": self.whole(1, 128)}
        kind: Parts = self.of(
            {"model_type": "llama", "torch_dtype": "float32", **self.of({}, kv_heads, shape)},
            {"model_type": "mistral", **window, **shape},
            {"model_type": "gpt_oss", **window, **shape, "layer_types": kinds},
            {"model_type": "deepseek_v3", "kv_lora_rank": self.whole(1, 512),
             "qk_rope_head_dim": self.whole(1, 64)},
        )  # fmt: skip
        return {
            **kind, "num_hidden_layers": layers, "num_attention_heads": 16,
            "hidden_size": 16 * self.whole(1, 128),
        }  # fmt: skip


# How a parameter is drawn, by its name, or after that of its mechanism: from the least to the most,
# perhaps divided by the third; one of a list; or by a function.
DRAWN: dict[str, Any] = {
    "layers": (1, 100), "kv_heads": (1, 64), "q_heads": (1, 128), "head_dim": (1, 256),
    "dtype_bytes": [1, 2, 4, 0.5, 0.55, 17 / 16, 9 / 16], "weight_bytes": [0.5, 1, 4],
    "tokens": (0, 9000), "step_seconds tokens": (0, 4000, 2), "kv_gib tokens": (0, 10**12),
    "held_tokens": (0, 1_200_000, 2), "max_batched_tokens": (1, 18_000, 2), "page_tokens": (1, 40),
    "n": (0, 100), "expected_saving n": (0, 10**4), "preempted_tokens n": (0, 200),
    "seed": (0, 99), "gib": (0, 400, 4), "budget_gib": (1, 400, 4), "kv_per_token": (1, 10**6),
    "fetch_seconds kv_per_token": (1, 10**6, 2), "break_even kv_per_token": (1, 10**6, 2),
    "step_seconds kv_per_token": (1, 10**6, 2), "n_params": (10**9, 10**12),
    "size n_params": (10**9, 2 * 10**9), "active_params": [None, 1e8, 9e8],
    "flops_per_gpu": (10**14, 10**15), "tp": [1, 2, 4, 8, 16], "mfu": (20, 100, 100),
    "mbu": (20, 100, 100), "utilization": (50, 100, 100), "rest_gib": (0, 40, 4),
    "attention": [True, True, False], "copy_on_write": [True, True, False],
    "break_even prefix": (1, 10**6), "fetch_seconds prefix": (0, 10**6),
    "recompute_seconds prefix": (0, 10**6), "config": Draw.config,
    "private": lambda draw: draw.of(0, draw.whole(0, 2000, 4)),
    "occupancy": lambda draw: draw.of(0, 0.85, 1, 0.85 + 0.15 * draw.random()),
    "prefix": lambda draw: draw.of(1, 1, 1000) * draw.whole(0, 60),
    "reserve": lambda draw: draw.of(1, 1, 9421) * draw.whole(1, 60) + draw.whole(0, 1),
    "gb_per_s": lambda draw: draw.of(0.01, 0.1, 1, 10, 1000) * (1 + 9 * draw.random()),
    "card": lambda draw: (draw.of(40, 400) + draw.whole(0, 9, 4), 3000, 500),
    "requests": lambda draw: draw.requests(0, 1, 1, 1, 30_000),
    "resident_tokens requests": lambda draw: [*draw.requests(0, 1), (3, 2)],
    "step_fills requests": lambda draw: draw.requests(1, 1, 50),
    "size requests": lambda draw: draw.requests(1, 1, 50),
    "traffic requests": lambda draw: draw.requests(1, 1, 50),
}  # fmt: skip


def drawn(name: str, parameter: str, draw: Draw) -> Any:
    """An argument of a mechanism."""
    kind = DRAWN.get(f"{name} {parameter}") or DRAWN[parameter]
    if callable(kind):
        return kind(draw)
    return draw.of(*kind) if isinstance(kind, list) else draw.whole(*kind)


def drawn_calls(name: str) -> list[str]:
    """Calls with no optional parameter, with each alone, with all and with some; short ones first.

    Where a budget or the KV of a token is drawn, there is room for a few tokens.
    """
    draw, calls = Draw(), []
    bare = globals()[name].__wrapped__
    parameters = bare.__code__.co_varnames[: bare.__code__.co_argcount]
    optional = parameters[len(parameters) - len(bare.__defaults__ or ()) :]
    n = 5 * (len(optional) + 3)
    for i in range(n):
        draw.size = (i + 1) / n
        some = [x for x in optional if draw.random() < 0.5]
        given = [[], optional, some, *([x] for x in optional)][i % (len(optional) + 3)]
        case = {x: drawn(name, x, draw) for x in parameters if x in given or x not in optional}
        if name in ("budget_tokens", "contiguous", "paged", "shared_prefix"):
            tokens = draw.whole(0, 300) + draw.of(0, 0, 0.5, 0.999) or 0.5
            if "requests" in case:  # or just what the first of them need, or a token less
                first = case["requests"][: draw.whole(0, 9)]
                endless = {**case, "requests": first, "budget_gib": 10**9, "kv_per_token": 1}
                needed = NAIVE[name](**endless)["held_tokens"]
                tokens = draw.of(tokens, needed, needed - 1) if 1 < needed < 3000 else tokens
            if "budget_gib" in case:
                case["budget_gib"] = tokens * case.get("kv_per_token", 327_680) / 2**30
            elif "kv_per_token" in case:
                case["kv_per_token"] = int(345 * 2**29 / tokens)
            elif "page_tokens" in case:
                case["page_tokens"] *= 256  # or a pool has too many pages to be quick
        by_name = {*optional}.difference({"page_tokens", "tokens"})
        given = [f"{x}={value!r}" if x in by_name else repr(value) for x, value in case.items()]
        calls.append(f"{name}({', '.join(given)})")
    return sorted(calls, key=len)


class Held:
    """A sequence of a naive pool."""

    def __init__(self, table: list[int], tokens: int) -> None:
        self.table, self.tokens = table, tokens


class NaivePool:
    """A pool of few lines: each page that it hands out is new, and held while a table names it.

    `places` says which page of yours stands for each of its own, as seen when it was handed out.
    """

    def __init__(self, pages: int, page_tokens: int = 16) -> None:
        if pages < 1 or page_tokens < 1:
            raise ValueError
        self.pages, self.page_tokens = pages, page_tokens
        self.alive: list[Held] = []
        self.new_pages = count()
        self.places: dict[int, int] = {}

    def allocate(self, tokens: int) -> Held:
        self.alive.append(Held(self.grown([], 0, tokens), tokens))
        return self.alive[-1]

    def append(self, sequence: Held, n: int = 1) -> None:
        self.alive.index(sequence)  # ValueError if it is none of these
        sequence.table = self.grown(sequence.table, sequence.tokens, n)
        sequence.tokens += n

    def fork(self, sequence: Held, tokens: int) -> Held:
        self.alive.index(sequence)
        if not 0 <= tokens <= sequence.tokens:
            raise ValueError
        table = sequence.table[: math.ceil(tokens / self.page_tokens)]
        self.alive.append(Held(table, tokens))
        return self.alive[-1]

    def release(self, sequence: Held) -> None:
        self.alive.remove(sequence)

    def held(self) -> list[int]:
        """The pages in all tables: a shared one as often as it is shared."""
        return [page for sequence in self.alive for page in sequence.table]

    def grown(self, table: list[int], tokens: int, n: int) -> list[int]:
        """The table of a sequence that writes n more tokens."""
        if n < 0:
            raise ValueError
        held = self.held()
        if n and tokens % self.page_tokens and held.count(table[-1]) > 1:
            table = table[:-1]  # copy-on-write: its others keep this page
        needed = math.ceil((tokens + n) / self.page_tokens) - len(table)
        if needed > self.pages - len({*held}):
            raise OutOfPages
        return table + list(islice(self.new_pages, needed))


def stories() -> Iterator[list[str]]:
    """Lines about two small pools, legal or not, the shortest first."""
    draw = Draw()
    for i in range(240):
        story: list[str] = []
        made: dict[str, int] = {}  # tokens of each sequence, if nothing is refused
        pages, page = draw.whole(1, 6), draw.of(1, 2, 2, 3, 4, 16)
        sizes = pages if page == 16 else f"{pages}, {page}"
        for name in "abcdefghij"[: 1 + i // 25]:
            verb = draw.of("allocate", "append", "append", "fork", "fork", "release", "release")
            old = draw.of(*made or [""])
            verb, held = verb if made else "allocate", made.get(old, 0)
            whole = page * draw.whole(0, pages)
            tokens = draw.of(1, whole, draw.whole(-1, page), draw.whole(0, pages * page + 1))
            if verb == "fork":
                tokens = draw.of(held, draw.whole(0, held), draw.whole(-1, held + 1))
            how_many = "" if verb == "append" and draw.random() < 0.1 else f", {tokens}"
            pool = draw.of(*"pppppq")
            line, new, tokens = {
                "allocate": (f"{name} = {pool}.allocate({tokens})", name, tokens),
                "fork": (f"{name} = {pool}.fork({old}, {tokens})", name, tokens),
                "append": (f"{pool}.append({old}{how_many})", old, held + tokens),
                "release": (f"{pool}.release({old})", old, 0),
            }[verb]
            made[new] = max(0, tokens)
            created = f"{pool} = PagePool({sizes})"
            story += [line] if created in story else [created, line]
        yield story
    # A shared page, full or not, and tokens behind it, in pools that just have room for them.
    for tokens, pages, n in product((1, 2), (1, 2, 3), range(6)):
        shared = [f"p = PagePool({pages}, 2)", f"a = p.allocate({tokens})"]
        shared += [f"b = p.fork(a, {tokens})", f"p.append(b, {n})"]
        yield [*shared, "p.release(b)", "p.release(a)"]
    # More sharers than a byte counts, each a fork of the one before; a long table; no pool at all.
    forks = "[many.append(p.fork(many[-1], 2)) for _ in range(300)]"
    many = ["p = PagePool(2, 2)", "a = p.allocate(2)", "many = [a]", forks, *["p.release(a)"] * 2]
    yield [*many, *(f"[p.release(x) for x in many[{x}]]" for x in ("1:290", "290:"))]
    yield ["p = PagePool(70, 1)", "a = p.allocate(1)", "p.append(a, 69)"]
    for sizes in ("0", "-1", "1, 0"):
        yield [f"p = PagePool({sizes})"]


# A line is run by both, and in many stories.
compiled = lru_cache(4096)(partial(compile, filename="verify"))


def error_of(line: str, names: Parts) -> Exception | None:
    """Run a line of a story; what it raises, if anything."""
    try:
        exec(compiled(line, mode="exec"), names)
    except Exception as error:
        return error
    return None


def read_back(naive: Parts, yours: Parts) -> str:
    """Where your sequences and pools say something else than the naive ones."""
    for owner in [name for name in "pq" if name in naive]:
        pool, mine = naive[owner], yours[owner]
        for name in [name for name in naive if naive[name] in pool.alive]:
            if difference := misplaced(pool, naive[name], yours[name]):
                return f"{name}{difference}"
        tables = [pool.places[page] for page in pool.held()]
        for figure, n in (("held", len({*tables})), ("free", pool.pages - len({*tables}))):
            said = getattr(mine, figure, n)
            if n != said and (difference := unlike(n, said)):
                return f"{owner}.{figure} {difference}"
        for page in range(pool.pages) if hasattr(mine, "references") else ():
            n, said = tables.count(page), mine.references(page)
            if n != said and (difference := unlike(n, said)):
                return f"{owner}.references({page}) {difference}"
    return ""


def misplaced(pool: NaivePool, sequence: Held, mine: Any) -> str:
    """Where a sequence of yours is not as long, or on pages that it should not have.

    A page of yours may be any that is free; while it is held, it stays where it is.
    """
    if not (hasattr(mine, "table") and hasattr(mine, "tokens")):
        raise Wrong(f"must return what has table and tokens, not {described(mine)}")
    table, places = list(mine.table), pool.places
    if table != [places.get(page) for page in sequence.table]:
        kept = [places[page] for page in sequence.table if page in places]
        needed, fresh = sequence.table[len(kept) :], table[len(kept) :]
        free = {*range(pool.pages)}.difference(map(places.get, pool.held()))
        free_ones = free.intersection(fresh)
        if table[: len(kept)] != kept or not len(free_ones) == len(needed) == len(fresh):
            kept_and = f"{kept} and " if kept else ""
            return f" in {kept_and}{len(needed)} free pages, yours {described(table)}"
        places.update(zip(needed, fresh))
    difference = unlike(sequence.tokens, mine.tokens)
    return f".tokens {difference}" if difference else ""


class Wrong(BaseException):  # no Exception, which a mechanism may have to raise
    """What is wrong with a mechanism, in words."""


def described(value: Any) -> str:
    """`shown`, in few characters, and even of a value whose repr raises what is no Exception."""
    try:
        return shortened(shown(value), 40)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return f"<a {type(value).__name__}>"


def ascii_line(text: str) -> str:
    """`text` on one line and in ASCII, whatever an exception may say."""
    return " ".join(text.split()).encode("unicode_escape").decode()


def shortened(text: str, width: int) -> str:
    """`text` on one line, in ASCII, and without its middle if that is too long."""
    line = ascii_line(text)
    end = (width - 3) // 3
    return line if len(line) <= width else f"{line[: width - 3 - end]}...{line[-end:]}"


def same(derived: Any, yours: Any, tolerance: float) -> bool:
    """Whether two numbers are the same: exactly, if the first is whole."""
    try:
        slack = 0.0 if isinstance(derived, int) else tolerance
        return math.isclose(derived, yours, rel_tol=slack, abs_tol=slack / 1e6)
    except (TypeError, ValueError, OverflowError):  # no number at all
        return False


def unlike(derived: Any, yours: Any, tolerance: float = 1e-9) -> str:
    """Where what is returned is not what is derived, in words; nothing if it is.

    A dict is of attributes (`saved` may be lacking), a list of pairs, and a tuple is one.
    """
    if isinstance(derived, dict):
        wanted = [x for x in derived if x != "saved" or hasattr(yours, x)]
        if not all(hasattr(yours, x) for x in wanted):
            return f"must return what has {', '.join(wanted)}, not {described(yours)}"
        both = ((f"{x.replace('_', ' ')} ", derived[x], getattr(yours, x)) for x in wanted)
    elif isinstance(derived, (list, tuple)):
        if not isinstance(yours, Iterable):
            return f"must return (prompt, output) pairs, not {described(yours)}"
        items = list(islice(yours, len(derived) + 1))
        if len(items) != len(derived):
            return f"{len(derived):,} items, yours {len(items):,}"
        if {*map(type, items)} == {tuple} and items == derived:
            return ""
        both = ((f"[{i}] ", *pair) for i, pair in enumerate(zip(derived, items)))
    elif isinstance(derived, str):
        return "" if derived == yours else f"{derived}, yours {described(yours)}"
    elif same(derived, yours, tolerance):
        return ""
    else:
        form = "{:,}" if isinstance(derived, int) else "{:,.6g}"
        is_number = isinstance(yours, (int, float)) and abs(yours) < 1e300
        figures = form.format(derived), form.format(yours) if is_number else described(yours)
        if figures[0] == figures[1]:
            figures = repr(derived), described(yours)
        return f"{figures[0]}, yours {figures[1]}"
    for where, figure, mine in both:
        if difference := unlike(figure, mine, tolerance):
            return where + difference
    return ""


def evaluated(call: str, **mechanisms: Any) -> Any:
    """What a call returns, by the naive mechanisms and those that are given."""
    return eval(compiled(call, mode="eval"), NAMES, mechanisms)


class Grading:
    """The mechanisms in `s`, asked one call after the other; `doing` is the one that is asked."""

    def __init__(self, s: Parts) -> None:
        self.s, self.doing = s, ""
        self.known: dict[str, Fault | None] = {}  # several claims rest on the same call

    def fault(self, doing: str, difference: Callable[[], str]) -> Fault | None:
        """A call and what is wrong with it, a difference or an error; None if nothing is."""
        self.doing = doing
        try:
            said = difference()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a reader's mechanism may do anything
            said = str(error) if isinstance(error, Wrong) else f"raises {described(error)}"
        return (self.doing, said) if said else None

    def ask(self, name: str, *args: Any, **options: Any) -> Any:
        """What a mechanism returns."""
        try:
            return self.s[name](*args, **options)
        except TypeError:
            from inspect import signature  # slow to load, and seldom needed

            try:
                signature(self.s[name]).bind(*args, **options)
            except TypeError as error:
                raise Wrong(str(error)) from None
            raise

    def answer(self, call: str) -> Any:
        """What a call returns, if its mechanism is the one that is graded."""
        name = call.partition("(")[0]
        return evaluated(call, **{name: partial(self.ask, name)})

    def compare(self, call: str, derived: Any = None, tolerance: float = 1e-9) -> Fault | None:
        """What is wrong with a call, by the naive mechanism if nothing else is derived."""
        if call not in self.known:
            derived = evaluated(call) if derived is None else derived
            self.known[call] = self.fault(
                call, lambda: unlike(derived, self.answer(call), tolerance)
            )
        return self.known[call]

    def fault_of_refusal(self, call: str) -> str:
        """What a call returns that must raise an error; nothing if it does."""
        with contextlib.suppress(Exception):
            return f"an error, yours {described(self.answer(call))}"
        return ""

    def fault_of_pool(self) -> str:
        """The first wrong story of a pool, without the lines that it does not need."""
        self.doing = "PagePool(6)"
        pool = self.answer(self.doing)
        wanted = ("allocate", "append", "fork", "release", "free", "held", "references")
        lacking = [x for x in wanted if not hasattr(pool, x)]
        for story in stories():
            story = [line for line in story if not any(f".{x}(" in line for x in lacking)]
            if self.fault_of_story(story):
                for i in reversed(range(len(story))):
                    fewer = story[:i] + story[i + 1 :]
                    story = fewer if self.fault_of_story(fewer) else story
                return self.fault_of_story(story)
        self.doing = ""
        return f"lacks {', '.join(lacking)}; what it has is right" if lacking else ""

    def fault_of_story(self, story: list[str]) -> str:
        """Run a story on naive pools and on yours; where the two differ, after any of its lines."""
        errors = [x for x in (self.s["OutOfPages"], OutOfPages) if isinstance(x, type)]
        out_of_pages = tuple(x for x in errors if issubclass(x, Exception))
        naive: Parts = {"PagePool": NaivePool}
        yours: Parts = {"PagePool": partial(self.ask, "PagePool")}
        told: list[str] = []
        for line in story:
            right = error_of(line, naive)
            if isinstance(right, NameError):
                continue  # what made it was refused
            told.append(line)
            self.doing = "; ".join(told)
            said = error_of(line, yours)
            full, is_full = isinstance(right, OutOfPages), isinstance(said, out_of_pages)
            if (right is None) != (said is None) or (full and not is_full):
                wanted = "OutOfPages" if full else "an error" if right else "no error"
                raised = "OutOfPages" if is_full else f"raises {described(said)}"
                return f"{wanted}, yours {'none' if said is None else raised}"
            if difference := read_back(naive, yours):
                return difference
        return ""

    def fault_of_error(self) -> str:
        """What is wrong with OutOfPages, which the pool must raise."""
        mine = self.s["OutOfPages"]
        raised = OutOfPages if self.s["PagePool"] is PagePool else mine
        right = isinstance(mine, type) and issubclass(mine, Exception) and issubclass(raised, mine)
        return "" if right else f"must be an exception that PagePool raises, not {described(mine)}"

    def fault_of_steps(self, requests: Requests, server: str, counts: Parts, checksum: str) -> str:
        """Where a scheduler does not make the steps that the engine made."""
        idle, *rows, last = self.steps(requests, [], server, counts["steps"])
        said = {x: sum(row[x] for row in rows) for x in rows[0] if x in (*counts, "entered")}
        said["peak_pages"] = max(row["held"] for row in rows)
        derived = {**counts, "entered": len(requests)}
        if difference := unlike({x: derived[x] for x in said}, SimpleNamespace(**said)):
            return difference
        steps = json.dumps([[*row.values()][:5] for row in rows])
        if f"{zlib.crc32(steps.encode()):08x}" != checksum:
            return "not the engine's steps, though their sums are right"
        if idle["running"]:
            return "a step of a scheduler without requests runs some"
        if not last["generated"]:
            return "what is added after the end does not run"
        n = rows[0]["running"] + 1
        late = len(rows) < 99 and self.steps(requests[:n], requests[n:], server, len(rows))
        if late and late != [idle, *rows, last]:
            return "its steps are others if requests are added after the first"
        return ""

    def steps(self, first: Requests, later: Requests, server: str, n: int) -> list[dict[str, int]]:
        """What a scheduler says of n steps, of one before it has requests, and of one at the end.

        It gets the first requests before its first step, and the later ones after it.
        """
        scheduler, another = (self.answer(f"Scheduler({server})") for _ in range(2))
        another.add(1, 1)
        names, rows = ("running", "computed", "generated", "held", "preempted"), []
        arrivals: list[Requests] = [[] for _ in range(n + 2)]
        arrivals[1], arrivals[2], arrivals[-1] = first, later, [(1, 1)]
        for arriving in arrivals:
            for prompt, output in arriving:
                scheduler.add(prompt, output)
            step = scheduler.step()
            own = [x for x in ("prefilled", "reprefilled", "entered") if hasattr(step, x)]
            rows.append({x: int(getattr(step, x)) for x in (*names, *own)})
        return rows

    def faults(self, name: str) -> Iterator[Fault | None]:
        """All that is asked of a mechanism beyond the claims."""
        if name in NAIVE:
            yield from map(self.compare, drawn_calls(name))
        elif name == "PagePool":
            yield self.fault("", self.fault_of_pool)
        elif name == "OutOfPages":
            yield self.fault("", self.fault_of_error)
        elif name == "serve":
            for requests, server, counts, _ in engine_runs():
                yield self.compare(f"serve({requests}, {server})", counts)
        elif name == "Scheduler":
            for requests, server, counts, checksum in engine_runs():
                if "prefix_caching" not in server:
                    steps = partial(self.fault_of_steps, requests, server, counts, checksum)
                    yield self.fault(f"Scheduler({server}) on {requests}", steps)
        else:
            raise NotImplementedError(f"nothing grades {name}")
        for call, derived, tolerance in KNOWN:
            if call.startswith(f"{name}("):
                yield self.compare(call, derived, tolerance)
        for call in REFUSED:
            if call.startswith(f"{name}("):
                yield self.fault(call, partial(self.fault_of_refusal, call))


# What vLLM 0.33's own scheduler did, recorded: its server | steps, generated, prefilled,
# reprefilled, preempted, peak pages | a checksum of each step's (running, computed, generated,
# held, preempted) | its requests. The first four runs follow by hand, and the first one with
# caching. A limit of 1,000 running or 8,192 tokens does not bind, and is left out.
ENGINE_RUNS = """
863 | 2 602 9300 0 0 863 | 8ddff513 | 9000,2 1,2*300
3, 4, max_batched_tokens=5 | 5 4 17 8 1 3 | 7fb7827b | 3,3 8,1
18, 4, watermark=0.1 | 2 4 66 0 0 17 | 341b3935 | 39,2 27,2
19, 4, watermark=0.1 | 4 4 72 0 0 11 | 496e56e8 | 40,2 32,2
14, watermark=0.01, max_batched_tokens=64 | 18 24 71 0 0 6 | 8701feff | 7,18 64,6
5, 4, max_running=4 | 19 27 41 6 1 5 | 2e7668ed | 15,3 10,4 3,6 1,2 6,12
32, 4, max_running=2, max_batched_tokens=200 | 49 90 173 0 0 32 | 3d0d1173 | 105,7 10,15 44,34 14,34
5, max_running=8, max_batched_tokens=64 | 90 117 219 49 1 5 | e4784911 | 15,14 42,14 24,27 7,20
    57,22 25,20
39, 4, max_running=2, max_batched_tokens=64 | 92 119 262 100 1 39 | 4d138ba4 | 31,54 3,5 20,16 5,3
    99,38 4,3
21, max_batched_tokens=64 | 176 250 1040 367 3 21 | 94c8f3d6 | 113,103 11,27 167,59 7,14 289,2 14,11
    31,18 10,10 30,2 1,4
33, watermark=0.3, max_running=4, max_batched_tokens=20 | 238 274 1109 0 0 29 | 5dd18be2 | 12,18
    422,28 148,104 10,79 29,9 405,9 83,27
3, max_batched_tokens=64 | 120 159 354 84 4 3 | aa0733de | 2,16 25,9 16,24 2,4 6,13 5,22 6,1 3,8
    25,15 24,19 47,1 8,3 28,10 36,4 37,10
14, 4, watermark=0.05, max_running=8 | 119 233 477 188 15 14 | 3ceaba0e | 21,9 18,25 1,1 2,1 3,1
    18,5 5,10 16,24 8,31 20,6 2,14 1,11 20,25 26,2 4,13 15,5 8,8 12,7 47,2 15,2 26,9 1,22
17, 4, watermark=0.1, max_running=4, max_batched_tokens=64 | 195 340 372 204 9 17 | 9c44e72e | 6,55
    15,21 12,30 22,5 2,4 7,19 6,3 16,44 5,55 4,1 2,1 37,9 3,22 20,36 2,6 9,29
37, watermark=0.05 | 101 388 969 90 1 36 | 3f3ec851 | 137,26 17,20 22,3 5,22 29,1 169,76 8,4 14,25
    73,101 11,7 89,71 223,7 69,12 13,13
863, prefix_caching=True | 2 602 9300 0 0 863 | 8ddff513 | 9000,2 1,2*300
5, max_running=8, max_batched_tokens=64, prefix_caching=True | 90 117 171 1 1 5 | 2caf32c5 | 15,14
    42,14 24,27 7,20 57,22 25,20
9, watermark=0.01, max_batched_tokens=200, prefix_caching=True | 92 142 179 22 3 9 | 260e5be0 | 4,3
    50,23 52,84 11,9 16,8 1,3 19,2 4,10
9, watermark=0.01, prefix_caching=True | 99 217 423 93 4 9 | 45788ccf | 30,32 14,19 23,8 4,48 32,27
    17,57 74,2 1,2 94,7 29,7 11,2 1,6
37, watermark=0.05, prefix_caching=True | 101 388 969 90 1 36 | 3f3ec851 | 137,26 17,20 22,3 5,22
    29,1 169,76 8,4 14,25 73,101 11,7 89,71 223,7 69,12 13,13
21, max_batched_tokens=64, prefix_caching=True | 173 250 786 113 3 21 | b5c1f74c | 113,103 11,27
    167,59 7,14 289,2 14,11 31,18 10,10 30,2 1,4
"""


def engine_runs() -> Iterator[tuple[Requests, str, Parts, str]]:
    """The recorded runs: requests, the arguments of their server, counts, a checksum."""
    totals = ("steps", "generated", "prefilled", "reprefilled", "preempted", "peak_pages")
    for record in re.split(r"\n(?=\S)", ENGINE_RUNS.strip()):
        server, counts, checksum, lengths = record.split(" | ")
        requests = []
        for length in lengths.split():
            prompt, output, times = map(int, re.split("[,*]", f"{length}*1")[:3])
            requests += [(prompt, output)] * times
        yield requests, server, dict(zip(totals, map(int, counts.split()))), checksum


# What follows by hand; what the engine's scheduler did on the chat mix, with its steady state, to
# as many digits as are known; what Scheduler makes of traffic's two servers; and calls (None) that
# are not drawn, but compared with the naive mechanism.
ONE_AT_A_TIME = 4 / (math.hypot(8, 8) + 2 * math.hypot(1, 12) + math.hypot(17, 20))
KNOWN: list[tuple[str, Parts | None, float]] = [
    ("serve([(1, 1)] * 1100, 1100)", {"steps": 1}, 0),
    ("serve([(1, 1)] * 1100, 1100, prefix_caching=True)", {"steps": 1}, 0),
    ("serve([(3, 1)], 9, 4)", {"running": 0.0, "held": 0.0, "again": 0.0, "tokens_per_s": 0.0}, 0),
    ("serve([(4, 2), (7, 1), (8, 3), (17, 2)], 7, 4, max_running=1, step_seconds=math.hypot)",
     {"running": 1.0, "held": 13 / 28, "again": 0.0, "tokens_per_s": ONE_AT_A_TIME}, 1e-9),
    ("serve([(4, 1), (8, 1), (12, 1)], 10, 4, max_running=1, step_seconds=math.hypot,"
     " prefix_caching=True)",
     {"running": 1.0, "held": 0.3, "again": 0.0, "tokens_per_s": 1 / math.hypot(12, 12)}, 1e-9),
    ("serve(seq_lengths(4000), 35328, max_running=450, max_batched_tokens=8192)",
     {"preempted": 169, "running": 432.8, "held": 0.996, "again": 0.078, "tokens_per_s": 5788.0},
     2e-4),
    ("serve(seq_lengths(4000), 35328, max_running=500, max_batched_tokens=8192,"
     " prefix_caching=True)",
     {"preempted": 306, "running": 433.5, "held": 0.998, "again": 0.053, "tokens_per_s": 5862.0},
     3e-3),
    ("traffic([(3000, 240)] * 240)",
     {"slots_per_s": 1649.097759, "pages_per_s": 2144.89237, "worth": 1.30064598,
      "again": 0.008759986854}, 1e-9),
    ("shared_prefix(seq_lengths(4000), 2048)", None, 1e-9),  # the row of the assembly
    ("size({'model_type': 'llama', 'num_hidden_layers': 90, 'num_attention_heads': 16,"
     " 'hidden_size': 16384}, [(5800, 180)], (40, 3000, 500), 1e9)", None, 1e-9),  # one fits
    ("size({'model_type': 'gpt_oss', 'num_hidden_layers': 4, 'num_attention_heads': 16,"
     " 'num_key_value_heads': 16, 'hidden_size': 64000, 'head_dim': 4000, 'sliding_window': 1000,"
     " 'layer_types': ['full_attention', 'sliding_attention', 'full_attention',"
     " 'sliding_attention']}, [(100, 10)], (40, 3000, 500), 1e9, tp=2)", {"longest": 141_040}, 0),
]  # fmt: skip
# What has no answer.
REFUSED = (
    "serve([(5, 3), (5, 0)], 10, 4)",
    "serve([(0, 5)], 10, 4)",
    "serve([(1, 1)] * 9 + [(39, 2)], 10, 4, max_running=1,"
    " step_seconds=lambda *_: sys.exit('serves some before it refuses'))",
    "resident_tokens([(5, 0)])",
    "kv_bytes({'num_hidden_layers': 2, 'num_attention_heads': 4, 'hidden_size': 64})",
    "kv_bytes({'model_type': 'new', 'num_hidden_layers': 2, 'num_attention_heads': 4,"
    " 'hidden_size': 64})",
    "kv_bytes({'model_type': 'llama', 'num_hidden_layers': 2, 'num_attention_heads': 4,"
    " 'hidden_size': 64}, 1, tp=3)",
    "size({'model_type': 'llama', 'num_hidden_layers': 2, 'num_attention_heads': 4,"
    " 'hidden_size': 64}, [(1, 1)], (2, 100, 1), 1e9)",  # its weights fill the memory
    "size({'model_type': 'llama', 'num_hidden_layers': 90, 'num_attention_heads': 16,"
    " 'hidden_size': 16384}, [(1, 1), (5800, 185)], (40, 3000, 500), 1e9)",  # 5,984 fit
    "size({'model_type': 'mixtral', 'num_hidden_layers': 2, 'num_attention_heads': 4,"
    " 'num_key_value_heads': 4, 'hidden_size': 64, 'num_local_experts': 8}, [(1, 1)],"
    " (80, 100, 1), 1e9)",  # and active_params?
)


class Claim(NamedTuple):
    """A sentence of the lesson, its figure, and the calls that this figure comes from."""

    block: int
    statement: str
    stated: str  # the figure to the character, as the lesson states it
    figure: str  # the figure as it is derived here
    holds: bool  # whether the statement is true of what is derived here
    calls: list[str]
    constants: Mapping[str, Any] = {}  # the module's constants that it is about
    tolerance: float = 1e-9


def claims() -> list[Claim]:
    """The 14 claims, derived by the naive mechanisms."""
    per_token, without = "kv_bytes_per_token(80, 8, 128, 2)", "kv_bytes_per_token(80, 64, 128, 2)"
    kv, without_gqa, gib = map(evaluated, (per_token, without, "kv_gib(131072)"))
    share_of = f"budget_share({gib})"
    share = evaluated(share_of)

    drawn, slots = "seq_lengths(4000)", "contiguous(seq_lengths(4000), 8192)"
    paged_16, paged_1 = "paged(seq_lengths(4000), 16)", "paged(seq_lengths(4000), 1)"
    prefixed = "prefixed_lengths(64, 4096)"
    sharing = f"shared_prefix({prefixed}, 4096, 1, budget_gib=20)"
    reserved, in_pages, finest, shared = map(evaluated, (slots, paged_16, paged_1, sharing))
    few, batch, most = (x["batch"] for x in (reserved, in_pages, finest))

    at_tp = {tp: f"break_even(tp={tp})" for tp in (1, 2, 4, 8)}
    half_kv = f"break_even(kv_per_token={kv // 2})"
    even, even_8, halved = map(evaluated, ("break_even()", at_tp[8], half_kv))
    fetched = [f"fetch_seconds({n}, 1)" for n in (1, 4096, 131_072)]
    computed = [f"recompute_seconds({n})" for n in (1, 4096, 131_072)]
    spans = {f"{evaluated(x) / evaluated(y):.2f} GB/s" for x, y in zip(fetched, computed)}
    at_span = " or ".join(sorted(spans))
    dense = 132 * 4096 * 1.83e9
    return [
        Claim(1, "KV is 320 KiB per token for a 70B, GQA-8, fp16",
              "327,680 B = 320 KiB", f"{kv:,} B = {kv // 2**10} KiB", kv == 320 * 2**10,
              [per_token],
              {"LAYERS": 80, "KV_HEADS": 8, "HEAD_DIM": 128, "DTYPE": 2, "KV_PER_TOKEN": kv}),
        Claim(1, "one 128k-context request is ~23% of a 4xH100 replica's KV budget",
              "23.2% of 172.5 GiB", f"{share:.1%} of {345 / 2} GiB", round(share, 2) == 0.23,
              ["kv_gib(131072)", share_of], {"KV_BUDGET_GIB": 345 / 2, "GIB": 1024**3}),
        Claim(1, "GQA is an 8x reduction",
              "2,560 KiB/token without it", f"{without_gqa // 2**10:,} KiB/token without it",
              without_gqa == 8 * kv, [without], {"Q_HEADS": 64}),
        Claim(2, "an 8k reservation wastes over 80% of the budget",
              "82.3% wasted, batch 69", f"{reserved['waste']:.1%} wasted, batch {few}",
              reserved["waste"] > 0.80, [drawn, slots]),
        Claim(3, "16-token pages keep internal waste under 1%",
              "0.54%", f"{in_pages['waste']:.2%}", in_pages["waste"] < 0.01, [drawn, paged_16]),
        Claim(3, "and multiply the batch ~6x over an 8k reservation",
              "batch 69 -> 417 = 6.0x", f"batch {few} -> {batch} = {batch / few:.1f}x",
              round(batch / few) == 6, [drawn, slots, paged_16]),
        Claim(3, "below 16 tokens a page the batch barely improves",
              "batch 417 at 16 tokens vs 420 at 1", f"batch {batch} at 16 tokens vs {most} at 1",
              batch <= most < 1.01 * batch, [drawn, paged_16, paged_1]),
        Claim(4, "a 4k prefix shared by 64 requests is ~89% of the KV",
              "89.0% saved by storing it once", f"{shared['saved']:.1%} saved by storing it once",
              round(shared["saved"], 2) == 0.89 and shared["batch"] == 64, [prefixed, sharing]),
        Claim(5, "break-even at TP4 is ~9.3 GB/s",
              "9.26 GB/s", f"{even:.2f} GB/s", round(even, 1) == 9.3, ["break_even()"],
              {"N_PARAMS": 70e9, "DENSE_FLOPS_PER_GPU": 989.5e12}),
        Claim(5, "it does not depend on prefix length (at 2N FLOP a token)",
              "9.26 GB/s at 1, 4,096 and 131,072 tokens",
              f"{at_span} at 1, 4,096 and 131,072 tokens", len(spans) == 1, fetched + computed),
        Claim(5, "one local NVMe drive at 7 GB/s is below it",
              "7 GB/s vs 9.26 GB/s break-even", f"7 GB/s vs {even:.2f} GB/s break-even",
              even > 7, ["break_even()"], {"TIERS": [3350, 64, 25, 7, 1]}),
        Claim(5, "FP8 KV halves it",
              "4.63 GB/s -- NVMe becomes viable", f"{halved:.2f} GB/s -- NVMe becomes viable",
              halved < 7 and math.isclose(2 * halved, even),
              ["kv_bytes_per_token(80, 8, 128, 1)", half_kv]),
        Claim(5, "TP8 raises it",
              "TP4 9.3 -> TP8 18.5 GB/s", f"TP4 {even:.1f} -> TP8 {even_8:.1f} GB/s",
              even_8 > even, [*at_tp.values()]),
        Claim(5, "the datasheet's 1,979 TFLOP/s is the with-sparsity figure",
              "132 SMs x 4,096 FLOP/clock x 1.83 GHz = 989.4 dense, x2 sparse = 1,979",
              f"132 SMs x 4,096 FLOP/clock x 1.83 GHz = {dense / 1e12:.1f} dense,"
              f" x2 sparse = {2 * dense / 1e12:,.0f}", round(2 * dense / 1e12) == 1979,
              ["recompute_seconds(1, tp=1)"], {"DENSE_FLOPS_PER_GPU": dense}, 1e-3),
    ]  # fmt: skip


def fault_of_claim(claim: Claim, grading: Grading) -> Fault | None:
    """What is wrong with a claim: with its own figure, a constant or a mechanism; or nothing."""
    if not claim.holds:
        return "not true of the derived figures", claim.figure
    if claim.figure != claim.stated:
        return f"derived {claim.figure}", f"the lesson states {claim.stated}"
    for name, derived in claim.constants.items():
        yours = globals()[name]
        yours = yours.values() if isinstance(yours, dict) else yours
        if difference := unlike(derived, yours, claim.tolerance):
            return name, difference
    return next(filter(None, map(grading.compare, claim.calls)), None)


def failing(start: str, fault: Fault) -> str:
    """A line that says FAIL, of at most 160 columns; a call that is too long lacks its middle."""
    start, said = f"  [FAIL] {start}", ascii_line(fault[1])
    said = shortened(said, 144 - len(start))
    called = shortened(fault[0], 158 - len(start) - len(said))
    return f"{start}{called}: {said}" if called else f"{start}{said}"


def verify(parts_override: Parts | None = None) -> int:
    """Print the 14 claims, each PASS or FAIL with its figure. Returns 0 if all is right, else 1.

    Every figure is derived a second time, and compared with the stated one and with what the
    mechanisms give. A claim fails for the mechanisms that its figure comes from. Whatever else is
    wrong with a mechanism has a line of its own, below the claims.

    `parts_override` puts your mechanisms in place of the lesson's, by their names in `parts()`:
    `verify({"paged": my_paged})` grades yours. Required parameters, `page_tokens` and `tokens` are
    given by position, so that you may name your own; all others by keyword. What a call leaves out
    has the lesson's default. What you return may be anything that has the attributes, and a pair
    anything that unpacks.
    """
    s = parts()
    if not isinstance(parts_override, (dict, type(None))):
        raise TypeError(f"parts_override must be a dict, not {shown(parts_override)}")
    for name in parts_override or {}:
        if name not in s:
            raise ValueError(f"parts_override must name parts of the lesson, not {shown(name)}")
    grading, stated = Grading({**s, **(parts_override or {})}), claims()
    failed, wrong, column = 0, [], max(len(claim.statement) for claim in stated)
    try:
        for number, block in BLOCKS.items():
            for claim in stated:
                if claim.block == number:
                    fault = fault_of_claim(claim, grading)
                    start = f"B{number}  {claim.statement:<{column}}   "
                    failed += fault is not None
                    print(failing(start, fault) if fault else f"  [PASS] {start}{claim.stated}")
            for name in block.run({}, False):
                if fault := next(filter(None, grading.faults(name)), None):
                    wrong.append(failing(f"B{number}  {name}: ", fault))
            flush()
    except KeyboardInterrupt:
        print(f"  stopped in block {number}: {shortened(grading.doing, 120)}")
        raise
    for line in wrong:
        print(line)
    others = f", {len(wrong)} mechanism{'s' * (len(wrong) > 1)} wrong" if wrong else ""
    print(f"  {len(stated) - failed}/{len(stated)} claims verified{others}")
    return 1 if failed or wrong else 0


# --------------------------------------------------------------------------------- your own model

# The same price for any other model. Its config.json holds the figures, and the class that its
# model_type names says what they mean. TABLE has the classes that were read: those of transformers
# 5.25 and vLLM 0.33, and of older ones for a few that both have dropped; of the newest (apertus1p5,
# beam, flint, granite_docling, kolibri1, lara_mini, lfm3, minimax_m3_vl, muse, sarvam) only that of
# transformers, so an engine may keep more. What is not in the table is refused: better no answer
# than a wrong one.

ALIASES = {  # other names of a setting, where a class reads them
    alias: usual
    for usual, aliases in {
        "num_hidden_layers": "n_layer n_layers num_layers",
        "num_attention_heads": "n_head n_heads",
        "num_key_value_heads": "num_kv_heads n_head_kv n_kv_heads kv_n_heads num_attention_groups"
        " multi_query_group_num num_multi_query_heads",
        "hidden_size": "n_embd n_embed d_model",
        "head_dim": "kv_channels attention_head_dim",
        "index_head_dim": "sparse_index_dim",
    }.items()
    for alias in aliases.split()
}
DECODERS = ("text_config", "llm_config", "language_config", "thinker_config")  # where it may be
GROUPS = ("attn_config", "linear_attn_config", "sparse_attention_config")  # of settings
EVERY = """
    num_hidden_layers num_attention_heads num_key_value_heads hidden_size head_dim v_head_dim
    qk_rope_head_dim index_head_dim sliding_window layer_types per_layer_config
    num_nextn_predict_layers
"""  # what classes read unless the table denies it
SHAPE = ("num_attention_heads", "num_key_value_heads", "head_dim")  # what a layer may have its own
OTHERWISE = (
    "kv_bytes_per_token is right only where every layer keeps one K and one V of every token for"
    " each KV head, which is not so with a latent, a window or a state"
)

# What a layer keeps: every token, a window of them, the chunk they are in, nothing, or every token
# and one more key to find it by.
FULL, WINDOW, CHUNK, NOTHING, INDEXED = "F", "W", "C", "-", "I"
KINDS = {
    "full_attention": FULL, "attention": FULL, "hybrid": FULL, "*": FULL, "G": FULL,
    "sliding_attention": WINDOW, "L": WINDOW, "chunked_attention": CHUNK,
    "minimax_m3_sparse": INDEXED, "linear_attention": NOTHING, "mamba": NOTHING, "conv": NOTHING,
    "moe": NOTHING, "mlp": NOTHING, "M": NOTHING, "E": NOTHING, "-": NOTHING,
}  # fmt: skip

# layers, to be repeated (after a slash: what else the file may name)
#     | model types, or architectures of families that publish none
#     | what the file must say | what else the class reads (name=value: where the file is silent),
#     and with a minus what it does not read of EVERY
# Null is as many KV heads as query heads, and as head_dim hidden size / query heads.
MHA = "num_key_value_heads=null -num_key_value_heads -head_dim"
GEMMA_4 = (
    "attention_k_eq_v global_head_dim num_global_key_value_heads num_kv_shared_layers"
    " use_bidirectional_attention"
)
TABLE = f"""
F | apertus apertus1p5_text arcee aria_text cohere flex_olmo granite granitemoe granitemoeshared \
    hyperclovax jais2 llama nanochat nemotron olmo olmo2 olmoe phi xverse \
    | | num_key_value_heads=null
F | aquila arctic bailing_moe bailing_moe_v2 bitnet chameleon deepseek emu3_text_model \
    ernie4_5_moe ernie4_5_moe_vl ernie4_5_vl_moe_text git glm4_moe glm4v_moe_text glm4v_text \
    glm_ocr_text granite_docling_text internlm2 minicpm molmo orion phi3small \
    qwen3_omni_moe_text qwen3_vl_moe_text stablelm stablelm_epoch
F | cosmos3_edge_text ernie4_5 gemma glm glm4 helium hy_v3 internlm3 molmo2_text paddleocr_vl \
    paddleocr_vl_text qwen3_vl_text sarvam_moe seed_oss solar_open | head_dim
F | exaone | | num_layers
F | falcon_h1 | | layers_block_type
F | minimax_m2 | head_dim | attn_type_list
F | step3_text | head_dim | num_attention_groups
F | hunyuan_vl_text | | attention_head_dim num_key_value_heads=null
F | llava llava_llama minicpmo minicpmv qwen2_moe qwen3_moe smollm3 | | use_sliding_window
F | iquestcoder | head_dim | use_sliding_window
F | baichuan gpt_neox internlm InternLM opt persimmon | | {MHA}
F | bloom codegen gptj jais | | n_layer n_head n_embd n_embed {MHA}
F | gpt2 | | n_layer n_head n_embd attention_head_type {MHA}
F | gpt_bigcode | multi_query | n_layer n_head n_embd {MHA}
F | falcon RefinedWebModel | multi_query \
    | n_layer n_head n_embed num_kv_heads new_decoder_architecture {MHA}
F | RefinedWeb | n_head_kv | n_layer n_head n_embed -head_dim
F | phi-msft | n_head_kv | n_layer n_head n_embd -head_dim
F | hf_olmo | | n_layers n_heads d_model n_kv_heads multi_query_attention {MHA}
F | mpt | | n_layers n_heads d_model attn_config attn_type kv_n_heads {MHA}
F | dbrx | attn_config | n_layers n_heads d_model kv_n_heads
F | qwen | kv_channels | num_key_value_heads=null -num_key_value_heads
F | chatglm | kv_channels | num_layers multi_query_attention multi_query_group_num {MHA}
F/- | hunyuan hunyuan_v1_dense hunyuan_v1_moe \
    | | use_cla cla_share_factor attention_head_dim num_key_value_heads=null
W | ministral mistral | sliding_window
W | ministral3 | sliding_window head_dim
W | mixtral phi3_v phi4_multimodal phi4mm phimoe starcoder2
W | phi3 | | num_key_value_heads=null
/FW | dots1 | sliding_window | max_window_layers
/FW | dots_ocr mimo qwen2 qwen2_5_omni_text qwen2_5_vl qwen2_5_vl_text qwen2_vl qwen2_vl_text \
    | | use_sliding_window max_window_layers
/FW | qwen3 | head_dim | use_sliding_window max_window_layers
/FW | beam cwm flint gpt_oss kolibri1 laguna mellum muse_glimmer_text muse_spark_text vaultgemma \
    | sliding_window head_dim
/FW | granite_swa granitemoe_swa olmo3 | sliding_window
/FW | afmoe | sliding_window head_dim | global_attn_every_n_layers
/FW | cohere2 | sliding_window | sliding_window_pattern -head_dim
/FW | exaone4 exaone_moe | sliding_window | sliding_window_pattern
/FW | gemma3n_text | sliding_window head_dim num_kv_shared_layers
/FW | gemma4_text | sliding_window head_dim | {GEMMA_4}
/FW | gemma4_unified_text | head_dim | {GEMMA_4} sliding_window=1024
/FW | step3p5 step3p7 | | num_attention_groups attention_other_setting head_dim=128
/FW- | lara_mini lfm3 | sliding_window head_dim
WF | gemma2 | sliding_window head_dim
WWWWWF | gemma3 gemma3_text | sliding_window head_dim | sliding_window_pattern
CCCF | llama4_text | attention_chunk_size head_dim | no_rope_layers no_rope_layer_interval
/F- | qwen3_5_moe_text qwen3_5_text qwen3_next | head_dim | full_attention_interval
/F- | granitemoehybrid minimax olmo_hybrid
/F- | minimax_m1 minimax_text_01 | | attn_type_list
/F- | jamba | | attn_layer_period attn_layer_offset layers_block_type
/F- | bamba | | attn_layer_indices layers_block_type
/F- | lfm2 lfm2_moe | | full_attn_idxs
/F- | nemotron_h | head_dim | attention_head_dim hybrid_override_pattern layers_block_type
/FI | minimax_m3 minimax_m3_text minimax_m3_vl minimax_m3_vl_text \
    | head_dim | sparse_attention_config sparse_attention_freq sparse_index_dim
F | axk1 deepseek_v3 glm4_moe_lite kimi_k2 minicpm3 mistral4 sarvam_mla youtu | kv_lora_rank
F | deepseek_v2 deepseek_vl_v2 | kv_lora_rank | use_mla
F | longcat_flash ['LongcatFlashForCausalLM'] ['LongcatFlashNgramForCausalLM'] | kv_lora_rank \
    | num_layers pairs_of_layers
/F- | kimi_linear | kv_lora_rank | linear_attn_config full_attn_layers
/F- | bailing_hybrid | kv_lora_rank | layer_group_size
F | (none) | num_hidden_layers num_key_value_heads | n_layer n_layers num_layers n_head n_heads \
    n_embd n_embed d_model kv_channels num_kv_heads n_head_kv n_kv_heads num_multi_query_heads
"""

HEADS_OF_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
HEADS_OF_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
TEXT_CONFIG = {  # what its class fills in where a text_config is silent, as published ones are
    "llama": HEADS_OF_7B,
    "mistral": {**HEADS_OF_7B, "num_key_value_heads": 8},
    "qwen2": {**HEADS_OF_7B, "num_key_value_heads": 32},
    "gemma": {"head_dim": 256},
    "gemma2": {**HEADS_OF_GEMMA, "sliding_window": 4096},
    "gemma3": HEADS_OF_GEMMA,
    "gemma3_text": HEADS_OF_GEMMA,
}

CHOOSING: dict[str, Any] = {  # what tells the layers apart
    # A list: a word or a mark for each.
    "layer_types": KINDS, "layers_block_type": KINDS, "hybrid_override_pattern": KINDS,
    "attn_type_list": {0: NOTHING, 1: FULL}, "no_rope_layers": {0: FULL, 1: CHUNK},
    "sparse_attention_freq": {0: FULL, 1: INDEXED},
    # A number n: what layer i keeps.
    "full_attention_interval": lambda n, i: NOTHING if (i + 1) % n else FULL,
    "layer_group_size": lambda n, i: NOTHING if (i + 1) % n else FULL,
    "sliding_window_pattern": lambda n, i: WINDOW if (i + 1) % n else FULL,
    "global_attn_every_n_layers": lambda n, i: WINDOW if (i + 1) % n else FULL,
    "no_rope_layer_interval": lambda n, i: CHUNK if (i + 1) % n else FULL,
    "max_window_layers": lambda n, i: WINDOW if i >= n else FULL,
    "cla_share_factor": lambda n, i: NOTHING if i % n else FULL,
    "attn_layer_period": lambda n, i: NOTHING if i % n else FULL,  # i counts from an offset
    # A list of the full layers: the number of the first of all.
    "full_attn_idxs": 0, "attn_layer_indices": 0, "full_attn_layers": 1,
}  # fmt: skip
FLAGS = """
    attention_k_eq_v multi_query multi_query_attention new_decoder_architecture use_cla use_mla
    use_sliding_window
"""
# These tell of another architecture than the model_type, unless its class reads them.
TELLTALES = """
    add_cross_attention attention_chunk_size attention_other_setting attn_layer_indices
    attn_layer_period attn_type_list block_configs cross_attention_layers full_attention_interval
    full_attn_idxs full_attn_layers global_attn_every_n_layers global_head_dim
    hybrid_override_pattern index_topk is_encoder_decoder kv_lora_rank layer_group_size
    layers_block_type linear_attn_config num_global_key_value_heads num_key_value_heads_per_layer
    num_kv_shared_layers sparse_attention_config swa_head_dim swa_num_key_value_heads
    type_vocab_size use_bidirectional_attention use_cla
"""

Config = Mapping[str, Any]


class Family(NamedTuple):
    """A row of the table."""

    layers: str
    must_say: list[str]
    reads: list[str]
    silent: dict[str, Any]


def families() -> dict[str, Family]:
    """The rows of the table by model_type."""
    found = {}
    for row in TABLE.strip().splitlines():
        (layers,), names, must_say, others, *_ = (cell.split() for cell in f"{row}||".split("|"))
        usual = [name for name in EVERY.split() if f"-{name}" not in others]
        reads = [*usual, *must_say, *(word for word in others if "=" not in word)]
        fills = (word.partition("=") for word in others)
        silent = {name: json.loads(value) for name, _, value in fills if value}
        found.update(dict.fromkeys(names, Family(layers, must_say, reads, silent)))
    return found


FAMILIES = families()


def dimension(settings: Config, name: str, least: int = 1, most: int = 10**7) -> int:
    """A number of layers, heads, values or tokens, which the config must give."""
    if settings.get(name) is None:
        raise ValueError(f"config lacks {name}")
    return whole(name, settings[name], least, most)


def decoder_of(config: Config, where: str = "") -> tuple[str, Config]:
    """The part of a config that is about the decoder, after where it stands ("": outside)."""
    if where.count(".") == 9:
        raise ValueError(f"config has {where}: its architecture is not supported")
    name = next((name for name in DECODERS if config.get(name) is not None), "")
    if not name or config.get("is_encoder_decoder"):
        return where, config
    inner = {"model_type": config.get("model_type"), **mapping(name, config[name])}
    filled = {**TEXT_CONFIG.get(str(inner["model_type"]), {}), **inner}
    return decoder_of(filled, f"{where}.{name}".lstrip("."))


def family_of(config: Config) -> Family:
    """The row of a config's model_type, unless a setting tells of another architecture."""
    kind = config.get("model_type")
    if kind is None:
        architectures = repr(config.get("architectures"))
        kind = architectures if architectures in FAMILIES else "(none)"
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type {shown(kind)} is not one of those known here; {OTHERWISE}")
    for name in TELLTALES.split():
        if config.get(name) and name not in FAMILIES[kind].reads:
            value = shown(config[name])
            raise ValueError(f"config has {name} = {value}, unlike its model_type; {OTHERWISE}")
    return FAMILIES[kind]


def read(said: Config, row: Family) -> dict[str, Any]:
    """What the class reads, and under its usual name too if it has another."""
    settings = {name: said[name] for name in row.reads if name in said}
    for name in [name for name in settings if name in ALIASES]:
        value, usual = settings[name], ALIASES[name]
        other = settings.get(usual)
        if None not in (value, other) and value != other:
            raise ValueError(f"{name} = {shown(value)} contradicts {usual} = {shown(other)}")
        settings[usual] = value if other is None else other
    return settings


def settings_of(config: Config, row: Family) -> dict[str, Any]:
    """The settings of a config as its class has them."""
    groups = [name for name in GROUPS if name in row.reads and config.get(name)]
    parts = [*(mapping(name, config[name]) for name in groups), config]
    said = {name: part[name] for part in parts for name in row.reads if name in part}
    if "pairs_of_layers" in row.reads and "num_layers" in said:  # LongCat: two attentions each
        said["num_layers"] = 2 * dimension(said, "num_layers")
    listed = said.get("hybrid_override_pattern") or said.get("layers_block_type")
    if "hybrid_override_pattern" in row.reads and isinstance(listed, (list, str)):
        said.setdefault("num_hidden_layers", len(listed))  # Nemotron may list its layers only
    settings = {**row.silent, **read(said, row)}
    for name in row.must_say:
        if name not in settings:
            raise ValueError(f"config lacks {name}")
    for name in FLAGS.split():
        if settings.get(name) is not None:
            truth(name, settings[name])
    if "use_sliding_window" in row.reads and not settings.get("use_sliding_window"):
        settings["sliding_window"] = None
    if settings.get("sliding_window") is None:
        settings.update(sliding_window_pattern=None, max_window_layers=None)
    shares = settings.get("use_cla")
    settings["cla_share_factor"] = dimension(settings, "cla_share_factor") if shares else None
    return settings


def told_by(settings: Config, name: str, layers: int) -> str:
    """What each layer keeps, by one setting."""
    way, value = CHOOSING[name], settings[name]
    if callable(way) and not isinstance(value, (list, str)):
        n = dimension(settings, name, least=int(name != "max_window_layers"))
        first = dimension(settings, "attn_layer_offset", 0) if name == "attn_layer_period" else 0
        if name != "layer_group_size" or layers % n == 0:  # engines differ on what remains
            return "".join(way(n, i - first) for i in range(layers))
    elif isinstance(way, int) and isinstance(value, list):
        kept = [FULL if i + way in value else NOTHING for i in range(layers)]
        if kept.count(FULL) == len(value):
            return "".join(kept)
    elif isinstance(value, (list, str)):
        if name == "sliding_window_pattern" and isinstance(value, str):  # LLLG, as EXAONE has it
            value = "".join(islice(cycle(value), layers))
        words = way if isinstance(way, dict) else KINDS
        with contextlib.suppress(KeyError, TypeError):
            kept = [words[word] for word in value[:layers]]
            # of all layers, or of those too that draft
            if len(value) - layers in (0, settings.get("num_nextn_predict_layers") or 0):
                return "".join(kept)
    raise ValueError(f"{name} = {shown(value)} does not tell what {layers} layers keep")


def kept_by(settings: Config, row: Family) -> str:
    """What each layer keeps. Configs say so in several ways, which must not disagree."""
    layers = dimension(settings, "num_hidden_layers", most=10_000)
    if "pairs_of_layers" in row.reads and layers % 2:
        raise ValueError(f"num_hidden_layers = {layers} must be even, two for each of num_layers")
    pattern, window = row.layers.split("/")[0], settings.get("sliding_window")
    if window is None and set(row.layers) <= {FULL, WINDOW, "/"}:
        pattern = FULL
    elif window is not None and WINDOW not in row.layers:
        raise ValueError(f"sliding_window = {shown(window)} is not supported for its model_type")
    ways = [name for name in CHOOSING if name in row.reads]
    told = [name for name in ways if settings.get(name) not in (None, [])]
    if not told and not pattern:
        raise ValueError(f"config lacks {ways[-1]}")
    kept = told_by(settings, told[0], layers) if told else (pattern * layers)[:layers]
    for name in told[1:]:
        if told_by(settings, name, layers) != kept:
            raise ValueError(f"{name} contradicts {told[0]}")
    if WINDOW in kept and window is None:
        raise ValueError(f"{told[0]} has sliding layers, but sliding_window is absent or not used")
    if not {FULL, *row.layers}.issuperset(kept):
        raise ValueError(f"{told[0]} has layers of a kind that its model_type does not have")
    return kept


def own_shapes(settings: Config, row: Family, kept: str) -> list[Config]:
    """What each layer has of its own."""
    gemma_4 = "global_head_dim" in row.reads
    masked = settings.get("use_bidirectional_attention")
    if gemma_4 and (masked not in (None, False, "vision") or kept[-1] != FULL):
        raise ValueError(  # its class mends what the file says
            f"use_bidirectional_attention = {shown(masked)} or a last layer with a window is not"
            " supported"
        )
    if settings.get("per_layer_config") is not None:  # as transformers 5.15 and later save it
        own: list[Config] = [{}] * len(kept)
        for place, shape in mapping("per_layer_config", settings["per_layer_config"]).items():
            for name in mapping("per_layer_config", shape):
                if name not in SHAPE:
                    raise ValueError(f"per_layer_config has {shown(name)}, which is not supported")
            i = int(place) if isinstance(place, str) and place.isdecimal() else place
            own[whole("a layer in per_layer_config", i, 0, len(kept) - 1)] = shape
        return own
    if gemma_4:
        kind, shape = FULL, {"head_dim": dimension(settings, "global_head_dim")}
        if settings.get("attention_k_eq_v"):
            shape["num_key_value_heads"] = settings.get("num_global_key_value_heads")
    else:
        step = settings.get("attention_other_setting") or {}
        kind, shape = WINDOW, read(mapping("attention_other_setting", step), row)
    shape = {name: shape[name] for name in SHAPE if shape.get(name) is not None}
    return [shape if keeps == kind else {} for keeps in kept]


def kv_heads_of(settings: Config, heads: int) -> int:
    """How many KV heads serve the query heads: as many (MHA), fewer (GQA) or one (MQA)."""
    if settings.get("multi_query") and not settings.get("new_decoder_architecture"):
        return 1  # Falcon 7B states all its heads, and has one
    if "multi_query_group_num" in settings and not settings.get("multi_query_attention"):
        return heads  # ChatGLM states groups that it does not use
    if settings.get("num_key_value_heads", 0) is None:
        single = (
            settings.get("multi_query_attention")
            or settings.get("attention_head_type") == "multiquery"
            or settings.get("attn_type") == "multiquery_attention"
        )
        return 1 if single else heads
    kv_heads = dimension(settings, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads = {kv_heads} does not divide the {heads} heads")
    return kv_heads


class Layer(NamedTuple):
    """What one layer keeps on each GPU."""

    values: int  # of a token
    words: str  # how they come about
    most: float  # tokens


def layer_of(settings: Config, kind: str, tp: int) -> Layer:
    """What a layer with these settings keeps on each of `tp` GPUs."""
    latent = "kv_lora_rank" in settings and settings.get("use_mla") is not False
    if not latent and settings.get("kv_lora_rank"):
        raise ValueError("use_mla = False contradicts kv_lora_rank")
    heads = dimension(settings, "num_attention_heads") if tp > 1 or not latent else 1
    if heads % tp:
        raise ValueError(f"tp = {tp} does not divide the {heads} query heads")
    if latent:
        rank, rope = dimension(settings, "kv_lora_rank"), dimension(settings, "qk_rope_head_dim")
        return Layer(rank + rope, f"({rank} + {rope})", math.inf)
    kv_heads = kv_heads_of(settings, heads)
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(f"tp = {tp} neither divides the {kv_heads} KV heads nor is a multiple")
    if settings.get("head_dim") is None:
        hidden = dimension(settings, "hidden_size")
        if hidden % heads:
            raise ValueError(
                f"config lacks head_dim, and hidden_size = {hidden} is no multiple of {heads} heads"
            )
        settings = {**settings, "head_dim": hidden // heads}
    head_dim = dimension(settings, "head_dim")
    if settings.get("v_head_dim") not in (None, 0, head_dim):
        raise ValueError(f"v_head_dim = {shown(settings['v_head_dim'])} is not the {head_dim} of K")
    on_each = max(1, kv_heads // tp)
    values, words = 2 * on_each * head_dim, f"2 x {on_each} KV heads x {head_dim}"
    if kind == INDEXED:
        key = dimension(settings, "index_head_dim")
        return Layer(values + key, f"({words} + {key})", math.inf)
    limit = {WINDOW: "sliding_window", CHUNK: "attention_chunk_size"}.get(kind)
    return Layer(values, words, dimension(settings, limit) if limit else math.inf)


def layers_of(config: Config, tp: int = 1) -> list[Layer]:
    """The layers that keep KV, by a model's config.json."""
    where, part = decoder_of(config)
    try:
        row = family_of(part)
        settings = settings_of(part, row)
        kept = kept_by(settings, row)
        own = own_shapes(settings, row, kept)
        shared = settings.get("num_kv_shared_layers") or 0  # the last ones read the KV of others
        writers = len(kept) - whole("num_kv_shared_layers", shared, 0, len(kept) - 1)
        return [
            layer_of({**settings, **shape}, kind, tp)
            for kind, shape in zip(kept[:writers], own)
            if kind != NOTHING
        ]
    except (TypeError, ValueError) as error:
        raise type(error)(f"in {where}: {error}" if where else str(error)) from None


def kv_bytes(config: Config, tokens: int = 1, dtype_bytes: float | None = None, tp: int = 1) -> int:
    """Bytes of KV cache that one sequence of `tokens` tokens holds, from a model's config.json.

    `config` is the file read as a dict; where it nests the decoder (`text_config`, `llm_config`,
    `language_config`, `thinker_config`), that counts. A value takes `dtype_bytes` bytes (fp8: 1;
    llama.cpp's q8_0: 1.0625; int4: 0.5), and 2 if that is not given, as in engines, whatever the
    width of the weights. The total is rounded up to whole bytes. With `tp` it is the bytes on each
    GPU: KV heads are split, and repeated where there are more GPUs than heads; a latent is whole
    on each.

    - Full attention: 2 x KV heads x head_dim values a layer and token (MHA, GQA and MQA).
    - Multi-head latent attention: kv_lora_rank + qk_rope_head_dim values a layer and token, once
      for all heads and for both K and V (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).
    - Layers with a window or in chunks hold no more tokens than that (an engine, a prefill chunk
      more), linear-attention and state-space layers no KV; their state is not counted.

    A config that lacks a setting, contradicts itself or is of an architecture not known here raises
    ValueError or TypeError, and names the setting. One without a model_type must state its layers,
    heads, KV heads and hidden_size or head_dim, and is read as full attention.

    >>> config = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    ...     "num_key_value_heads": 8, "hidden_size": 4096}
    >>> kv_bytes(config), kv_bytes(config, tokens=1000, dtype_bytes=1), kv_bytes(config, tp=4)
    (131072, 65536000, 32768)
    """
    kept = sum(layer.values * min(tokens, layer.most) for layer in layers_of(config, tp))
    return math.ceil(kept * (2 if dtype_bytes is None else dtype_bytes))


def contents(option: str, path: str, largest: int) -> bytes:
    """All bytes of the file at `path` (-: standard input), or UsageError."""
    try:
        if path == "-":
            stdin = getattr(sys.stdin, "buffer", sys.stdin)
            text = stdin.read(largest + 1) if stdin else b""
            text = text.encode() if isinstance(text, str) else text
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
        config: dict[str, Any] = json.loads(contents("--model", path, 2**24))
    except (MemoryError, RecursionError):
        raise UsageError(f"--model {path}: too large or nested too deeply") from None
    except json.JSONDecodeError as error:  # in words that are the same in every Python
        where = f"line {error.lineno} column {error.colno}"
        raise UsageError(f"--model {path}: not JSON: wrong at {where}") from None
    except ValueError as error:  # no text, or a number of too many digits
        raise UsageError(f"--model {path}: not JSON: {error}") from None
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
        """One copy of the KV, in GiB of 2^30 bytes, at 2 bytes a value. A GPU of a tensor-parallel
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


# After each card: where its GiB were seen, as "total capacity" or "total_gpu_memory" in public logs
# (0.3 to 0.7 less than nvidia-smi shows, and 0.2 more or less with the driver); then the document
# that has its GB/s and TFLOP/s, of which half where it counts sparsity.
CARDS = {
    "A100-40G": Card(39.38, 1555, 312),  # vLLM issue 16570; NVIDIA A100 datasheet, 2020
    "A100-80G": Card(79.15, 2039, 312),  # vLLM 0.8.2, Phi-4; A100 80GB datasheet, 2021: the SXM's
    "H100-SXM": Card(79.11, 3350, 989.5),  # vLLM issue 27508; H100 datasheet, 2022
    "H100-PCIe": Card(79.11, 2000, 756.5),  # no log found, as the SXM's; H100 datasheet, 2022
    "H200": Card(139.80, 4800, 989.5),  # PyTorch; H200 datasheet, 2023
    "B200": Card(178.35, 8000, 2250),  # PyTorch; Blackwell brief, 2024: HGX at 1,000 W
    "L40S": Card(44.39, 864, 362),  # PyTorch (44.52: vLLM issue 14011); L40S datasheet, 2023
    "L4": Card(22.03, 300, 121),  # PyTorch; L4 datasheet, 2023
    "A10G": Card(21.99, 600, 70),  # Unsloth; Baseten, "A10 vs A10G": an A10 computes 125
    "RTX-4090": Card(23.53, 1008, 165.2),  # Unsloth; Ada whitepaper, 2022: with FP32 accumulation
    "MI300X": Card(191.98, 5300, 1307),  # PyTorch; AMD MI300X datasheet, 2023
}
REST_SHARE = 0.05  # of a card, for all but weights and KV: in block 1 it is 15.7 of 318.6 GiB
KEPT_FREE, CAP = 0.05, 0.9  # block 6's rules: the watermark, or a share of those that fill a pool
MAX_NUM_SEQS = 1024  # vLLM's, serving on an H100
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


class Range(NamedTuple):
    """A figure at the hardware's peak, and at 50% MFU and 80% of the bandwidth."""

    peak: float
    below: float

    def __format__(self, _: str) -> str:
        """Two columns of a recipe."""
        return f"{three_digits(self.peak):>7} {three_digits(self.below):>9}"


def three_digits(figure: float) -> str:
    """A figure with three digits or more."""
    decimals = 0 if figure >= 999.5 else 1 if figure >= 10 else 2 if figure >= 1 else 3
    return f"{figure:,.{decimals}f}"


class Figures(SimpleNamespace):
    """What was calculated, by name and in this order."""


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
) -> Figures:
    """Size a replica of `tp` cards for a model's config.json and (prompt, output) requests.

    `card` is a name in CARDS or (GiB, GB/s, dense TFLOP/s). `active_params` are those that a token
    uses; a mixture of experts must say. A parameter takes `weight_bytes` bytes, a value of KV
    `dtype_bytes` (None: 2). An engine may use `utilization` of the memory, and needs `rest_gib` of
    each GPU for more than weights and KV (None: 5% of the card, as in block 1).

    The setting follows block 6: keep 5% of the pages free, and let as many run as fill the pool or
    the step. Where an engine cannot keep pages free, a cap of nine tenths of those that fill the
    pool. Most steps only decode, so a mean step takes step_seconds of decoding and its share of the
    prompts' arithmetic: at the peak, and at 50% MFU and 80% of the bandwidth. vars() of the result
    lists the figures.

    >>> llama = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    ...     "num_key_value_heads": 8, "hidden_size": 4096}
    >>> l4 = size(llama, [(2000, 500)], card="L4", n_params=8.03e9)
    >>> l4.tokens, round(l4.fill_pool, 1), l4.limit
    (34480, 15.3, 'KV memory')
    """
    if active_params is None and experts(config):
        raise ValueError(f"active_params is missing: config has {experts(config)}, and uses a few")
    if active_params is not None and active_params > n_params:
        raise ValueError(f"active_params = {active_params:g} is more than all {n_params:g}")
    requests, d = list(requests), Figures()
    d.resident = resident_tokens(requests)  # tokens that a running sequence holds

    d.memory_gib = tp * card.gib  # of all GPUs, as the runtime reports it
    d.used_gib = d.memory_gib * utilization
    d.weights_gib = n_params * weight_bytes / GIB
    d.rest_gib = tp * (REST_SHARE * card.gib if rest_gib is None else rest_gib)
    d.budget_gib = d.used_gib - d.weights_gib - d.rest_gib  # what is left for KV
    if d.budget_gib <= 0:
        raise ValueError(
            f"no memory is left for KV: {d.memory_gib:.2f} GiB x {utilization:g} -"
            f" {d.weights_gib:.2f} of weights of {weight_bytes:g} B (weight_bytes) -"
            f" {d.rest_gib:.2f} for the rest = {d.budget_gib:.2f}"
        )
    length = math.ceil(d.resident)  # where layers have a window, a longer one costs less a token
    d.bytes_on_each = math.ceil(kv_bytes(config, length, dtype_bytes, tp) / length)
    if not d.bytes_on_each:
        raise ValueError("no layer keeps KV: its memory is never the limit")
    d.kv_per_token = tp * d.bytes_on_each
    d.tokens = budget_tokens(d.budget_gib, d.kv_per_token)  # that fit
    d.longest = longest_sequence(config, d.budget_gib, dtype_bytes, tp)  # if it runs alone
    if (longest := max(map(sum, requests))) > d.longest:
        raise ValueError(f"a request of {longest:,} tokens never fits: {d.longest:,} are the most")

    d.fill_pool = d.tokens / d.resident  # sequences, on average
    d.fill_step = step_fills(requests, STEP_TOKENS)  # sequences, with the prefill of others
    d.least = min(d.fill_pool, d.fill_step)
    d.limit = "KV memory" if d.fill_pool == d.least else "the step"
    d.max_num_seqs = math.ceil(d.least)  # with 5% of the pages kept free
    d.cap = max(1, int(min(CAP * d.fill_pool, d.fill_step)))  # where no pages can be kept free
    d.running = max(1, min((1 - KEPT_FREE) * d.fill_pool, d.fill_step))  # sequences
    d.prompt, d.output = (sum(column) / len(requests) for column in zip(*requests))
    d.prefill_tokens = d.running * d.prompt / d.output  # in a mean step
    d.held_tokens = d.running * d.resident  # whose KV it reads

    def pace(mfu: float, mbu: float) -> Parts:
        speed: Parts = {
            "n_params": n_params, "active_params": active_params, "weight_bytes": weight_bytes,
            "flops_per_gpu": card.tflops * 1e12, "gb_per_s": card.gb_per_s, "mfu": mfu, "mbu": mbu,
        }  # fmt: skip
        seconds: Any = partial(step_seconds, kv_per_token=d.kv_per_token, tp=tp, **speed)
        at = Figures(ridge=ridge_tokens(**speed))  # tokens a step
        at.weights_ms = 1000 * seconds(0, 0)  # to read them
        at.decode_ms = 1000 * seconds(d.running, 0)
        at.prefill_ms = at.weights_ms * d.prefill_tokens / at.ridge
        at.kv_ms = 1000 * seconds(d.running, d.held_tokens) - at.decode_ms
        at.step_ms = at.decode_ms + at.prefill_ms + at.kv_ms
        at.tokens_per_s = 1000 * d.running / at.step_ms
        at.requests_per_s = at.tokens_per_s / d.output
        at.per_user = 1000 / at.step_ms  # tokens/s of one sequence
        at.first_token_ms = 1000 * seconds(d.prompt, 0)  # of a mean prompt, on an idle server
        return vars(at)

    peak, below = pace(1, 1), pace(0.5, 0.8)
    return Figures(**vars(d), **{name: Range(peak[name], below[name]) for name in peak})


def longest_sequence(config: Config, budget: float, dtype_bytes: float | None, tp: int) -> int:
    """Tokens, in whole pages of 16, that one sequence may have if it has all of the budget's GiB.

    At the price of a short one, or with the layers that have a window at the end of theirs.
    """
    layers = layers_of(config, tp)
    values = budget * GIB / tp / (dtype_bytes or DTYPE)
    growing = sum(layer.values for layer in layers if layer.most == math.inf)
    windows = sum(layer.values * layer.most for layer in layers if layer.most < math.inf)
    if not growing and windows <= values:
        return MANY
    longest = values / sum(layer.values for layer in layers)
    if growing:
        longest = max(longest, (values - windows) / growing)
    return int(longest) // 16 * 16


def experts(config: Config) -> str:
    """What a config says of a mixture of experts, or nothing."""
    _, decoder = decoder_of(config)
    inner = decoder.get("ffn_config")  # DBRX's
    for name in (*EXPERTS, "model_type"):
        told = decoder.get(name, inner.get(name) if isinstance(inner, Mapping) else None)
        if (isinstance(told, int) and told > 1) or (isinstance(told, str) and "moe" in told):
            return f"{name} = {told}"
    return ""


def card_of(name: str, value: Any) -> Card:
    """A card by its name, or from its GiB, GB/s and dense TFLOP/s."""
    if isinstance(value, str):
        known = {known.lower(): card for known, card in CARDS.items()}
        if value.lower() in known:
            return known[value.lower()]
        names = ", ".join(CARDS)
        raise ValueError(f"{name} must be GiB,GB/s,TFLOP/s (dense) or {names}, not {value!a}")
    try:
        gib, gb_per_s, tflops = value
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be (GiB, GB/s, TFLOP/s), not {shown(value)}") from None
    least = {"GiB": (gib, 1), "GB/s": (gb_per_s, 50), "TFLOP/s": (tflops, 1)}  # or it is TB/s
    return Card(*(number(f"{name} {unit}", *x, 10**6) for unit, x in least.items()))


RECIPE = """\
  {card.gib:g} GiB as CUDA shows it, {card.gb_per_s:,g} GB/s, {card.tflops:g} TFLOP/s
  Figures are rounded, tokens that fit and the cap without watermark down.
  A sequence holds its prompt, half its answer on average, half a page of 16.
  A step computes 1 token for it, and prompt / answer to prefill the next one.
  A token costs 2 FLOP for each parameter that it uses.

memory shown | {tp} x {card.gib:.2f} | {memory_gib:.2f} GiB
of it in use | {memory_gib:.2f} x {utilization:g} | {used_gib:.2f} GiB
weights | {params} x {weight_bytes:g} B / 2^30 | {weights_gib:.2f} GiB
the rest, {rest} | {rest_gib:.2f} GiB
KV budget | {used_gib:.2f} - {weights_gib:.2f} - {rest_gib:.2f} | {budget_gib:.2f} GiB
a token, each GPU | {token} | {bytes_on_each:,} B
a token, in all | {tp} x {bytes_on_each:,} | {kv_per_token:,} B
tokens that fit | {budget_gib:.2f} x 2^30 / {kv_per_token:,} | {tokens:,}
a sequence holds | {prompt_and_half} + 16 / 2 | {resident:,.1f} tokens
fill the pool | {tokens:,} / {resident:,.1f} | {fill_pool:,.1f} sequences
fill a step | {STEP_TOKENS:,} / (1 + {prompt:,.6g} / {output:,.6g}) | {fill_step:,.1f} sequences
the limit | the lesser of the two | {limit}

  THE SETTING (vLLM's options; enter all): --tensor-parallel-size {tp}
  --max-num-batched-tokens {STEP_TOKENS}, --gpu-memory-utilization {utilization:g}
--max-model-len | {context} | {longest}
--watermark | pages kept free (vLLM 0.33 or later) | {KEPT_FREE}
--max-num-seqs | {least:,.1f}, rounded up | {max_num_seqs:,}
without watermark | the cap: {CAP} x {fill_pool:,.1f}{most} | {cap:,} sequences

so there run | (1 - {KEPT_FREE}) x {fill_pool:,.1f}{most}{one} | {running:,.1f} sequences
a step prefills | {running:,.1f} x {prompt:,.6g} / {output:,.6g} | {prefill_tokens:,.1f} tokens
a step reads KV of | {running:,.1f} x {resident:,.1f} | {held_tokens:,.0f} tokens

                                                                      peak  50%, 80%
ridge, tokens | {card.tflops:g} / {tb_per_s:g} x {weight_bytes:g} B / 2 FLOP{sparse} | {ridge}
read weights, ms | {params} x {weight_bytes:g} / ({tp} x {tb_per_s:g}e12) | {weights_ms}
decode, ms | read weights x max(1, {running:,.1f} / ridge) | {decode_ms}
prefill, ms | read weights x {prefill_tokens:,.1f} / ridge | {prefill_ms}
read KV, ms | {held_tokens:,.0f} x {kv_per_token:,} / ({tp} x {tb_per_s:g}e12) | {kv_ms}
a step, ms | decode + prefill + read KV | {step_ms}
tokens/s | 1,000 x {running:,.1f} / a step | {tokens_per_s}
requests/s | tokens/s / {output:,.6g} | {requests_per_s}
tokens/s, a user | 1,000 / a step | {per_user}
idle 1st token, ms | read weights x max(1, {prompt:,.6g} / ridge) | {first_token_ms}
"""


def recipe(model: str, config: Config, given: Parts, d: Figures) -> None:
    """Print how `d` = size(config, **given) comes about: a line for each number, its name first."""
    tp, rest, n_params = given["tp"], given["rest_gib"], given["n_params"]
    layers = layers_of(config, tp)
    uniform = len(set(layers)) == 1 and layers[0].most == math.inf
    active, width = given["active_params"] or n_params, given["dtype_bytes"] or DTYPE
    alike, longest = len(set(given["requests"])) == 1, max(map(sum, given["requests"]))
    context = decoder_of(config)[1].get("max_position_embeddings")
    if not isinstance(context, int) or not 1 < context < MANY:
        context = MANY
    allowed = min(context, d.longest)
    fit = f"{d.longest:,}" if d.longest < MANY else "any length"
    figures: Parts = {
        **globals(), **given, **vars(d),
        "token": f"{len(layers)} layers x {layers[0].words} x {width:g} B" if uniform
        else f"kv_bytes(config, tp={tp}), from its class",
        "params": f"{n_params / 1e9:.6g}e9", "tb_per_s": given["card"].gb_per_s / 1000,
        "rest": f"assumed | {d.memory_gib:.2f} x {REST_SHARE}" if rest is None
        else f"given | {tp} x {rest:g}",
        "prompt_and_half": f"{d.prompt:,.6g} + {d.output:,.6g} / 2" if alike
        else "E[p x o + o^2 / 2] / E[o]",
        "most": f", at most {d.fill_step:,.1f}" if d.limit == "the step" else "",
        "sparse": f" x {n_params / 1e9:.6g} / {active / 1e9:.6g}" if active != n_params else "",
        "one": ", at least 1" if d.running == 1 else "",
        "context": f"config: {context:,}; fit: {fit}" if context < MANY else "fit",
        "longest": f"at most {allowed:,}" if allowed < MANY else fit,
    }  # fmt: skip
    print(f"  {model}, tensor parallel {tp}; of each GPU:")
    for line in RECIPE.format_map(figures).splitlines():
        print("  {:<18} = {:<41} = {}".format(*line.split(" | ")) if "|" in line else line)
    say(
        """Left, the hardware's peak; right, 50% MFU and 80% of the bandwidth: ridge x 0.5 / 0.8,
        reading / 0.8. Neither includes communication between GPUs or the FLOP of attention."""
    )
    for applies, note in (
        (longest > context, f"A request of {longest:,} tokens exceeds the config's context."),
        (d.fill_pool < 5, "So few fit that whole sequences count: fewer run, at fewer tokens/s."),
        (d.fill_pool < 100, "Below 100 sequences the cap of an engine without a watermark loses up"
         " to a tenth of the tokens/s."),
        (rest is None, "The rest (activations, CUDA graphs, communication) is assumed:"
         f" {REST_SHARE:.0%} of what is shown, about as in block 1. In engines' logs it is 0.4 to 8"
         f" GiB a GPU. A GiB more on each costs {GIB / d.bytes_on_each / d.resident:.1f} sequences."
         " Your engine prints the tokens that fit (vLLM: GPU KV cache size). Then --rest is"
         f" ({d.used_gib:.2f} - {d.weights_gib:.2f} - tokens x {d.kv_per_token:,} / 2^30) / {tp}."),
        (alike, "Where lengths differ, long answers stay longer, so sequences hold more: --trace."),
        (given["weight_bytes"] < DTYPE, "FLOP/s are those of 16 bits. If the engine computes in"
         " fewer, say so with --card GIB,GB/S,TFLOP/S."),
        (active != n_params, "Steps are assumed to read all experts. A small batch reads fewer."),
        (d.kv_per_token > kv_bytes(config, 1, width) + tp, "GPUs hold copies of a latent or a KV"
         " head: as many tokens fit as one GPU holds. Attention in data parallel keeps each once."),
        (d.bytes_on_each < kv_bytes(config, 1, width, tp), "Layers with a window keep less:"
         f" a token's share of {d.resident:,.0f} is counted."),
    ):  # fmt: skip
        if applies:
            say(note)


def traffic(requests: Iterable[tuple[int, int]]) -> Figures:
    """What pages are worth to these requests: the lesson's model, GPUs and 35,328 pages.

    Both servers prefill in the same steps, of 8,192 tokens at most. All requests wait from the
    start, in the order given; fewer than twice as many as run at once have no steady state.
    """
    requests, tokens, row = list(requests), budget_tokens(), Figures()
    row.requests = len(requests)
    row.fill_pool = tokens / resident_tokens(requests)  # sequences, on average
    row.fill_step = step_fills(requests, STEP_TOKENS)
    row.least = min(row.fill_pool, row.fill_step, MAX_NUM_SEQS)
    row.prompt, row.output = (sum(column) / len(requests) for column in zip(*requests))
    row.prompt_per_output = row.prompt / row.output

    server = partial(serve, requests, tokens // 16, max_batched_tokens=STEP_TOKENS)
    pages = server(max_running=MAX_NUM_SEQS, watermark=KEPT_FREE)
    row.slots_per_s = server(max_running=tokens // 8192).tokens_per_s
    row.pages_per_s, row.again = pages.tokens_per_s, pages.again
    row.worth = row.pages_per_s / row.slots_per_s if row.slots_per_s else math.nan
    return row


TRAFFIC = """
            mean tokens          sequences that fill    tokens/s with
  requests prompt output ratio   pool   step  least  slots  pages worth  again
{requests:>10,}{prompt:>7,.0f}{output:>7,.0f}{prompt_per_output:>6.1f}\
{fill_pool:>7,.0f}{fill_step:>7,.0f}{least:>7,.0f}{slots_per_s:>7,.0f}{pages_per_s:>7,.0f}\
{worth:>5.2f}x{again:>7.1%}

The pool is {tokens:,} tokens, a step {STEP_TOKENS:,}; the least is of these two and the
{MAX_NUM_SEQS:,} that vLLM runs. {slots} run in slots of 8,192 tokens; pages keep {KEPT_FREE:.0%}
free. Again: prefill that preempted sequences repeat.
"""


def traffic_table(row: Figures) -> None:
    """Print a row of real traffic under its heading."""
    tokens = budget_tokens()
    tell(TRAFFIC, {**vars(row), "tokens": tokens, "slots": tokens // 8192})
    if row.requests < 2 * row.least:
        say("So few requests have no steady state: take more before you believe the tokens/s.")


def requests_at(path: str) -> list[tuple[int, int]]:
    """The (prompt, output) requests of the trace at `path`, or UsageError."""
    requests = []
    try:
        text = contents("--trace", path, 2**28).decode("utf-8-sig", "replace")
        rows = csv.DictReader(io.StringIO(text, newline=""))
        if rows.fieldnames and not {"ContextTokens", "GeneratedTokens"}.issubset(rows.fieldnames):
            raise ValueError
        for row in rows:
            prompt, output = int(row["ContextTokens"] or ""), int(row["GeneratedTokens"] or "")
            if prompt < 0 or output < 1:
                raise ValueError
            requests.append((prompt, output))
    except (csv.Error, KeyError, ValueError):
        raise UsageError(
            f"--trace {path}: line {rows.line_num} is not that of a CSV with the columns"
            " ContextTokens (0 or more) and GeneratedTokens (1 or more)"
        ) from None
    except MemoryError:
        raise UsageError(f"--trace {path}: too large for the memory here") from None
    if not requests:
        raise UsageError(f"--trace {path}: no requests")
    return requests


def deploy(mode: argparse.Namespace, config: Config, s: Parts) -> None:
    """Size the deployment that the command line describes, and print the recipe."""
    many = experts(mapping("config", config))
    lengths = mode.trace is not None or (mode.prompt and mode.output)
    asked = {
        "--params N": mode.params, "--gpus N": mode.gpus, "--card NAME": mode.card,
        "--prompt N and --output N, or --trace FILE": lengths,
        f"--active N (parameters that a token uses: {many})": mode.active or not many,
    }  # fmt: skip
    missing = [option for option, given in asked.items() if not given]
    if missing:
        raise UsageError(f"to size a deployment, add {'; '.join(missing)}")
    given = {
        "requests": [(mode.prompt, mode.output)] if mode.trace is None else requests_at(mode.trace),
        "card": mode.card, "n_params": mode.params, "tp": mode.gpus,
        "active_params": mode.active, "weight_bytes": mode.weights or DTYPE,
        "dtype_bytes": mode.kv, "utilization": mode.utilization or UTILIZATION,
        "rest_gib": mode.rest,
    }  # fmt: skip
    recipe(ascii_line(mode.model), config, given, s["size"](config, **given))


# --------------------------------------------------------------------------------------- predict

# By an example of a guess: the units that it may be in, as parts of the answer's unit.
UNITS: dict[str, dict[str, float]] = {
    "2*50 KB": {"": 1, "b": 1, "bytes": 1, "kb": 1e3, "mb": 1e6, "k": 2**10, "kib": 2**10,
                "mib": 2**20},
    "50%": {"": 1, "%": 0.01, "percent": 0.01},
    "3x": {"": 1, "x": 1, "times": 1},
    "50 GB/s": {"": 1, "gb/s": 1, "mb/s": 1e-3, "tb/s": 1e3, "gib/s": GIB / 1e9,
                "Mb/s": 0.125e-3, "Gb/s": 0.125, "Tb/s": 125},  # a small b is a bit
}  # fmt: skip
FACTOR = r"(?:[0-9]+(?:[,_][0-9]{3})*(?:\.[0-9]*)?|\.[0-9]+)"
GUESS = re.compile(rf"[~\s]*({FACTOR}(?:\s*[*x\u00d7]\s*{FACTOR})*)\s*(.*)")
CLOSE = 1 / 0.95  # times too high or too low: 160 KB means 160 KiB


def questions(s: Parts) -> list[tuple[Any, ...]]:
    """The quiz: each question's block, an example of a guess, a text, and figures with remarks.

    The first figure is the answer by the mechanisms in `s`, and the others are wrong turns.
    """
    requests = s["seq_lengths"](4000)
    token = s["kv_bytes_per_token"](LAYERS, KV_HEADS, HEAD_DIM, DTYPE)
    share = s["budget_share"](s["kv_gib"](131_072))
    slots, pages = s["contiguous"](requests, 8192), s["paged"](requests, 16)
    waste, growth = slots.waste, pages.batch / slots.batch
    saved, bar = s["expected_saving"](64, 4096), s["break_even"]()
    counted = s["break_even"](attention=True, prefix=131_072)
    lost_v = "That is one vector a head, but K and V are both kept."
    return [
        (1, "2*50 KB", f"""How many bytes of KV does one token of a 70B model hold? ({LAYERS}
         layers, {Q_HEADS} query heads, {KV_HEADS} KV heads of {HEAD_DIM} values, fp16)""",
         (token, f"A token holds {token:,} B = {token // 1024} KiB."),
         (token / LAYERS, "That is one layer of it."),
         (token / 2, lost_v),
         (token * 2, "A value in fp16 takes 2 bytes."),
         (token * Q_HEADS / KV_HEADS, "That counts query heads; only KV heads keep anything.")),
        (1, "50%", f"""Four H100s hold that model and have {KV_BUDGET_GIB} GiB left for KV. What
         share of it does one request of 128k tokens take?""",
         (share, f"128k tokens take {share:.1%} of the memory for KV."),
         (share / 2, lost_v)),
        (2, "50%", """Chat: prompts and answers of any length, most of them short. If every
         sequence reserves 8,192 tokens, what share of that memory is never used? (Just guess.)""",
         (waste, f"Reserving 8,192 tokens wastes {waste:.1%}."),
         (1 - waste, "That is what is used.")),
        (3, "3x", "By what factor does the batch grow with pages of 16 tokens instead?",
         (growth, f"The batch grows {growth:.1f}x: {slots.batch} -> {pages.batch}.")),
        (4, "50%", """64 chats share a prefix of 4,096 tokens, and each adds a prompt and an answer
         of its own. What share of their KV goes away if the prefix is stored once?""",
         (saved, f"Sharing saves {saved:.1%} on average."),
         (63 / 64, "That is of the prefixes alone."),
         (1 - saved, "That is what stays.")),
        (5, "50 GB/s", f"""From how many GB/s on is it faster to load a prefix's KV than to compute
         it again, on 4 GPUs of {DENSE_FLOPS_PER_GPU / 1e12} TFLOP/s at 2 FLOP per parameter and
         token?""",
         (bar, f"""Loading wins from {bar:.2f} GB/s on, whatever the length. If attention is
         counted, it wins from {counted:.2f} GB/s on at 131,072 tokens."""),
         (bar / 4, "That is for one GPU; four compute four times as fast."),
         (bar / 2, lost_v),
         (bar * 2, "That counts one FLOP per parameter and token."),
         (bar * 8, "That is in Gbit/s.")),
    ]  # fmt: skip


def guess_of(typed: str, units: Mapping[str, float]) -> float | None:
    """The guess in the unit of the answer, 2*50 KB as 100,000; None if it cannot be read."""
    found = GUESS.fullmatch(typed.rstrip())
    if not found:
        return None
    factors, unit = re.findall(FACTOR, found[1]), found[2]
    guess = math.prod(float(factor.replace(",", "")) for factor in factors)
    if "%" in units and not unit and guess >= 1:  # 23 is 23%, and so is 0.23
        unit = "%"
    guess *= units.get(unit) or units.get(unit.lower()) or math.nan
    return guess if math.isfinite(guess) else None


def ask(example: str) -> float | None:
    """The guess that is typed, asked for twice if need be (None: no guess); EOFError at the end."""
    for prompt in ("your guess", f"I cannot read that. Once more, like {example}"):
        print(f"     {prompt}: ", end="", flush=True)
        typed = ""
        with contextlib.suppress(AttributeError, OSError, ValueError):
            typed = sys.stdin.readline()  # unless there is no input, or its terminal has gone
        if not typed:
            raise EOFError
        if not sys.stdin.isatty():
            print(ascii_line(typed)[:30])
        guess = guess_of(typed, UNITS[example])
        if guess is not None or not typed.strip():
            break
    return guess


def times_off(guess: float, figure: float) -> float:
    """How many times too high or too low a guess at a figure is; at least 1."""
    return max(guess, figure) / min(guess, figure) if guess else math.inf


def judged(guess: float | None, figures: list[tuple[float, str]]) -> tuple[float, str]:
    """How many times off a guess is (0.0: no guess), and what to say of it."""
    (answer, fact), *turns = figures
    if guess is None:
        return 0.0, f"No guess. {fact}"
    off = times_off(guess, answer)
    if off <= CLOSE:
        return off, f"Spot on. {fact}"
    size = f"{off:.2f}x" if off < 1000 else "far"
    direction = "high" if guess > answer else "low"
    hints = [hint for figure, hint in turns if times_off(guess, figure) <= CLOSE]
    return off, " ".join([f"You are {size} too {direction}.", *hints, fact])


def predict(s: Parts) -> int:
    """Ask for a guess at each number, and say how far off it is. Returns 0.

    It ends early, with the same summary, when the input ends or Ctrl-C is pressed (130).
    """
    quiz, status = questions(s), 0
    misses = [(0.0, 0, 0)]  # how far off a guess was, its question and its block
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte is no reason to stop
    print(f"  Guess {len(quiz)} numbers before you read. Press Enter to skip one.\n")
    try:
        for i, (block, example, text, *figures) in enumerate(quiz, 1):
            print(wrapped(text, f"  {i}. "))
            off, said = judged(ask(example), figures)
            print(wrapped(said, "     "), end="\n\n")
            misses.append((off, i, block))
    except (EOFError, KeyboardInterrupt) as end:
        status = 130 if isinstance(end, KeyboardInterrupt) else 0
        print(f"\n\n     ({'Stopped' if status else 'End of input'}.)\n")
    off, i, block = max(misses)
    if not off:
        print("  No guess to judge. Run this without --predict and start at block 1.")
    elif off <= CLOSE:
        print("  Every guess is spot on.")
    else:
        print(f"  Your worst miss is question {i}: read --block {block} first.")
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


def bounded(name: str, value: Any, least: float, most: float, kind: str, convert: Any) -> Any:
    """`value`, converted and in bounds, or an error that names the parameter and the value."""
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


def whole(name: str, value: Any, least: int = 0, most: int = MANY) -> int:
    """`value` as an int in [least, most]; TypeError or ValueError if it is none."""
    if value.__class__ is int and least <= value <= most:
        return cast(int, value)  # as nearly always: this costs next to nothing
    return int(bounded(name, value, least, most, "whole number", operator.index))


def number(name: str, value: Any, least: float = TINY, most: float = HUGE) -> float:
    """`value` as a float or an int in [least, most]; TypeError or ValueError if it is none."""
    if value.__class__ in (float, int) and least <= value <= most:
        return cast(float, value)
    return cast(float, bounded(name, value, least, most, "number", float))


def of_kind(kind: Any, words: str, name: str, value: Any) -> Any:
    """`value` if it is of that kind, otherwise TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {words}, not {shown(value)}")
    return value


truth = partial(of_kind, bool, "True or False")
mapping = partial(of_kind, Mapping, "a dict")


def clock(name: str, value: Any) -> Callable[[float, float], float]:
    """`value` if it can be called, otherwise TypeError; what it returns is checked too."""
    returned, seconds = f"what {name} returns", of_kind(Callable, "a function", name, value)
    return lambda tokens, held_tokens: number(returned, seconds(tokens, held_tokens))


def pairs(name: str, requests: Any) -> Iterator[tuple[int, int]]:
    """The requests, each checked when its turn comes: any iterable of pairs is a workload."""
    try:
        return map(pair, count(), requests)
    except TypeError:
        raise TypeError(f"{name} must be (prompt, output) pairs, not {shown(requests)}") from None


def pair(i: int, request: Any) -> tuple[int, int]:
    """Request number `i`, if it is a pair of whole numbers of tokens."""
    try:
        if isinstance(request, (str, bytes, bytearray, set, frozenset, dict)):
            raise TypeError
        prompt, output = request
    except (TypeError, ValueError):
        message = f"requests[{i}] must be a (prompt, output) pair, not {shown(request)}"
        raise TypeError(message) from None
    if prompt.__class__ is output.__class__ is int and MANY >= prompt >= 0 <= output <= MANY:
        return prompt, output
    return whole(f"requests[{i}] prompt", prompt), whole(f"requests[{i}] output", output)


def servable(
    requests: Iterable[tuple[int, int]], pages: int, page_tokens: int
) -> list[tuple[int, int]]:
    """The requests, if each has a prompt and an output and fits the pool."""
    lengths, pool = list(requests), f"{pages:,} pages of {page_tokens:,}"
    for i, (prompt, output) in enumerate(lengths):
        if prompt < 1 or output < 1 or prompt + output > pages * page_tokens:
            whole(f"requests[{i}] prompt", prompt, 1)
            whole(f"requests[{i}] output", output, 1)
            raise ValueError(f"requests[{i}] of {prompt + output:,} tokens never fits {pool}")
    return lengths


def some_output(tokens: float) -> float:
    """The output tokens of a workload, if there are any."""
    if not tokens:
        raise ValueError("requests must generate something, not 0 tokens in all")
    return tokens


# What an argument must be follows from the type of its parameter.
TYPES: dict[str, Callable[..., Any]] = {
    "int": whole, "float": number, "bool": truth, "Iterable[tuple[int, int]]": pairs,
    "Callable[[float, float], float]": clock, "Config": mapping, "Card": card_of,
    "self": lambda name, value: value,
}  # fmt: skip
# The range of a number follows from its name; some mean something else in one mechanism.
RANGES: dict[str, tuple[float, float]] = {
    "int": (1, MANY), "tokens": (0, MANY), "prefix": (0, MANY), "seed": (-MANY, MANY),
    "n": (0, 10**8), "break_even prefix": (1, MANY),
    "PagePool.__init__ pages": (1, 10**7),  # it has a list of them
    "float": (TINY, HUGE), "gib": (0, HUGE), "private": (0, HUGE), "held_tokens": (0, HUGE),
    "budget_gib": (TINY, 1e9), "rest_gib": (0, 1e6), "shortest_fetch gb_per_s": (1e-3, HUGE),
    "size n_params": (10**6, HUGE), "size active_params": (10**6, HUGE), "size tp": (1, 10**6),
    "size weight_bytes": (0.01, 4), "size dtype_bytes": (0.01, 4),  # bytes, not bits
    "model_table budget_gib": (1e-6, 1e9),
    "mfu": (TINY, 1), "mbu": (TINY, 1), "utilization": (0.01, 1), "occupancy": (0, 1),
    "watermark": (0, math.nextafter(1, 0)),  # less than 1, as the engine takes it
    "dtype_bytes": (0.01, 1000), "weight_bytes": (0.01, 1000),
}  # fmt: skip


def check_of(mechanism: Callable[..., Any], name: str) -> Callable[[str, Any], Any]:
    """What checks an argument: called with its name and value, it returns the value or raises."""
    kind, _, none = mechanism.__annotations__.get(name, name).partition(" | ")
    check, own = TYPES[kind], RANGES.get(f"{mechanism.__qualname__} {name}")
    bounds = own or RANGES.get(name) or RANGES.get(kind) or ()
    return lambda name, value: None if none and value is None else check(name, value, *bounds)


def guarded(bare: Callable[..., Any]) -> Callable[..., Any]:
    """The mechanism, but wrong arguments raise before its body runs, and name the parameter."""
    names = bare.__code__.co_varnames[: bare.__code__.co_argcount]
    checks = {name: check_of(bare, name) for name in names}

    @wraps(bare)
    def mechanism(*args: Any, **kwargs: Any) -> Any:
        checked = [check(name, value) for (name, check), value in zip(checks.items(), args)]
        for name in kwargs:
            if name in checks:  # or the call will say that there is none of this name
                kwargs[name] = checks[name](name, kwargs[name])
        return bare(*checked, *args[len(checked) :], **kwargs)

    return mechanism


for name, part in parts().items():
    if not isinstance(part, type):
        globals()[name] = guarded(part)


def refuse(sequence: Any) -> NoReturn:
    """Say why `sequence` is none of the pool that is asked to change it."""
    if not isinstance(sequence, Sequence):
        raise TypeError(f"sequence must come from this pool, not {shown(sequence)}")
    if sequence.pool is None:
        raise ValueError("sequence was released before")
    raise ValueError(f"sequence belongs to another pool: {shown(sequence)}")


def guard_methods() -> None:
    """Give PagePool and Scheduler the same: a call that they refuse has changed nothing."""
    bare_allocate, bare_append, bare_fork = PagePool.allocate, PagePool.append, PagePool.fork
    bare_release, bare_references = PagePool.release, PagePool.references
    bare_add = Scheduler.add

    def allocate(self: PagePool, tokens: int) -> Sequence:
        plain = tokens.__class__ is int and 0 <= tokens <= MANY
        return bare_allocate(self, tokens if plain else whole("tokens", tokens))

    def append(self: PagePool, sequence: Sequence, n: int = 1) -> None:
        if sequence.__class__ is not Sequence or sequence.pool is not self:
            refuse(sequence)
        plain = n.__class__ is int and 0 <= n <= MANY
        bare_append(self, sequence, n if plain else whole("n", n))

    def fork(self: PagePool, sequence: Sequence, tokens: int) -> Sequence:
        if sequence.__class__ is not Sequence or sequence.pool is not self:
            refuse(sequence)
        return bare_fork(self, sequence, whole("tokens", tokens, 0, sequence.tokens))

    def release(self: PagePool, sequence: Sequence) -> None:
        if sequence.__class__ is not Sequence or sequence.pool is not self:
            refuse(sequence)
        bare_release(self, sequence)

    def references(self: PagePool, page: int) -> int:
        return bare_references(self, whole("page", page, 0, self.pages - 1))

    def add(self: Scheduler, prompt: int, output: int) -> None:
        prompt, output = whole("prompt", prompt, 1), whole("output", output, 1)
        room = self.pool.pages * self.pool.page_tokens
        if prompt + output > room:
            raise ValueError(f"prompt + output = {prompt + output:,} never fits {room:,} tokens")
        bare_add(self, prompt, output)

    def uncopied(self: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied; a sequence can be forked")

    for method in (allocate, append, fork, release, references):
        setattr(PagePool, method.__name__, wraps(getattr(PagePool, method.__name__))(method))
    setattr(Scheduler, "add", wraps(bare_add)(add))  # noqa: B010
    for owner in (PagePool, Scheduler):
        setattr(owner, "__init__", guarded(vars(owner)["__init__"]))  # noqa: B010
    for uncopyable in (PagePool, Sequence):
        setattr(uncopyable, "__reduce__", uncopied)  # noqa: B010


guard_methods()


# ---------------------------------------------------------------------------------- command line

USAGE = """\
usage: m02_kv_cache [one of the following]

  (nothing)     every block, then the assembly
  --block N     block N alone, from 1 to 6; the blocks it needs run silently
  --quiet       the assembly only
  --verify      check the 14 claims and every mechanism; exit 1 if one fails
  --model FILE  block 1's table for a model's config.json (-: standard input);
                with --budget GIB also what fits into so much memory
  --model FILE --params N --gpus N --card NAME --prompt N --output N
                size a deployment: a recipe. Instead of --prompt and --output:
                --trace FILE, a CSV with ContextTokens and GeneratedTokens.
                NAME: L4, A100-80G, H100-SXM, ... (a wrong one lists them), or
                GIB,GB/S,TFLOP/S of one GPU (dense, 16 bits).
                Also: --active N (parameters that a token uses, of a mixture
                of experts), --weights BYTES a parameter, --kv BYTES a value,
                --utilization SHARE of the memory, --rest GIB of each GPU
  --trace FILE  what pages are worth to these lengths, on the lesson's server
  --predict     guess six numbers first, and see how far off you are
  --help        this text
"""


class UsageError(Exception):
    """The command line asks for what cannot be done; the message says what."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse, but a wrong argument is an exception rather than an exit."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message, and the modes that there are."""
        raise UsageError(
            f"{message}; use nothing, --block N (N from 1 to 6), --quiet, --verify, --model FILE"
            " [--budget GIB], --trace FILE, --predict or --help"
        )


# What is typed for an option becomes an argument, and may be what its parameter may be.
OPTIONS = {
    "budget": check_of(model_table, "budget_gib"), "params": check_of(size, "n_params"),
    "active": check_of(size, "active_params"), "gpus": check_of(size, "tp"),
    "card": check_of(size, "card"), "weights": check_of(size, "weight_bytes"),
    "kv": check_of(size, "dtype_bytes"), "utilization": check_of(size, "utilization"),
    "rest": check_of(size, "rest_gib"), "prompt": check_of(Scheduler.add, "prompt"),
    "output": check_of(Scheduler.add, "output"),
}  # fmt: skip
SIZING = [*(name for name in OPTIONS if name != "budget"), "trace"]  # they size a deployment
OPTION_OF = {"tp": "--gpus", "active_params": "--active", "weight_bytes": "--weights"}


def typed(option: str, text: str) -> Any:
    """The argument that is typed for an option: a number, some with commas between, or a word."""
    argument: Any = text
    with contextlib.suppress(ValueError):
        numbers = [int(x) if x.is_integer() else x for x in map(float, text.split(","))]
        argument = {1: numbers[0], 3: numbers}.get(len(numbers), text)
    try:
        return OPTIONS[option](f"--{option}", argument)
    except (TypeError, ValueError) as error:
        raise UsageError(error) from None


def parse(argv: list[str] | None) -> argparse.Namespace:
    """What the command line asks for, each name None unless it is given; or UsageError."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--block", choices=[str(number) for number in BLOCKS], action="append")
    modes.add_argument("--model", action="append")
    for names in (["--quiet"], ["--verify"], ["--predict"], ["-h", "--help"]):
        modes.add_argument(*names, action="store_true", default=None)
    for name in OPTIONS:
        parser.add_argument(f"--{name}", type=partial(typed, name), action="append")
    parser.add_argument("--trace", action="append")
    mode = parser.parse_args(argv)
    given = {name: value for name, value in vars(mode).items() if value is not None}
    for name, values in given.items():
        if values is not True:
            if len(values) > 1:
                parser.error(f"argument --{name}: given more than once")
            setattr(mode, name, values[0])
    options = [name for name in ("budget", *SIZING) if name in given]
    if options and mode.model is None and list(given) != ["trace"]:
        others = [name for name in given if name not in options]
        parser.error(
            f"argument --{options[0]}: not with --{others[0]}"
            if others
            else f"argument --{options[0]}: only with --model FILE"
        )
    if mode.model == mode.trace == "-":
        parser.error("argument --trace: not - too, which --model reads")
    for name, other in (*product(["budget"], SIZING), ("trace", "prompt"), ("trace", "output")):
        if name in given and other in given:
            parser.error(f"argument --{name}: not with --{other}")
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
            if any(getattr(mode, name) is not None for name in SIZING):
                deploy(mode, config, parts())
            else:
                model_table(mode.model, config, mode.budget, parts())
        except (TypeError, ValueError) as error:
            told = str(error)
            for name, option in OPTION_OF.items():
                told = re.sub(rf"(^|: |\(){name}(?= =| is|\))", rf"\1{option}", told)
            raise UsageError(f"--model {mode.model}: {told}") from None
    elif mode.trace is not None:
        try:
            row = traffic(requests_at(mode.trace))
            if not row.slots_per_s or not row.pages_per_s:
                raise ValueError("too few requests: nobody waits for long")
        except ValueError as error:
            raise UsageError(f"--trace {mode.trace}: {error}") from None
        print(f"  {ascii_line(mode.trace)} on 4 x H100, a 70B model, 35,328 pages of 16 tokens\n")
        traffic_table(row)
    elif mode.block:
        number = int(mode.block)
        first = prerequisites(number)
        if first:
            plural = "s" if len(first) > 1 else ""
            print(f"(Ran silently first: block{plural} {', '.join(map(str, first))}.)")
        collect([*first, number], shown=[number])
    else:
        assembly(collect(BLOCKS, shown=BLOCKS))
    return 0


def flush() -> None:
    """Write out what was printed, unless there was nothing to print on from the start."""
    if sys.stdout is not None:
        sys.stdout.flush()


def write_off(stream: Any) -> None:
    """Close a stream that cannot be written, or Python tries once more at exit, and complains."""
    with contextlib.suppress(AttributeError, OSError, KeyboardInterrupt):
        stream.close()


def complain(message: object) -> None:
    """One line on standard error, if there is one."""
    try:
        if sys.stderr is not None:
            print(f"m02_kv_cache: {ascii_line(str(message))}", file=sys.stderr, flush=True)
    except OSError:
        write_off(sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (the process's own if None) and return the exit status."""
    status = 0
    try:
        try:
            status = run(parse(argv))
        except UsageError as error:
            status = 2
            complain(error)
        except KeyboardInterrupt:
            status = 130
        flush()
    except KeyboardInterrupt:  # while the last lines were written
        write_off(sys.stdout)
        status = 130
    except BrokenPipeError:  # whoever read has seen enough
        write_off(sys.stdout)
        status = status or 141
    except OSError as error:
        write_off(sys.stdout)
        complain(f"cannot write the output: {error.strerror}")
        status = status or 1
    return status


if __name__ == "__main__":
    gc.freeze()  # what is there now stays: the collector need not look at it again
    exit_status = main()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python ends: no traceback
    sys.exit(exit_status)
