"""The command line: python train.py, python eval.py, python -m txl COMMAND.

Every error that a user can mend is one line on stderr and exit status 2.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from txl.errors import ConfigError, TxlError

COMMANDS = ("train", "eval", "generate")


def main(argv: list[str] | None = None) -> int:
    """python -m txl COMMAND ...; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return {"train": train, "eval": evaluate, "generate": generate}[argv[0]](argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: python -m txl {{{','.join(COMMANDS)}}} ...\n\nEach command has its own --help.")
        return 0
    print(f"error: expected a command, one of {', '.join(COMMANDS)}; got {argv[:1] or 'none'}", file=sys.stderr)
    return 2


def train(argv: list[str] | None = None) -> int:
    """Train a model, or go on with a run."""
    return _guarded(_train, argv)


def evaluate(argv: list[str] | None = None) -> int:
    """Score a text with several memory lengths."""
    return _guarded(_evaluate, argv)


def generate(argv: list[str] | None = None) -> int:
    """Continue a text."""
    return _guarded(_generate, argv)


def _train(argv: list[str] | None) -> int:
    parser = _Parser(
        prog="train.py",
        description="Train a Transformer-XL language model.",
        usage="train.py CONFIG [section.key=value ...]\n       train.py --resume RUN [section.key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG section.key=value", help="a TOML file, and settings")
    parser.add_argument("--resume", metavar="RUN", help="go on with this run directory")
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings and stop")
    if "-h" in (argv or sys.argv[1:]) or "--help" in (argv or sys.argv[1:]):
        from txl.config import describe
        from txl.training.run import RunConfig

        parser.epilog = "settings and their defaults:\n\n" + describe(RunConfig)
    arguments = parser.parse_intermixed_args(argv)

    from txl.config import to_toml
    from txl.report import training_report
    from txl.training import loop
    from txl.training.run import Run, RunConfig

    words = arguments.words
    if arguments.resume:
        if words and "=" not in words[0]:
            raise ConfigError(f"--resume takes its settings from {arguments.resume}: leave out {words[0]}")
        if arguments.print_config:
            print(to_toml(RunConfig.load(Path(arguments.resume) / "config.toml", words)), end="")
            return 0
        run = Run.open(arguments.resume, words)
        if run.is_finished:
            print(f"{run.directory} has done all its {run.config.train.steps} steps; train.steps=N would go on")
            if not (run.directory / "memory_valid.png").exists():  # stopped in the report
                print(training_report(run))
            return 0
    else:
        if not words or ("=" in words[0] and not Path(words[0]).is_file()):
            raise ConfigError("expected a config file, as in: python train.py configs/quickstart.toml")
        config = RunConfig.load(words[0], words[1:])
        if arguments.print_config:
            print(to_toml(config), end="")
            return 0
        loop.pick_device(config.train.device)
        run = Run.create(config)
    stopped = loop.train(run, resume=bool(arguments.resume))
    if stopped:
        print(f"stopped; go on with: python train.py --resume {run.directory}")
        return 128 + stopped
    print(training_report(run))
    return 0


def _evaluate(argv: list[str] | None) -> int:
    parser = _Parser(prog="eval.py", description="Score a text with one or several memory lengths.")
    parser.add_argument("run", metavar="RUN", help="a run directory, or a directory of save_pretrained")
    parser.add_argument("--data", metavar="FILE", help="score this text instead of a split of the run")
    parser.add_argument("--split", choices=("train", "valid", "test"), default="test", help="default: test")
    parser.add_argument("--mem-len", type=int, nargs="+", metavar="N", help="default: 0, 1, 2, 4, 8 x the trained one")
    parser.add_argument("--tgt-len", type=int, metavar="N", help="tokens of a segment; default: the run's eval.tgt_len")
    parser.add_argument("--clamp-len", type=int, metavar="N", help="distances beyond N count as N; 0 is off")
    parser.add_argument(
        "--same-length", action=argparse.BooleanOptionalAction, help="every query sees at most mem_len keys"
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="parts side by side; the result is the same")
    parser.add_argument("--cold", action="store_true", help="begin every part with a new memory, without warm-up")
    parser.add_argument("--which", choices=("best", "last"), default="best", help="checkpoint of the run")
    parser.add_argument("--device", default="auto", help="default: a GPU when there is one")
    parser.add_argument("--json", metavar="FILE", help="write the results there, a list of objects")
    arguments = parser.parse_args(argv)

    from txl.report import evaluate_text

    if arguments.json and (Path(arguments.json).is_dir() or not Path(arguments.json).absolute().parent.is_dir()):
        raise ConfigError(f"--json {arguments.json}: expected a file in a directory that exists")
    result = evaluate_text(
        arguments.run,
        data=arguments.data,
        split=arguments.split,
        mem_lens=arguments.mem_len,
        tgt_len=arguments.tgt_len,
        clamp_len=arguments.clamp_len,
        same_length=arguments.same_length,
        batch_size=arguments.batch_size,
        cold=arguments.cold,
        which=arguments.which,
        device=arguments.device,
    )
    print(result.text)
    if arguments.json:
        lines = [asdict(score) | result.origin for score in result.scores]
        Path(arguments.json).write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")
    return 0


def _generate(argv: list[str] | None) -> int:
    parser = _Parser(prog="txl generate", description="Continue a text.")
    parser.add_argument("run", metavar="RUN", help="a run directory, or a directory of save_pretrained")
    parser.add_argument("--prompt", default="\n", help="default: a line end")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="how many to add; default 200")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest always; default 0.8")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="0 is all; default 40")
    parser.add_argument("--mem-len", type=int, metavar="N", help="positions in memory; default: the trained number")
    parser.add_argument("--seed", type=int, help="default: another each time")
    parser.add_argument("--which", choices=("best", "last"), default="best", help="checkpoint of the run")
    arguments = parser.parse_args(argv)

    import torch

    from txl.generate import generate
    from txl.training.checkpoint import load

    model, tokenizer = load(arguments.run, arguments.which)
    prompt = torch.from_numpy(tokenizer.encode(arguments.prompt).astype("int64"))[None]
    if prompt.shape[1] == 0:
        raise ConfigError("--prompt has no token: give at least one character")
    tokens = generate(
        model,
        prompt,
        arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        mem_len=arguments.mem_len,
        seed=arguments.seed,
    )
    print(tokenizer.decode(tokens[0].tolist()))
    return 0


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line like all others."""

    def error(self, message: str):
        raise ConfigError(f"{message} (see --help)")


def _guarded(command, argv: list[str] | None) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a sample may have what the terminal has not
    try:
        return command(argv)
    except TxlError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2
