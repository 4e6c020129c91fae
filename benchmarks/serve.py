"""Measure the throughput of a server under load, compared with the stream sampler's, and check every answer.

    python -m benchmarks.serve --clients 64 --seconds 60

Prints tokens per second of the server, of `rollout_stream` on the same prompts, and their ratio. Each answer is
compared with the stream sampler's for the same `rid`; a wrong one is an error.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from benchmarks.machine import address_of
from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.models.tokenizer import end_ids
from d1.ranges import COUNT, POSITIVE
from d1.runs.cli import OneLineParser, run_script
from d1.sampling import SamplingSettings, rollout_stream

BASE = str(Path(__file__).resolve().parents[1] / "pocket" / "base")


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=BASE)
    parser.add_argument("--clients", type=COUNT, default=64)
    parser.add_argument("--seconds", type=POSITIVE, default=60.0, help="during which clients send requests")
    parser.add_argument("--batch_size", type=COUNT, default=32)
    parser.add_argument("--gen_length", type=COUNT, default=64)
    parser.add_argument("--block_length", type=COUNT, default=8)
    return parser


def prompt_of(number: int, vocabulary: int) -> list[int]:
    """A random prompt of 16 to 48 tokens."""
    draw = keyed_generator(7, number)
    length = int(torch.randint(16, 49, (), generator=draw))
    return torch.randint(4, vocabulary, (length,), generator=draw).tolist()


def ask_for_a_while(args: argparse.Namespace, params: dict[str, Any], vocabulary: int) -> tuple[dict[int, Any], float]:
    """The answers of a new server by number, and the seconds that they took together."""
    words = [sys.executable, "-m", "d1", "serve", args.model_path, "--port", "0", "--batch_size", str(args.batch_size)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    port = urlsplit(address_of(process)).port
    numbers, answers, began = count(), dict[int, Any](), time.perf_counter()

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while time.perf_counter() - began < args.seconds:
            number = next(numbers)
            body = {"input_ids": prompt_of(number, vocabulary), "rid": f"0-{number}", "sampling_params": params}
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            answers[number] = json.loads(connection.getresponse().read())

    clients = [threading.Thread(target=ask) for _ in range(args.clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    took = time.perf_counter() - began
    process.terminate()
    assert process.wait() == 0
    assert len(answers) == next(numbers), "an answer was lost"
    return answers, took


def main(args: argparse.Namespace) -> None:
    model, tokenizer = load_model(args.model_path), load_tokenizer(args.model_path)
    vocabulary = model.config.vocab_size
    settings = SamplingSettings(args.gen_length, args.block_length, args.gen_length, temperature=1.0)
    shared = {"block_length": args.block_length, "steps": args.gen_length, "temperature": 1.0}
    params = shared | {"max_new_tokens": args.gen_length, "ignore_eos": True, "eos_stop": end_ids(tokenizer)}
    answers, took = ask_for_a_while(args, params, vocabulary)
    prompts = ((prompt_of(number, vocabulary), keyed_generator(0, 0, number)) for number in range(len(answers)))
    options = {"mask_token_id": tokenizer.mask_token_id, "eos_token_ids": end_ids(tokenizer)}
    began, wrong = time.perf_counter(), []
    for rows, sampled in rollout_stream(model, prompts, settings, batch_size=args.batch_size, **options):
        for row, ids in zip(rows, sampled.ids[:, -args.gen_length :].tolist(), strict=True):
            answer = answers[row]
            if answer["output_ids"] != ids or answer["meta_info"]["id"] != f"0-{row}":
                wrong.append(row)
    offline = time.perf_counter() - began
    tokens = len(answers) * args.gen_length
    sys.stdout.write(
        f"{len(answers)} answers to {args.clients} clients in {took:.1f} s, {len(wrong)} of them wrong\n"
        f"tokens per second: server {tokens / took:.0f}, stream sampler {tokens / offline:.0f}, "
        f"ratio {offline / took:.2f}\n"
    )
    if wrong:
        raise ValueError(f"answers {wrong[:10]} are not those of the stream sampler")


if __name__ == "__main__":
    run_script("serve", lambda: main(make_parser().parse_args()))
