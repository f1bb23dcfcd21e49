"""The ``hgc`` command. Exit codes: 0 done, 1 something failed (a check, or hgc itself), 2 a mistake in the request, told in one line."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from hgc.errors import HgcError
from hgc.records import suggestion

EPILOG = """\
A MODEL is hf:PATH, a Hugging Face config.json or the folder that holds it, or module:function, a Python function
that returns the model and its example inputs. Nothing is downloaded.

  hgc compile hf:config.json --devices 4 -o out/     then: torchrun --nproc-per-node 4 out/program.py --steps 20
  hgc compile hf:config.json --devices 4 --plan "dp2 tp2" -o out/
  hgc verify out/
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the value is the exit code."""
    try:
        request = _parser().read(sys.argv[1:] if arguments is None else arguments)
        command: Callable[[argparse.Namespace], int] = _command(request.command)
        return command(request)
    except HgcError as mistake:
        print(f"hgc: {_one_line(str(mistake))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hgc: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception:
        traceback.print_exc()
        print("hgc: this is an error in hgc, not in your request; please report it with the lines above", file=sys.stderr)
        return 1


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """Commands are imported when one runs, so that --help needs no torch."""
    from hgc.tools import commands

    found: Callable[[argparse.Namespace], int] = getattr(commands, f"{name}_command")
    return found


def _one_line(message: str) -> str:
    return " ".join(message.split())


class _Parser(argparse.ArgumentParser):
    """argparse, with one-line errors that name the nearest thing that exists."""

    def error(self, message: str) -> NoReturn:
        raise HgcError(f"{message.rstrip('.')}; see {self.prog} --help")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Unknown options come first: argparse would complain about what is missing because of them."""
        inner = self._commands().get(words[0], self) if words else self
        known = [option for action in inner._actions for option in action.option_strings]
        for word in (word.partition("=")[0] for word in words):
            if word.startswith("--") and word not in known:
                raise HgcError(f"{inner.prog} has no option {word}; {suggestion(word, [o for o in known if o.startswith('--')])}")
        found, extra = self.parse_known_args(words)
        if extra:
            raise HgcError(f"{inner.prog} takes no argument {extra[0]!r}; see {inner.prog} --help")
        return found

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            raise HgcError(f"{value!r} is not a command of {self.prog}; {suggestion(str(value), map(str, action.choices))}")

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        groups = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return {name: parser for group in groups for name, parser in group.choices.items()}


