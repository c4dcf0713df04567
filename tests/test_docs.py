"""The documentation is true: its commands and examples run, and the lines it quotes are in the code."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL_AND_TRAIN = "pip install -r requirements.txt -e . && python train.py configs/quickstart.toml"
INSTALL_AND_TEST = 'pip install -r requirements.txt -e ".[test]" && pytest'
FEW_STEPS = [
    "train.steps=4", "train.tgt_len=16", "train.batch_size=2", "model.mem_len=16", "model.n_layer=1",
    "model.d_model=16", "model.n_head=2", "model.d_inner=32", "eval.tokens=200", "eval.every=0",
    "eval.tgt_len=256", "eval.batch_size=32", "optim.warmup_steps=2",
]  # fmt: skip


def run(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_two_commands_stand_in_the_readme_on_a_line_each():
    lines = README.splitlines()
    assert INSTALL_AND_TRAIN in lines
    assert INSTALL_AND_TEST in lines


def test_ci_runs_the_readme_line():
    assert INSTALL_AND_TEST in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    """A directory with the project's scripts and a text my.txt, in which the README's commands run."""
    directory = tmp_path_factory.mktemp("readme")
    for name in ("train.py", "eval.py", "configs"):
        (directory / name).symlink_to(ROOT / name)
    (directory / "my.txt").write_text("To be, or not to be, that is the question.\n" * 400, encoding="utf-8")
    (directory / "other.txt").write_text("Whether it is nobler to be.\n" * 20, encoding="utf-8")
    return directory


def test_readme_commands_run_with_few_steps(mine):
    """Every `python ...` line of the README, in order; training with few steps, evaluation as written."""
    commands = [line for line in README.splitlines() if re.match(r"python (train\.py|eval\.py|-m txl) ", line)]
    assert len(commands) >= 5
    for line in [INSTALL_AND_TRAIN.split(" && ")[1], *commands]:
        words = shlex.split(line)[1:]
        trains = words[0] == "train.py" and "--resume" not in words
        result = run(words + (FEW_STEPS if trains else []), mine)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"


def test_readme_python_examples_run(mine):
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert examples
    for example in examples:
        result = run(["-c", example], mine)
        assert result.returncode == 0, f"{example}\n{result.stderr}"


def test_every_config_trains(mine):
    for config in sorted((ROOT / "configs").glob("*.toml")):
        words = ["train.py", f"configs/{config.name}", "data.train=my.txt", f"run_dir=runs/config-{config.stem}"]
        result = run(words + FEW_STEPS, mine)
        assert result.returncode == 0, f"{config.name}\n{result.stderr}"
        assert f"python train.py configs/{config.name}" in config.read_text(encoding="utf-8").split("\n[")[0]


def test_paper_to_code_quotes_lines_that_exist():
    page = (ROOT / "docs" / "paper-to-code.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`]+)`(?: \| | in )`(txl/[^`]+)`", page)
    assert len(quoted) >= 20
    for line, file in quoted:
        code = (ROOT / file).read_text(encoding="utf-8")
        assert line in code, f"{file} has no {line!r}"


def test_links_between_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
