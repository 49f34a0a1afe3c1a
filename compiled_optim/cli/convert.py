"""Convert a file or folder of optimizer state to another form."""

# torch is imported when a conversion runs, so that ``tools/convert --help`` works before torch is installed.

from __future__ import annotations

import argparse
import json

TO = ("torch", "compiled_optim", "named", "safetensors", "dcp", "optimi", "bitsandbytes", "fused")
FROM = ("torch", "optimi", "bitsandbytes", "flashoptim", "fused", "dcp", "deepspeed", "safetensors")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = (
        "IN is a file of torch.save by torch.optim, this package, optimi, bitsandbytes, FlashOptim, torchao, or FusedAdam "
        "of apex or TransformerEngine; or a .safetensors file with the .json of its groups beside it; or a folder of "
        "torch.distributed.checkpoint, or a universal checkpoint of DeepSpeed. Nothing in it is executed. OUT is written "
        "completely or not at all, and may be IN. A file is replaced only if it holds an optimizer's state, a folder never. "
        "The exit status is 2 if IN cannot be converted."
    )
    parser.add_argument("source", metavar="IN")
    parser.add_argument("target", metavar="OUT", help="for safetensors, NAME.safetensors, with NAME.json")
    parser.add_argument("--to", required=True, choices=TO, help="the form of OUT, or the package that loads it")
    parser.add_argument("--from", dest="form", choices=FROM, help="the form of IN; by default it is detected")
    parser.add_argument("--key", help="the state dict's key in a file of several things; in a folder its keys' prefix")
    parser.add_argument("--lossy", action="store_true", help="leave out what cannot be read: FlashOptim's error_bits")


def run(options: argparse.Namespace) -> int:
    """Convert, and print the summary if JSON is asked for."""
    from compiled_optim.interop.convert import convert

    done = convert(options.source, options.target, options.to, form=options.form, key=options.key, lossy=options.lossy)
    if options.json:
        print(json.dumps(done._asdict()))
    return 0


def parsed() -> argparse.Namespace:
    """Parse the options of ``tools/convert``, which is this command alone."""
    parser = argparse.ArgumentParser(prog="tools/convert", description=(__doc__ or "").partition("\n")[0])
    arguments(parser)
    parser.add_argument("--json", action="store_true", help="print what was converted, as JSON")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return parser.parse_args()
