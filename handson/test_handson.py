#!/usr/bin/env python3
"""Tests of m02_kv_cache. Run this file, or collect it with pytest; nothing but Python is needed.

They compare with something the lesson does not compute: a naive model, brute force over single
tokens, a conservation law, a published figure, or the lesson itself with a bug planted in it.
"""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import copy
import csv
import doctest
import enum
import functools
import glob
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest
import warnings
from functools import partial
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import m02_kv_cache as lesson  # noqa: E402

SCRIPT = os.path.join(HERE, "m02_kv_cache.py")
# `python3 test_handson.py --full` recomputes every range over draws.
EVERY_DRAW = "--full" in sys.argv
README = os.path.join(os.path.dirname(HERE), "README.md")
CONFIG = """{"model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32,
"num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096, "torch_dtype": "bfloat16"}"""
GUESSES = "320 KiB\n23%\n\n6x\n\u00e9\n\u00e9\n9.3 GB/s\nno\n"
MODES = (
    [], *(["--block", str(n)] for n in range(1, 7)), ["--quiet"], ["--verify"], ["--help"],
    ["--model", "-"], ["--predict"],
)  # fmt: skip
TYPED = {"--model": CONFIG, "--predict": GUESSES}  # what standard input holds in a mode


def typed(mode):
    """The standard input of a mode, as bytes."""
    return TYPED.get(mode[0], "").encode() if mode else b""


def run(*args, python=(sys.executable,), script=SCRIPT, stdout=subprocess.PIPE, **kwargs):
    """The script as a process of its own."""
    kwargs.setdefault("input", typed(args))
    kwargs.setdefault("env", environment())
    return subprocess.run(
        [*python, script, *args], stdout=stdout, stderr=subprocess.PIPE, timeout=100, **kwargs
    )


def call_main(*args, module=lesson, entered=None):
    """The exit status of main in this process, and what it prints."""
    entered = typed(args) if entered is None else entered
    stdin = io.TextIOWrapper(io.BytesIO(entered), encoding="utf-8")
    with mock.patch.object(sys, "stdin", stdin):
        return call(module.main, list(args))


def environment(**changes):
    """This process's environment, its settings of Python aside, with some variables set."""
    inherited = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}
    return {**inherited, **changes}


