"""How fast `trainwright data build` is next to a plain loop over the same text: `python benchmarks/data_build.py`.

The loop parses each line, encodes its text, appends the end-of-document token, keeps all tokens in a list and writes
that with numpy's tofile: one process, no index, nothing checked, nothing that outlives a kill. Both read the same
jsonl, words drawn by Zipf's law from the shipped text; the tokens of both must be equal. Each row is the fastest of
some rounds, in which all take turns. What counts is the last column, taken in one run.

Measured 2026-11-30 on 2 cores shared with others (load 3.1), a local SSD, 50 MB of text, 14.7 million tokens:

plain loop     12.1 s     1217 thousand tokens/s   1.00 x the loop
1 worker       10.9 s     1351 thousand tokens/s   1.11 x the loop
2 workers       6.0 s     2446 thousand tokens/s   2.01 x the loop
"""

import argparse
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainwright import places

_WORDS_A_DOCUMENT = 400  # on average
_LOOP = """
import json, sys
import numpy as np
from trainwright.dataset.tokenizer import load_tokenizer

tokenizer = load_tokenizer("gpt2_bpe")
tokens = []
with open(sys.argv[1]) as lines:
    for line in lines:
        tokens.extend(tokenizer.backend.encode(json.loads(line)["text"]).ids)
        tokens.append(tokenizer.eod)
np.array(tokens, dtype=np.uint16).tofile(sys.argv[2])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--mb", type=int, default=50, help="of text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        make_text(folder / "text.jsonl", options.mb * 10**6)
        kinds = {
            "plain loop": lambda: run("-c", _LOOP, folder / "text.jsonl", folder / "loop.bin"),
            "1 worker": lambda: build(folder, 1),
            f"{options.workers} workers": lambda: build(folder, options.workers),
        }
        seconds: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for kind, work in kinds.items():
                seconds.setdefault(kind, []).append(timed(work))
        num_tokens = compare(folder, options.workers)
        show(seconds, num_tokens, (folder / "text.jsonl").stat().st_size)


def make_text(path: Path, num_bytes: int) -> None:
    """Write documents of words that are as often as words are, each line a JSON object."""
    corpus = places.corpus("shakespeare")
    assert corpus is not None
    words = np.unique(re.findall(r"\S+", lzma.decompress(corpus.read_bytes()).decode()))
    random = np.random.RandomState(0)
    random.shuffle(words)
    written = 0
    with open(path, "w") as stream:
        while written < num_bytes:
            ranks = random.zipf(1.2, random.poisson(_WORDS_A_DOCUMENT)) % len(words)
            written += stream.write(json.dumps({"text": " ".join(words[ranks])}) + "\n")


def build(folder: Path, workers: int) -> None:
    """Build as users do."""
    program = "from trainwright.cli import main; main()"
    output = folder / f"built-{workers}"
    given = ["data", "build", folder / "text.jsonl", "--output", output, "--tokenizer", "gpt2_bpe", "--overwrite"]
    run("-c", program, *given, "--workers", str(workers))


def run(*arguments: str | Path) -> None:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(folder: Path, workers: int) -> int:
    """Return the number of tokens, which must be the same in all three files."""
    loop = (folder / "loop.bin").read_bytes()
    assert loop == (folder / "built-1.bin").read_bytes() == (folder / f"built-{workers}.bin").read_bytes()
    return len(loop) // 2


def show(seconds: dict[str, list[float]], num_tokens: int, num_bytes: int) -> None:
    loop = min(seconds["plain loop"])
    print(f"{num_bytes / 1e6:.0f} MB, {num_tokens:,} tokens, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for kind, times in seconds.items():
        best = min(times)
        print(
            f"{kind:12} {best:6.1f} s  {num_tokens / best / 1e3:7.0f} thousand tokens/s  {loop / best:5.2f} x the loop"
        )


if __name__ == "__main__":
    main()
