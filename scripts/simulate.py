"""The engine in virtual time, with faults and hostile clients: does it break a law?

    python -m scripts.simulate --steps 100000000        two processes; prints what breaks a law
    python -m scripts.simulate --seed 4711              repeats one run
    python -m scripts.simulate --faults                 does the auditor find what is planted?

A step is one callback of the event loop. The simulation is in tests/simulation, and `LAWS` of its
auditor are the laws. For a seed that breaks one, the fewest steps of its clients that still do are
searched. With `--faults`, each fault of tests/simulation/faults.toml is planted in a copy of the
tree, which is then simulated until a law is broken, for `--steps` steps at most.
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
MOST_STEPS_OF_A_SEED = 6_000
# In the steps of one task of a process.
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
    parser.add_argument("--steps-of-a-seed", type=int, default=MOST_STEPS_OF_A_SEED)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--faults", nargs="*", metavar="NAME", help="plant these, or all")
    parser.add_argument("--until-broken", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.faults is not None:
        return plant(options.faults, options.steps, options.processes)
    if options.seed is not None:
        print(shown(run(options.seed, options.steps_of_a_seed)))
        return 0
    if options.until_broken:
        return until_broken(options.first, options.steps)
    return simulate(options.first, options.steps, options.processes, options.steps_of_a_seed)


def shown(report: Report) -> str:
    """A run in a line or two."""
    what = ", ".join(f"{count} {name}" for name, count in sorted(report.tally.items()))
    end = "no law broken" if report.broken is None else f"BROKEN: {report.broken}"
    return f"seed {report.seed}: {report.steps} steps, {report.seconds:.0f} s; {what}; {end}"


def simulate(first: int, steps: int, processes: int, most: int) -> int:
    """Run seed after seed until there were so many steps."""
    began, done, broken, printed = time.monotonic(), 0, 0, 0
    chunks = itertools.count(first, CHUNK)
    with ProcessPoolExecutor(processes) as pool:
        running = {pool.submit(_run_all, next(chunks), most) for _ in range(processes)}
        while running:
            finished = next(as_completed(running))
            running.remove(finished)
            count, found = finished.result()
            done, broken = done + count, broken + len(found)
            for line in found:
                print(line, flush=True)
            if done < steps:
                running.add(pool.submit(_run_all, next(chunks), most))
            if done // MILLION > printed:
                printed = done // MILLION
                rate = done / (time.monotonic() - began)
                print(f"{done:,} steps, {rate:,.0f} a second, {broken} broken", flush=True)
    print(f"{done:,} steps from seed {first} on, {broken} seeds that break a law")
    return int(broken > 0)


def _run_all(first: int, most: int) -> tuple[int, list[str]]:
    steps, found = 0, []
    for seed in range(first, first + CHUNK):
        report = run(seed, most)
        steps += report.steps
        if report.broken is not None:
            found.append(f"{shown(report)}\n    fewest steps: {shrunk(seed, most)}")
    return steps, found


def shrunk(seed: int, most: int) -> str:
    """The fewest steps of clients, by halves, with which the seed still breaks a law."""
    report = None
    while most > 10:
        smaller = run(seed, most // 2)
        if smaller.broken is None:
            break
        report, most = smaller, most // 2
    return f"--steps-of-a-seed {most}" + ("" if report is None else f" ({report.broken})")


def until_broken(first: int, most: int) -> int:
    """Print, as JSON, the first law that is broken and after how many steps."""
    steps, found = 0, {}
    for seed in itertools.count(first):
        report = run(seed, MOST_STEPS_OF_A_SEED)
        steps += report.steps
        if report.broken is not None:
            found = {"seed": seed, "law": report.broken.law, "detail": str(report.broken)}
        if found or steps > most:
            break
    print(json.dumps(found | {"steps": steps}))
    return 0


def plant(names: list[str], steps: int, processes: int) -> int:
    """Plant one fault after the other; print the law that finds it, as a table."""
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
    """The file of a fault, with the fault."""
    source: str = (ROOT / FAULTS[name]["file"]).read_text("utf-8")
    for old, new in zip(FAULTS[name]["old"], FAULTS[name]["new"], strict=True):
        if source.count(old) != 1:
            raise ValueError(f"{name}: this does not stand in {FAULTS[name]['file']} once: {old}")
        source = source.replace(old, new)
    return source


def look_for(name: str, steps: int) -> dict[str, int | str]:
    """Plant a fault, and simulate until a law is broken; its name, the seed and the steps."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        ignored = shutil.ignore_patterns("*.so", "__pycache__", "ui", "csrc")
        for part in ("app", "smart_embedder", "tests/simulation"):
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