def call(function, *args):
    """What a function returns, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = function(*args)
    return result, printed.getvalue()


def another_copy():
    """The lesson as a second module, which shares nothing with the first."""
    spec = importlib.util.spec_from_file_location("another_copy", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"another_copy": module}):
        spec.loader.exec_module(module)
    return module


def random_requests(rng, longest=60):
    """A small workload, sometimes empty, sometimes with empty requests."""
    return [(rng.randint(0, longest), rng.randint(0, longest)) for _ in range(rng.randint(0, 30))]


class Workload(unittest.TestCase):
    def test_anchors(self):
        requests = lesson.seq_lengths(4000)
        self.assertEqual(sum(map(sum, requests[:420])), 564_502)
        self.assertEqual(statistics.median_low([prompt for prompt, _ in requests]), 600)

    def test_a_shorter_workload_is_the_start_of_a_longer_one(self):
        self.assertEqual(lesson.seq_lengths(10), lesson.seq_lengths(4000)[:10])
        self.assertEqual(lesson.seq_lengths(0), [])
        for seed in (6, -7, 10**18):
            self.assertNotEqual(lesson.seq_lengths(10), lesson.seq_lengths(10, seed))

    def test_prefixed_lengths_differ_by_the_prefix_alone(self):
        bare, prefixed = lesson.prefixed_lengths(64, 0), lesson.prefixed_lengths(64, 4096)
        self.assertEqual([(prompt + 4096, output) for prompt, output in bare], prefixed)


class PublishedFigures(unittest.TestCase):
    """Facts from model cards and bug reports, not from this lesson."""

    LLAMA_8B = lesson.kv_bytes_per_token(32, 8, 128, 2)
    QWEN_7B = lesson.kv_bytes_per_token(28, 4, 128, 2)

    def test_bytes_per_token(self):
        self.assertEqual(self.LLAMA_8B, 128 * 1024)
        self.assertEqual(self.QWEN_7B, 57_344)
        self.assertEqual(lesson.kv_bytes_per_token(126, 8, 128, 2), 516_096)  # Llama-3.1 405B
        self.assertEqual(lesson.kv_bytes_per_token(32, 32, 128, 2), 512 * 1024)  # Llama-2 7B

    def test_vllm_issue_10517(self):
        # One token a request, so that the batch counts pages: 3.81 GiB are 1,952 of them.
        for pages, gib, length, concurrency in (
            (1952, 3.81, 20_000, 1.56),
            (1478, 2.89, 29_000, 0.82),
        ):
            budget = pages * 16 * self.LLAMA_8B / 2**30
            self.assertEqual(round(budget, 2), gib)
            ones = lesson.paged(itertools.repeat((1, 0)), 16, budget, self.LLAMA_8B)
            self.assertEqual(ones.batch, pages)
            share = lesson.budget_share(lesson.kv_gib(length, self.LLAMA_8B), budget)
            self.assertEqual(round(1 / share, 2), concurrency)

    def test_vllm_pull_request_44594(self):
        pages = lesson.paged(itertools.repeat((16, 0)), 16, 16, self.QWEN_7B)
        self.assertEqual(pages.held_tokens, 299_584)
        self.assertEqual(lesson.budget_tokens(16, self.QWEN_7B) // 16, 18_724)

    def test_h100_needs_295_flop_for_each_byte(self):
        # The roofline's ridge: at its own bandwidth, HBM loads bytes as fast as FLOPs can use them.
        self.assertEqual(round(lesson.DENSE_FLOPS_PER_GPU / (lesson.TIERS["GPU HBM"] * 1e9)), 295)

    def test_the_budget_is_what_four_gpus_leave(self):
        weights = lesson.N_PARAMS * lesson.DTYPE / 2**30
        self.assertAlmostEqual(4 * 79.65 - weights - 15.7, lesson.KV_BUDGET_GIB, delta=0.1)


class NaivePool:
    """What a PagePool must amount to: the text of each sequence, and where its tables put it.

    It watches the pool from outside. `memory` is what the pages would contain if every append wrote
    where the table says, after the copy that a changed last page stands for.
    """

    def __init__(self, test, pages, page_tokens):
        self.test, self.pool = test, lesson.PagePool(pages, page_tokens)
        self.texts = {}  # sequence -> the tokens it must read back
        self.memory = [[None] * page_tokens for _ in range(pages)]
        self.clock = itertools.count()

    def holders(self, page):
        return sum(page in sequence.table for sequence in self.texts)

    def free(self):
        return self.pool.pages - len({page for sequence in self.texts for page in sequence.table})

    def snapshot(self):
        return [(id(s), list(s.table), s.tokens) for s in self.texts], self.pool.free

    def attempt(self, needed, function, *args):
        """Call the pool; OutOfPages must come exactly when too few are free, and change nothing."""
        before, free = self.snapshot(), self.free()
        try:
            result = function(*args)
        except lesson.OutOfPages:
            self.test.assertGreater(needed, free)
            self.test.assertEqual(self.snapshot(), before)
            return False, None
        self.test.assertLessEqual(needed, free)
        return True, result

    def write(self, sequence, old_table, n):
        """Write n new tokens at the end of the sequence's text, and to memory through its table."""
        size = self.pool.page_tokens
        if old_table and sequence.table[len(old_table) - 1] != old_table[-1]:
            source, copy = old_table[-1], sequence.table[len(old_table) - 1]
            self.memory[copy] = list(self.memory[source])
        text = self.texts[sequence]
        for _ in range(n):
            page = sequence.table[len(text) // size]
            self.test.assertEqual(self.holders(page), 1, "a shared page is written")
            self.memory[page][len(text) % size] = token = next(self.clock)
            text.append(token)

    def allocate(self, tokens):
        done, sequence = self.attempt(
            math.ceil(tokens / self.pool.page_tokens), self.pool.allocate, tokens
        )
        if done:
            self.texts[sequence] = []
            self.write(sequence, [], tokens)

    def append(self, sequence, n):
        size, old_table = self.pool.page_tokens, list(sequence.table)
        room = len(old_table) * size - sequence.tokens
        copy = n > 0 and room > 0 and self.holders(old_table[-1]) > 1
        more = math.ceil(max(0, n - room) / size)
        done, _ = self.attempt(more + copy, self.pool.append, sequence, n)
        if done:
            self.write(sequence, old_table, n)

    def fork(self, sequence, tokens):
        _, child = self.attempt(0, self.pool.fork, sequence, tokens)
        self.texts[child] = self.texts[sequence][:tokens]

    def release(self, sequence):
        del self.texts[sequence]
        self.pool.release(sequence)

    def check(self):
        pool, test = self.pool, self.test
        counts = [0] * pool.pages
        for sequence, text in self.texts.items():
            test.assertEqual(sequence.tokens, len(text))
            test.assertEqual(len(sequence.table), math.ceil(len(text) / pool.page_tokens))
            read = [token for page in sequence.table for token in self.memory[page]]
            test.assertEqual(read[: len(text)], text)
            for page in sequence.table:
                counts[page] += 1
        test.assertEqual([pool.references(page) for page in range(pool.pages)], counts)
        test.assertEqual(pool.held, sum(count > 0 for count in counts))
        test.assertEqual(pool.free + pool.held, pool.pages)


class Pool(unittest.TestCase):
    def test_100_000_random_operations_against_a_naive_model(self):
        rng, operations = random.Random(11), 0
        while operations < 100_000:
            naive = NaivePool(self, pages=rng.randint(1, 14), page_tokens=rng.randint(1, 5))
            for _ in range(500):
                live = list(naive.texts)
                kind = rng.choice(("allocate", "append", "append", "fork", "release"))
                if not live or (kind == "allocate" and len(live) < 9):
                    naive.allocate(rng.choice((0, 1, rng.randint(0, 20))))
                elif kind == "append":
                    naive.append(rng.choice(live), rng.choice((0, 1, 1, rng.randint(0, 12))))
                elif kind == "fork" and len(live) < 9:
                    sequence = rng.choice(live)
                    naive.fork(
                        sequence, rng.choice((sequence.tokens, rng.randint(0, sequence.tokens)))
                    )
                else:
                    naive.release(rng.choice(live))
                naive.check()
                operations += 1

    def test_the_pages_that_come_back_last_are_taken_first(self):
        pool = lesson.PagePool(9, 1)
        first, second = pool.allocate(3), pool.allocate(3)
        pages = list(second.table)
        pool.release(first)
        pool.release(second)
        self.assertEqual(pool.allocate(3).table, pages)

    def test_defaults_and_what_a_sequence_shows(self):
        pool = lesson.PagePool(8)
        sequence = pool.allocate(40)
        pool.append(sequence)
        self.assertEqual(pool.page_tokens, 16)
        self.assertEqual(repr(sequence), "<Sequence tokens=41 table=[0, 1, 2]>")
        pool.release(sequence)
        self.assertEqual(repr(sequence), "<Sequence tokens=0 table=[]>")

    def test_a_pool_of_any_size_costs_nothing_until_it_is_used(self):
        pool = lesson.PagePool(10**15, 1)
        self.assertEqual((pool.free, pool.allocate(3).table), (10**15, [0, 1, 2]))

    def test_a_failed_call_names_what_was_needed(self):
        pool = lesson.PagePool(2, 16)
        pool.allocate(1)
        with self.assertRaisesRegex(lesson.OutOfPages, "^2 pages needed, 1 of 2 free$"):
            pool.allocate(17)


class Allocators(unittest.TestCase):
    """Against brute force that places every token, or every byte, by itself."""

    def workloads(self, seed):
        rng = random.Random(seed)
        for _ in range(300):
            kv = rng.randint(1, 50)
            room = rng.randint(0, 400)  # tokens
            # Less than a token more: rounding must go down, and not lose a token either.
            budget_gib = (room * kv + rng.randrange(kv) + 0.5) / 2**30
            requests = random_requests(rng)
            yield rng, requests, room, {"budget_gib": budget_gib, "kv_per_token": kv}

    def test_contiguous(self):
        for rng, requests, room, card in self.workloads(1):
            reserve = rng.randint(1, 90)
            admitted = []
            for prompt, output in requests:
                if room < reserve:
                    break
                room -= reserve
                admitted.append(prompt + output)
            got = lesson.contiguous(iter(requests), reserve, **card)
            self.assertEqual(
                got,
                (
                    len(admitted),
                    reserve * len(admitted),
                    sum(admitted),
                    len([length for length in admitted if length > reserve]),
                ),
            )

    def pages_of(self, tokens, page_tokens):
        """The pages that a range of token positions touches."""
        return len({token // page_tokens for token in tokens})

    def test_paged(self):
        for rng, requests, room, card in self.workloads(2):
            page = rng.randint(1, 20)
            pages, held, admitted = room // page, 0, []
            for prompt, output in requests if pages else ():
                need = self.pages_of(range(prompt + output), page)
                if held + need > pages:
                    break
                held += need
                admitted.append(prompt + output)
            got = lesson.paged(iter(requests), page, **card)
            self.assertEqual(got[:3], (len(admitted), held * page, sum(admitted)))
            self.assertEqual(got, lesson.shared_prefix(requests, 0, page, **card))

    def test_shared_prefix(self):
        for rng, requests, room, card in self.workloads(3):
            page, prefix = rng.randint(1, 20), rng.randint(0, 50)
            for copy_on_write in (False, True):
                pages, admitted = room // page, []
                held = self.pages_of(range(prefix), page)
                fits = pages and held <= pages
                held = held if fits else 0
                for prompt, output in requests if fits else ():
                    shared = min(prefix, prompt)
                    # Copy-on-write keeps positions, so private tokens touch the pages they are on.
                    start = shared if copy_on_write else 0
                    private = range(start, start + prompt + output - shared)
                    need = self.pages_of(private, page)
                    if held + need > pages:
                        break
                    held += need
                    admitted.append(prompt + output)
                got = lesson.shared_prefix(
                    iter(requests), prefix, page, **card, copy_on_write=copy_on_write
                )
                self.assertEqual(got[:3], (len(admitted), held * page, sum(admitted)))

    def test_the_empty_workload(self):
        for allocation in (
            lesson.contiguous([], 8192),
            lesson.paged([]),
            lesson.shared_prefix([], 0),
        ):
            self.assertEqual(allocation, (0, 0, 0, 0))
            self.assertEqual(allocation.waste, 0)

    def test_a_workload_may_be_endless(self):
        forever = itertools.repeat((600, 201))
        self.assertEqual(lesson.contiguous(forever, 8192).batch, 69)
        self.assertEqual(lesson.paged(forever).batch, 35_328 // 51)

    def test_what_the_lesson_denies(self):
        # 131,072-token reservations hold a batch of 4, not of 1, and 512-token ones are overrun.
        requests = lesson.seq_lengths(4000)
        self.assertEqual(lesson.contiguous(requests, 131_072).batch, 4)
        self.assertEqual([lesson.contiguous(requests, r).misfits for r in (2048, 4096)], [43, 5])
        self.assertEqual(round(lesson.contiguous(requests, 512).waste, 2), -1.65)

    def test_exercise_figures(self):
        requests = lesson.seq_lengths(4000)
        for page, batch, waste, entries in (
            (4, 420, 0.11, 141_284), (64, 412, 2.30, 8_824),
            (256, 384, 8.51, 2_206), (1024, 308, 27.28, 550),
        ):  # fmt: skip
            pages = lesson.paged(requests, page)
            self.assertEqual((pages.batch, round(pages.waste * 100, 2)), (batch, waste))
            self.assertEqual(pages.held_tokens // page, entries)
        for n, prefix, naive, stored in (
            (2, 512, 0.58, 0.43), (8, 4096, 10.91, 2.16),
            (256, 512, 84.11, 44.27), (256, 4096, 364.11, 45.36),
        ):  # fmt: skip
            shared = lesson.shared_prefix(lesson.prefixed_lengths(n, prefix), prefix, 1)
            self.assertEqual(round(lesson.kv_gib(shared.logical_tokens), 2), naive)
            self.assertEqual(round(lesson.kv_gib(shared.held_tokens), 2), stored)


class FetchOrRecompute(unittest.TestCase):
    def test_break_even_is_where_the_two_times_meet(self):
        rng = random.Random(4)
        for _ in range(200):
            kv, n_params, flops = (
                rng.randint(1, 10**6),
                rng.uniform(1e9, 1e12),
                rng.uniform(1e13, 1e16),
            )
            tp, prefix = rng.randint(1, 16), rng.randint(1, 10**6)
            even = lesson.break_even(kv, n_params, flops, tp)
            recompute = lesson.recompute_seconds(prefix, n_params, flops, tp)
            for faster, wins in ((0.999, False), (1.001, True)):
                self.assertEqual(lesson.fetch_seconds(prefix, even * faster, kv) < recompute, wins)

    def test_8b_on_one_gpu(self):
        self.assertEqual(round(lesson.break_even(131_072, 8e9, tp=1), 2), 8.11)

    def test_a_token_takes_2n_flop(self):
        # 140 TFLOP a thousand tokens, on one GPU of 140 TFLOP/s.
        self.assertAlmostEqual(lesson.recompute_seconds(1000, 70e9, 140e12, tp=1), 1.0)
        self.assertAlmostEqual(lesson.fetch_seconds(1000, 0.5, 500_000), 1.0)

    def test_where_the_verdict_flips(self):
        nvme = 7
        self.assertEqual(round(nvme / lesson.break_even(), 3), 0.756)
        self.assertAlmostEqual(lesson.break_even(mfu=nvme / lesson.break_even()), nvme)
        self.assertEqual(round(lesson.break_even(mfu=0.5), 2), 4.63)
        for prefix, even in (
            (1024, 9.18), (4096, 8.92), (16_384, 8.03), (32_768, 7.09), (131_072, 4.16)
        ):  # fmt: skip
            self.assertEqual(round(lesson.break_even(attention=True, prefix=prefix), 2), even)
        self.assertEqual(lesson.shortest_fetch(nvme), 34_546)
        for prefix, fetched in ((34_545, False), (34_546, True)):
            recompute = lesson.recompute_seconds(prefix, attention=True)
            self.assertEqual(lesson.fetch_seconds(prefix, nvme) < recompute, fetched)
        self.assertEqual(lesson.shortest_fetch(14), 1)

    def test_attention_against_a_sum_over_tokens(self):
        # Scores and their sum: two products of 2 x head_dim FLOP a head, layer and earlier token.
        layers, heads, head_dim, prefix = 3, 5, 7, 400
        flop = sum(2 * 1000 + layers * heads * 2 * (2 * head_dim) * i for i in range(prefix))
        shape = {"layers": layers, "q_heads": heads, "head_dim": head_dim}
        got = lesson.recompute_seconds(prefix, 1000, 1e6, tp=2, mfu=0.4, attention=True, **shape)
        self.assertAlmostEqual(got * 2e6 * 0.4 / flop, 1, delta=1 / prefix)
        bare = lesson.recompute_seconds(prefix, 1000, 1e6, tp=2, mfu=0.4, **shape)
        self.assertAlmostEqual(bare * 2e6 * 0.4, 2 * 1000 * prefix)


class Preemption(unittest.TestCase):
    def test_the_stated_figures(self):
        for occupancy, tokens in ((0, 0), (0.85, 0), (0.90, 215_494), (0.99, 1_652_576)):
            self.assertEqual(lesson.preempted_tokens(occupancy), tokens)

    def test_a_full_pool_preempts_at_every_step(self):
        # Every step draws a victim, so the mean is the log-normal's: exp(6.4 + 1/2) = 992 tokens.
        tokens = lesson.preempted_tokens(1.0, n=100_000, seed=1)
        self.assertAlmostEqual(tokens / 100_000, math.exp(6.9), delta=15)
        self.assertEqual(lesson.preempted_tokens(1.0, n=0), 0)


def step_by_step(
    requests, pages, page=16, watermark=0.0, max_running=None, budget=None, seconds=None
):
    """The scheduler of `serve`, one token and one page at a time, with nothing clever in it."""
    queue = [
        {"prompt": p, "output": o, "generated": 0, "pages": 0, "new": True} for p, o in requests
    ]
    running, counted, finished, owed = [], [], 0, 0
    total = dict.fromkeys(
        ("steps", "generated", "prefilled", "reprefilled", "preempted", "peak_pages"), 0
    )

    def free():
        return pages - sum(sequence["pages"] for sequence in running)

    def needed(sequence):
        return math.ceil((sequence["prompt"] + sequence["generated"] + 1) / page)

    def note_peak():
        total["peak_pages"] = max(total["peak_pages"], pages - free())

    while queue or running:
        total["steps"] += 1
        never_ran = sum(sequence["new"] for sequence in queue)
        steady = bool(queue) and 2 * (len(requests) - never_ran) >= len(requests)
        first_time = again = 0
        while queue:
            kept_free = math.floor(watermark * pages) if running else 0
            if needed(queue[0]) + kept_free > free() or len(running) == max_running:
                break
            if budget is not None and running and owed >= budget - len(running):
                break
            sequence = queue.pop(0)
            running.append(sequence)
            sequence["pages"] = needed(sequence)
            tokens = sequence["prompt"] + sequence["generated"]
            first_time += tokens if sequence["new"] else 0
            again += 0 if sequence["new"] else tokens
            owed += tokens
            sequence["new"] = False
        total["prefilled"] += first_time + again
        total["reprefilled"] += again
        note_peak()
        room = owed if budget is None else max(1, budget - len(running))
        prefill = min(owed, room)
        owed -= prefill
        if steady:
            took = seconds(len(running) + prefill, (pages - free()) * page) if seconds else 1.0
            counted.append((len(running), pages - free(), first_time, again, took))
        for sequence in running:
            sequence["generated"] += 1
            total["generated"] += 1
        for sequence in list(running):
            if sequence["generated"] == sequence["output"]:
                running.remove(sequence)
                finished += 1
        for sequence in list(running):
            while sequence in running and sequence["pages"] < needed(sequence):
                if free():
                    sequence["pages"] += 1
                    note_peak()
                else:
                    queue.insert(0, running.pop())
                    total["preempted"] += 1
    assert finished == len(requests)
    ran, held, first_time, again, took = map(sum, zip(*counted)) if counted else (0,) * 5
    total["running"] = ran / max(1, len(counted))
    total["held"] = held / max(1, len(counted)) / pages
    total["again"] = again / first_time if first_time else 0
    total["tokens_per_s"] = ran / took if counted else 0
    return total


def random_servings(seed, n):
    """Workloads that fit their pools, with pages, watermarks and limits: arguments of serve."""
    rng = random.Random(seed)
    for _ in range(n):
        page, pages = rng.choice((1, 2, 3, 5, 16, 1000)), rng.randint(1, 30)
        requests = []
        for _ in range(rng.randint(0, 14)):
            tokens = rng.randint(1, min(300, pages * page))
            output = rng.randint(1, tokens)
            requests.append((tokens - output, output))
        watermark = rng.choice((0, 0, 0.01, 0.1, 0.3, 0.5, 0.999))
        limits = rng.choice((None, None, 1, 2, 5)), rng.choice((None, None, 1, 3, 40, 400))
        yield requests, pages, page, watermark, *limits


class Serving(unittest.TestCase):
    PAGES = 35_328

    def setUp(self):
        self.chat = lesson.seq_lengths(1500)
        self.mirror = [(output, prompt) for prompt, output in self.chat]

    def test_golden_figures(self):
        golden = {  # watermark: (steps, preempted, re-prefilled) of the chat mix and of its mirror
            0: ((4932, 116, 133_076), (16_782, 1139, 547_398)),
            0.01: ((4942, 8, 16_784), (16_782, 417, 195_206)),
            0.05: ((4993, 0, 0), (16_782, 392, 183_535)),
            0.15: ((5135, 0, 0), (16_782, 245, 122_728)),
        }
        for watermark, rows in golden.items():
            for requests, row in zip((self.chat, self.mirror), rows):
                served = lesson.serve(requests, self.PAGES, watermark=watermark)
                self.assertEqual((served.steps, served.preempted, served.reprefilled), row)
                self.assertEqual(served.generated, sum(output for _, output in requests))
                prompts = sum(prompt for prompt, _ in requests)
                self.assertEqual(served.prefilled - served.reprefilled, prompts)

    def test_the_sweep(self):
        golden = {  # (at most, kept free): (running, held, preempted, again, tokens/s), chat, long
            (350, 0): ((350.0, 81.1, 0, 0.0, 6054), (350.0, 77.2, 0, 0.0, 12_696)),
            (400, 0): ((399.9, 92.3, 7, 0.2, 6071), (400.0, 88.5, 0, 0.0, 12_672)),
            (425, 0): ((421.9, 97.2, 68, 2.7, 5980), (424.8, 94.3, 149, 7.1, 12_506)),
            (450, 0): ((432.5, 99.6, 191, 8.1, 5763), (438.6, 97.3, 1260, 57.2, 11_545)),
            (500, 0): ((433.1, 99.8, 303, 10.6, 5675), (449.7, 99.6, 3695, 133.8, 10_290)),
            (500, 0.01): ((428.8, 98.8, 0, 0.0, 6033), (447.6, 98.9, 241, 9.0, 12_434)),
            (500, 0.05): ((410.9, 94.8, 0, 0.0, 6066), (430.9, 95.3, 0, 0.0, 12_625)),
        }
        mixes = lesson.mixes(lesson.seq_lengths(4000))
        for (most, free), rows in golden.items():
            for requests, row in zip((mixes["chat"], mixes["long"]), rows):
                served = lesson.serve(requests, self.PAGES, 16, free, most, 8192)
                got = (
                    round(served.running, 1), round(served.held * 100, 1), served.preempted,
                    round(served.again * 100, 1), round(served.tokens_per_s),
                )  # fmt: skip
                self.assertEqual(got, row)
        for mix, most, rate in (
            ("chat", 69, 3790), ("long", 69, 5327), ("chat", 276, 5957), ("long", 276, 12_403)
        ):  # fmt: skip
            served = lesson.serve(mixes[mix], self.PAGES, 16, 0, most, 8192)
            self.assertEqual(round(served.tokens_per_s), rate)

    def published(self, seed):
        """A draw of the workload of vLLM's pull request 44594."""
        rng = random.Random(seed)
        return [(rng.randint(800, 1200), rng.randint(4000, 6000)) for _ in range(450)]

    def test_against_the_engine_measured_in_vllm_pull_request_44594(self):
        pages = lesson.budget_tokens(16, lesson.kv_bytes(QWEN_7B)) // 16
        self.assertEqual(pages, 18_724)
        simulated = [
            lesson.serve(self.published(0), pages, watermark=watermark, max_running=128).preempted
            for watermark in lesson.WATERMARKS
        ]
        self.assertEqual(simulated, [1003, 379, 229, 188, 178])
        for ours, measured in zip(simulated, lesson.MEASURED):
            self.assertLess(abs(ours - measured) / measured, 0.25)

    def test_the_range_over_draws(self):
        # 100 draws take a quarter of a minute: see EVERY_DRAW.
        draws = 100 if EVERY_DRAW else 8
        for watermark, (low, high) in zip(lesson.WATERMARKS, lesson.SIMULATED):
            counts = sorted(
                lesson.serve(self.published(seed), 18_724, 16, watermark, 128).preempted
                for seed in range(draws)
            )
            if EVERY_DRAW:
                self.assertEqual((counts[5], counts[-6]), (low, high))
            inside = sum(low <= count <= high for count in counts)
            self.assertGreaterEqual(inside, 0.75 * draws)

    def compare(self, served, expected):
        self.assertEqual(set(expected), set(served._fields))
        for field, value in expected.items():
            if isinstance(value, int):
                self.assertEqual(getattr(served, field), value, field)
            else:
                self.assertAlmostEqual(getattr(served, field), value, 9, field)

    def test_step_by_step(self):
        for i, serving in enumerate(random_servings(7, 1200)):
            with self.subTest(serving):
                seconds = [lambda tokens, held: 1.0, lambda tokens, held: 1 + tokens + held / 7][
                    i % 2
                ]
                served = lesson.serve(*serving, step_seconds=seconds)
                self.compare(served, step_by_step(*serving, seconds=seconds))

    def test_step_by_step_on_a_scarce_pool(self):
        # Long answers on few pages: preempted again and again, and in every order.
        rng = random.Random(8)
        for page in (1, 4, 16):
            pages = 240 // page
            requests = [(rng.randint(0, 9), rng.randint(1, 200)) for _ in range(60)]
            served = lesson.serve(iter(requests), pages, page, step_seconds=lambda *of: 1.0)
            self.compare(served, step_by_step(requests, pages, page))
            self.assertGreater(served.preempted, 50)

    def test_it_counts_as_many_pages_as_a_pool_hands_out(self):
        for requests, pages, page, _, most, _ in random_servings(9, 150):
            pool, waiting, running = lesson.PagePool(pages, page), list(requests), []
            generated = dict.fromkeys(range(len(waiting)), 0)
            waiting = [(i, *request) for i, request in enumerate(waiting)]
            steps = preempted = 0
            while waiting or running:
                while waiting and len(running) != most:
                    i, prompt, _ = waiting[0]
                    try:
                        running.append((*waiting[0], pool.allocate(prompt + generated[i] + 1)))
                    except lesson.OutOfPages:
                        break
                    del waiting[0]
                steps += 1
                for i, _, output, sequence in list(running):
                    generated[i] += 1
                    if generated[i] == output:
                        pool.release(sequence)
                running = [row for row in running if generated[row[0]] < row[2]]
                grown = 0
                while grown < len(running):
                    try:
                        pool.append(running[grown][3])
                        grown += 1
                    except lesson.OutOfPages:
                        *request, sequence = running.pop()
                        pool.release(sequence)
                        waiting.insert(0, tuple(request))
                        preempted += 1
            served = lesson.serve(requests, pages, page, max_running=most)
            self.assertEqual((served.steps, served.preempted), (steps, preempted))

    def test_the_default_step_time_is_the_roofline(self):
        requests = lesson.seq_lengths(300)

        def roofline(tokens, held):
            return max(140e9 / 13.4e12, tokens * 140e9 / 3.958e15) + held * 327_680 / 13.4e12

        served = lesson.serve(requests, 2000, max_batched_tokens=2048)
        self.assertGreater(served.tokens_per_s, 0)
        expected = step_by_step(requests, 2000, budget=2048, seconds=roofline)
        self.assertAlmostEqual(served.tokens_per_s / expected["tokens_per_s"], 1, 9)

    def test_step_times_of_ones_own(self):
        requests, calls = [(3, 5)] * 40, []

        def measured(tokens, held_tokens):
            calls.append((tokens, held_tokens))
            return 2

        served = lesson.serve(requests, 9, 4, step_seconds=measured)
        self.assertAlmostEqual(served.tokens_per_s, served.running / 2)
        self.assertAlmostEqual(sum(held for _, held in calls) / len(calls) / 36, served.held)
        self.assertLess(len(calls), served.steps)  # neither the first flood nor the drain
        twice = partial(lesson.step_seconds, kv_per_token=2 * lesson.KV_PER_TOKEN)
        slower = lesson.serve(requests, 9, 4, step_seconds=twice)
        self.assertLess(slower.tokens_per_s, lesson.serve(requests, 9, 4).tokens_per_s)
        for wrong, error in (
            (0, ValueError), (0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError),
            (math.inf, ValueError), ("1", TypeError), (None, TypeError),
        ):  # fmt: skip
            with self.assertRaisesRegex(error, "what step_seconds returns must be"):
                lesson.serve(requests, 9, 4, step_seconds=lambda *of, wrong=wrong: wrong)

    def test_a_cap_of_one_serves_one_by_one(self):
        served = lesson.serve(self.chat[:50], self.PAGES, max_running=1)
        self.assertEqual(served.steps, served.generated)
        self.assertEqual(served.peak_pages, max(math.ceil((p + o) / 16) for p, o in self.chat[:50]))

    def test_no_requests(self):
        self.assertEqual(lesson.serve([], 1), (0,) * 10)

    def test_a_request_that_just_fits(self):
        served = lesson.serve([(0, 32)], 2)
        self.assertEqual(served, (32, 32, 0, 0, 0, 2, 0, 0, 0, 0))


class WhatTheBatchBuys(unittest.TestCase):
    def test_published_shapes_of_a_step(self):
        # The weights of a 70B, read once by four H100: 140 GB at 13.4 TB/s.
        self.assertEqual(round(lesson.step_seconds(0, 0) * 1e3, 2), 10.45)
        self.assertEqual(lesson.step_seconds(295, 0), lesson.step_seconds(0, 0))
        self.assertGreater(lesson.step_seconds(296, 0), lesson.step_seconds(295, 0))
        mean = 1308  # one more sequence of the workload: its KV, and above the ridge its FLOPs too
        for tokens, microseconds in ((200, 32), (400, 67)):
            before = lesson.step_seconds(tokens, tokens * mean)
            after = lesson.step_seconds(tokens + 1, (tokens + 1) * mean)
            self.assertEqual(round((after - before) * 1e6), microseconds)

    def test_each_parameter_of_a_step(self):
        # 1 KB of KV and 1 GB of weights at 1 GB/s a GPU; 2 GFLOP a token at 1 GFLOP/s a GPU.
        card = {"kv_per_token": 1000, "n_params": 5e8, "flops_per_gpu": 1e9, "gb_per_s": 1}
        for tokens, held, tp, mfu, seconds in (
            (0, 0, 1, 1, 1), (1, 0, 1, 1, 1), (3, 0, 1, 1, 3), (3, 0, 2, 1, 1.5),
            (3, 0, 1, 0.5, 6), (0, 10**6, 1, 1, 2), (0, 10**6, 4, 1, 0.5), (2.5, 0.5e6, 1, 1, 3),
        ):  # fmt: skip
            got = lesson.step_seconds(tokens, held, tp=tp, mfu=mfu, **card)
            self.assertAlmostEqual(got, seconds)

    def test_the_four_allocators_in_decode(self):
        requests = lesson.seq_lengths(4000)
        for row, milliseconds, rate in (
            (lesson.contiguous(requests, 8192), 12.9, 5352),
            (lesson.contiguous(requests, 2048), 19.5, 14_144),
            (lesson.paged(requests, 16), 28.5, 14_652),
            (lesson.shared_prefix(requests, 2048), 74.4, 14_585),
        ):
            seconds = lesson.step_seconds(row.batch, row.logical_tokens)
            self.assertEqual((round(seconds * 1e3, 1), round(row.batch / seconds)),
                             (milliseconds, rate))  # fmt: skip

    def test_resident_tokens_against_a_count(self):
        # Every sequence at the beginning of every step that it runs, and the half token on average
        # that the step adds.
        requests = [(rng_prompt, output) for rng_prompt, output in lesson.seq_lengths(50)]
        held = [prompt + i + 0.5 for prompt, output in requests for i in range(output)]
        self.assertAlmostEqual(lesson.resident_tokens(requests), statistics.mean(held))
        self.assertEqual(round(lesson.resident_tokens(lesson.seq_lengths(4000)), 1), 1291.3)
        long = lesson.mixes(lesson.seq_lengths(4000))["long"]
        self.assertEqual(round(lesson.resident_tokens(long)), 1236)
        self.assertEqual(max(output for _, output in long), 4096)


class RangesOverSeeds(unittest.TestCase):
    """The constants beside the blocks that say what another seed would give."""

    def check(self, spread, values, digits):
        got = min(values), statistics.median(values), max(values)
        self.assertEqual(tuple(round(value, digits) for value in got), spread)

    def test_allocators(self):
        # No draw admits more than 600 requests, and a shorter workload is the start of a longer.
        waste, batch, ratio, worth, worth_2048 = [], [], [], [], []
        for seed in range(200):
            requests = lesson.seq_lengths(600, seed)
            reserved, pages = lesson.contiguous(requests, 8192), lesson.paged(requests)
            small = lesson.contiguous(requests, 2048)
            waste.append(reserved.waste)
            batch.append(pages.batch)
            ratio.append(pages.batch / reserved.batch)
            rate, small_rate, pages_rate = (
                row.batch / lesson.step_seconds(row.batch, row.logical_tokens)
                for row in (reserved, small, pages)
            )
            worth.append(pages_rate / rate)
            worth_2048.append(small_rate / rate)
        self.assertLess(max(batch), 600)
        self.check(lesson.WASTE_AT_8192, waste, 3)
        self.check(lesson.BATCH_IN_PAGES, batch, 0)
        self.check(lesson.PAGES_OVER_8192, ratio, 1)
        self.check(lesson.WORTH_OF_PAGES, worth, 1)
        self.check(lesson.WORTH_OF_2048, worth_2048, 1)

    def test_a_prefix_of_2k(self):
        inside, each, once = [], [], []
        for seed in range(200):
            requests = lesson.seq_lengths(1300, seed)
            inside.append(lesson.shared_prefix(requests, 2048).batch)
            ahead = [(2048 + prompt, output) for prompt, output in requests]
            each.append(lesson.paged(ahead).batch)
            once.append(lesson.shared_prefix(ahead, 2048).batch)
        self.assertLess(max(inside), 1300)
        self.check(lesson.BATCH_BEHIND_2K, inside, 1)
        self.check(lesson.BATCH_2K_EACH, each, 0)
        self.check(lesson.BATCH_2K_ONCE, once, 0)

    def test_a_shared_prefix(self):
        saved = [
            lesson.shared_prefix(lesson.prefixed_lengths(64, 4096, seed), 4096, 1).saved
            for seed in range(200)
        ]
        self.check(lesson.SAVED_BEHIND_4096, saved, 3)
        self.check(lesson.EXTRA_BEHIND_4096, [1 / (1 - share) for share in saved], 1)
        self.assertEqual(max(saved), saved[9])  # the lesson's draw is the luckiest
        many = lesson.prefixed_lengths(10**5, 0, seed=1)
        self.assertAlmostEqual(statistics.mean(map(sum, many)), lesson.MEAN_PRIVATE, delta=4)
        for n, prefix, share in ((64, 4096, 0.866), (64, 512, 0.471), (256, 512, 0.476)):
            self.assertEqual(round(lesson.expected_saving(n, prefix), 3), share)
            alike = [(prefix + 7, 93)] * n
            saved = lesson.shared_prefix(alike, prefix, 1, budget_gib=400).saved
            self.assertAlmostEqual(lesson.expected_saving(n, prefix, 100), saved)
        self.assertEqual(lesson.expected_saving(0, 100), 0)
        self.assertEqual(lesson.expected_saving(3, 0, private=0), 0)

    def test_the_cliff(self):
        runs, swings = {}, []
        for seed in range(10):
            for mix, requests in lesson.mixes(lesson.seq_lengths(4000, seed)).items():
                for most, free in lesson.SWEEP:
                    held = []

                    def recording(tokens, held_tokens, held=held):
                        held.append(held_tokens / 16 / 35_328)
                        return lesson.step_seconds(tokens, held_tokens)

                    row = lesson.serve(requests, 35_328, 16, free, most, 8192, recording)
                    runs.setdefault((mix, most, free), []).append(row)
                    if most == 400:
                        swings.append(statistics.pstdev(held) * 100)
        self.check(lesson.SWING, swings, 1)
        for mix in ("chat", "long"):
            for (most, free), spread in zip(lesson.SWEEP, lesson.AGAIN[mix]):
                again = [row.again * 100 for row in runs[mix, most, free]]
                self.check(spread, again, 1)
            at_500 = [row.tokens_per_s for row in runs[mix, 500, 0]]
            best = [
                max(rows) for rows in zip(*(
                    [row.tokens_per_s for row in runs[mix, most, free]]
                    for most, free in lesson.SWEEP if not free
                ))
            ]  # fmt: skip
            loss = [100 - 100 * rate / most for rate, most in zip(at_500, best)]
            self.check(lesson.LOSS[mix], loss, 1)
            for most, free, kept in ((500, 0.05, 0.98), (400, 0, 0.98), (500, 0.01, 0.97)):
                for served, rate in zip(runs[mix, most, free], best):
                    self.assertGreater(served.tokens_per_s, kept * rate)
            for seed, most in enumerate(best):  # a tenth fewer than fill the pool
                requests = lesson.mixes(lesson.seq_lengths(4000, seed))[mix]
                fewer = int(0.9 * 565_248 / lesson.resident_tokens(requests))
                served = lesson.serve(requests, 35_328, 16, 0, fewer, 8192)
                self.assertGreater(served.tokens_per_s, 0.97 * most)
            unlimited = lesson.serve(lesson.mixes(lesson.seq_lengths(4000))[mix], 35_328, 16, 0,
                                     None, 8192)  # fmt: skip
            self.assertAlmostEqual(unlimited.tokens_per_s / at_500[5], 1, delta=0.04)

    def test_prefill_in_the_same_steps(self):
        worth = []
        for seed in range(10):
            requests = lesson.seq_lengths(4000, seed)
            slots, pages = (
                lesson.serve(requests, 35_328, 16, free, most, 8192).tokens_per_s
                for free, most in ((0, 69), (0.05, 500))
            )
            worth.append(pages / slots)
        self.check(lesson.WORTH_WITH_PREFILL, worth, 2)

    def test_tokens_prefilled_again_by_the_assumed_curve(self):
        tokens = [lesson.preempted_tokens(0.95, seed=seed) for seed in range(200)]
        self.check(lesson.REPREFILLED_AT_95, tokens, 1)


K = 1024
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def shape(layers, heads, kv_heads, hidden, **more):
    """A config as most families write it."""
    config = {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "hidden_size": hidden, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip
    return {name: value for name, value in config.items() if value is not None or name in more}


def config_of(model_type, *dims, **more):
    """The same with a model_type, and nothing else if no dimensions are given."""
    return {**(shape(*dims) if dims else {}), "model_type": model_type, **more}


def per_layer(kv_heads, head_dim):
    """Bytes of a layer and token in 16 bits."""
    return 2 * kv_heads * head_dim * 2


LLAMA_8B = config_of("llama", 32, 32, 8, 4096)
DEEPSEEK_V3 = config_of(
    "deepseek_v3", 61, 128, 128, 7168, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128
)
QWEN_7B = config_of(
    "qwen2", 28, 28, 4, 3584, use_sliding_window=False, sliding_window=131_072, max_window_layers=28
)
GPT_OSS = config_of(
    "gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128, layer_types=[SLIDING, FULL] * 12
)
FALCON_7B = {
    "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "multi_query": True,
}  # fmt: skip
NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
T = 131_072

# model: (config, bytes of the first token, bytes of T tokens)
PUBLISHED = {
    "Llama-3.1 8B": (LLAMA_8B, 128 * K, 128 * K * T),
    "Llama-3.1 405B": (config_of("llama", 126, 128, 8, 16_384), 516_096, 516_096 * T),
    "Llama-2 7B, no KV heads": (config_of("llama", 32, 32, None, 4096), 512 * K, 512 * K * T),
    "LLaVA 1.5 7B": (
        {"model_type": "llava", "text_config": config_of("llama", torch_dtype="float16")},
        512 * K, 512 * K * T,
    ),
    "Mistral 7B v0.1": (config_of("mistral", 32, 32, 8, 4096), 128 * K, 128 * K * 4096),
    "Mistral 7B v0.3": (
        config_of("mistral", 32, 32, 8, 4096, sliding_window=None), 128 * K, 128 * K * T
    ),
    "Mixtral 8x7B": (config_of("mixtral", 32, 32, 8, 4096), 128 * K, 128 * K * T),
    "Pixtral 12B": (
        {
            "model_type": "llava", "torch_dtype": "bfloat16",
            "text_config": config_of(
                "mistral", hidden_size=5120, head_dim=128, num_hidden_layers=40, sliding_window=None
            ),
        },
        160 * K, 160 * K * T,
    ),
    "Qwen 7B": (
        {"model_type": "qwen", "num_hidden_layers": 32, "num_attention_heads": 32,
         "hidden_size": 4096, "kv_channels": 128}, 512 * K, 512 * K * T,
    ),
    "Qwen2.5 7B": (QWEN_7B, 57_344, 57_344 * T),
    "Qwen3 235B": (config_of("qwen3_moe", 94, 64, 4, 4096, head_dim=128), 192_512, 192_512 * T),
    "Qwen3-Next 80B": (
        config_of("qwen3_next", 48, 16, 2, 2048, head_dim=256), 24_576, 24_576 * T
    ),
    "Qwen3.5 35B": (
        {
            "model_type": "qwen3_5_moe",
            "text_config": config_of("qwen3_5_moe_text", 40, 16, 2, 2048),
        },
        20_480, 20_480 * T,
    ),
    "DeepSeek-V3": (DEEPSEEK_V3, 70_272, 70_272 * T),
    "Kimi-K2.5": (
        {"model_type": "kimi_k25", "text_config": {**DEEPSEEK_V3, "model_type": "kimi_k2"}},
        70_272, 70_272 * T,
    ),
    "Kimi-Linear 48B": (
        config_of("kimi_linear", 27, 32, 32, 2304, kv_lora_rank=512, qk_rope_head_dim=64,
              linear_attn_config={"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}),
        8064, 8064 * T,
    ),
    "GLM-4 9B": (
        {"model_type": "chatglm", "num_layers": 40, "num_attention_heads": 32, "hidden_size": 4096,
         "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2,
         "torch_dtype": "bfloat16"},
        40 * K, 40 * K * T,
    ),
    "Falcon 7B": (FALCON_7B, 32 * per_layer(1, 64), 32 * per_layer(1, 64) * T),
    "Falcon 7B, all its heads": (
        {**FALCON_7B, "num_kv_heads": 71}, 32 * per_layer(1, 64), 32 * per_layer(1, 64) * T
    ),
    "Falcon 40B": (
        config_of("falcon", 60, 128, 8, 8192, multi_query=True, new_decoder_architecture=True),
        60 * per_layer(8, 64), 60 * per_layer(8, 64) * T,
    ),
    "SantaCoder": (
        {"model_type": "gpt2", "n_embd": 2048, "n_head": 16, "n_layer": 24, "torch_dtype":
         "float32", "attention_head_type": "multiquery"}, 12_288, 12_288 * T,
    ),
    "Gemma 3 27B": (
        {
            "model_type": "gemma3", "torch_dtype": "bfloat16",
            "text_config": config_of("gemma3_text", 62, 32, 16, 5376, head_dim=128,
                                 sliding_window=1024),
        },
        62 * per_layer(16, 128), (10 * T + 52 * 1024) * per_layer(16, 128),
    ),
    "Gemma 3 4B, silent": (
        {
            "model_type": "gemma3",
            "text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
        },
        34 * per_layer(4, 256), (5 * T + 29 * 1024) * per_layer(4, 256),
    ),
    "Gemma 3n E4B": (
        {"model_type": "gemma3n", "text_config": config_of("gemma3n_text", 35, 8, 2, 2048)},
        20 * per_layer(2, 256), (4 * T + 16 * 512) * per_layer(2, 256),
    ),
    "Gemma 4 26B": (
        {
            "model_type": "gemma4",
            "text_config": config_of(
                "gemma4_text", 30, 16, 8, 2816, head_dim=256, global_head_dim=512,
                attention_k_eq_v=True, num_global_key_value_heads=2, sliding_window=1024,
                num_kv_shared_layers=0,
            ),
        },
        25 * per_layer(8, 256) + 5 * per_layer(2, 512),
        25 * per_layer(8, 256) * 1024 + 5 * per_layer(2, 512) * T,
    ),
    "gpt-oss 20B": (GPT_OSS, 48 * K, (12 * T + 12 * 128) * per_layer(8, 64)),
    "Command R7B": (
        config_of("cohere2", 32, 32, 8, 4096, sliding_window=4096, sliding_window_pattern=4),
        128 * K, (8 * T + 24 * 4096) * 4 * K,
    ),
    "EXAONE 4 32B": (
        config_of("exaone4", 64, 40, 8, 5120, sliding_window=4096, sliding_window_pattern="LLLG"),
        64 * 4 * K, (16 * T + 48 * 4096) * 4 * K,
    ),
    "EXAONE 4 1.2B": (
        config_of("exaone4", 30, 32, 8, 2048, sliding_window=None, sliding_window_pattern="LLLG"),
        30 * per_layer(8, 64), 30 * per_layer(8, 64) * T,
    ),
    "Llama-4 Scout": (
        {
            "model_type": "llama4",
            "text_config": config_of(
                "llama4_text", 48, 40, 8, 5120, head_dim=128, no_rope_layers=[]
            ),
        },
        192 * K, (12 * T + 36 * 8192) * 4 * K,
    ),
    "MiniMax-M1": (
        config_of("minimax_m1", 80, 64, 8, 6144, head_dim=128, attn_type_list=([0] * 7 + [1]) * 10,
              sliding_window=None),
        40 * K, 40 * K * T,
    ),
    "MiniMax-M3": (
        config_of("minimax_m3", 60, 64, 4, 6144, head_dim=128, sparse_attention_config={
            "sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_index_dim": 128}),
        137_472, 137_472 * T,
    ),
    "Nemotron-3 Nano": (
        config_of("nemotron_h", 52, 32, 2, 2688, head_dim=128, hybrid_override_pattern=NEMOTRON),
        6 * K, 6 * K * T,
    ),
    "LFM2 1.2B": (
        config_of("lfm2", 16, 32, 8, 2048, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
        12 * K, 12 * K * T,
    ),
    "Jamba": (
        config_of("jamba", 32, 32, 8, 4096, attn_layer_offset=4, attn_layer_period=8),
        16 * K, 16 * K * T,
    ),
    "Granite 4 micro, hybrid": (
        config_of("granitemoehybrid", 40, 32, 8, 2048,
              layer_types=(["mamba"] * 9 + ["attention"]) * 4),
        8 * K, 8 * K * T,
    ),
    "Hunyuan-Large": (
        config_of(
            "hunyuan", 64, 80, 8, 6400, attention_head_dim=128, use_cla=True, cla_share_factor=2
        ),
        128 * K, 128 * K * T,
    ),
    "Qwen2.5-Omni 7B": (
        {"model_type": "qwen2_5_omni", "thinker_config": {
            "model_type": "qwen2_5_omni_thinker",
            "text_config": config_of("qwen2_5_omni_text", 28, 28, 4, 3584, sliding_window=32_768)}},
        57_344, 57_344 * T,
    ),
    "InternVL3 1B": (
        {"model_type": "internvl_chat", "llm_config": config_of("qwen2", 24, 14, 2, 896)},
        12 * K, 12 * K * T,
    ),
    "LongCat-Flash": (
        {"model_type": "longcat_flash", "num_layers": 28, "kv_lora_rank": 512,
         "qk_rope_head_dim": 64},
        28 * 2 * 576 * 2, 28 * 2 * 576 * 2 * T,
    ),
    "MiniMax-M2": (
        config_of("minimax_m2", 62, 48, 8, 3072, head_dim=128, attn_type_list=[1] * 62),
        62 * 4 * K, 62 * 4 * K * T,
    ),
    "DeepSeek-OCR": (
        {
            "model_type": "deepseek_vl_v2", "torch_dtype": "bfloat16",
            "language_config": config_of(
                "deepseek_v2", 12, 10, 10, 1280, kv_lora_rank=None, qk_rope_head_dim=0,
                qk_nope_head_dim=0, v_head_dim=0, use_mla=False,
            ),
        },
        12 * per_layer(10, 128), 12 * per_layer(10, 128) * T,
    ),
    "Qwen2.5-VL 7B": (
        config_of("qwen2_5_vl", 28, 28, 4, 3584, sliding_window=32_768, use_sliding_window=False,
              max_window_layers=28),
        57_344, 57_344 * T,
    ),
    "Phi-3 mini 4k": (
        config_of("phi3", 32, 32, 32, 3072, sliding_window=2047), 32 * per_layer(32, 96),
        32 * per_layer(32, 96) * 2047,
    ),
    "Step 3.5 Flash": (
        {"model_type": "step3p5", "num_hidden_layers": 45, "num_attention_heads": 64,
         "num_attention_groups": 8, "head_dim": 128, "hidden_size": 4096, "sliding_window": 512,
         "attention_other_setting": {"num_attention_groups": 8}, "num_nextn_predict_layers": 3,
         "layer_types": ([FULL] + [SLIDING] * 3) * 12},
        45 * 4 * K, (12 * T + 33 * 512) * 4 * K,
    ),
    "keys alone, window": (shape(32, 32, 8, 4096, sliding_window=4096), 128 * K, 128 * K * 4096),
    "keys alone, latent": (
        shape(61, 128, 128, 7168, kv_lora_rank=512, qk_rope_head_dim=64), 70_272, 70_272 * T
    ),
}  # fmt: skip

KNOWN_NOT = "model_type 'x' is not one of those known here; kv_bytes_per_token takes layers,"
REFUSED = [  # a config, and how the message must begin
    (config_of("x", 32, 32, 8, 4096), KNOWN_NOT),
    (config_of("bert", 12, 12, None, 768), "model_type 'bert' is not one of those known here"),
    ({**LLAMA_8B, "model_type": 5}, "model_type 5 is not one of"),
    (config_of("deepseek_v32"), "model_type 'deepseek_v32' is not"),
    ({**DEEPSEEK_V3, "index_topk": 2048}, "config has index_topk: its architecture is not"),
    (config_of("whisper", is_encoder_decoder=True), "config has is_encoder_decoder: its archit"),
    ({**LLAMA_8B, "sliding_window": 4096}, "sliding_window = 4096 is not supported for its"),
    ({**LLAMA_8B, "layer_types": ["mamba"] * 32}, "layer_types has layers of a kind that its"),
    ({**LLAMA_8B, "attn_layer_period": 8}, "config has attn_layer_period: its architecture"),
    ({**LLAMA_8B, "kv_lora_rank": 512}, "config has kv_lora_rank: its architecture"),
    ({**LLAMA_8B, "num_attention_heads": 24}, "config lacks head_dim, and hidden_size = 4096 is"),
    ({**LLAMA_8B, "num_key_value_heads": 7}, "num_key_value_heads = 7 does not divide the 32"),
    ({**LLAMA_8B, "n_layer": 31}, "num_hidden_layers = 32 contradicts n_layer = 31"),
    ({**LLAMA_8B, "num_hidden_layers": "32"}, "num_hidden_layers must be a whole number, not '32'"),
    ({**LLAMA_8B, "torch_dtype": "int3"}, "torch_dtype = 'int3' is not supported; dtype_bytes"),
    ({**GPT_OSS, "layer_types": ["new"] * 24}, "layer_types has 'new', which is not supported"),
    ({**GPT_OSS, "layer_types": [FULL]}, "layer_types must list 24 layers"),
    ({**GPT_OSS, "sliding_window": None}, "layer_types has sliding layers, but sliding_window"),
    (config_of("seed_oss", 2, 80, None, 5120), "config lacks num_key_value_heads"),
    (config_of("granitemoehybrid", 40, 32, 8, 2048), "config lacks layer_types"),
    (config_of("bamba", 40, 32, 8, 2048), "config lacks attn_layer_indices"),
    (config_of("deepseek_v3", 61, 128, 128, 7168, kv_lora_rank=None), "config lacks kv_lora_rank"),
    ({"num_layers": 28, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "config lacks model_type"),
    (config_of(None, 12, 12, 12, 768, type_vocab_size=2), "config has type_vocab_size"),
    (config_of("gemma4_text", 12, 8, 1, 1536, use_bidirectional_attention="all"), "use_bidirec"),
    (
        config_of("bailing_hybrid", 32, 16, 16, 64, layer_group_size=5),
        "layer_group_size = 5 does not divide the 32 layers",
    ),
    (
        config_of("qwen3_next", 4, 16, 16, 64, full_attention_interval=0),
        "full_attention_interval must be from 1",
    ),
    ({"text_config": 5}, "text_config must be a dict, not 5"),
    ({"text_config": {}}, "in text_config: config lacks num_hidden_layers"),
    (
        {"thinker_config": {"text_config": config_of("olmo")}},
        "in thinker_config.text_config: config lacks num_hidden_layers",
    ),
    ({}, "config lacks num_hidden_layers"),
]


class Configs(unittest.TestCase):
    def test_published_models(self):
        for model, (config, first, all_of_t) in PUBLISHED.items():
            with self.subTest(model):
                self.assertEqual(lesson.kv_bytes(config), first)
                self.assertEqual(lesson.kv_bytes(config, T), all_of_t)
                self.assertEqual(lesson.kv_bytes(config, 0), 0)

    def test_a_config_is_left_as_it_was(self):
        for config, _, _ in PUBLISHED.values():
            before = repr(config)
            lesson.kv_bytes(config)
            self.assertEqual(repr(config), before)

    def test_a_window_in_the_upper_layers(self):
        config = {**QWEN_7B, "use_sliding_window": True, "sliding_window": 100}
        config["max_window_layers"] = 21
        self.assertEqual(lesson.kv_bytes(config, 1000), (21 * 1000 + 7 * 100) * 2 * K)

    def test_what_few_configs_say(self):
        small = {"num_hidden_layers": 2, "num_attention_heads": 16, "hidden_size": 64}
        for config, tokens, size in (
            ({**small, "model_type": "qwen2", "num_key_value_heads": None}, 1, 512),
            ({"model_type": "bloom", "n_layer": 2, "n_head": 4, "n_embed": 64}, 1, 512),
            (config_of("hunyuan", 4, 8, 8, 1024, use_cla=False, cla_share_factor=2), 1, 16_384),
            ({"torch_dtype": "float8_e4m3fn", "text_config": config_of(
                "llama", 2, 16, 16, 64, torch_dtype=None)}, 1, 256),
            ({"model_type": "x", "thinker_config": {"model_type": "llama", "text_config": {
                **small, "num_key_value_heads": 16}}}, 1, 512),
            (config_of("gemma3_text", 4, 2, 2, 64, head_dim=16, sliding_window=10,
                       sliding_window_pattern=3), 100, (3 * 10 + 100) * 128),
            (config_of("nemotron_h", None, 4, 2, 64, head_dim=16,
                       layers_block_type=["mamba", "attention", "moe"]), 1, 128),
            ({"model_type": "mpt", "n_layers": 2, "n_heads": 4, "d_model": 64,
              "attn_config": {"attn_type": "multiquery_attention"}}, 1, 128),
            ({"architectures": ["LongcatFlashForCausalLM"], "num_layers": 28, "kv_lora_rank": 512,
              "qk_rope_head_dim": 64, "num_attention_heads": 64, "zero_expert_num": 9}, 1, 64_512),
            ({"model_type": "deepseek_vl_v2", "language_config": {
                "num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 10,
                "hidden_size": 1280, "use_mla": False, "kv_lora_rank": None}}, 1, 61_440),
            (config_of("qwen3_vl_moe_text", 2, 16, 4, 64), 1, 2 * 2 * 4 * 4 * 2),
            (config_of("ministral3", 2, 16, 4, 64), 1, 2 * 2 * 4 * 128 * 2),
        ):  # fmt: skip
            with self.subTest(config):
                self.assertEqual(lesson.kv_bytes(config, tokens), size)

    def test_refusals(self):
        for config, message in REFUSED:
            with self.subTest(message):
                with self.assertRaises((ValueError, TypeError)) as caught:
                    lesson.kv_bytes(config)
                self.assertTrue(str(caught.exception).startswith(message), caught.exception)

    def test_width(self):
        for name, size in (
            ("float64", 8), ("float32", 2), (None, 2), ("float16", 2), ("torch.bfloat16", 2),
            ("float8_e4m3fn", 1), ("fp8", 1),
        ):  # fmt: skip
            config = {**LLAMA_8B, "torch_dtype": name}
            self.assertEqual(lesson.kv_bytes(config), 64 * K * size)
            self.assertEqual(lesson.kv_bytes(config, dtype_bytes=1), 64 * K)
        qwen_32b = config_of("qwen2", 64, 40, 8, 5120)
        self.assertEqual(lesson.kv_bytes(qwen_32b, 32_768, 1.0625), 4352 * 2**20)
        tiny = config_of("llama", 1, 1, 1, 1)
        self.assertEqual([lesson.kv_bytes(tiny, n, 0.75) for n in (1, 2, 3)], [2, 3, 5])

    def test_each_gpu(self):
        qwen = PUBLISHED["Qwen3 235B"][0]
        self.assertEqual(lesson.kv_bytes(qwen, tp=4), 48_128)
        self.assertEqual(lesson.kv_bytes(qwen, tp=8), 48_128)
        self.assertEqual(lesson.kv_bytes(DEEPSEEK_V3, tp=8), 70_272)
        self.assertEqual(lesson.kv_bytes(LLAMA_8B, 10, tp=2), 640 * K)
        for config, tp in ((LLAMA_8B, 3), (LLAMA_8B, 12), (qwen, 6)):
            with self.assertRaisesRegex(ValueError, f"tp = {tp} neither divides"):
                lesson.kv_bytes(config, tp=tp)

    def test_mutated_configs_raise_with_a_text(self, n=3000, seed=0):
        draw = random.Random(seed)
        bases = [config for config, _, _ in PUBLISHED.values()]
        values = [
            None, True, False, 0, 1, -1, 7, 10**20, 2.5, float("nan"), float("inf"), "", "x",
            "LLG", "M*", [], [0], [1, 2], ["x"], [[]], [None], {}, {"a": 1}, "float32", 1e400,
        ]  # fmt: skip
        settings = sorted(
            {name for config in bases for name in config}
            | set(lesson.TELLTALES.split())
            | lesson.CHOOSING
            | {name for names in lesson.SPELLINGS.values() for name in names}
        )
        for _ in range(n):
            config = dict(draw.choice(bases))
            target = config
            for name in lesson.DECODERS:
                if name in config and draw.random() < 0.7:
                    target = config[name] = dict(config[name])
            for _ in range(draw.randint(1, 3)):
                target[draw.choice(settings)] = draw.choice(values)
            if draw.random() < 0.3:
                target["model_type"] = draw.choice(sorted(lesson.FAMILIES))
            try:
                held = lesson.kv_bytes(
                    config, draw.choice([0, 1, T]), draw.choice([None, 0.5, 2]),
                    draw.choice([1, 2, 8]),
                )  # fmt: skip
            except (ValueError, TypeError) as error:
                self.assertTrue(str(error), config)
                self.assertNotRegex(str(error), r"operand|object is not|NoneType|argument")
            else:
                self.assertIsInstance(held, int)


# What engines printed of themselves: model, GiB that one GPU showed, GPUs, utilization, then on each
# GPU GiB of weights, of everything else but KV, and of KV; pages of 16 tokens (None: not printed).
ENGINE_LOGS = {
    "vLLM pull request 10511": (
        config_of("llama", 32, 32, 8, 4096), 79.22, 1, 0.90, 14.96, 1.79 + 1.26, 53.29, None),
    "vLLM issue 13061": (
        config_of("qwen2", 48, 40, 8, 5120), 23.55, 2, 0.98, 13.95, 0.25 + 0.19, 8.69, None),
    "Phi-4, 4 bits, A100-SXM4-80GB": (
        config_of("phi3", 40, 40, 10, 5120), 79.15, 1, 0.696, 8.63, 0.09 + 1.16, 45.21, 14_815),
    "vLLM issue 10517, 20,000": (
        config_of("llama", 32, 32, 8, 4096), 23.58, 1, 0.90, 14.99, 2.07 + 0.35, 3.81, 1_952),
    "vLLM issue 10517, 29,000": (
        config_of("llama", 32, 32, 8, 4096), 23.58, 1, 0.90, 14.99, 2.99 + 0.35, 2.89, 1_478),
}  # fmt: skip
QWEN_30B_A3B = config_of("qwen3_moe", 48, 32, 4, 2048, head_dim=128, num_experts=128)
QWEN_235B_A22B = config_of("qwen3_moe", 94, 64, 4, 4096, head_dim=128, num_experts=128)
QWEN_32B = config_of("qwen2", 64, 40, 8, 5120)
# And where the rest is assumed: model, GiB, GPUs, parameters, bytes of one, utilization, the tokens
# that the engine printed, and how far off the recipe is.
ASSUMED_LOGS = {
    "vLLM pull request 10511": (
        config_of("llama", 32, 32, 8, 4096), 79.22, 1, 8.03e9, 2, 0.90, 436_552, -0.017),
    "vLLM pull request 10511, tp=2": (
        config_of("llama", 32, 32, 8, 4096), 79.22, 2, 8.03e9, 2, 0.90, 966_164, 0.015),
    "vLLM pull request 2031, Llama-2-7B": (
        config_of("llama", 32, 32, 32, 4096), 79.15, 1, 6.74e9, 2, 0.90, 7_351 * 16, -0.047),
    "vLLM pull request 4454, A6000": (
        config_of("llama", 32, 32, 8, 4096), 47.54, 1, 8.03e9, 2, 0.90, 13_248 * 16, -0.016),
    "vLLM issue 17327, 4 x A10": (QWEN_30B_A3B, 22.06, 4, 30.5e9, 2, 0.90, 198_784, 0.0),
    "vLLM issue 13061, 2 x RTX 4090": (
        config_of("qwen2", 48, 40, 8, 5120), 23.55, 2, 14.8e9, 2, 0.98, 81_536, 0.087),
    "vLLM pull request 12569, w8a8": (
        config_of("llama", 80, 64, 8, 8192), 79.11, 1, 72.7e9, 1, 0.98, 1_381 * 16, -0.130),
    # Far off: whole prompts of 20,000 tokens were profiled; a large mixture of experts needs more.
    "vLLM issue 10517, RTX 3090": (
        config_of("llama", 32, 32, 8, 4096), 23.58, 1, 8.03e9, 2, 0.90, 1_952 * 16, 0.334),
    "vLLM issue 21348, 4 x H100": (QWEN_235B_A22B, 79.11, 4, 235.1e9, 1, 0.90, 178_880, 0.560),
}  # fmt: skip
QUESTION = (
    "--model", "-", "--params", "32.8e9", "--gpus", "2", "--card", "A100-80G", "--prompt", "2000",
    "--output", "500",
)  # fmt: skip


def changed(*options, without=()):
    """QUESTION with other options, or without some."""
    pairs = dict(zip(QUESTION[::2], QUESTION[1::2]))
    pairs.update(zip(options[::2], options[1::2]))
    return [word for pair in pairs.items() if pair[0] not in without for word in pair]


class Sizing(unittest.TestCase):
    def test_engine_logs(self):
        for log, (config, shown, tp, used, weights, rest, kv, pages) in ENGINE_LOGS.items():
            with self.subTest(log):
                sized = lesson.size(
                    config, [(1, 1)], (shown, 1, 1), weights * tp * 2**30, tp, weight_bytes=1,
                    utilization=used, rest_gib=rest,
                )  # fmt: skip
                self.assertAlmostEqual(sized.budget_gib / tp, kv, delta=0.02)
                if pages:
                    self.assertAlmostEqual(sized.tokens / 16 / pages, 1, delta=0.005)

    def test_engine_logs_where_the_rest_is_assumed(self):
        for log, (config, shown, tp, params, each, used, tokens, off) in ASSUMED_LOGS.items():
            with self.subTest(log):
                active = params / 10 if "num_experts" in config else None
                sized = lesson.size(
                    config, [(1, 1)], (shown, 1, 1), params, tp, active, each, utilization=used
                )
                self.assertAlmostEqual(sized.tokens / tokens - 1, off, delta=0.001)

    def test_a_latent_is_whole_on_each_gpu(self):
        # vLLM pull request 20665: DeepSeek-V2-Lite on L4s, tensor parallel by 2; the fewest tokens
        # have a GPU with 13 of the layers, 11.33 GiB of KV and 807,792 tokens.
        config = config_of(
            "deepseek_v2", 13, 16, 16, 2048, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128
        )
        budget = {"utilization": 1, "rest_gib": 0}
        sized = lesson.size(config, [(1, 1)], (11.33 + 1, 1, 1), 2**31, 2, weight_bytes=1, **budget)
        self.assertAlmostEqual(sized.tokens / 807_792, 1, delta=0.007)
        self.assertEqual(sized.kv_per_token, 2 * 13 * 576 * 2)

    def test_by_hand(self):
        sized = lesson.size(QWEN_32B, [(2000, 500)], "A100-80G", 32.8e9, tp=2, utilization=0.9)
        for what, by_hand, delta in (
            ("memory_gib", 158.30, 0.001), ("weights_gib", 61.095, 0.001), ("rest_gib", 7.915, 1e-3),
            ("budget_gib", 73.46, 0.001), ("bytes_on_each", 131_072, 0), ("kv_per_token", 2**18, 0),
            ("tokens", 300_890, 5), ("resident", 2258, 0), ("fill_pool", 133.255, 0.01),
            ("fill_step", 1638.4, 1e-9), ("max_num_seqs", 134, 0), ("max_num_seqs_alone", 110, 0),
            ("running", 126.59, 0.01), ("step_tokens", 632.96, 0.05),
        ):  # fmt: skip
            self.assertAlmostEqual(getattr(sized, what), by_hand, delta=delta, msg=what)
        self.assertEqual(sized.limit, "KV memory")
        for what, by_hand in (
            ("ridge", (153.02, 95.64)), ("weights_s", (0.016086, 0.020108)),
            ("step_s", (0.066540 + 0.018374, 0.133080 + 0.022968)), ("per_user", (11.777, 6.4083)),
            ("tokens_per_s", (1490.8, 811.2)), ("first_token_s", (0.21038, 0.42067)),
        ):  # fmt: skip
            for figure, expected in zip(getattr(sized, what), by_hand):
                self.assertAlmostEqual(figure / expected, 1, delta=0.0003, msg=what)

    def test_the_setting_is_what_the_engines_scheduler_does(self):
        # vLLM 0.33's own scheduler on the lesson's server with 5% kept free: sequences running, and
        # the tokens/s of its steps.
        chat = lesson.seq_lengths(4000)
        long = [(output, min(prompt, 4096)) for prompt, output in chat]
        config = shape(80, 64, 8, 8192)
        for mix, running, rate in ((chat, 411.3, 6069), (long, 431.2, 12_641)):
            card = (lesson.KV_BUDGET_GIB / 4 + 35e9 / 2**30, 3350, 989.5)
            sized = lesson.size(config, mix, card, 70e9, 4, utilization=1, rest_gib=0)
            self.assertEqual(sized.tokens, 35_328 * 16)
            self.assertAlmostEqual(sized.running / running, 1, delta=0.02)
            self.assertAlmostEqual(sized.tokens_per_s[0] / rate, 1, delta=0.04)

    def test_which_limit_binds(self):
        code = [(2048, 28)] * 9  # as long as Azure's code completions are, on average
        card, config = (200, 3350, 989.5), shape(80, 64, 8, 8192)
        sized = lesson.size(config, code, card, 70e9, 4)
        self.assertEqual((sized.limit, sized.max_num_seqs, sized.max_num_seqs_alone),
                         ("the step", 111, 110))  # fmt: skip
        self.assertAlmostEqual(sized.step_tokens, 8192)
        few = lesson.size(config, [(2048, 28)], (20, 1, 1), 70e9, 4, weight_bytes=1)
        self.assertEqual((few.limit, few.max_num_seqs_alone), ("KV memory", 1))
        self.assertLess(few.fill_pool, 8)

    def test_windows_and_widths(self):
        sized = lesson.size(GPT_OSS, [(1000, 384)], "H100-SXM", 21e9)  # holds 1,200 tokens
        self.assertEqual(sized.bytes_on_each, math.ceil((12 + 12 * 128 / 1200) * per_layer(8, 64)))
        half = lesson.size(QWEN_32B, [(2000, 500)], "H200", 32.8e9, dtype_bytes=1)
        self.assertEqual(half.kv_per_token, 2**17)

    def test_what_cannot_be_sized(self):
        card, fits = "A100-80G", dict(tp=2)
        for what, error, message in (
            (lambda: lesson.size(QWEN_30B_A3B, [(1, 1)], card, 30.5e9), ValueError,
             "active_params is missing: config has num_experts = 128, and uses a few"),
            (lambda: lesson.size({"text_config": {"n_routed_experts": 9}}, [(1, 1)], card, 1e9),
             ValueError, "active_params is missing: config has n_routed_experts = 9"),
            (lambda: lesson.size(QWEN_32B, [(1, 1)], card, 3e9, active_params=4e9), ValueError,
             r"active_params = 4e\+09 is more than all 3e\+09"),
            (lambda: lesson.size(QWEN_32B, [(1, 1)], "L4", 32.8e9), ValueError,
             "no memory is left for KV: 22.03 GiB x 0.92 - 61.09 of weights - 1.10 for the rest"),
            (lambda: lesson.size(QWEN_32B, [(1, 1), (10**6, 1)], card, 32.8e9, **fits), ValueError,
             "a request of 1,000,001 tokens never fits a pool of 313,861"),
            (lambda: lesson.size(QWEN_32B, [(1, 0)], card, 32.8e9, **fits), ValueError,
             "requests must generate something"),
            (lambda: lesson.size(QWEN_32B, [], card, 32.8e9, **fits), ValueError,
             "requests must generate something"),
            (lambda: lesson.size(QWEN_32B, [(1, 1)], "H100", 1e9), ValueError,
             r"card must be GiB,GB/s,TFLOP/s \(dense\) or A100-40G, .*MI300X, not 'H100'"),
            (lambda: lesson.size(QWEN_32B, [(1, 1)], (80, 2039), 1e9), TypeError,
             r"card must be \(GiB, GB/s, TFLOP/s\), not \(80, 2039\)"),
            (lambda: lesson.size(QWEN_32B, [(1, 1)], (80, "x", 1), 1e9), TypeError,
             "card GB/s must be a number, not 'x'"),
            (lambda: lesson.size(QWEN_32B, [(1, 1)], card, 1e9, utilization=2), ValueError,
             "utilization must be from 1e-30 to 1, not 2"),
            (lambda: lesson.size(QWEN_32B, [(1, 1)], card, 1e9, rest_gib=-1), ValueError,
             "rest_gib must be from 0"),
            (lambda: lesson.size(QWEN_32B, [(1, 1)], card, 1e9, tp=7), ValueError, "tp = 7"),
            (lambda: lesson.traffic([(600_000, 1)]), ValueError, "never fits 35,328 pages"),
        ):  # fmt: skip
            with self.assertRaisesRegex(error, message):
                what()

    def test_a_pencil_can_follow(self):
        """Each line's formula, calculated from what is printed, gives its result."""
        deepseek = {**DEEPSEEK_V3, "n_routed_experts": 256}
        for config, args in (
            (QWEN_32B, QUESTION), (QWEN_32B, changed("--rest", "3", "--kv", "1")),
            (LLAMA_8B, changed("--params", "8.03e9", "--gpus", "1", "--card", "22,300,121")),
            (QWEN_30B_A3B, changed("--params", "30.5e9", "--active", "3.3e9", "--card", "h100-sxm")),
            (deepseek, changed("--params", "671e9", "--active", "37e9", "--weights", "1", "--gpus",
                               "8", "--card", "H200", "--output", "40")),
        ):  # fmt: skip
            status, printed = call_main(*args, entered=json.dumps(config).encode())
            self.assertEqual(status, 0)
            self.assertTrue(printed.isascii())
            self.assertLessEqual(max(map(len, printed.splitlines())), 84)
            known, followed = ({}, {}), 0  # at the peak, and at 50% and 80%
            for line in filter(re.compile(r"  .{18} = ").match, printed.splitlines()):
                name, formula = line[2:20].strip(), line[23:].rpartition("=")[0]
                formula = re.sub(r"(.*) at most (.*)", r"min(\1 | \2)", formula.replace(",", ""))
                for words, sign in (
                    ("|", ","), ("ridge x that", "ridge * read / 1000"), ("a step", "(step / 1000)"),
                    ("the longer of the first two + KV", "max(read, compute) + KV"),
                    (" layers", ""), (" KV heads", ""), (" B", ""), (" x ", " * "), ("^", "**"),
                ):  # fmt: skip
                    formula = formula.replace(words, sign)
                results = re.findall(r"[\d,.]*\d", line.rpartition("=")[2])
                for result, values, mfu, mbu in zip(results, known, (1, 0.5), (1, 0.8)):
                    result = float(result.replace(",", ""))
                    slower = {"ridge, tokens": mbu / mfu, "read weights, ms": mbu,
                              "read KV, ms": mbu}.get(name, 1)  # fmt: skip
                    unit = 1000 if name in ("read weights, ms", "compute, ms", "read KV, ms") else 1
                    try:
                        pencil = eval(formula, {"sqrt": math.sqrt}, values) * unit / slower
                    except (NameError, SyntaxError):  # words
                        continue
                    delta = 1 if "max_num_seqs" in line else 0.006 * result
                    self.assertAlmostEqual(pencil, result, delta=delta, msg=line)
                    short = {"read weights, ms": "read", "read KV, ms": "KV", "a step, ms": "step"}
                    values[short.get(name, name.split(",")[0])] = result
                    followed += 1
            self.assertEqual(followed, 29, printed)

    def test_real_traffic(self):
        chat = lesson.seq_lengths(600)
        text = "\ufeffGeneratedTokens,TIMESTAMP,ContextTokens\r\n" + "".join(
            f"{output},2023-11-16 18:15:46.68,{prompt}\r\n" for prompt, output in chat
        )
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.csv")
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            status, printed = call_main("--trace", path)
            _, sized = call_main(
                *changed("--trace", path, without=("--prompt", "--output")),
                entered=json.dumps(QWEN_32B).encode(),
            )
        self.assertEqual(status, 0)
        row = lesson.traffic(iter(chat))
        prompt, output = (statistics.fmean(column) for column in zip(*chat))
        rates = [
            lesson.serve(chat, 35_328, max_batched_tokens=8192, **options)
            for options in ({"max_running": 69}, {"max_running": 1024, "watermark": 0.05})
        ]
        self.assertAlmostEqual(row.prompt, prompt)
        self.assertAlmostEqual(row.fill_step * (1 + prompt / output), 8192)
        self.assertEqual([row.slots_per_s, row.pages_per_s], [r.tokens_per_s for r in rates])
        self.assertEqual(row.least, min(row.fill_pool, row.fill_step, 1024))
        last = printed.splitlines()[-1].split()
        self.assertEqual(last[:3], ["600", f"{prompt:,.0f}", f"{output:,.0f}"])
        self.assertEqual(last[-2], f"{rates[1].tokens_per_s / rates[0].tokens_per_s:.2f}x")
        self.assertLessEqual(max(map(len, printed.splitlines())), 84)
        held = float(re.search(r"a sequence holds .* ([\d,.]+) tokens", sized)[1].replace(",", ""))
        self.assertAlmostEqual(held, lesson.resident_tokens(chat), delta=0.06)

    def test_wrong_options_are_one_line_and_exit_2(self):
        with tempfile.TemporaryDirectory() as folder:

            def trace(content):
                path = os.path.join(folder, f"{len(os.listdir(folder))}.csv")
                with open(path, "wb") as file:
                    file.write(content)
                return path

            head = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
            moe = json.dumps(QWEN_30B_A3B).encode()
            plain = json.dumps(QWEN_32B).encode()
            lengths = ("--prompt", "--output")
            for args, entered, message in (
                (changed(without=("--params",)), plain, "add --params N$"),
                (changed(without=("--gpus", "--card")), plain, "add --gpus N; --card NAME$"),
                (changed(without=("--output",)), plain, "--prompt N and --output N, or --trace"),
                (changed(without=lengths), plain, "add --prompt N and --output N, or --trace"),
                (QUESTION, moe, r"add --active N \(parameters .*: num_experts = 128\)"),
                (changed("--params", "32.8"), plain, "params must be from"),
                (changed("--params", "7b"), plain, "'7b' is not a number"),
                (changed("--params", "nan"), plain, "params must be"),
                (changed("--active", "99e9"), plain, "active_params = 9.9e.10 is more"),
                (changed("--gpus", "0"), plain, "gpus must be"),
                (changed("--gpus", "1.5"), plain, "gpus must be a whole number"),
                (changed("--gpus", "3"), plain, "tp = 3"),
                (changed("--card", "H100"), plain, "card must be .*H100-SXM"),
                (changed("--card", ""), plain, "card must be"),
                (changed("--card", "80,2039"), plain, "card must be"),
                (changed("--card", "80,x,1"), plain, "'80,x,1' is not GIB,GB/S,TFLOP/S"),
                (changed("--card", "80,0,1"), plain, "card GB/s must be"),
                (changed("--card", "L4"), plain, "no memory is left for KV"),
                (changed("--weights", "0"), plain, "weights must be"),
                (changed("--kv", "-1"), plain, "kv must be"),
                (changed("--utilization", "92"), plain, "utilization must be"),
                (changed("--utilization", "92%"), plain, "'92%' is not a number"),
                (changed("--rest", "-1"), plain, "rest must be"),
                (changed("--rest", "70"), plain, "no memory is left for KV"),
                (changed("--prompt", "1e7"), plain, "never fits a pool"),
                (changed("--prompt", "0.5"), plain, "prompt must be a whole number"),
                (changed("--output", "0"), plain, "output must be"),
                (changed("--budget", "3"), plain, "--budget: not with --params"),
                (changed("--trace", "x"), plain, "--trace: not with --prompt or --output"),
                ([*QUESTION, "--card", "L4"], plain, "--card: given more than once"),
                (QUESTION, b"[]", "config must be a dict"),
                (QUESTION, b"{", "not JSON"),
                (["--params", "1e9"], b"", "--params: only with --model FILE"),
                (["--trace", "x", "--quiet"], b"", "--trace: only with --model FILE"),
                (["--trace", "x", "--gpus", "1"], b"", "only with --model FILE"),
                (["--trace", os.path.join(folder, "absent")], b"", "No such file"),
                (["--trace", folder], b"", "--trace .*"),
                (["--trace", trace(b"")], b"", "no column ContextTokens"),
                (["--trace", trace(b"ContextTokens\n1\n")], b"", "no column GeneratedTokens"),
                (["--trace", trace(head)], b"", "no requests"),
                (["--trace", trace(head + b"0,1,0\n")], b"", "line 2: .*GeneratedTokens 1 or more"),
                (["--trace", trace(head + b"0,1,2\n0,1\n")], b"", "line 3: "),
                (["--trace", trace(head + b"0,-1,2\n")], b"", "line 2: "),
                (["--trace", trace(head + b"0,x,2\n")], b"", "line 2: "),
                (["--trace", trace(b"\xff\xfe")], b"", "no text in UTF-8"),
                (["--trace", trace(head + b"0,600000,2\n")], b"", "never fits 35,328 pages"),
                (["--trace", trace(b"a" * 200_000)], b"", "larger than field limit"),
            ):  # fmt: skip
                with self.subTest(args), contextlib.redirect_stderr(io.StringIO()) as told:
                    self.assertEqual(call_main(*args, entered=entered), (2, ""))
                    self.assertRegex(told.getvalue().rstrip("\n"), message)
                    self.assertEqual(told.getvalue().count("\n"), 1)


class Indexed:
    """A whole number that is no int, as NumPy's are."""

    def __init__(self, n):
        self.n = n

    def __index__(self):
        return self.n


WRONG = [  # a call, the error it must raise, and how its message must begin
    (lambda: lesson.seq_lengths(-1), ValueError, "n must be from 0 to"),
    (lambda: lesson.seq_lengths(2.0), TypeError, "n must be a whole number, not 2.0"),
    (lambda: lesson.seq_lengths(2, seed="5"), TypeError, "seed must be a whole number, not '5'"),
    (lambda: lesson.prefixed_lengths(2, -1), ValueError, "prefix must be from 0 to"),
    (lambda: lesson.kv_bytes_per_token(0, 8, 128, 2), ValueError, "layers must be from 1 to"),
    (lambda: lesson.kv_bytes_per_token(80, 0, 128, 2), ValueError, "kv_heads must be from 1 to"),
    (lambda: lesson.kv_bytes_per_token(80, 8, -1, 2), ValueError, "head_dim must be from 1 to"),
    (lambda: lesson.kv_bytes_per_token(80, 8, 128, 0), ValueError, "dtype_bytes must be from 0.01"),
    (lambda: lesson.kv_bytes_per_token(80, 8, 128, "2"), TypeError, "dtype_bytes must be a number"),
    (lambda: lesson.kv_gib(-1), ValueError, "tokens must be from 0 to"),
    (lambda: lesson.kv_gib(1, 0), ValueError, "kv_per_token must be from 1 to"),
    (lambda: lesson.budget_share(-1), ValueError, "gib must be from 0 to"),
    (lambda: lesson.budget_share(1, budget_gib=1e10), ValueError, "budget_gib must be from"),
    (lambda: lesson.budget_share(1, budget_gib=0), ValueError, "budget_gib must be from 1e-30 to"),
    (lambda: lesson.contiguous([], 0), ValueError, "reserve must be from 1 to"),
    (lambda: lesson.contiguous([], True), TypeError, "reserve must be a whole number, not True"),
    (lambda: lesson.contiguous([], 1, budget_gib=-1), ValueError, "budget_gib must be from"),
    (lambda: lesson.contiguous(5, 10**17), TypeError, "requests must be (prompt, output) pairs"),
    (lambda: lesson.contiguous([(1, 2, 3)], 9), TypeError, "requests[0] must be a (prompt"),
    (lambda: lesson.paged([(1, 2), (3, -4)]), ValueError, "requests[1] output must be from 0 to"),
    (lambda: lesson.paged([(1, 2), (3.5, 4)]), TypeError, "requests[1] prompt must be a whole"),
    (lambda: lesson.paged([7]), TypeError, "requests[0] must be a (prompt, output) pair, not 7"),
    (lambda: lesson.paged(None), TypeError, "requests must be (prompt, output) pairs, not None"),
    (lambda: lesson.paged([], 0), ValueError, "page_tokens must be from 1 to"),
    (lambda: lesson.paged([], budget_gib=math.inf), ValueError, "budget_gib must be from"),
    (lambda: lesson.paged([], budget_gib=math.nan), ValueError, "budget_gib must be from"),
    (lambda: lesson.paged([], budget_gib=1e10), ValueError, "budget_gib must be from"),
    (lambda: lesson.paged([], budget_gib=True), TypeError, "budget_gib must be a number, not True"),
    (lambda: lesson.paged([], budget_gib="80"), TypeError, "budget_gib must be a number, not '80'"),
    (lambda: lesson.paged([], kv_per_token=1.5), TypeError, "kv_per_token must be a whole"),
    (lambda: lesson.shared_prefix([], -1), ValueError, "prefix must be from 0 to"),
    (lambda: lesson.shared_prefix([], 1, 0), ValueError, "page_tokens must be from 1 to"),
    (lambda: lesson.PagePool(0), ValueError, "pages must be from 1 to"),
    (lambda: lesson.PagePool(1, 0), ValueError, "page_tokens must be from 1 to"),
    (lambda: lesson.PagePool("4"), TypeError, "pages must be a whole number, not '4'"),
    (lambda: lesson.PagePool(4).references(4), ValueError, "page must be from 0 to 3, not 4"),
    (lambda: lesson.break_even(kv_per_token=0), ValueError, "kv_per_token must be from"),
    (lambda: lesson.break_even(n_params=1e31), ValueError, "n_params must be from 1e-30 to 1e+30"),
    (lambda: lesson.break_even(n_params=-7e9), ValueError, "n_params must be from"),
    (lambda: lesson.break_even(flops_per_gpu=None), TypeError, "flops_per_gpu must be a number"),
    (lambda: lesson.break_even(tp=0), ValueError, "tp must be from 1 to"),
    (lambda: lesson.break_even(mfu=0), ValueError, "mfu must be from 1e-30 to 1, not 0"),
    (lambda: lesson.break_even(mfu=1.1), ValueError, "mfu must be from 1e-30 to 1, not 1.1"),
    (lambda: lesson.break_even(prefix=0), ValueError, "prefix must be from 1 to"),
    (lambda: lesson.break_even(attention=True, layers=0), ValueError, "layers must be from 1 to"),
    (lambda: lesson.break_even(layers="x"), TypeError, "layers must be a whole number, not 'x'"),
    (lambda: lesson.break_even(attention=True, q_heads=0), ValueError, "q_heads must be from 1 to"),
    (lambda: lesson.break_even(attention=True, head_dim=0), ValueError, "head_dim must be from 1"),
    (lambda: lesson.recompute_seconds("9", attention=True), TypeError, "prefix must be a whole"),
    (lambda: lesson.shortest_fetch(0), ValueError, "gb_per_s must be from"),
    (lambda: lesson.serve([], 0), ValueError, "pages must be from 1 to"),
    (lambda: lesson.serve([], 1, 0), ValueError, "page_tokens must be from 1 to"),
    (lambda: lesson.serve([], 1, watermark=1.5), ValueError, "watermark must be from 0 to 1"),
    (lambda: lesson.serve([], 1, watermark="1%"), TypeError, "watermark must be a number"),
    (lambda: lesson.serve([], 1, max_running=0), ValueError, "max_running must be from 1 to"),
    (lambda: lesson.serve([], 1, watermark=1), ValueError, "watermark must be from 0 to less than"),
    (lambda: lesson.serve([], 1, max_batched_tokens=0), ValueError, "max_batched_tokens must be f"),
    (lambda: lesson.serve([], 1, max_batched_tokens=8.5), TypeError, "max_batched_tokens must be"),
    (lambda: lesson.serve([], 1, step_seconds=0.1), TypeError, "step_seconds must be a function"),
    (lambda: lesson.step_seconds(-1, 0), ValueError, "tokens must be from 0 to"),
    (lambda: lesson.step_seconds(1, "x"), TypeError, "held_tokens must be a number, not 'x'"),
    (lambda: lesson.step_seconds(1, math.inf), ValueError, "held_tokens must be from 0 to"),
    (lambda: lesson.step_seconds(1, 1, mfu=0), ValueError, "mfu must be from 1e-30 to 1, not 0"),
    (lambda: lesson.step_seconds(1, 1, gb_per_s=0), ValueError, "gb_per_s must be from 1e-30"),
    (lambda: lesson.resident_tokens([]), ValueError, "requests must generate something"),
    (lambda: lesson.resident_tokens([(9, 0)]), ValueError, "requests must generate something"),
    (lambda: lesson.resident_tokens(9), TypeError, "requests must be (prompt, output) pairs"),
    (lambda: lesson.serve(7, 1), TypeError, "requests must be (prompt, output) pairs, not 7"),
    (lambda: lesson.serve([(1, 1), (5, 0)], 9), ValueError, "requests[1] output must be from 1 to"),
    (
        lambda: lesson.serve([(1, 1), (1, 32)], 2), ValueError,
        "requests[1] of 33 tokens never fits 2 pages of 16",
    ),
    (lambda: lesson.kv_bytes([]), TypeError, "config must be a dict, not []"),
    (lambda: lesson.kv_bytes(LLAMA_8B, -1), ValueError, "tokens must be from 0 to"),
    (lambda: lesson.kv_bytes(LLAMA_8B, 1, 0), ValueError, "dtype_bytes must be from 0.01 to"),
    (lambda: lesson.kv_bytes(LLAMA_8B, 1, "1"), TypeError, "dtype_bytes must be a number, not '1'"),
    (lambda: lesson.kv_bytes(LLAMA_8B, tp=0), ValueError, "tp must be from 1 to"),
    (lambda: lesson.kv_bytes(LLAMA_8B, tp=3), ValueError, "tp = 3 neither divides the 8 KV heads"),
    (lambda: lesson.fetch_seconds(-1, 7), ValueError, "prefix must be from 0 to"),
    (lambda: lesson.fetch_seconds(1, 0), ValueError, "gb_per_s must be from"),
    (lambda: lesson.recompute_seconds(1.5), TypeError, "prefix must be a whole number, not 1.5"),
    (lambda: lesson.recompute_seconds(1, tp=2.0), TypeError, "tp must be a whole number, not 2.0"),
    (lambda: lesson.preempted_tokens(1.01), ValueError, "occupancy must be from 0 to 1, not 1.01"),
    (lambda: lesson.preempted_tokens(-0.1), ValueError, "occupancy must be from 0 to 1, not -0.1"),
    (lambda: lesson.preempted_tokens("full"), TypeError, "occupancy must be a number, not 'full'"),
    (lambda: lesson.preempted_tokens(0.9, seed=None), TypeError, "seed must be a whole number"),
    (lambda: lesson.preempted_tokens(0.9, n=-1), ValueError, "n must be from 0 to"),
    (lambda: lesson.kv_gib(int), TypeError, "tokens must be a whole number, not <class 'int'>"),
    (lambda: lesson.kv_gib(Indexed("3")), TypeError, "tokens must be a whole number, not <"),
    (lambda: lesson.kv_gib(Indexed(-5)), ValueError, "tokens must be from 0 to"),
    (lambda: lesson.kv_gib(10**5000), ValueError, "tokens must be from 0 to"),
    (lambda: lesson.budget_share(10**5000), ValueError, "gib must be from 0 to"),
    (lambda: lesson.budget_share(1j), TypeError, "gib must be a number, not 1j"),
    (lambda: lesson.paged([{600, 200}]), TypeError, "requests[0] must be a (prompt, output) pair"),
    (lambda: lesson.paged([b"ab"]), TypeError, "requests[0] must be a (prompt, output) pair"),
    (lambda: lesson.paged(None, budget_gib=1e-20), TypeError, "requests must be (prompt, output)"),
    (lambda: lesson.shared_prefix(5, 5, 16, 1e-20), TypeError, "requests must be (prompt, output)"),
    (lambda: lesson.shared_prefix([], 5, copy_on_write="no"), TypeError, "copy_on_write must be"),
    (lambda: lesson.break_even(attention=1), TypeError, "attention must be True or False, not 1"),
    (lambda: lesson.seq_lengths(10**18), ValueError, "n must be from 0 to"),
    (lambda: lesson.verify({"pagd": len}), ValueError, "parts_override must name parts"),
    (lambda: lesson.verify([1]), TypeError, "parts_override must be a dict, not [1]"),
]  # fmt: skip


class WrongArguments(unittest.TestCase):
    def test_the_bounds_themselves_are_in_bounds(self):
        self.assertEqual(lesson.budget_tokens(1e9, 1), 10**9 * 2**30)
        self.assertEqual(lesson.budget_share(1e9, 1e9), 1)
        self.assertEqual(lesson.kv_gib(2**30, 10**18), 1e18)
        self.assertEqual(lesson.fetch_seconds(1, 1e21, 1e30), 1)
        self.assertEqual(lesson.preempted_tokens(0), 0)
        self.assertGreater(lesson.preempted_tokens(1), 0)

    def test_each_has_one_clear_message(self):
        for wrong, error, message in WRONG:
            with self.subTest(inspect.getsource(wrong).strip()), self.assertRaises(error) as caught:
                wrong()
            self.assertTrue(str(caught.exception).startswith(message), caught.exception)

    def test_numbers_of_other_libraries_are_numbers(self):
        requests = lesson.seq_lengths(100)
        others = [(Indexed(prompt), Indexed(output)) for prompt, output in requests]
        eight, kv = Indexed(8), Indexed(10**6)
        for got, wanted in (
            (lesson.contiguous(others, eight), lesson.contiguous(requests, 8)),
            (lesson.paged(others, eight, 80, kv), lesson.paged(requests, 8, 80, 10**6)),
            (lesson.shared_prefix(others, eight, eight), lesson.shared_prefix(requests, 8, 8)),
            (lesson.prefixed_lengths(Indexed(2), eight), lesson.prefixed_lengths(2, 8)),
            (lesson.serve(others, Indexed(9999), eight), lesson.serve(requests, 9999, 8)),
            (lesson.break_even(kv_per_token=kv), lesson.break_even(10**6)),
        ):
            self.assertEqual(got, wanted)
        pool = lesson.PagePool(eight, eight)
        sequence = pool.allocate(eight)
        pool.append(sequence, Indexed(0))
        pool.append(sequence, Indexed(1))
        self.assertEqual((sequence.tokens, pool.references(Indexed(1))), (9, 1))
        self.assertIs(type(pool.held), int)

    def test_messages_are_short(self):
        self.assertEqual(len(lesson.shown("x" * 99)), 80)
        self.assertNotEqual(lesson.seq_lengths(2, -(10**18)), lesson.seq_lengths(2))
        for value in (list(range(10**6)), "x" * 10**6, Unspeakable()):
            with self.assertRaises(TypeError) as caught:
                lesson.kv_gib(value)
            self.assertLess(len(str(caught.exception)), 150)

    def test_errors_of_the_workload_itself_pass(self):
        def workload():
            yield 1, 1
            lesson.PagePool(1, 16).allocate(100)

        for allocator in (
            lambda requests: lesson.contiguous(requests, 16),
            lesson.paged,
            lambda requests: lesson.shared_prefix(requests, 16),
        ):
            with self.assertRaises(lesson.OutOfPages):
                allocator(workload())

    def test_a_pool_is_not_copied_and_its_numbers_are_plain(self):
        class Two(enum.IntEnum):
            PAGES = 2

        pool = lesson.PagePool(Two.PAGES)
        self.assertIs(type(pool.pages), int)
        for copier in (copy.copy, copy.deepcopy):
            with self.assertRaisesRegex(TypeError, "pool cannot be copied"):
                copier(pool)
        with self.assertRaisesRegex(ValueError, "n must be from 0 to"):
            pool.append(pool.allocate(1), 10**5000)
        with self.assertRaisesRegex(ValueError, "tokens must be from 0 to"):
            pool.allocate(10**5000)

    def test_a_config_that_contains_itself(self):
        config = {"model_type": "llama"}
        config["text_config"] = config
        with self.assertRaisesRegex(ValueError, "its architecture is not supported"):
            lesson.kv_bytes(config)

    def test_a_sequence_is_forked_and_not_copied(self):
        pool = lesson.PagePool(8, 16)
        sequence = pool.allocate(40)
        for copier in (copy.copy, copy.deepcopy, pickle.dumps):
            with self.assertRaisesRegex(TypeError, "sequence cannot be copied; fork it"):
                copier(sequence)

    def test_a_wrong_call_leaves_the_pool_as_it_was(self):
        pool, other = lesson.PagePool(8, 16), lesson.PagePool(8, 16)
        kept, released, foreign = pool.allocate(40), pool.allocate(1), other.allocate(1)
        pool.release(released)
        for call, error, message in (
            (lambda: pool.allocate(-1), ValueError, "tokens must be from 0 to"),
            (lambda: pool.allocate(1.0), TypeError, "tokens must be a whole number, not 1.0"),
            (lambda: pool.append(kept, -1), ValueError, "n must be from 0 to"),
            (lambda: pool.append(kept, None), TypeError, "n must be a whole number, not None"),
            (lambda: pool.fork(kept, 41), ValueError, "tokens must be from 0 to 40, not 41"),
            (lambda: pool.fork(kept, -1), ValueError, "tokens must be from 0 to 40, not -1"),
            (lambda: pool.append(released, 1), ValueError, "sequence was released before"),
            (lambda: pool.fork(released, 0), ValueError, "sequence was released before"),
            (lambda: pool.release(released), ValueError, "sequence was released before"),
            (lambda: pool.append(foreign, 1), ValueError, "sequence belongs to another pool"),
            (lambda: pool.release(foreign), ValueError, "sequence belongs to another pool"),
            (lambda: pool.release(Unspeakable()), TypeError, "sequence must come from this pool"),
            (lambda: pool.release(0), TypeError, "sequence must come from this pool, not 0"),
            (lambda: pool.fork(kept.table, 1), TypeError, "sequence must come from this pool"),
            (lambda: pool.append(kept, 200), lesson.OutOfPages, "12 pages needed, 5 of 8 free"),
        ):
            with self.subTest(message), self.assertRaises(error) as caught:
                call()
            self.assertTrue(str(caught.exception).startswith(message), caught.exception)
            self.assertEqual((kept.table, kept.tokens, pool.held), ([0, 1, 2], 40, 3))
            self.assertEqual((foreign.table, other.held), ([0], 1))


class OwnSequence:
    def __init__(self, table, tokens):
        self.table, self.tokens = table, tokens


class OwnPool:
    """A pool as a reader may write it: right, short and slow."""

    def __init__(self, pages, page_tokens=16):
        if pages < 1 or page_tokens < 1:
            raise ValueError
        self.pages, self.page_tokens, self.live = pages, page_tokens, []

    def references(self, page):
        return sum(sequence.table.count(page) for sequence in self.live)

    @property
    def held(self):
        return sum(self.references(page) > 0 for page in range(self.pages))

    @property
    def free(self):
        return self.pages - self.held

    def needed(self, tokens):
        return math.ceil(tokens / self.page_tokens)

    def take(self, n):
        free = [page for page in range(self.pages) if not self.references(page)]
        if n > len(free):
            raise lesson.OutOfPages
        return free[:n]

    def known(self, sequence, n=0):
        if sequence not in self.live or n < 0:
            raise ValueError

    def allocate(self, tokens):
        if tokens < 0:
            raise ValueError
        self.live.append(OwnSequence(self.take(self.needed(tokens)), tokens))
        return self.live[-1]

    def copies(self, sequence, n):
        last = sequence.tokens % self.page_tokens and n and sequence.table[-1]
        return bool(sequence.tokens % self.page_tokens and n) and self.references(last) > 1

    def append(self, sequence, n=1):
        self.known(sequence, n)
        table, copies = sequence.table, self.copies(sequence, n)
        taken = self.take(self.needed(sequence.tokens + n) - len(table) + copies)
        sequence.table = table[: len(table) - copies] + taken
        sequence.tokens += n

    def fork(self, sequence, tokens):
        self.known(sequence)
        if tokens > sequence.tokens:
            raise ValueError
        self.live.append(OwnSequence(sequence.table[: self.needed(tokens)], tokens))
        return self.live[-1]

    def release(self, sequence):
        self.known(sequence)
        self.live.remove(sequence)


def own_pool(**methods):
    """That pool with some methods replaced."""
    return type("OwnPool", (OwnPool,), methods)


def leaks_a_page(pool, sequence):
    OwnPool.release(pool, sequence)
    pool.live.append(OwnSequence(sequence.table[:1], 0))


def frees_what_is_shared(pool, sequence):
    OwnPool.release(pool, sequence)
    pool.live = [x for x in pool.live if not set(x.table) & set(sequence.table)]


def copies_at_once(pool, sequence, tokens):
    pool.known(sequence)
    return pool.allocate(tokens)


def forks_everything(pool, sequence, tokens):
    return OwnPool.fork(pool, sequence, sequence.tokens)


def takes_a_page_each(pool, sequence, n=1):
    OwnPool.append(pool, sequence, n)
    sequence.table = sequence.table + pool.take(1)


def drops_before_it_takes(pool, sequence, n=1):
    """When no page is left for the copy, the shared page is already gone."""
    pool.known(sequence, n)
    copies = pool.copies(sequence, n)
    sequence.table = sequence.table[: len(sequence.table) - copies]
    sequence.table += pool.take(pool.needed(sequence.tokens + n) - len(sequence.table))
    sequence.tokens += n


def moves_its_last_page(pool, sequence, n=1):
    if n and sequence.tokens % pool.page_tokens and pool.free:
        sequence.table = sequence.table[:-1] + pool.take(1)
    OwnPool.append(pool, sequence, n)


def shrinks(pool, sequence, n=1):
    if n < 0:
        sequence.tokens += n
        return
    OwnPool.append(pool, sequence, n)


def always_page_0(pool, tokens):
    sequence = OwnPool.allocate(pool, tokens)
    sequence.table = [0] * len(sequence.table)
    return sequence


def budget_ignored(mechanism, *names):
    """A mechanism that takes these options and ignores them."""

    def ignores(*args, **options):
        return mechanism(*args, **{x: options[x] for x in options if x not in names})

    return ignores


def floor_of_pages(requests, page_tokens=16, **card):
    floored = [(length - length % page_tokens, 0) for length in map(sum, requests)]
    return lesson.paged(floored, page_tokens, **card)


def one_too_many(requests, page_tokens=16, **card):
    fitting = lesson.paged(requests, page_tokens, **card)
    return fitting._replace(batch=fitting.batch + 1)


def own_paged(requests, page_tokens=16, budget_gib=172.5, kv_per_token=327_680, short=0, spare=0):
    """Right, unless it is so many pages short, or wants so many pages more than it needs."""
    pages = int(budget_gib * 2**30) // kv_per_token // page_tokens - short
    batch = held = logical = 0
    for prompt, output in requests:
        need = math.ceil((prompt + output) / page_tokens)
        if held + need + spare > pages:
            break
        batch, held, logical = batch + 1, held + need, logical + prompt + output
    waste = 1 - logical / held / page_tokens if held else 0
    return types.SimpleNamespace(
        batch=batch, held_tokens=held * page_tokens, logical_tokens=logical, waste=waste
    )


def never_looks(requests, page_tokens=16, **card):
    return lesson.paged(lesson.seq_lengths(4000), page_tokens, **card)


def right_for(name, parameter, *values):
    """The lesson's mechanism where an argument is one of these, else with 1 more in its place."""
    genuine = vars(lesson)[name]

    def sometimes(*args, **options):
        args = list(args)
        if args[parameter] not in values:
            args[parameter] += 1
        return genuine(*args, **options)

    return sometimes


def no_misfits(*args, **card):
    return lesson.contiguous(*args, **card)._replace(misfits=0)


def prefix_for_each(requests, prefix, page_tokens=16, copy_on_write=False, **card):
    return lesson.paged(requests, page_tokens, **card)


def always_copied(*args, copy_on_write=False, **card):
    return lesson.shared_prefix(*args, **card, copy_on_write=True)


def prefix_is_free(requests, prefix, *args, **card):
    shared = lesson.shared_prefix(requests, prefix, *args, **card)
    return shared._replace(held_tokens=shared.held_tokens - prefix)


def other_order(n, seed=5):
    rng = random.Random(seed)
    flipped = [
        (int(rng.lognormvariate(5.5, 0.8)), int(rng.lognormvariate(6.4, 1))) for _ in range(n)
    ]
    return [(prompt, output) for output, prompt in flipped]


def linear_curve(occupancy, n=2000, seed=3):
    rng, probability = random.Random(seed), max(0, (occupancy - 0.85) / 0.15)
    return sum(int(rng.lognormvariate(6.4, 1)) for _ in range(n) if rng.random() < probability)


def served(**changes):
    """A `serve` whose figures are changed, each by a function."""

    def changed(*args, **options):
        genuine = lesson.serve(*args, **options)
        return genuine._replace(**{x: by(getattr(genuine, x)) for x, by in changes.items()})

    return changed


def never_preempts(requests, pages, *args, **options):
    return lesson.serve(requests, pages * 1000, *args, **options)


def times_every_step(*args, step_seconds=lesson.step_seconds, **options):
    return lesson.serve(
        *args, **options, step_seconds=lambda tokens, held: step_seconds(tokens=tokens, held=held)
    )


def times_too_much(*args, step_seconds=lesson.step_seconds, **options):
    step_seconds(0, 0)
    return lesson.serve(*args, **options, step_seconds=step_seconds)


def average_length(requests):
    lengths = [prompt + output / 2 for prompt, output in requests]
    return sum(lengths) / len(lengths)


class Unspeakable(Exception):
    def __repr__(self):
        raise RuntimeError


class Silent(BaseException):
    def __repr__(self):
        raise SystemExit


def raises(error):
    def mechanism(*args, **options):
        raise error

    return mechanism


def doubles(name):
    return lambda *args, **options: vars(lesson)[name](*args, **options) * 2


CLAIMS_OF = {  # a mechanism -> the claims (0 to 13) whose figures come from it
    "kv_bytes_per_token": {0, 2, 11}, "kv_gib": {1}, "budget_share": {1},
    "seq_lengths": {3, 4, 5, 6}, "contiguous": {3, 5}, "paged": {4, 5, 6}, "shared_prefix": {7},
    "prefixed_lengths": {7}, "break_even": {8, 10, 11, 12}, "fetch_seconds": {9},
    "recompute_seconds": {9, 13},
}  # fmt: skip
SABOTAGE = {  # a mechanism -> bugs in it
    "kv_bytes_per_token": {
        "keys but no values": lambda *shape: lesson.kv_bytes_per_token(*shape) // 2,
        "KV heads ignored": lambda layers, heads, *more: (
            lesson.kv_bytes_per_token(layers, 8, *more)
        ),
        "dtype ignored": lambda layers, heads, dim, size: 2 * layers * heads * dim * 2,
        "rounded for each layer": lambda layers, *more: (
            layers * lesson.kv_bytes_per_token(1, *more)
        ),
        "rounded down": lambda layers, heads, dim, size: int(2 * layers * heads * dim * size),
    },
    "kv_gib": {
        "a constant": lambda tokens, kv_per_token=327_680: 40.0,
        "GB for GiB": lambda tokens, kv_per_token=327_680: tokens * kv_per_token / 1e9,
        "kv_per_token ignored": budget_ignored(lesson.kv_gib, "kv_per_token"),
    },
    "budget_share": {
        "share of all memory": lambda gib, budget_gib=318.6: gib / budget_gib,
        "budget_gib ignored": budget_ignored(lesson.budget_share, "budget_gib"),
    },
    "kv_bytes": {
        "of one token": lambda config, tokens=1, **more: lesson.kv_bytes(config, 1, **more),
        "dtype_bytes ignored": budget_ignored(lesson.kv_bytes, "dtype_bytes"),
        "tp ignored": budget_ignored(lesson.kv_bytes, "tp"),
        "windows ignored": lambda config, tokens=1, **more: (
            tokens * lesson.kv_bytes(config, 1, **more)
        ),
        "the lesson's model": lambda config, tokens=1, dtype_bytes=2, tp=1: tokens * 327_680,
        "a constant": lambda *args, **options: 131_072,
    },
    "seq_lengths": {
        "another seed": lambda n, seed=5: lesson.seq_lengths(n, seed + 1),
        "seed ignored": lambda n, seed=5: lesson.seq_lengths(n),
        "n ignored": lambda n, seed=5: lesson.seq_lengths(4000, seed),
        "right at 4,000 and 9 only": lambda n, seed=5: (
            lesson.seq_lengths(n, seed if n in (9, 4000) else 1)
        ),
        "drawn in another order": other_order,
        "for ever": lambda n, seed=5: iter(int, 1),
    },
    "budget_tokens": {
        "GB for GiB": lambda budget_gib=172.5, kv_per_token=327_680: (
            int(budget_gib * 1e9) // kv_per_token
        ),
        "rounded up": lambda budget_gib=172.5, kv_per_token=327_680: (
            math.ceil(budget_gib * 2**30 / kv_per_token)
        ),
        "budget_gib ignored": budget_ignored(lesson.budget_tokens, "budget_gib"),
        "kv_per_token ignored": budget_ignored(lesson.budget_tokens, "kv_per_token"),
    },
    "contiguous": {
        "reserve ignored": lambda requests, reserve, **card: (
            lesson.contiguous(requests, 8192, **card)
        ),
        "right at 2,048 and 8,192 only": right_for("contiguous", 1, 2048, 8192),
        "without misfits": no_misfits,
        "no reservation": lambda requests, reserve, **card: lesson.paged(requests, 1, **card),
        "budget_gib ignored": budget_ignored(lesson.contiguous, "budget_gib"),
        "kv_per_token ignored": budget_ignored(lesson.contiguous, "kv_per_token"),
        "nothing returned": lambda requests, reserve, **card: None,
        "an exit": lambda requests, reserve, **card: sys.exit(),
        "an error that cannot be shown": raises(Unspeakable()),
    },
    "PagePool": {
        "a page leaks": own_pool(release=leaks_a_page),
        "shared pages freed": own_pool(release=frees_what_is_shared),
        "fork copies": own_pool(fork=copies_at_once),
        "no copy-on-write": own_pool(copies=lambda pool, sequence, n: False),
        "copies what is not shared": own_pool(append=moves_its_last_page),
        "fork of all tokens": own_pool(fork=forks_everything),
        "drops the shared page, then finds none": own_pool(append=drops_before_it_takes),
        "a page an append": own_pool(append=takes_a_page_each),
        "floor for ceiling": own_pool(needed=lambda pool, tokens: tokens // pool.page_tokens),
        "a page too early": own_pool(needed=lambda pool, tokens: tokens // pool.page_tokens + 1),
        "all tables say page 0": own_pool(allocate=always_page_0),
        "one page too few": own_pool(take=lambda pool, n: OwnPool.take(pool, n + (n > 0))[:n]),
        "never full": own_pool(take=lambda pool, n: list(range(n))),
        "page size ignored": lambda pages, page_tokens=16: lesson.PagePool(pages),
        "another page size by default": lambda pages, page_tokens=8: (
            lesson.PagePool(pages, page_tokens)
        ),
        "another n by default": own_pool(append=lambda pool, x, n=2: OwnPool.append(pool, x, n)),
        "shrinks": own_pool(append=shrinks),
        "references of 1 at most": own_pool(
            references=lambda pool, page: min(1, OwnPool.references(pool, page))
        ),
        "free counts tables": own_pool(
            free=property(lambda pool: pool.pages - sum(len(x.table) for x in pool.live))
        ),
        "released twice": own_pool(
            release=lambda pool, x: x in pool.live and OwnPool.release(pool, x)
        ),
        "none": None,
    },
    "OutOfPages": {"another error": KeyError, "no class": "OutOfPages", "no error": int},
    "paged": {
        "floor for ceiling": floor_of_pages,
        "page size ignored": lambda requests, page_tokens=16, **card: (
            lesson.paged(requests, 16, **card)
        ),
        "right for pages of 1 and 16 only": right_for("paged", -1, 1, 16),
        "one too many": one_too_many,
        "not at an exact fit": partial(own_paged, spare=1),
        "96 pages short": partial(own_paged, short=96),
        "never looks at its requests": never_looks,
        "budget_gib ignored": budget_ignored(lesson.paged, "budget_gib"),
        "kv_per_token ignored": budget_ignored(lesson.paged, "kv_per_token"),
        "an error": lambda *args, **card: 1 // 0,
    },
    "prefixed_lengths": {
        "another seed": lambda n, prefix, seed=9: lesson.prefixed_lengths(n, prefix, seed + 1),
        "seed ignored": lambda n, prefix, seed=9: lesson.prefixed_lengths(n, prefix),
        "right at 4,096 only": right_for("prefixed_lengths", 1, 4096),
        "n ignored": lambda n, prefix, seed=9: lesson.prefixed_lengths(64, prefix, seed),
    },
    "shared_prefix": {
        "stops at 500": lambda requests, *sizes, **options: lesson.shared_prefix(
            list(requests)[:500], *sizes, **options
        ),
        "prefix for each request": prefix_for_each,
        "copy_on_write ignored": budget_ignored(lesson.shared_prefix, "copy_on_write"),
        "copy_on_write by default": always_copied,
        "prefix not charged": prefix_is_free,
        "right at 2,048 and 4,096 only": right_for("shared_prefix", 1, 2048, 4096),
        "budget_gib ignored": budget_ignored(lesson.shared_prefix, "budget_gib"),
    },
    "expected_saving": {
        "the ceiling": lambda n, prefix, private=558.5: prefix / (prefix + private),
        "one prefix too many": lambda n, prefix, private=558.5: prefix / (prefix + private / n),
        "its mean ignored": lambda n, prefix, private=558.5: lesson.expected_saving(n, prefix),
    },
    "break_even": {
        "sparsity FLOPs": lambda flops_per_gpu=1979e12, **more: (
            lesson.break_even(flops_per_gpu=flops_per_gpu, **more)
        ),
        "GiB/s": lambda **options: lesson.break_even(**options) * 1e9 / 2**30,
        **{
            f"{name} ignored": budget_ignored(lesson.break_even, name)
            for name in ("kv_per_token", "n_params", "flops_per_gpu", "tp", "mfu", "attention",
                         "prefix", "layers", "q_heads", "head_dim")
        },
    },
    "fetch_seconds": {
        "in bits": lambda *args, **more: 8 * lesson.fetch_seconds(*args, **more),
        "a latency": lambda *args, **more: 1e-4 + lesson.fetch_seconds(*args, **more),
        "kv_per_token ignored": budget_ignored(lesson.fetch_seconds, "kv_per_token"),
    },
    "recompute_seconds": {
        "sparsity FLOPs": lambda prefix, flops_per_gpu=1979e12, **more: (
            lesson.recompute_seconds(prefix, flops_per_gpu=flops_per_gpu, **more)
        ),
        "one GPU by default": lambda prefix, tp=1, **more: (
            lesson.recompute_seconds(prefix, tp=tp, **more)
        ),
        **{
            f"{name} ignored": budget_ignored(lesson.recompute_seconds, name)
            for name in ("n_params", "flops_per_gpu", "tp", "mfu", "attention", "layers", "q_heads",
                         "head_dim")
        },
    },
    "shortest_fetch": {
        "one token late": lambda gb_per_s: lesson.shortest_fetch(gb_per_s) + 1,
        "the figure of one drive": lambda gb_per_s: 34_546,
    },
    "preempted_tokens": {
        "a linear curve": linear_curve,
        "another seed": lambda occupancy, n=2000, seed=5: (
            lesson.preempted_tokens(occupancy, n, seed)
        ),
        "n ignored": budget_ignored(lesson.preempted_tokens, "n"),
        "seed ignored": budget_ignored(lesson.preempted_tokens, "seed"),
    },
    "step_seconds": {
        "the sum, not the longer": lambda tokens, held_tokens, **more: (
            lesson.step_seconds(tokens, held_tokens, **more)
            + lesson.step_seconds(0, 0, **more) * bool(tokens)
        ),
        "KV not read": lambda tokens, held_tokens, **more: lesson.step_seconds(tokens, 0, **more),
        **{
            f"{name} ignored": budget_ignored(lesson.step_seconds, name)
            for name in ("kv_per_token", "n_params", "flops_per_gpu", "gb_per_s", "tp", "mfu")
        },
    },
    "resident_tokens": {
        "over requests, not over time": average_length,
        "at its end": lambda requests: (
            sum((p + o) * o for p, o in requests) / sum(o for _, o in requests)
        ),
    },
    "serve": {
        "preempts nobody": never_preempts,
        "watermark ignored": budget_ignored(lesson.serve, "watermark"),
        "max_running ignored": budget_ignored(lesson.serve, "max_running"),
        "max_batched_tokens ignored": budget_ignored(lesson.serve, "max_batched_tokens"),
        "step_seconds ignored": budget_ignored(lesson.serve, "step_seconds"),
        "keywords for the step time": times_every_step,
        "page size ignored": lambda requests, pages, page_tokens=16, **more: (
            lesson.serve(requests, pages * page_tokens, 1, **more)
        ),
        **{
            f"{name} is wrong": served(**{name: lambda figure: figure * 1.001 + 1})
            for name in ("steps", "generated", "prefilled", "reprefilled", "preempted",
                         "peak_pages", "running", "held", "again", "tokens_per_s")
        },
        "times steps that do not count": times_too_much,
        "never more than 256": lambda requests, *sizes, max_running=None, **options: lesson.serve(
            requests, *sizes, max_running=max_running or 256, **options
        ),
        "only half of the figures": lambda *args, **options: lesson.serve(*args, **options)[:6],
    },
}  # fmt: skip


class VerifyBites(unittest.TestCase):
    def graded(self, *override):
        """The claims that fail (0 to 13), and the other faults by mechanism."""
        status, printed = call(lesson.verify, *override)
        lines = printed.splitlines()
        claims = [re.match(r"  \[(PASS|FAIL)\] B[1-6]  \S", line) for line in lines[:14]]
        self.assertTrue(all(claims), printed)
        failing = {i: lines[i][80:] for i in range(14) if claims[i][1] == "FAIL"}
        others = [re.fullmatch(r"  \[FAIL\] B[1-6]  (\w+): (.+)", line) for line in lines[14:-1]]
        self.assertTrue(all(others), printed)
        many = {0: "", 1: ", 1 mechanism wrong"}
        end = many.get(len(others), f", {len(others)} mechanisms wrong")
        self.assertEqual(lines[-1], f"  {14 - len(failing)}/14 claims verified{end}")
        self.assertEqual(status, 1 if failing or others else 0)
        for line in lines:
            self.assertTrue(line.isascii() and len(line) <= 160, line)
        return failing, {other[1]: other[2] for other in others}

    def fault(self, name, mechanism):
        """What the line of its own says of a wrong mechanism."""
        return self.graded({name: mechanism})[1][name]

    def test_the_lesson_itself_passes(self):
        for override in ((), (None,), ({},), (lesson.parts(),)):
            self.assertEqual(self.graded(*override), ({}, {}))
        self.assertEqual(call(lesson.verify), call(lesson.main, ["--verify"]))

    def test_every_bug_is_seen_and_blamed_on_its_mechanism(self):
        bitten = set()
        for bugs in itertools.zip_longest(*(bugs.items() for bugs in SABOTAGE.values())):
            # One bug in each mechanism at a time; but a pool and its error are two ends of a call.
            wrong = {name: bug for name, bug in zip(SABOTAGE, bugs) if bug}
            pool = {"PagePool": wrong.pop("PagePool")} if "OutOfPages" in wrong else {}
            for override in filter(None, (wrong, pool)):
                failing, others = self.graded({name: bug for name, (_, bug) in override.items()})
                self.assertLessEqual(set(others), set(override))
                blamed = set().union(*(CLAIMS_OF.get(name, set()) for name in override))
                self.assertLessEqual(set(failing), blamed)
                for name, (bug, _) in override.items():
                    said = [failing[i] for i in set(failing) & CLAIMS_OF.get(name, set())]
                    said = [text for text in said if text.startswith(name)]
                    self.assertTrue(said or name in others, f"{name}: {bug} is not seen")
                bitten |= set(failing)
        self.assertEqual(bitten, set(range(14)))
        self.assertEqual(set(SABOTAGE), set(lesson.parts()))

    def test_claims_fail_for_the_mechanisms_that_their_figures_come_from(self):
        for name, claims in CLAIMS_OF.items():
            failing, others = self.graded({name: raises(ValueError())})
            self.assertEqual((set(failing), set(others)), (claims, {name}))

    def test_failures_teach(self):
        def paged(**wrong):
            return lambda *args, **card: own_paged(*args, **card, **wrong)

        self.assertEqual(
            self.fault("paged", paged(spare=1)),
            "paged([(10, 16)]) on 2 pages of 16 tokens: batch 1, yours 0",
        )
        self.assertEqual(
            self.fault("paged", lambda *args, **card: lesson.paged(args[0], 16, **card)),
            "paged([(10, 16)], 64, budget_gib=0.5, kv_per_token=16777216): batch 0, yours 1",
        )
        self.assertEqual(
            self.fault("paged", lambda *args, **card: lesson.paged(*args)),
            "paged([(10, 16), (10, 16), (10, 16)], 16, budget_gib=0.5, kv_per_token=16777216):"
            " batch 1, yours 3",
        )
        failing, _ = self.graded({"paged": floor_of_pages})
        self.assertEqual(failing[4], "paged(seq_lengths(4000), 16): batch 417, yours 423")
        self.assertEqual(
            self.fault("PagePool", SABOTAGE["PagePool"]["no copy-on-write"]),
            "after append(b, 1): 4 pages held, yours 3",
        )
        self.assertEqual(
            self.fault("PagePool", SABOTAGE["PagePool"]["drops the shared page, then finds none"]),
            "after append(d, 40): d has 3 pages, yours 2",
        )
        self.assertEqual(
            self.fault("PagePool", SABOTAGE["PagePool"]["released twice"]),
            "release(b), released before: an error, yours none",
        )
        self.assertEqual(
            self.fault("PagePool", SABOTAGE["PagePool"]["all tables say page 0"]),
            "after a = allocate(20): a reads its token 0, yours another one",
        )
        failing, _ = self.graded({"break_even": lambda **options: 9.26})
        self.assertEqual(
            failing,
            {
                8: "break_even(): 9.263981714285714 GB/s, yours 9.26",
            }
            | {i: failing[i] for i in (10, 11, 12)},
        )
        failing, _ = self.graded({"break_even": lambda **options: 8.6})
        self.assertEqual(failing[8], "break_even(): 9.26 GB/s, yours 8.60")
        failing, _ = self.graded({"break_even": lambda **options: "9.26"})
        self.assertEqual(failing[8], "break_even(): 9.26 GB/s, yours '9.26'")
        self.assertEqual(
            self.fault("serve", never_preempts),
            "serve([(4, 6), (4, 6)], 4, 4): 8 steps, yours 6",
        )
        self.assertEqual(
            self.fault("contiguous", no_misfits),
            "contiguous([(10, 16), (10, 16), (10, 16)], 16, budget_gib=0.5, kv_per_token=16777216):"
            " 2 misfits, yours 0",
        )

    def test_the_error_of_a_pool_is_graded_too(self):
        said = "is an exception that PagePool raises: True, yours False"
        self.assertEqual(self.fault("OutOfPages", KeyError), said)
        self.assertIn("raises TypeError(", self.fault("OutOfPages", "OutOfPages"))

    def test_a_wrong_type_says_what_to_return(self):
        wanted = "an Allocation, or anything with batch, held_tokens, logical_tokens, waste"
        for rubbish in (None, (417, 0.54), "batch"):
            self.assertEqual(
                self.fault("paged", lambda *args, rubbish=rubbish, **card: rubbish),
                f"must return {wanted}, not {rubbish!r}",
            )
        self.assertEqual(
            self.fault("seq_lengths", lambda n, seed=5: n),
            "must return (prompt, output) pairs, not 9",
        )

    def test_a_missing_parameter_is_named(self):
        lacking = {  # a mechanism, and the first parameter that it lacks
            "paged": (lambda requests, size=16: own_paged(requests, size), "budget_gib"),
            "contiguous": (lambda requests, n, budget_gib=172.5: None, "kv_per_token"),
            "seq_lengths": (lambda n: lesson.seq_lengths(n), "seed"),
            "kv_gib": (lambda tokens: tokens * 327_680 / 2**30, "kv_per_token"),
            "serve": (
                lambda requests, pages, page_tokens=16: lesson.serve(requests, pages, page_tokens),
                "watermark",
            ),
        }
        _, others = self.graded({name: mine for name, (mine, _) in lacking.items()})
        for name, (_, missing) in lacking.items():
            self.assertTrue(others[name].startswith(f"lacks {missing}: its parameters are "))
        self.assertEqual(
            others["paged"],
            "lacks budget_gib: its parameters are requests, page_tokens, budget_gib, kv_per_token",
        )
        failing, others = self.graded({"paged": lambda requests: own_paged(requests)})
        self.assertTrue(failing[4].startswith("paged lacks page_tokens: its parameters are "))
        self.assertEqual(set(failing), {4, 5, 6})
        self.assertEqual(set(others), {"paged"})

    def test_a_right_mechanism_of_ones_own_passes(self):
        def slots(workload, room_each, budget_gib=172.5, kv_per_token=327_680):
            lengths = [prompt + output for prompt, output in workload]
            lengths = lengths[: int(budget_gib * 2**30) // kv_per_token // room_each]
            held = room_each * len(lengths)
            misfits = sum(length > room_each for length in lengths)
            return lesson.Allocation(len(lengths), held, sum(lengths), misfits)

        own = {
            "paged": lambda mine, size=16, *, budget_gib=172.5, kv_per_token=327_680: own_paged(
                mine, size, budget_gib, kv_per_token
            ),
            "contiguous": slots,
            "PagePool": OwnPool,
            "kv_bytes_per_token": lambda a, b, c, d: math.ceil(2 * a * b * c * d),
            "resident_tokens": lambda mine: (
                sum(p * o + o * o / 2 for p, o in mine) / sum(o for _, o in mine)
            ),
            "fetch_seconds": lambda n, rate, kv_per_token=327_680: n * kv_per_token / rate / 1e9,
            "step_seconds": partial(lesson.step_seconds),
        }
        self.assertEqual(self.graded(own), ({}, {}))

        class OwnError(Exception):
            pass

        class Pool(OwnPool):
            def take(self, n):
                try:
                    return super().take(n)
                except lesson.OutOfPages:
                    raise OwnError from None

        self.assertEqual(self.graded({"PagePool": Pool, "OutOfPages": OwnError}), ({}, {}))
        self.assertEqual(self.fault("PagePool", Pool), "append(a, 16) raises OwnError()")

    def test_a_pool_that_is_half_done(self):
        class First:
            def __init__(self, pages, page_tokens):
                self.unused, self.page = list(range(pages)), page_tokens

            def needs(self, tokens):
                return math.ceil(tokens / self.page)

            def allocate(self, tokens):
                if self.needs(tokens) > len(self.unused):
                    raise lesson.OutOfPages
                taken = [self.unused.pop() for _ in range(self.needs(tokens))]
                return OwnSequence(taken, tokens)

            def release(self, sequence):
                self.unused += sequence.table

        class Floors(First):
            def needs(self, tokens):
                return tokens // self.page

        class Second(First):
            def append(self, sequence, n=1):
                taken = self.needs(sequence.tokens + n) - len(sequence.table)
                if taken > len(self.unused):
                    raise lesson.OutOfPages
                sequence.table += [self.unused.pop() for _ in range(taken)]
                sequence.tokens += n

        self.assertEqual(
            self.fault("PagePool", type("Nothing", (First,), {"allocate": lambda *args: None})),
            "a = allocate(20) must return what has table and tokens, not None",
        )
        self.assertEqual(
            self.fault("PagePool", lambda pages, page_tokens: OwnPool(999, page_tokens)),
            "after a = allocate(20): 6 pages free, yours 997",
        )
        self.assertEqual(
            self.fault("PagePool", First),
            "lacks append, fork, held, free, references; what it has is right",
        )
        self.assertEqual(
            self.fault("PagePool", Floors),
            "after a = allocate(20): a has 2 pages, yours 1;"
            " it lacks append, fork, held, free, references",
        )
        self.assertEqual(
            self.fault("PagePool", Second),
            "lacks fork, held, free, references; what it has is right",
        )

    def test_a_verdict_always_follows(self):
        class Odd:
            def __getattribute__(self, name):
                raise Silent

            def __repr__(self):
                raise Silent

        names = set(lesson.parts())
        for rubbish in (None, Odd(), math.nan, 10**5000, "\u00e9\n", [None], {}, mock.MagicMock()):
            mechanism = lambda *args, rubbish=rubbish, **options: rubbish  # noqa: E731
            _, others = self.graded(dict.fromkeys(names, mechanism))
            self.assertEqual(set(others), names)
        for error in (
            Unspeakable(), Silent(), SystemExit(0), RecursionError(), StopIteration(), TypeError(),
            GeneratorExit(), lesson.OutOfPages(),
        ):  # fmt: skip
            failing, others = self.graded(dict.fromkeys(names - {"OutOfPages"}, raises(error)))
            self.assertEqual((len(failing), set(others)), (14, names - {"OutOfPages"}))
        for wrong in (None, len, Odd()):
            self.assertEqual(set(self.graded(dict.fromkeys(names, wrong))[1]), names)
        for name in ("seq_lengths", "PagePool", "serve"):
            with self.assertRaises(KeyboardInterrupt), contextlib.redirect_stdout(io.StringIO()):
                lesson.verify({name: raises(KeyboardInterrupt())})

    def test_a_mechanism_is_not_blamed_for_another(self):
        def sorts(requests, *args, **options):
            allocation = lesson.contiguous(requests, *args, **options)
            requests.sort()
            return allocation

        def empties(config, *args, **options):
            answer = lesson.kv_bytes(config, *args, **options)
            config.clear()
            return answer

        generator = {"seq_lengths": lambda n, seed=5: iter(lesson.seq_lengths(n, seed))}
        for override in ({"contiguous": sorts}, {"kv_bytes": empties}, generator):
            self.assertEqual(self.graded(override), ({}, {}))

    def test_what_can_be_overridden(self):
        with self.assertRaisesRegex(TypeError, r"^parts_override must be a dict, not \[1\]$"):
            lesson.verify([1])
        message = r"^parts_override must name parts of the lesson, not 'pages'$"
        with self.assertRaisesRegex(ValueError, message):
            lesson.verify({"pages": 1})

    def test_constants_changed_in_a_repl(self):
        for name in lesson.__all__:
            value = vars(lesson)[name]
            if isinstance(value, (int, float)):
                with self.subTest(name), mock.patch.object(lesson, name, value * 2):
                    failing, _ = self.graded()
                    self.assertTrue(failing)
        with mock.patch.dict(lesson.TIERS, {"local NVMe": 5}):
            self.assertEqual(self.graded(), ({10: "TIERS[3]: 7, yours 5"}, {}))


class Predict(unittest.TestCase):
    RIGHT = ("320 KiB", "23%", "82%", "6", "89%", "9.3", "no")

    def answered(self, **changed):
        """What is said of these answers (q1="6x"), all others being right: status, lines, text."""
        lines = list(self.RIGHT)
        for question, line in changed.items():
            lines[int(question[1]) - 1] = line
        status, printed = call_main("--predict", entered="".join(f"{x}\n" for x in lines).encode())
        self.assertTrue(printed.isascii())
        return status, printed.splitlines(), " ".join(printed.split())

    def test_it_reads_what_people_type(self):
        for question, guesses in {
            "q1": (
                "320 KiB",
                "327680",
                "327,680 bytes",
                "327_680",
                "327 680",
                "320k",
                "0.3125 MiB",
                "3.2768e5 B",
                "327680 byte",
                "0.32768 MB",
                "3.0517578125e-4 GiB",
                "2*80*8*128*2",
                "160 * 2 KiB",
                "2 x 80 x 8 x 128 x 2",
                "2 \u00d7 80 \u00d7 8 \u00d7 128 \u00d7 2",
                "2x80x8x128x2 B",
                "2*80*8*128*2 = 327680",
            ),
            "q2": (
                "23.2%",
                "0.2319",
                "23.19",
                "~23.19 %",
                "23.19 percent",
                ".2319",
                "23,19 %",
                "3/13",
                "6 / 26",
                "a quarter",
                "one quarter",
                "25 pct",
                "22-24%",
                "22%-25%",
                "20 to 25 %",
            ),
            "q3": ("82.3%", "0.823", "about 82.3%!", "82.3 %\r", "four fifths", "80 percent"),
            "q4": (
                "6x",
                "6.04",
                "x6",
                "6 times",
                "604%",
                "factor 6",
                "six times",
                "6 fold",
                "5.5-6.5x",
            ),
            "q5": ("89%", "0.89", "89.0 percent", "88\u201390 %"),
            "q6": (
                "9.26 GB/s",
                "9260 MB/s",
                "9.26GB/s",
                "8.63 GiB/s",
                "74 Gbit/s",
                "74 Gbps",
                "9.26 GBps",
                "74 Gb/s",
                "9.26 gb/s at TP4",
                "9-9.5 GB/s",
            ),
        }.items():
            for guess in guesses:
                with self.subTest(guess):
                    status, _, text = self.answered(**{question: guess})
                    self.assertEqual((status, text.count("Spot on")), (0, 6))
                    self.assertTrue(
                        text.endswith(
                            "You said so. (With attention counted it does;"
                            " there it is 4.16 GB/s.) Every guess is spot on."
                        )
                    )

    def test_it_asks_once_more_when_it_cannot_read(self):
        for odd in (
            "-5", "5 apples", "1e999", "nan", "inf", "\u0663", "\0", "1/0", "200 / 7 / 0 KB", "foo",
            "1 in 4", "x", "/",
        ):  # fmt: skip
            with self.subTest(odd):
                _, _, text = self.answered(q1=f"{odd}\n320 KiB")
                self.assertEqual(text.count("Once more"), 1)
                self.assertTrue(text.endswith("Every guess is spot on."))
                _, _, text = self.answered(q1=f"{odd}\n{odd}")
                self.assertEqual(text.count("Once more"), 1)
                self.assertIn("It is 327,680 B = 320 KiB. I cannot read that as a guess.", text)
                _, _, text = self.answered(q1=f"{odd}\n")
                self.assertIn("It is 327,680 B = 320 KiB. No guess.", text)
        for skipped in ("", " ", "?", "no idea", "not sure", "I do not know"):
            _, _, text = self.answered(q1=skipped)
            self.assertEqual((text.count("Once more"), text.count("Spot on")), (0, 5))
        _, _, text = self.answered(q7="perhaps\nNo!")
        self.assertEqual(text.count("Once more"), 1)
        self.assertIn("You said so.", text)

    def test_it_says_how_far_off_and_why(self):
        for answer, said in {
            "q1=160 KiB": "2.00x too low. That is one vector for each head; K and V are both kept.",
            "q1=2560 KiB": "8.00x too high. That counts query heads; only KV heads keep anything.",
            "q1=4 KiB": "80.00x too low. That is one layer of it.",
            "q1=100 KiB": "3.20x too low.",
            "q1=0": "more than a million times too low.",
            "q2=11.6%": "11.6 points too low. That is one vector for each head; K and V are both"
            " kept.",
            "q2=46.4%": "23.2 points too high.",
            "q3=17.7%": "64.6 points too low. That is what is used.",
            "q3=0.5": "32.3 points too low.",
            "q4=3x": "2.01x too low.",
            "q5=98.4%": "11.8 points too high. That is of the prefixes alone.",
            "q6=926 GB/s": "99.96x too high.",
            "q6=18.5": "2.00x too high. That counts one FLOP per parameter and token.",
            "q6=2.3": "4.03x too low. That is for one GPU; four recompute four times as fast.",
        }.items():
            question, _, guess = answer.partition("=")
            with self.subTest(answer):
                _, _, text = self.answered(**{question: guess})
                self.assertEqual(text.count("Spot on"), 5)
                self.assertIn(f". You are {said} ", text)
                self.assertIn(f"Your worst miss is question {question[1]}: read --block ", text)
        _, _, text = self.answered(q7="yes")
        said = "it is 9.26 GB/s at 131,072 tokens too. You said yes; but both times grow with the"
        self.assertIn(said, text)
        _, _, text = self.answered(q6="9.26, no", q7="")
        self.assertIn("You said so.", text)

    def test_the_question_does_not_hand_over_the_answer(self):
        asked = " ".join(question.text for question in lesson.questions(lesson.parts()))
        workloads = lesson.seq_lengths(4000), lesson.prefixed_lengths(64, 4096)
        for mean in (sum(map(sum, requests)) / len(requests) for requests in workloads):
            for hint in (mean, mean - 4096):
                self.assertNotIn(f"{hint:,.0f}", asked)

    def test_it_ends_with_what_was_learned(self):
        _, lines, text = self.answered(q4="2x", q3="", q1="foo\nfoo")
        self.assertIn("Your worst miss is question 4: read --block 3 first.", text)
        self.assertEqual(
            lines[-2:],
            [
                "  Learned: a token holds 320 KiB; 8k reservations waste 82.3%; pages hold 6.0x",
                "  the batch.",
            ],
        )

    def test_it_ends_politely(self):
        whole = call_main("--predict", entered="".join(f"{x}\n" for x in self.RIGHT).encode())
        for n in range(len(self.RIGHT)):
            entered = "".join(f"{x}\n" for x in self.RIGHT[:n]).encode()
            status, printed = call_main("--predict", entered=entered)
            self.assertEqual((status, printed.count("(End of input.)")), (0, 1))
            self.assertEqual(printed.count("Spot on"), n if n < 7 else 6)
            self.assertIn(printed.partition("(End of input.)")[0].rstrip(), whole[1])
        status, printed = call_main("--predict", entered=b"foo\n")
        self.assertEqual((status, printed.count("(End of input.)")), (0, 1))
        status, printed = call_main(
            "--predict", entered=b"\xff\xfe\n\x1b[2J 5%\n\0\n" + b"9" * 5000 + b"\n"
        )
        self.assertEqual(status, 0)
        self.assertTrue(printed.isascii() and "\x1b" not in printed)
        for stdin in (None, mock.Mock(readline=mock.Mock(side_effect=OSError))):
            with mock.patch.object(sys, "stdin", stdin):
                status, printed = call(lesson.main, ["--predict"])
            self.assertEqual((status, printed.count("(End of input.)")), (0, 1))
        stdin = mock.Mock(readline=mock.Mock(side_effect=["6x\n", KeyboardInterrupt]))
        with mock.patch.object(sys, "stdin", stdin):
            status, printed = call(lesson.main, ["--predict"])
        self.assertEqual((status, printed.count("(Stopped.)")), (130, 1))


class TheLesson(unittest.TestCase):
    def test_docstring_examples(self):
        if lesson.__doc__ is None:
            self.skipTest("docstrings are stripped (-OO)")
        result = doctest.testmod(lesson)
        self.assertEqual(result.failed, 0)
        self.assertGreaterEqual(result.attempted, 12)

    def test_every_mechanism_is_documented_and_is_the_one_in_the_module(self):
        for name, mechanism in lesson.parts().items():
            self.assertIs(mechanism, getattr(lesson, name))
            if lesson.__doc__ is not None:
                self.assertTrue(inspect.getdoc(mechanism), name)

    def test_the_names_that_a_star_brings(self):
        brought = {}
        exec("from m02_kv_cache import *", brought)
        del brought["__builtins__"]
        types_met = {"Allocation", "Sequence", "Served"}
        constants = {
            "GIB", "LAYERS", "KV_HEADS", "HEAD_DIM", "DTYPE", "Q_HEADS", "KV_PER_TOKEN",
            "KV_BUDGET_GIB", "N_PARAMS", "DENSE_FLOPS_PER_GPU", "TIERS", "CARDS",
        }  # fmt: skip
        own = {"parts", "assembly", "verify"}
        self.assertEqual(set(brought), {*lesson.parts(), *types_met, *constants, *own})

    def test_the_machinery_stands_behind_the_lesson(self):
        with open(SCRIPT, encoding="utf-8") as file:
            lines = file.read().splitlines()
        (end,) = (i for i, line in enumerate(lines, 1)
                  if line.startswith("#") and "the lesson ends here" in line)  # fmt: skip

        def line_of(function):
            return inspect.getsourcelines(inspect.unwrap(function))[1]

        blocks = [line_of(block.run) for block in lesson.BLOCKS.values()]
        ordered = [line_of(lesson.seq_lengths), line_of(lesson.block), *blocks]
        ordered += [line_of(lesson.assembly), line_of(lesson.parts), end]
        ordered += [line_of(x) for x in (lesson.verify, lesson.predict, lesson.main)]
        self.assertEqual(ordered, sorted(ordered))
        for name, mechanism in lesson.parts().items():
            if name not in ("kv_bytes", "size", "traffic"):  # no part of the argument
                self.assertLess(line_of(mechanism), end, name)

    def test_prerequisites(self):
        needs = {n: lesson.prerequisites(n) for n in range(1, 7)}
        self.assertEqual(needs, {1: [], 2: [1], 3: [1, 2], 4: [1, 2, 3], 5: [1], 6: [1, 2, 3, 5]})

    def test_a_block_is_registered_and_stays_callable(self):
        for number, registered in lesson.BLOCKS.items():
            self.assertEqual(registered.number, number)
            self.assertIs(registered.run, getattr(lesson, f"b{number}"))

    def test_parts_and_silent_blocks_print_nothing_and_run_no_workload(self):
        with mock.patch.object(lesson, "lognormal_pairs", side_effect=AssertionError):
            _, printed = call(lesson.parts)
        self.assertEqual(printed, "")

    def test_what_is_printed_comes_out_of_the_parts(self):
        # A mechanism that is off shows in its block and in the assembly: no second copy exists.
        for n, name, wrong in (
            (1, "kv_bytes_per_token", lambda *shape: 7 * 2**10),
            (2, "contiguous", lambda requests, reserve: lesson.Allocation(7777, 10**6, 10**5, 7)),
            (3, "paged", lambda requests, page=16: lesson.Allocation(7777, 10**6, 10**5)),
            (4, "shared_prefix", lambda *args, **kwargs: lesson.Allocation(7777, 10**6, 10**5)),
            (5, "break_even", lambda *args, **kwargs: 77.77),
            (6, "serve", lambda *args, **kwargs: lesson.Served(7, 7, 7, 7, 7, 7, 77.7, 0.7, 7, 7)),
        ):
            run_block, parts = lesson.BLOCKS[n].run, lesson.parts()
            _, before = call(run_block, parts, True)
            with mock.patch.object(lesson, name, wrong):
                _, after = call(run_block, parts, True)
            self.assertNotEqual(before, after, name)
            right, wired = (
                call(lesson.assembly, parts),
                call(lesson.assembly, {**parts, name: wrong}),
            )
            self.assertNotEqual(right, wired, name)

    def test_the_assembly_is_wired_from_the_parts_alone(self):
        # The parts of another copy of the file, while this one's mechanisms are out of order.
        parts, forbidden = another_copy().parts(), mock.Mock(side_effect=AssertionError)
        expected = call(lesson.assembly, parts)
        with mock.patch.multiple(lesson, **dict.fromkeys(lesson.parts(), forbidden)):
            self.assertEqual(call(lesson.assembly, parts), expected)

    def test_prose_is_ascii_and_fits_a_terminal(self):
        for mode in MODES:
            status, printed = call_main(*mode)
            self.assertEqual(status, 0)
            self.assertTrue(printed.isascii())
            for line in printed.splitlines():
                table_or_claim = re.match(r"  (\[PASS\]|allocator  |contiguous, |paged)", line)
                self.assertTrue(len(line) <= 80 or table_or_claim, line)
                self.assertTrue(line == line.rstrip() or "your guess" in line, line)


# ------------------------------------------------------------------------------------- the page
#
# README.md is checked as a whole. What a machine can write, it writes (--write-readme):
#
#   ```python, first line def, class or @   the source of that function or class of the script
#   ```python otherwise, then ```text       a snippet, and what it prints in a fresh interpreter;
#                                           the end of a fold, </details>, may stand between them
#   ```console, `$ python3 handson/...`     what the command prints; `| sed -n '/this/,/that/p'`
#                                           leaves those lines of it, `| sed '1,/that/d'` the rest
#   ```mermaid, a line `%%= template`       the next line of the picture, as an f-string
#
# Every number in prose and tables that looks like a figure (a decimal, a percentage, a factor, 100
# or more) is marked in its section, in a comment, which GitHub does not show:
#
#   <!-- 417 = pages16.batch; 82.3% = eight.waste -->    computed, and printed as it is written
#   <!-- eight := contiguous(chat, 8192) -->             a name, for all marks and pictures below
#   <!-- 291 in Grow and copy -->                        printed by the code under that heading
#   <!-- 96% from Kwon et al. 2023, section 1 -->        a fact from outside, and where it is from
#   <!-- 8,192 given -->                                 a parameter

PART = re.compile(r"^```(\w*)\n(.*?)^```$|<!--(.*?)-->", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)
COMMAND = re.compile(
    r"\$ python3 handson/m02_kv_cache\.py(.*?)(?: \| sed (?:-n )?'/?([^/]+)/?,/?([^/]+?)/?([pd])')?"
)
MARK = re.compile(r"(\S+) (=|:=|from|in|given) ?(.*)")
BETWEEN_MARKS = re.compile(r"\n|; (?=\S+ (?:=|from|in|given)(?:[\s;]|$))")
NUMBER = re.compile(r"(?<![\w.,/#-])-?\d[\d,]*(?:\.\d+)?(?![\w.,]*[A-WYZa-wyz])[%x]?")
STALE = "not what the script says; --write-readme mends it"
NO_FIGURE = re.compile(  # numbers in code, addresses, versions and citations, and of a list
    r"`[^`\n]+`|\]\([^)\s]+\)|<[^>\n]+>|(?:issue|request|sections?|Python|seeds)\s+[\d.]+"
    r"|(?m:^\d+\.(?= ))"
)


def is_slice(code):
    return re.match(r"def |class |@", code)


def spaces(found):
    """Blanks in place of what was found, on the same lines."""
    return re.sub(r"[^\n]", " ", found[0])


@functools.lru_cache(None)
def slices():
    """The source of every function and class of the script, by name; a method is moved left."""
    with open(SCRIPT, encoding="utf-8") as file:
        lines = file.read().splitlines(keepends=True)
    found = {}
    for node in ast.walk(ast.parse("".join(lines))):  # what is at the top level comes first
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(at.lineno for at in node.decorator_list)])
            source = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
            found.setdefault(node.name, source)
    return found


@functools.lru_cache(None)
def snippet_output(code):
    """What a snippet prints in a fresh interpreter that finds the lesson, and its exit status."""
    start = f"import sys; sys.path.insert(0, {HERE!r}); sys.dont_write_bytecode = True"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"{start}; exec(compile({code!r}, 'snippet', 'exec'))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=100,
    )
    return done.stdout.decode().replace("\r\n", "\n"), done.returncode


@functools.lru_cache(None)
def command_output(mode, first, last, edit):
    """What a command prints, beside the reader's config.json, and what sed leaves of it."""
    with reader_folder():
        printed = call(lesson.main, shlex.split(mode))[1]
    return sed(printed, first, last, edit) if edit else printed


def sed(text, first, last, edit):
    """What sed leaves of a text: like it, with every range that `first` opens, not just one."""
    chosen, others, opened, inside = [], [], 0, False
    for i, line in enumerate(text.splitlines(keepends=True)):
        if inside:
            chosen.append(line)
            inside = last == "$" or not has(last, line)
        elif i == 0 if first == "1" else has(first, line):
            chosen.append(line)
            opened, inside = opened + 1, True
        else:
            others.append(line)
    if opened != 1 or (inside and last != "$"):
        raise ValueError(f"/{first}/ opens {opened} ranges, and /{last}/ leaves one open: {inside}")
    return "".join(chosen if edit == "p" else others)


def has(pattern, line):
    """Whether sed finds its pattern in a line: a basic expression, in which + or ( is itself."""
    return re.search(re.sub(r"[+?(){}|]", r"\\\g<0>", pattern), line.rstrip("\n"))


@contextlib.contextmanager
def reader_folder():
    """In a folder with the two files that the reader brings: a config.json and a trace.csv."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with open("config.json", "w", encoding="utf-8") as file:
                json.dump(LLAMA_8B, file)
            with open("trace.csv", "w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow(["ContextTokens", "GeneratedTokens"])
                csv.writer(file).writerows(lesson.seq_lengths(20_000))
            yield
        finally:
            os.chdir(here)


def as_written(text, value):
    """`value` in the form of the number `text`: its separators, decimals and unit."""
    whole, decimals, unit = re.fullmatch(r"-?([\d,]+)(\.\d+)?(.*)", text).groups()
    comma = "," if "," in whole or len(whole) < 4 else ""
    scale = 100 if unit == "%" else 1
    return f"{value * scale:{comma}.{len(decimals or '.') - 1}f}{unit}"


class Page:
    """A README: `fresh` is what it should be, `told` has (line, complaint) for all that is not."""

    def __init__(self, text):
        self.text, self.told, self.names = text, set(), dict(vars(lesson))
        self.prose = NO_FIGURE.sub(spaces, PART.sub(spaces, text))
        headings = list(HEADING.finditer(PART.sub(spaces, text)))
        self.titles = [at[1].replace("`", "") for at in headings]
        self.starts = [0, *(at.start() for at in headings), len(text)]  # of the sections
        self.marked = [set() for _ in self.starts]
        parts = list(PART.finditer(text))
        snippets = [part[2] for part in parts if part[1] == "python" and not is_slice(part[2])]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            self.printed = dict(zip(snippets, threads.map(snippet_output, snippets)))
        written, at, snippet = [], 0, None
        for part in parts:
            between = text[at : part.start()].replace("\n</details>\n", "", 1).strip("`\n")
            if snippet and (part[1] != "text" or between):
                self.tell(at, "the output of this snippet must follow it, in a text fence")
            if part[3] is not None:
                self.read_marks(part[3], part.start(3))
                continue
            body = fresh = part[2]
            try:
                fresh = self.fresh_body(part[1], body, snippet)
            except Exception as error:
                self.tell(part.start(), f"{type(error).__name__}: {error}")
            if fresh != body:
                same = sum(1 for _ in itertools.takewhile(lambda x: x[0] == x[1], zip(fresh, body)))
                self.tell(part.start(2) + same, STALE)
            written += [text[at : part.start(2)], fresh]
            at, snippet = part.end(2), body if body in self.printed else None
        self.fresh = "".join(written) + text[at:]
        self.look_for_figures()

    def tell(self, at, complaint):
        self.told.add((self.text.count("\n", 0, at) + 1, complaint))

    def section(self, at):
        return sum(start <= at for start in self.starts[1:])

    def fresh_body(self, language, body, snippet):
        """What should stand in a fence."""
        command = COMMAND.fullmatch(body.split("\n")[0])
        if language == "python" and is_slice(body):
            return slices()[re.search(r"^(?:def|class) (\w+)", body, re.MULTILINE)[1]]
        if language == "text" and snippet:
            printed, status = self.printed[snippet]
            if status:
                raise ValueError(f"the snippet above fails: {printed}")
            return printed
        if language == "console" and command:
            return f"{command[0]}\n{command_output(*command.groups())}"
        if language == "mermaid":
            lines = body.splitlines()
            for i, line in enumerate(lines[:-1]):
                indent, is_template, template = line.partition("%%= ")
                if is_template:
                    lines[i + 1] = indent + eval(f'f"""{template} """', self.names)[:-1]
            return "\n".join(lines) + "\n"
        return body

    def read_marks(self, comment, start):
        """Recompute what a comment marks, and remember the names that it gives."""
        for mark in filter(None, BETWEEN_MARKS.split(comment.strip())):
            at = start + comment.find(mark)
            try:
                text, kind, rest = MARK.fullmatch(mark).groups()
                value = eval(rest, self.names) if "=" in kind else None
                if kind == ":=":
                    self.names[text] = value
                    continue
                self.marked[self.section(at)].add(text)
                if kind == "=" and as_written(text, value) != text:
                    self.tell(at, f"{text} is {as_written(text, value)}: {rest}")
                if kind == "in" and text not in NUMBER.findall(self.code_under(rest)):
                    self.tell(at, f"{text} is not in the code and output of {rest!r}")
            except Exception as error:
                self.tell(at, f"{mark}: {type(error).__name__}: {error}")

    def code_under(self, title):
        """All fences from the heading `title` to the next."""
        section = self.titles.index(title) + 1
        text = self.text[self.starts[section] : self.starts[section + 1]]
        return "".join(part[2] for part in PART.finditer(text) if part[2])

    def look_for_figures(self):
        """Each figure in prose must be marked in its section, and each mark must be of a figure."""
        found = [set() for _ in self.starts]
        for number in NUMBER.finditer(self.prose):
            text, section = number[0].strip(","), self.section(number.start())
            found[section].add(text)
            is_figure = re.search(r"[.,%x]|\d\d", text) and not re.fullmatch(r"(19|20)\d\d", text)
            if is_figure and text not in self.marked[section]:
                self.tell(number.start(), f"{text} is not marked")
        for start, marked, there in zip(self.starts, self.marked, found):
            for text in marked - there:
                self.tell(start, f"{text} is marked in this section, and is not in it")


@unittest.skipUnless(os.path.exists(README), "the README is not beside the tests")
class Readme(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with open(README, encoding="utf-8") as file:
            cls.page = Page(file.read())

    def test_every_part_and_figure_is_what_the_script_says(self):
        told = [f"README.md:{line}: {complaint}" for line, complaint in sorted(self.page.told)]
        self.assertEqual(told, [], "\n".join(["", *told]))

    def test_writing_it_anew_changes_nothing(self):
        self.assertEqual(self.page.fresh, self.page.text)
        self.assertGreater(len(self.page.printed), 20)

    def test_a_change_is_found_on_its_line(self):
        text, lines = self.page.text, {}
        source = next(part[2] for part in PART.finditer(text) if is_slice(part[2] or ""))
        for old, new in (
            (source.splitlines()[-1], "    return 417"),  # a slice
            ("[PASS] B3", "[FAIL] B3"),  # a captured output
            ("Llama-3 405B          ", "Llama-4 405B          "),  # the output of a snippet
            ("\n  line [1.0, 4", "\n  line [1.1, 4"),  # a picture
            ("every user gets fewer", "every user gets 1.2 fewer"),  # prose
            ("30% in Grow and copy", "31% in Grow and copy"),
            ("| 9.26 GB/s |", "| 9.27 GB/s |"),  # a table
            ("9.26 = break_even()", "9.26 = break_even(tp=8)"),  # a mark
        ):
            at = text.rindex(old)
            text = text[:at] + new + text[at + len(old) :]
            lines[new] = text.count("\n", 0, at + len(new)) + 1
        told = {line for line, _ in Page(text).told}
        for new, line in lines.items():
            with self.subTest(new):
                self.assertIn(line, told)

    def test_links_and_contents(self):
        titles = self.page.titles
        anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        self.assertEqual(len(set(anchors)), len(titles))
        text = PART.sub(spaces, self.page.text)
        links = list(re.finditer(r"\[([^]]*)\]\((?!https://)([^)]+)\)", text))
        contents = [link.groups() for link in links[: len(titles) - 1]]
        self.assertEqual(contents, [(t, f"#{a}") for t, a in zip(titles, anchors)][1:])
        for link in links:
            line = text.count("\n", 0, link.start()) + 1
            self.assertIn(link[2][1:], anchors, f"README.md:{line}: no such heading")

    def test_the_code_that_is_read_is_there(self):
        pool = self.page.code_under("Block 3: paged allocation")
        for at in re.finditer(r"^\*\*Reading it\.\*\*(?:.+\n)+", self.page.text, re.MULTILINE):
            title = self.page.titles[self.page.section(at.start()) - 1]
            for quoted in re.findall(r"`([^`]+)`", at[0]):
                with self.subTest(title, quoted=quoted):
                    code = " ".join(quoted.replace("(...)", "(").split())
                    line = self.page.text.count("\n", 0, at.start()) + 1
                    there = code in self.page.code_under(title) + pool
                    self.assertTrue(there, f"README.md:{line}: no {code!r} in the code of {title}")

    def test_names_in_prose_are_of_the_lesson_or_of_an_engine(self):
        with open(SCRIPT, encoding="utf-8") as file:
            known = set(re.findall(r"\w+", file.read() + "".join(self.page.printed)))
        known |= {"cache_salt", "copy_on_partial_reuse", "kv_offloading_size"}  # of engines
        known |= {"cd", "handson", "pip", "install", "pytest"}
        prose = PART.sub(spaces, self.page.text)
        unknown = []
        for quoted in re.finditer(r"`([^`\n]+)`", prose):
            names = set(re.findall(r"(?<!\w)[A-Za-z_]\w+", quoted[1])) - known
            if names and not re.search(r"[-/{]|\.\w", quoted[1]):
                unknown.append((self.page.text.count("\n", 0, quoted.start()) + 1, *names))
        self.assertEqual(unknown, [], "(line of README.md, names that are nowhere in the lesson)")

    def test_what_sed_leaves_is_what_the_page_shows(self):
        output = "a\nb (1)\nc\nb (1)\nd\n"
        self.assertEqual(sed(output, "a", "b (1)", "p"), "a\nb (1)\n")
        self.assertEqual(sed(output, "1", "c", "d"), "b (1)\nd\n")
        for first, last in (("b", "c"), ("b", "x"), ("x", "d"), ("d", "d")):
            with self.assertRaises(ValueError):
                sed(output, first, last, "p")
        if not shutil.which("sed"):
            self.skipTest("no sed here")
        for part in PART.finditer(self.page.text):
            command, _, shown = (part[2] or "").partition("\n")
            edit = re.fullmatch(r"\$ python3 handson/m02_kv_cache\.py(.*) \| (sed .*)", command)
            if part[1] == "console" and edit:
                with self.subTest(command):
                    printed = call(lesson.main, shlex.split(edit[1]))[1].encode()
                    done = subprocess.run(
                        shlex.split(edit[2]), input=printed, capture_output=True, timeout=60
                    )
                    self.assertEqual(done.stdout.decode(), shown)

    def test_transcripts(self):
        text, at = "", 0
        for part in PART.finditer(self.page.text):
            if part[1] == "pycon":  # and nothing but blank lines in place of the rest
                text += "\n" * self.page.text.count("\n", at, part.start(2)) + part[2]
                at = part.end(2)
        test = doctest.DocTestParser().get_doctest(text, dict(vars(lesson)), "README", README, 0)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        with reader_folder(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # a REPL may leave files open
            runner.run(test)
        self.assertEqual(runner.failures, 0)
        self.assertGreaterEqual(runner.tries, 16)


def write_readme():
    """Write the parts of the README that follow from the script, and say what is left to mend."""
    with open(README, encoding="utf-8") as file:
        page = Page(file.read())
    changed = page.fresh != page.text
    if changed:
        with open(README, "w", encoding="utf-8", newline="\n") as file:
            file.write(page.fresh)
    lines = sorted(line for line, complaint in page.told if complaint == STALE)
    print(f"README.md: {f'rewritten at lines {lines}' if changed else 'unchanged'}")
    told = sorted((Page(page.fresh) if changed else page).told)
    print(*(f"README.md:{line}: {complaint}\n" for line, complaint in told), sep="", end="")
    return 1 if told else 0


class CommandLine(unittest.TestCase):
    def test_wrong_usage_is_one_line_and_exit_2(self):
        for args in (
            ["--block", "0"], ["--block", "7"], ["--block", "x"], ["--block", ""], ["--block"],
            ["--block", "1.0"], ["--block", "-1"], ["--block", " 1"], ["--block", "\u0663"],
            ["--block", "1", "--block", "2"], ["--quiet", "--verify"], ["--block", "1", "--quiet"],
            ["--help", "--verify"], ["--predict", "--quiet"], ["--model"], ["--fast"],
            ["--model", "a", "--model", "b"], ["--model", "a", "--verify"], ["--budget", "9"],
            ["--budget", "9", "--quiet"], ["--model", "a", "--budget"],
            ["--model", "-", "--budget", "0"], ["--model", "-", "--budget", "-1"],
            ["--model", "-", "--budget", "nan"], ["--model", "-", "--budget", "inf"],
            ["--model", "-", "--budget", "x"], ["--model", "a", "--budget", "1", "--budget", "1"],
            ["--ver"], ["-v"], ["3"], ["--quiet=1"], [""], ["--fa\nst"], ["a\nb\x1b"],
        ):  # fmt: skip
            with self.subTest(args):
                done = run(*args)
                self.assertEqual((done.returncode, done.stdout), (2, b""))
                self.assertRegex(
                    done.stderr.decode(),
                    r"\Am02_kv_cache: [^\n]*--block N \(N from 1 to 6\)[^\n]*\n\Z",
                )
                with contextlib.redirect_stderr(io.StringIO()):
                    self.assertEqual(call_main(*args), (2, ""))

    def test_a_block_has_its_heading(self):
        _, printed = call_main("--block", "4")
        heading = "\nBlock 4. Sharing a prefix\n  copy-on-write, and where the real win is\n"
        self.assertIn(heading, printed)
        self.assertTrue(printed.startswith("(Ran silently first: blocks 1, 2, 3.)\n"))
        self.assertEqual(call_main("--help")[1], lesson.USAGE)

    def test_a_block_says_what_ran_before_it(self):
        _, printed = call_main("--block", "6")
        self.assertTrue(printed.startswith("(Ran silently first: blocks 1, 2, 3, 5.)\n"), printed)
        self.assertEqual(printed.count("Block "), 1)
        self.assertEqual(call_main("--block=6")[1], printed)

    def test_the_whole_run_is_its_blocks_and_the_assembly(self):
        whole = call_main()[1]
        blocks = [call_main("--block", str(n))[1] for n in range(1, 7)]
        shown = [re.sub(r"\A\(Ran silently.*\n", "", printed) for printed in blocks]
        self.assertEqual(whole, "".join(shown) + call_main("--quiet")[1])

    def test_a_reader_that_goes_away(self):
        for mode in MODES:
            reader, writer = os.pipe()
            os.close(reader)
            done = run(*mode, stdout=writer)
            os.close(writer)
            self.assertEqual((done.stderr, done.returncode), (b"", 141), mode)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_a_full_disk(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            done = run(stdout=full)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr.decode(), r"\Am02_kv_cache: cannot write the output: .*\n\Z")

    @unittest.skipUnless(os.name == "posix", "closing a standard stream takes a POSIX shell")
    def test_closed_standard_streams(self):
        for mode, status in ((["--verify"], 0), ([], 0), (["--help"], 0), (["--block", "9"], 2)):
            for closed in (">&-", "2>&-", "<&-", ">&- 2>&- <&-"):
                command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, SCRIPT, *mode]
                done = subprocess.run(command, capture_output=True, timeout=100)
                self.assertEqual(done.returncode, status, (mode, closed, done.stderr))
                self.assertNotIn(b"Traceback", done.stderr)

    def test_model(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "config.json")
            with open(path, "w", encoding="utf-16") as file:  # as some editors save it
                file.write(CONFIG)
            status, printed = call_main("--model", path)
        self.assertEqual(status, 0)
        self.assertIn("  = 131,072 B/token = 128 KiB per token\n", printed)
        self.assertIn("     131,072         0.500 GiB\n", printed)
        self.assertIn("stop growing there", printed)
        seventy = json.dumps(shape(80, 64, 8, 8192)).encode()
        status, printed = call_main("--model", "-", entered=seventy)
        sizes = [float(gib) for gib in re.findall(r"([\d.]+) GiB\n", printed)]
        self.assertEqual(sizes, [0.312, 1.25, 10, 40])
        self.assertNotIn("stop growing there", printed)
        self.assertNotIn("%", printed)
        status, with_budget = call_main("--model", "-", "--budget", "172.5", entered=seventy)
        self.assertEqual(status, 0)
        self.assertIn("  131,072        40.000 GiB             23.2%           4\n", with_budget)
        self.assertIn("172.5 GiB are 35,328 pages of 16 tokens", with_budget)

    def test_a_model_whose_layers_keep_nothing(self):
        mamba = b"""{"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-", "head_dim": 8,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}"""
        status, printed = call_main("--model", "-", "--budget", "1", entered=mamba)
        self.assertEqual(status, 0)
        self.assertIn("No layer of it keeps KV.", printed)

    @unittest.skipUnless(os.path.exists("/dev/zero"), "no /dev/zero here")
    def test_a_model_without_an_end(self):
        done = run("--model", "/dev/zero")
        self.assertEqual((done.returncode, done.stdout), (2, b""))
        self.assertIn(b"too large", done.stderr)

    def test_a_model_that_cannot_be_read(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "config.json")
            for content, message in (
                (b"", "not JSON: "), (b"{", "not JSON: "), (b"\xff\xfe\xff", "not JSON: "),
                (b"[]", "config must be a dict, not []"), (b"{}", "config lacks num_hidden_layers"),
                (b"[" * 100_000, ""), (b'{"a": 1,\n "b"}', "not JSON: "),
            ):  # fmt: skip
                with open(path, "wb") as file:
                    file.write(content)
                for name, entered in ((path, b""), ("-", content)):
                    done = run("--model", name, input=entered)
                    self.assertEqual((done.returncode, done.stdout), (2, b""))
                    start = re.escape(f"m02_kv_cache: --model {name}: {message}")
                    self.assertRegex(done.stderr.decode(), rf"\A{start}[^\n]*\n\Z")
            for path in (folder, os.path.join(folder, "absent\n\u00e9.json"), ""):
                done = run("--model", path)
                self.assertEqual((done.returncode, done.stdout), (2, b""))
                self.assertRegex(done.stderr.decode(), r"\Am02_kv_cache: --model [^\n]*\n\Z")

    def test_predict_ends_politely(self):
        answers = GUESSES.encode().splitlines(keepends=True)
        for n in range(len(answers)):
            done = run("--predict", input=b"".join(answers[:n]))
            self.assertEqual((done.returncode, done.stderr), (0, b""))
            self.assertIn(b"(End of input.)", done.stdout)
        done = run("--predict", input=b"\xff\xfe\n\x1b[2J 5%\n\0\n" + b"9" * 5000 + b"\n")
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertTrue(done.stdout.isascii() and b"\x1b" not in done.stdout)
        with mock.patch.object(lesson, "ask", side_effect=KeyboardInterrupt):
            status, printed = call_main("--predict")
        self.assertEqual(status, 130)
        self.assertIn("(Stopped.)", printed)

    def test_errors_that_cannot_be_told(self):
        reader, writer = os.pipe()
        os.close(reader)
        for unbuffered in ({}, {"PYTHONUNBUFFERED": "1"}):
            env = environment(**unbuffered)
            command = [sys.executable, SCRIPT, "--fast"]
            done = subprocess.run(command, env=env, stderr=writer, timeout=100)
            self.assertEqual(done.returncode, 2)
        os.close(writer)

    def test_ctrl_c_when_nobody_reads(self):
        code = (
            "import sys, m02_kv_cache as lesson\n"
            "def interrupted(s):\n    print('so far')\n    raise KeyboardInterrupt\n"
            "lesson.assembly = interrupted\nsys.exit(lesson.main(['--quiet']))"
        )
        reader, writer = os.pipe()
        os.close(reader)
        done = run("-c", code, script="-B", stdout=writer, cwd=HERE)
        os.close(writer)
        self.assertEqual((done.returncode, done.stderr), (130, b""))

    def test_ctrl_c(self):
        with mock.patch.object(lesson, "assembly", side_effect=KeyboardInterrupt):
            self.assertEqual(call_main("--quiet"), (130, ""))
        for stdout in (io.StringIO(), None):  # pressed again and again, while it writes
            flush = mock.patch.object(lesson, "flush", side_effect=KeyboardInterrupt)
            with flush, contextlib.redirect_stdout(stdout):
                self.assertEqual(lesson.main(["--help"]), 130)

    def test_verify_does_not_need_assert(self):
        for flag in ("-O", "-OO"):
            self.assertEqual(run("--verify", python=(sys.executable, flag)).returncode, 0)


def interpreters():
    """Commands of the Pythons found here, 3.9 or newer, one for each version and implementation."""
    names = [f"python3.{minor}" for minor in range(9, 30)] + ["pypy3"]
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    candidates = [path for path in map(shutil.which, names) if path]
    candidates += sorted(glob.glob(os.path.join(pyenv, "versions", "*", "bin", "python3")))
    report = "import platform, sys; print(platform.python_implementation(), *sys.version_info[:2])"
    found = {}
    for path in candidates:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run([path, "-c", report], capture_output=True, text=True, timeout=60)
            words = done.stdout.split()
            if done.returncode == 0 and (int(words[1]), int(words[2])) >= (3, 9):
                found.setdefault(" ".join((words[0], ".".join(words[1:]))), path)
    return found


class SameTextEverywhere(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.expected = {tuple(mode): call_main(*mode)[1].encode() for mode in MODES}

    def compare(self, modes=MODES, **kwargs):
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as processes:
            runs = list(processes.map(lambda mode: run(*mode, **kwargs), modes))
        for mode, done in zip(modes, runs):
            self.assertEqual((done.stderr, done.returncode), (b"", 0))
            text = done.stdout.replace(os.linesep.encode(), b"\n")
            self.assertEqual(text, self.expected[tuple(mode)])

    def test_every_python_found(self):
        found = interpreters()
        for version, path in found.items():
            with self.subTest(version):
                self.compare(python=(path,))
        wanted = {f"CPython 3.{minor}" for minor in range(9, 14)} | {"PyPy"}
        missing = sorted(wanted - set(found) - {version.split()[0] for version in found})
        if missing:
            self.skipTest(f"compared on {', '.join(found)}; not found: {', '.join(missing)}")

    def test_hash_seeds(self):
        for seed in ("0", "1", "4294967295", "random"):
            self.compare(env=environment(PYTHONHASHSEED=seed))

    def test_flags(self):
        for flags in (
            ("-I",),
            ("-O",),
            ("-OO",),
            ("-W", "error"),
            ("-X", "dev"),
            ("-I", "-S"),
            ("-u",),
        ):
            self.compare(
                ([], ["--verify"], ["--help"], ["--predict"], ["--model", "-"]),
                python=(sys.executable, *flags),
            )

    def test_locales_and_terminals(self):
        for changes in (
            {"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"},
            {"LC_ALL": "tr_TR.UTF-8"},
            {"COLUMNS": "20"}, {"TERM": "dumb", "NO_COLOR": "1"}, {"FORCE_COLOR": "1"},
        ):  # fmt: skip
            modes = ([], ["--verify"], ["--help"], ["--model", "-"])
            self.compare(modes, env=environment(**changes))

    def test_another_folder_as_a_module_and_read_only(self):
        with tempfile.TemporaryDirectory() as folder:
            self.compare(([], ["--verify"]), cwd=folder)
            copy = shutil.copy(SCRIPT, folder)
            os.chmod(copy, 0o444)
            os.chmod(folder, 0o555)
            self.compare(([], ["--verify"]), script=copy)
            os.chmod(folder, 0o755)
        self.compare(
            ([], ["--quiet"]), python=(sys.executable, "-B", "-m"), script="m02_kv_cache", cwd=HERE
        )


class Purity(unittest.TestCase):
    WATCH = """
import os, runpy, sys
found = []
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FORBIDDEN = (
    "socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system",
    "os.remove", "os.rename", "os.mkdir", "shutil.", "urllib.", "ctypes.", "tempfile.",
)
def hook(event, args):
    if event == "open":
        path, mode, flags = args
        if set(mode) & set("wax+") if isinstance(mode, str) else flags & WRITES:
            found.append((event, path))
    elif event.startswith(FORBIDDEN):
        found.append((event, args))
    elif event == "import":
        top = args[0].partition(".")[0]
        if top not in getattr(sys, "stdlib_module_names", (top,)):
            found.append((event, args[0]))
sys.addaudithook(hook)
script = sys.argv[1]
sys.argv[:] = sys.argv[1:]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    status = end.code
if found:
    sys.exit(f"impure: {found}")
sys.exit(status)
"""

    def watched(self, script, *args):
        # No site-packages (-I -S), so that a third-party import cannot succeed either; no bytecode.
        flags = (sys.executable, "-I", "-S", "-B", "-c", self.WATCH)
        return run(*args, python=flags, script=script)

    def test_every_mode(self):
        for mode in MODES:
            done = self.watched(SCRIPT, *mode)
            self.assertEqual((done.stderr, done.returncode), (b"", 0), mode)

    def test_the_watch_sees_a_write_a_socket_a_process_and_an_import(self):
        for impure in (
            "open(__file__ + '.x', 'w')", "import os; os.open(__file__, os.O_RDWR)",
            "import socket; socket.socket()", "import subprocess; subprocess.call(['true'])",
            "try:\n import numpy_or_so\nexcept ImportError: pass",
        ):  # fmt: skip
            if "numpy" in impure and not hasattr(sys, "stdlib_module_names"):
                continue
            with tempfile.TemporaryDirectory() as folder:
                script = os.path.join(folder, "impure.py")
                with open(script, "w", encoding="ascii") as file:
                    file.write(impure + "\nraise SystemExit(0)\n")
                done = self.watched(script)
                self.assertIn(b"impure: ", done.stderr, impure)

    def test_importing_prints_nothing(self):
        done = subprocess.run(
            [sys.executable, "-B", "-c", "import m02_kv_cache"],
            cwd=HERE,
            capture_output=True,
            timeout=60,
        )
        self.assertEqual((done.stdout, done.stderr, done.returncode), (b"", b"", 0))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write-readme"]:
        sys.exit(write_readme())
    unittest.main(argv=[word for word in sys.argv if word != "--full"])
