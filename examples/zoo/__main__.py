# SPDX-License-Identifier: Apache-2.0
"""`python -m zoo list`, `python -m zoo get NAME`: what there is, and where it is once made."""

import argparse
import os
import sys

from zoo.build import compiled, make
from zoo.errors import ZooError
from zoo.names import NAMES, model


def main() -> int:
    """Run one command; 0 if it worked."""
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the models, and what each is for")
    get = commands.add_parser("get", help="print the path of a compiled model, making it if needed")
    get.add_argument("name", choices=NAMES)
    # For compiled(), which holds the model's lock meanwhile.
    commands.add_parser("make").add_argument("name", choices=NAMES)
    arguments = parser.parse_args()
    try:
        if arguments.command == "list":
            for name in NAMES:
                print(f"{name:14} {model(name).precision:5} {model(name).task}")
        elif arguments.command == "get":
            print(compiled(arguments.name, lambda step: print(f"  {step}", file=sys.stderr)))
        else:
            # Libraries print to standard output too; the steps go to the real one.
            steps = os.fdopen(os.dup(1), "w", buffering=1)
            os.dup2(2, 1)
            make(arguments.name, lambda step: print(step, file=steps))
    except ZooError as error:
        print(f"zoo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
