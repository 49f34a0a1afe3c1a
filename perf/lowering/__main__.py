"""The command line of the report; see ``tools/lowering --help``."""

from __future__ import annotations

import sys

import torch

from perf.lowering import options, results, table
from perf.lowering.report import REGION_LIMIT, STOCK_LIMIT, Report, Workload, elementwise, lower, optimizers

_SLOW = {"torch": STOCK_LIMIT, "region": REGION_LIMIT}


def main() -> int:
    """Lower what the options ask for and print it; its exit status is the command's."""
    args = options.parse(sys.argv[1:])
    if args.optimizer not in optimizers():
        print(f"there is no optimizer {args.optimizer}; there are {', '.join(optimizers())}", file=sys.stderr)
        return 2
    torch._logging.set_logs(dynamo=40)
    workload = Workload(
        args.optimizer,
        args.workload,
        args.groups,
        getattr(torch, args.dtype),
        options=(("max_grad_norm", 1.0),) if args.clip else (),
    )
    reports: list[Report] = []
    skipped: dict[str, str] = {}
    lowerings = options.LOWERINGS if args.optimizer in elementwise() else ("auto",)
    for name in lowerings if args.lowering == "all" else [args.lowering]:
        limit = _SLOW.get(name, sys.maxsize)
        if args.lowering == "all" and workload.tensors > limit:
            skipped[name] = f"not run: compiling more than {limit} tensors takes minutes; ask with --lowering {name}"
            continue
        try:
            reports.append(lower(name, workload, options.ARCHITECTURES[args.arch], stand_in=workload.tensors > 1000))
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            skipped[name] = str(error).splitlines()[0]
    table.show(reports, skipped)
    if args.source:
        for report in reports:
            for source in report.sources:
                print(f"\n# {report.lowering}\n{source}")
    if args.save and reports:
        results.append(reports)
    return 0 if reports else 1


if __name__ == "__main__":
    sys.exit(main())
