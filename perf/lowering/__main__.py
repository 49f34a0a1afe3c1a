"""The command line of the report; see ``tools/lowering --help``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from perf.lowering import options, results
from perf.lowering.report import Report, lower
from perf.lowering.workload import Workload, elementwise, optimizers


def main() -> int:
    """Lower what the options ask for and print it; its exit status is the command's."""
    args = options.parse(sys.argv[1:])
    if args.optimizer not in optimizers():
        print(f"there is no optimizer {args.optimizer}; there are {', '.join(optimizers())}", file=sys.stderr)
        return 2
    if args.shapes == "gpt2" and args.workload != 148:
        print("GPT-2 has 148 tensors: --workload 148", file=sys.stderr)
        return 2
    torch._logging.set_logs(dynamo=40)
    workload = Workload(
        args.optimizer,
        args.workload,
        args.groups,
        getattr(torch, args.dtype),
        options=(("max_grad_norm", 1.0),) if args.clip else (),
        shapes=args.shapes,
    )
    skipped: dict[str, str] = {}
    lowerings = list(options.LOWERINGS) if args.optimizer in elementwise() else ["auto"]
    if args.lowering != ["all"]:
        lowerings = args.lowering
    elif slow := [name for name in lowerings if workload.tensors > options.LIMITS.get(name, sys.maxsize)]:
        for name in slow:
            limit = options.LIMITS[name]
            skipped[name] = f"not run: compiling more than {limit} tensors takes long; ask with --lowering {name}"
            lowerings.remove(name)
    reports = list(_reports(lowerings, workload, options.ARCHITECTURES[args.arch], args.repeats, skipped).values())
    results.show(reports, skipped)
    if args.source:
        for report in reports:
            for source in report.sources:
                print(f"\n# {report.lowering}\n{source}")
    if args.save and reports:
        results.append(reports, args.repeats)
    return 0 if reports else 1


def _reports(
    lowerings: Sequence[str], workload: Workload, arch: int, repeats: int, skipped: dict[str, str]
) -> dict[str, Report]:
    """By lowering what ``workload`` lowers to; ``skipped`` takes why something does not.

    With ``repeats`` every lowering has its turn as often, after one small workload that loads the compilers, so that
    no time has what the first in a process has to do.
    """
    found: dict[str, list[Report]] = {}
    for index in range(-1, repeats) if repeats > 1 else [0]:
        for name in lowerings if index % 2 == 0 else reversed(lowerings):
            if name in skipped:
                continue
            taken = workload if index >= 0 else replace(workload, tensors=2, shapes="equal")
            try:
                report = lower(name, taken, arch, stand_in=workload.tensors > 1000)
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                skipped[name] = str(error).partition("\n")[0]
                continue
            if index >= 0:
                found.setdefault(name, []).append(report)
    return {
        name: replace(found[name][0], seconds=median(r.seconds for r in found[name])) for name in lowerings if name in found
    }


if __name__ == "__main__":
    sys.exit(main())
