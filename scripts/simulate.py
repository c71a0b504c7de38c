"""Simulate the engine in virtual time, with faults and hostile clients, and check its laws.

    python -m scripts.simulate --steps 100000000        two processes; prints broken laws
    python -m scripts.simulate --seed 4711              repeats one run
    python -m scripts.simulate --faults                 checks that planted faults are found

A step is one callback of the event loop. The simulation is in tests/simulation, and its auditor's
`LAWS` are the laws. For a seed that breaks a law, the smallest number of client steps that still
breaks it is searched. With `--faults`, each fault of tests/simulation/faults.toml is planted in a
copy of the tree, which is then simulated until a law is broken, for at most `--steps` steps.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.simulation.scenario import Report, run

ROOT = Path(__file__).resolve().parents[1]
FAULTS = tomllib.loads((ROOT / "tests/simulation/faults.toml").read_text("utf-8"))
MAX_STEPS_OF_A_SEED = 6_000
# Seeds of one task of a process.
CHUNK = 200
MILLION = 1_000_000


def main() -> int:
    """Return 1 if a law was broken, or if a planted fault was not found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10 * MILLION)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="repeat this run alone")
    parser.add_argument("--steps-of-a-seed", type=int, default=MAX_STEPS_OF_A_SEED)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--faults", nargs="*", metavar="NAME", help="plant these, or all")
    parser.add_argument("--until-broken", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.faults is not None:
        return plant_faults(options.faults, options.steps, options.processes)
    if options.seed is not None:
        print(format_report(run(options.seed, options.steps_of_a_seed)))
        return 0
    if options.until_broken:
        return simulate_until_broken(options.first, options.steps)
    return simulate(options.first, options.steps, options.processes, options.steps_of_a_seed)


def format_report(report: Report) -> str:
    """Format a run in a line or two."""
    tally = ", ".join(f"{count} {name}" for name, count in sorted(report.tally.items()))
    end = "no law broken" if report.broken is None else f"BROKEN: {report.broken}"
    return f"seed {report.seed}: {report.steps} steps, {report.seconds:.0f} s; {tally}; {end}"


def simulate(first: int, steps: int, processes: int, max_steps: int) -> int:
    """Run seed after seed, each with at most `max_steps`, for this number of steps in all."""
    started, done, broken, printed = time.monotonic(), 0, 0, 0
    chunks = itertools.count(first, CHUNK)
    with ProcessPoolExecutor(processes) as pool:
        running = {pool.submit(_run_chunk, next(chunks), max_steps) for _ in range(processes)}
        while running:
            finished = next(as_completed(running))
            running.remove(finished)
            count, found = finished.result()
            done, broken = done + count, broken + len(found)
            for line in found:
                print(line, flush=True)
            if done < steps:
                running.add(pool.submit(_run_chunk, next(chunks), max_steps))
            if done // MILLION > printed:
                printed = done // MILLION
                rate = done / (time.monotonic() - started)
                print(f"{done:,} steps, {rate:,.0f} a second, {broken} broken", flush=True)
    print(f"{done:,} steps from seed {first} on, {broken} seeds that break a law")
    return int(broken > 0)


def _run_chunk(first: int, max_steps: int) -> tuple[int, list[str]]:
    steps, found = 0, []
    for seed in range(first, first + CHUNK):
        report = run(seed, max_steps)
        steps += report.steps
        if report.broken is not None:
            found.append(f"{format_report(report)}\n    fewest steps: {shrink(seed, max_steps)}")
    return steps, found


def shrink(seed: int, max_steps: int) -> str:
    """Find, by halving, the smallest number of steps with which the seed still breaks a law."""
    report = None
    while max_steps > 10:
        smaller = run(seed, max_steps // 2)
        if smaller.broken is None:
            break
        report, max_steps = smaller, max_steps // 2
    return f"--steps-of-a-seed {max_steps}" + ("" if report is None else f" ({report.broken})")


def simulate_until_broken(first: int, max_steps: int) -> int:
    """Print, as JSON, the first broken law and the number of steps until then."""
    steps, found = 0, {}
    for seed in itertools.count(first):
        report = run(seed, MAX_STEPS_OF_A_SEED)
        steps += report.steps
        if report.broken is not None:
            found = {"seed": seed, "law": report.broken.law, "detail": str(report.broken)}
        if found or steps > max_steps:
            break
    print(json.dumps(found | {"steps": steps}))
    return 0


def plant_faults(names: list[str], steps: int, processes: int) -> int:
    """Plant one fault after the other; print a table of the laws that find them."""
    names = names or sorted(FAULTS)
    found = 0
    print("| fault | found by the law | after steps | seed |\n|---|---|---|---|")
    with ProcessPoolExecutor(processes) as pool:
        results = pool.map(look_for, names, itertools.repeat(steps))
        for name, result in zip(names, results, strict=True):
            found += "law" in result
            law, seed = result.get("law", "**not found**"), result.get("seed", "")
            print(f"| {FAULTS[name]['fault']} | {law} | {result['steps']:,} | {seed} |", flush=True)
    print(f"\n{found} of {len(names)} found")
    return int(found < len(names))


def with_fault(name: str) -> str:
    """Return the text of the fault's file, with the fault."""
    source: str = (ROOT / FAULTS[name]["file"]).read_text("utf-8")
    for old, new in zip(FAULTS[name]["old"], FAULTS[name]["new"], strict=True):
        if source.count(old) != 1:
            raise ValueError(f"{name}: {FAULTS[name]['file']} must have this text once: {old}")
        source = source.replace(old, new)
    return source


def look_for(name: str, steps: int) -> dict[str, int | str]:
    """Plant a fault and simulate until a law is broken; return the law, the seed and the steps."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        ignored = shutil.ignore_patterns("*.so", "__pycache__", "csrc")
        for part in ("smart_embedder", "tests/simulation"):
            shutil.copytree(ROOT / part, tree / part, ignore=ignored)
        (tree / "scripts").mkdir()
        shutil.copy(ROOT / "scripts/simulate.py", tree / "scripts")
        (tree / FAULTS[name]["file"]).write_text(with_fault(name), "utf-8")
        command = ["-m", "scripts.simulate", "--until-broken", "--steps", str(steps)]
        done = subprocess.run(
            [sys.executable, *command], cwd=tree, check=True, capture_output=True, text=True
        )
    result: dict[str, int | str] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
