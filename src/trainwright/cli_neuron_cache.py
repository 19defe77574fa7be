"""`trainwright neuron-cache`: what the cache of the Neuron compiler holds, its stale locks, its end."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.cli_command import guarded
from trainwright.errors import EXIT_FAILED, UserError

SCHEMA_VERSION = 1


def add_to(commands: Any) -> None:
    """Add the command to the sub-commands of the command line."""
    command = commands.add_parser("neuron-cache", help="look into and tidy the Neuron compiler's cache of graphs")
    kinds = command.add_subparsers(title="what to do", metavar="KIND", required=True)
    _add(kinds, "ls", _ls, "list the compiled graphs, their state, size and age")
    _add(kinds, "clear-locks", _clear_locks, "remove locks that killed compilers left and new ones wait for")
    clean = _add(kinds, "clean", _clean, "remove all graphs: the next run compiles anew")
    clean.add_argument("--failed", action="store_true", help="only those that failed, so that they are tried again")
    clean.add_argument("--yes", action="store_true", help="do not ask")


def _add(kinds: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=help, description=help)
    parser.add_argument(
        "--cache",
        metavar="PATH",
        help="the cache (default: NEURON_COMPILE_CACHE_URL, else /var/tmp/neuron-compile-cache; of a run: "
        "backend.compiler_cache_url)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda options: sys.exit(guarded(run, options)))
    return parser


def _ls(options: argparse.Namespace) -> int:
    from trainwright.follow import tables
    from trainwright.node import neuron_cache

    cache = _cache(options)
    modules, users = neuron_cache.modules(cache), neuron_cache.users(cache)
    rows = [
        {
            "compiler": module.compiler,
            "graph": module.name,
            "state": module.state,
            "size_bytes": module.size_bytes,
            "age_s": max(0, round(time.time() - module.changed)),
            "locks": [str(lock) for lock in module.locks],
        }
        for module in modules
    ]
    if options.json:
        return _print_json(cache=str(cache), graphs=rows, users=users)
    tables.show(
        [
            {
                "graph": module.name,
                "state": module.state,
                "locks": str(len(module.locks)) if module.locks else "",
                "size": f"{module.size_bytes / 2**20:.1f} MiB",
                "age": _age(max(0, round(time.time() - module.changed))),
                "compiler": module.compiler,
            }
            for module in modules
        ]
    )
    counts = {state: sum(module.state == state for module in modules) for state in sorted({m.state for m in modules})}
    total = sum(module.size_bytes for module in modules) / 2**30
    told = ", ".join(f"{number} {state}" for state, number in counts.items()) or "no graphs"
    print(f"{cache}: {told}; {total:.2f} GiB")
    for who in users:
        print(f"in use by run {who.get('run_dir')} on {who['host']}")
    return 0


def _clear_locks(options: argparse.Namespace) -> int:
    from trainwright.node import neuron_cache

    done = neuron_cache.clear_stale_locks(_cache(options))
    if options.json:
        kept = {str(lock): why for lock, why in done.kept.items()}
        return _print_json(cleared=[str(lock) for lock in done.cleared], kept=kept)
    for lock in done.cleared:
        print(f"cleared  {lock}")
    for lock, why in done.kept.items():
        print(f"kept     {lock}: {why}")
    if not done.cleared and not done.kept:
        print("no locks")
    return 0


def _clean(options: argparse.Namespace) -> int:
    from trainwright.node import neuron_cache
    from trainwright.report import asks

    cache = _cache(options)
    users = neuron_cache.users(cache)
    if users:
        runs = ", ".join(f"{who.get('run_dir')} on {who['host']}" for who in users)
        raise UserError(f"{cache} is in use by {runs}; clean it when they have ended")
    modules = neuron_cache.modules(cache)
    chosen = [module for module in modules if not options.failed or module.state == neuron_cache.FAILED]
    what = f"{len(chosen)} {'failed ' if options.failed else ''}graphs ({sum(m.size_bytes for m in chosen) >> 20} MiB)"
    if chosen and not options.yes:
        if not sys.stdin.isatty():
            raise UserError(f"clean removes {what} from {cache}; add --yes if you mean it")
        if not asks(f"remove {what} from {cache}?"):
            return EXIT_FAILED
    held = {} if options.failed else neuron_cache.clear_stale_locks(cache).kept
    if held:  # a compiler that no run of ours started
        told = "; ".join(f"{lock}: {why}" for lock, why in held.items())
        raise UserError(f"{cache} is in use; clean it when nothing compiles any more: {told}")
    neuron_cache.clean(cache, only_failed=options.failed)
    if options.json:
        return _print_json(cache=str(cache), removed=[str(module.path) for module in chosen])
    print(f"removed {what} from {cache}")
    return 0


def _cache(options: argparse.Namespace) -> Path:
    from trainwright.node import neuron_cache

    named = options.cache or os.environ.get(neuron_cache.URL_VARIABLE) or neuron_cache.DEFAULT_CACHE
    if neuron_cache.is_remote(named):
        raise UserError(
            f"{named}: caches in a bucket are not looked into; on a node with the Neuron tools, "
            f"{neuron_cache.URL_VARIABLE}={named} neuron_parallel_compile --command clear-locks (or clean) does"
        )
    if not Path(named).is_dir():
        raise UserError(f"{named} is no directory; give --cache, for a run its backend.compiler_cache_url")
    return Path(named).resolve()


def _age(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _print_json(**content: Any) -> int:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=1))
    return 0