def _parser() -> _Parser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="hgc", description="Compile PyTorch models into distributed programs.", epilog=EPILOG, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    compile_ = _add(commands, "compile", "write the distributed program of a model into a folder")
    _add_model(compile_)
    compile_.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="folder for program.py, plan.json, the picture and launch.sh"
    )

    plan = _add(commands, "plan", "decide how a model would run and print or write the plan, nothing else")
    _add_model(plan)
    plan.add_argument("-o", "--output", metavar="FILE", help="write the plan here as JSON")

    verify = _add(commands, "verify", "run a compiled program on local processes and compare it with the model")
    verify.add_argument("folder", metavar="DIR", help="what hgc compile wrote")
    verify.add_argument("--model", metavar="MODEL", help="the model, if the folder holds none (hf:... or module:function)")
    verify.add_argument("--threads", action="store_true", help="ranks as threads of one process: quicker, the same numbers")
    verify.add_argument("--json", metavar="FILE", help="write the differences here")

    show = _add(commands, "show", "print the plan and the program of a compiled folder")
    show.add_argument("folder", metavar="DIR", help="what hgc compile wrote")

    profile = _add(commands, "profile", "measure this machine and write it as a cluster file")
    profile.add_argument("-o", "--output", required=True, metavar="FILE", help="where the cluster file goes, for --cluster")
    profile.add_argument("--devices", type=_whole, metavar="N", help="processes on this machine (default: its GPUs, or one for each core)")

    simulate = _add(commands, "simulate", "predict what a compiled program takes on a cluster, which need not be there")
    simulate.add_argument("folder", metavar="DIR", help="what hgc compile wrote")
    simulate.add_argument("--cluster", required=True, metavar="CLUSTER", help="a JSON file, or a preset and its nodes such as a100-80:8")
    simulate.add_argument("--batch-size", type=_whole, metavar="N", help="global batch (default: the example's)")
    simulate.add_argument("--sequence-length", type=_whole, metavar="N", help="default: the example's")
    simulate.add_argument("--optimizer", default="adamw", metavar="NAME", help="sgd, momentum, adam, adamw (the default) or none")
    simulate.add_argument("--trace", metavar="FILE", help="write the timeline here, as JSON for Perfetto")
    simulate.add_argument("--picture", metavar="FILE", help="draw the timeline here, as SVG")
    simulate.add_argument("--model", metavar="MODEL", help="the model, if the folder holds none (hf:... or module:function)")

    explain = _add(commands, "explain", "say why a compiled program's plan is as it is: what binds, and what other plans would cost")
    explain.add_argument("folder", metavar="DIR", help="what hgc compile wrote")
    explain.add_argument("--cluster", metavar="CLUSTER", help="a JSON file, or a preset and its nodes (default: that of the compilation)")
    explain.add_argument("--picture", metavar="FILE", help="draw throughput over memory here, as SVG (default: explain.svg in DIR)")
    explain.add_argument("--json", metavar="FILE", help="write the numbers here")
    explain.add_argument("--model", metavar="MODEL", help="the model, if the folder holds none (hf:... or module:function)")

    bench = _add(commands, "bench", "run a benchmark by name")
    bench.add_argument("name", metavar="NAME", help="trace, overhead, fidelity, experts, local, parity, search or sequence")
    bench.add_argument("--json", metavar="FILE", help="write the numbers here")
    bench.add_argument("--data", metavar="PATH", help="published measurements (fidelity, experts), profiles (search), lengths (sequence)")
    bench.add_argument("--launch", metavar="COMMAND", help="local: what starts the ranks (default: torchrun on this machine)")
    bench.add_argument("--cases", type=_whole, metavar="N", help="parity, search: how many random cases; experts: how many jobs")
    bench.add_argument("--seed", type=int, metavar="N", help="parity, experts: where the random cases start")
    bench.add_argument("--case", metavar="TEXT", help="parity: this case only, as a failure prints it")
    bench.add_argument("--jobs", type=_whole, metavar="N", help="parity: processes that share the cases (default 1)")
    return parser


def _add(commands: argparse._SubParsersAction[_Parser], name: str, purpose: str) -> _Parser:
    return commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", allow_abbrev=False)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="hf:path/to/config.json, or module:function")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--devices", type=_whole, metavar="N", help="plan for N processes on this machine")
    where.add_argument("--cluster", metavar="FILE", help="plan for the cluster described in this JSON file")
    words = 'auto (the default), a plan.json, or words: "dp2 tp2 zero3", "pp4 dp2 1f1b micro8"'
    parser.add_argument("--plan", default="auto", metavar="PLAN", help=words)
    parts = "pp, dp, cp, sp, tp, zero, recompute, sequence_parallel, micro_batches, schedule"
    parser.add_argument("--fix", action="append", default=[], metavar="PART=VALUE", help=f"a part that the plan of auto must have: {parts}")
    parser.add_argument("--forbid", action="append", default=[], metavar="PART=VALUE", help="one that it must not have, such as zero=2,3")
    parser.add_argument("--time-limit", type=_seconds, metavar="S", help="seconds after which auto takes the best plan that it has")
    parser.add_argument("--batch-size", type=_whole, default=8, metavar="N", help="global batch of hf: example inputs (default 8)")
    parser.add_argument("--sequence-length", type=_whole, default=64, metavar="N", help="of hf: example inputs (default 64)")


def _whole(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def _version() -> str:
    from importlib.metadata import version

    return f"hgc {version('hgc')}"


if __name__ == "__main__":
    sys.exit(main())
