"""`python -m tests.attacks --cases 5000 --seed 0`, or `--case SEED` for a single one."""

import argparse
import os
import sys
import time

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: bfloat16 dies on some machines else


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="how many cases are run")
    parser.add_argument("--seed", type=int, default=0, help="where their seeds begin: SEED * 1000000")
    parser.add_argument("--case", type=int, help="run this case alone and say what happened")
    parser.add_argument("--only", help="count only cases with this attack")
    parser.add_argument("--all", action="store_true", help="print every case, not only failures")
    options = parser.parse_args()

    from tests.attacks.case import run
    from tests.attacks.outcome import FAILED
    from tests.attacks.tally import report

    if options.case is not None:
        outcome = run(options.case)
        print(outcome)
        return outcome.kind == FAILED
    outcomes = []
    start = time.monotonic()
    for number in range(options.cases):
        outcome = run(options.seed * 1_000_000 + number)
        if options.only and options.only not in outcome.attacks:
            continue
        outcomes.append(outcome)
        if outcome.kind == FAILED or options.all:
            print(f"\r{outcome}", flush=True)
        if sys.stderr.isatty() or number % 100 == 99:
            failed = sum(one.kind == FAILED for one in outcomes)
            done = f"{number + 1} of {options.cases} cases, {failed} failed, {time.monotonic() - start:.0f} s"
            print(f"\r{done}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    print(f"\n{report(outcomes)}\n{time.monotonic() - start:.0f} s")
    return any(one.kind == FAILED for one in outcomes)


if __name__ == "__main__":
    sys.exit(main())
