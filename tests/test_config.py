"""Settings: files, words of the command line, types, and errors that name the nearest key."""

import math
import tomllib
from dataclasses import dataclass, field, fields

import pytest

from txl.config import Word, describe, from_dict, load, merge, parse_override, to_toml
from txl.errors import ConfigError, TxlError
from txl.model import ModelConfig


@dataclass(frozen=True)
class Optimiser:
    name: str = "adam"
    """Which optimiser to use,
    over two lines."""
    lr: float = 0.001
    """Peak learning rate."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """Decay of the two moments."""


@dataclass(frozen=True)
class Train:
    steps: int = 100
    """Number of updates."""
    clip: float | None = None
    """Largest norm of the gradient."""
    bf16: bool = False
    """Compute in bfloat16."""
    files: tuple[str, ...] = ()
    """Texts to train on."""

    def __post_init__(self):
        if self.steps < 1:
            raise ConfigError(f"train.steps must be at least 1, got {self.steps}")


@dataclass(frozen=True)
class Run:
    run_dir: str = "run"
    """Where to write."""
    train: Train = field(default_factory=Train)
    optimiser: Optimiser = field(default_factory=Optimiser)


@dataclass(frozen=True)
class Experiment:
    title: str = ""
    """Words about it."""
    run: Run = field(default_factory=Run)


def read(settings, cls=Run):
    return from_dict(cls, settings, "here.toml")


def refusal(settings, cls=Run):
    """The message with which from_dict refuses the settings: one line that names the file."""
    with pytest.raises(ConfigError) as caught:
        read(settings, cls)
    message = str(caught.value)
    assert message.startswith("here.toml: ")
    assert "\n" not in message
    return message


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(texts))}.toml"


# Round trip


@pytest.mark.parametrize(
    "config",
    [
        Run(),
        Run("a/b", Train(7, 0.25, True, ("x.txt", "y z.txt")), Optimiser("sgd", 1e-5, (0.0, 1.0))),
        Run('quotes " and \\ and # and = [x]', Train(clip=1e300), Optimiser(lr=5e-324)),
        Run("line\nbreak\ttab\x7f\x01 é 漢字 \u2028", Train(files=("", "'", '"'))),
        Run(train=Train(clip=math.inf)),
        ModelConfig(),
        ModelConfig(204, d_head=64, d_embed=16, tie_weight=False, memory_init="zeros", init_std=0.1 + 0.2),
    ],
)
def test_toml_reads_back_equal(config):
    text = to_toml(config)
    assert read(tomllib.loads(text), type(config)) == config
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_toml_of_sections_within_sections_reads_back_equal():
    config = Experiment("deep", Run("elsewhere", Train(3), Optimiser("sgd")))
    assert read(tomllib.loads(to_toml(config)), Experiment) == config


def test_toml_leaves_out_absent_settings():
    assert "clip" not in to_toml(Run())
    assert "clip = 0.5" in to_toml(Run(train=Train(clip=0.5)))


def test_an_empty_dict_gives_the_defaults():
    assert read({}) == Run()


def test_toml_written_to_a_file_is_loaded(tmp_path):
    config = Run("there", Train(12), Optimiser("sgd"))
    assert read(load(write(tmp_path, a=to_toml(config)))) == config


# extends


def test_a_chain_of_files_the_nearest_wins(tmp_path):
    path = write(
        tmp_path,
        a='extends = "b.toml"\n[train]\nsteps = 1',
        b='extends = "c.toml"\nrun_dir = "b"\n[train]\nsteps = 2\nclip = 2.0',
        c='run_dir = "c"\n[train]\nsteps = 3\nclip = 3.0\nbf16 = true\n[optimiser]\nlr = 3.0',
    )
    assert load(path) == {
        "run_dir": "b",
        "train": {"steps": 1, "clip": 2.0, "bf16": True},
        "optimiser": {"lr": 3.0},
    }


def test_words_win_over_every_file(tmp_path):
    path = write(tmp_path, a='extends = "b.toml"\n[train]\nsteps = 1', b="[train]\nsteps = 2\nclip = 2.0")
    settings = load(path, ["train.steps=9", "train.clip=8.5", "train.steps=10", "run_dir=x"])
    assert settings == {"train": {"steps": "10", "clip": "8.5"}, "run_dir": "x"}


def test_extends_is_beside_the_file_that_says_so(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, top='extends = "sub/middle.toml"', base="run_dir = 'base'")
    write(tmp_path / "sub", middle="extends = '../base.toml'")
    assert load(tmp_path / "top.toml") == {"run_dir": "base"}


@pytest.mark.parametrize("loop", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_circle_of_files_is_refused(tmp_path, loop):
    path = write(
        tmp_path, **{name: f'extends = "{after}.toml"' for name, after in zip(loop, loop[1:] + loop[:1], strict=True)}
    )
    with pytest.raises(ConfigError, match=r"a\.toml: files extend each other in a circle"):
        load(path)


def test_two_branches_to_one_base_are_no_circle(tmp_path):
    write(tmp_path, base="run_dir = 'base'", a='extends = "base.toml"', b='extends = "base.toml"')
    assert load(tmp_path / "a.toml") == load(tmp_path / "b.toml") == {"run_dir": "base"}


def test_a_missing_base_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config file .*absent\.toml"):
        load(write(tmp_path, a='extends = "absent.toml"'))


def test_a_missing_file_suggests_one_beside_it(tmp_path):
    write(tmp_path, enwik8="")
    with pytest.raises(ConfigError, match=r"no config file .*enwik\.toml; did you mean enwik8\.toml\?"):
        load(tmp_path / "enwik.toml")
    with pytest.raises(ConfigError, match="no config file"):
        load(tmp_path / "no" / "such" / "folder.toml")
    with pytest.raises(ConfigError, match="no config file"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["a = ", "[a", "a = 1\na = 2", "just words"])
def test_what_is_not_toml_is_named_with_its_place(tmp_path, text):
    with pytest.raises(ConfigError, match=r"a\.toml is not TOML: .*\(at (line|end)") as caught:
        load(write(tmp_path, a=text))
    assert "\n" not in str(caught.value)


def test_what_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"run_dir = '\xff'")
    with pytest.raises(ConfigError, match=r"a\.toml is not TOML"):
        load(tmp_path / "a.toml")


@pytest.mark.parametrize("value", ["3", "true", '["b.toml"]', "{ file = 'b.toml' }"])
def test_extends_must_be_text(tmp_path, value):
    with pytest.raises(ConfigError, match="extends"):
        load(write(tmp_path, a=f"extends = {value}", b=""))


# Words of the command line


@pytest.mark.parametrize(
    ("word", "settings"),
    [
        ("steps=10", {"steps": "10"}),
        ("train.steps=10", {"train": {"steps": "10"}}),
        ("a.b.c=1", {"a": {"b": {"c": "1"}}}),
        ("x=a=b", {"x": "a=b"}),
        ("x=", {"x": ""}),
        (" x = 1", {"x": " 1"}),
    ],
)
def test_a_word_names_a_setting(word, settings):
    assert parse_override(word) == settings


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("10", int, 10),
        ("-3", int, -3),
        (" 1", int, 1),
        ("0.5", float, 0.5),
        ("1e-4", float, 1e-4),
        ("true", bool, True),
        ("True", bool, "True"),
        ("[1, 2]", tuple, [1, 2]),
        ("['a', \"b\"]", tuple, ["a", "b"]),
        ("{y = 1}", dict, {"y": 1}),
        ("plain", str, "plain"),
        ('"quoted"', str, "quoted"),
        ("'quoted'", str, "quoted"),
        ('"10"', str, "10"),
        ("10", str, "10"),
        ("two words", str, "two words"),
        ("/some/path.txt", str, "/some/path.txt"),
        ("", str, ""),
        ("plain", int, "plain"),
    ],
)
def test_a_word_is_read_by_the_type_of_its_setting(text, hint, value):
    parsed = Word(text).parse(hint)
    assert parsed == value
    assert type(parsed) is type(value)  # 1, 1.0 and True are not the same here


@pytest.mark.parametrize("word", ["steps", "=3", "train.=3", ".steps=3", "a..b=3", "", "="])
def test_a_word_without_key_or_value_is_refused(word):
    with pytest.raises(ConfigError) as caught:
        parse_override(word)
    assert str(caught.value) == f'expected section.key=value on the command line, got "{word}"'


def test_words_reach_the_typed_config(tmp_path):
    words = [
        "train.steps=5",
        "train.clip=1",
        "train.bf16=true",
        "train.files=['a', 'b']",
        "optimiser.betas=[0, 0.5]",
        "run_dir=a b",
    ]
    assert read(load(write(tmp_path, a=""), words)) == Run(
        "a b", Train(5, 1.0, True, ("a", "b")), Optimiser(betas=(0.0, 0.5))
    )


@pytest.mark.parametrize(
    "text", ["7", "true", "false", "0.5", "2024-01-31", "12:30:00", "1e3", "007", "1_000", "0x10", "+5", "nan", "a.b"]
)
def test_a_text_setting_takes_a_word_as_it_was_typed(tmp_path, text):
    assert read(load(write(tmp_path, a=""), [f"run_dir={text}"])).run_dir == text


def test_nothing_is_executed(tmp_path):
    trap = tmp_path / "trap"
    for code in (f"__import__('pathlib').Path({str(trap)!r}).touch()", f"$(touch {trap})", f"!!python/name:{trap}"):
        assert parse_override(f"run_dir={code}") == {"run_dir": code}
        assert read({"run_dir": code}).run_dir == code
        with pytest.raises(ConfigError):
            read({"train": {"steps": code}})
        with pytest.raises(ConfigError):
            load(write(tmp_path, a=f"run_dir = {code}"))
    assert not trap.exists()


def test_merge_goes_section_by_section():
    settings = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    merge(settings, {"a": {"c": {"f": 4}}, "e": {"g": 5}})
    assert settings == {"a": {"b": 1, "c": {"d": 2, "f": 4}}, "e": {"g": 5}}


# Unknown keys


def deletions(key):
    return [(key[:i] + key[i + 1 :], key) for i in range(len(key))]


MODEL_KEYS = ("vocab_size", "n_layer", "d_inner", "dropatt", "mem_len", "clamp_len", "same_length", "memory_init")


@pytest.mark.parametrize(("typo", "key"), [pair for key in MODEL_KEYS for pair in deletions(key)])
def test_a_missing_letter_in_a_key(typo, key):
    assert refusal({typo: 1}, ModelConfig) == f"here.toml: unknown setting {typo}; did you mean {key}?"


@pytest.mark.parametrize(
    ("typo", "key"),
    [(typo, f"{section}.{key}") for section, name in [("train", "steps"), ("train", "files"), ("optimiser", "betas")]
     for typo, key in deletions(name)],
)  # fmt: skip
def test_a_missing_letter_in_a_section(typo, key):
    section = key.partition(".")[0]
    assert refusal({section: {typo: 1}}) == f"here.toml: unknown setting {section}.{typo}; did you mean {key}?"


@pytest.mark.parametrize(("typo", "section"), [*deletions("optimiser"), *deletions("train")])
def test_a_missing_letter_in_the_name_of_a_section(typo, section):
    message = refusal({typo: {}})
    assert message.startswith(f"here.toml: unknown setting {typo}; did you mean {section}")


def test_a_key_in_the_wrong_section_is_found_in_the_right_one():
    assert refusal({"steps": 3}) == "here.toml: unknown setting steps; did you mean train.steps?"
    assert refusal({"optimiser": {"clip": 1}}) == "here.toml: unknown setting optimiser.clip; did you mean train.clip?"


def test_a_far_key_suggests_nothing():
    assert refusal({"zzzzqqqq": 1}) == "here.toml: unknown setting zzzzqqqq"


# Types


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": {"steps": "ten"}}, "train.steps must be a whole number, got 'ten'"),
        ({"train": {"steps": 1.0}}, "train.steps must be a whole number, got 1.0"),
        ({"train": {"steps": True}}, "train.steps must be a whole number, got True"),
        ({"train": {"steps": None}}, "train.steps must be a whole number, got None"),
        ({"train": {"steps": [1]}}, "train.steps must be a whole number, got [1]"),
        ({"train": {"bf16": 1}}, "train.bf16 must be true or false, got 1"),
        ({"train": {"bf16": "true"}}, "train.bf16 must be true or false, got 'true'"),
        ({"train": {"clip": "x"}}, "train.clip must be a number, got 'x'"),
        ({"train": {"clip": False}}, "train.clip must be a number, got False"),
        ({"optimiser": {"lr": True}}, "optimiser.lr must be a number, got True"),
        ({"train": {"files": "a.txt"}}, "train.files must be a list of text, got 'a.txt'"),
        ({"train": {"files": [["a"]]}}, "train.files must be text, got ['a']"),
        ({"optimiser": {"betas": [0.9, "x"]}}, "optimiser.betas must be a number, got 'x'"),
        ({"optimiser": {"betas": 0.9}}, "optimiser.betas must be a list of a number, got 0.9"),
        ({"run_dir": ["x"]}, "run_dir must be text, got ['x']"),
        ({"run_dir": {}}, "run_dir must be text, got {}"),
        ({"train": 3}, "train is a section, expected train.key=value, got 3"),
        ({"train": {"steps": {"x": 1}}}, "train.steps must be a whole number, got {'x': 1}"),
    ],
)
def test_a_wrong_type_is_named(settings, message):
    assert refusal(settings) == f"here.toml: {message}"


def test_a_whole_number_serves_as_a_float():
    config = read({"train": {"clip": 1}, "optimiser": {"lr": 2, "betas": [0, 1]}})
    assert type(config.train.clip) is float
    assert type(config.optimiser.lr) is float
    assert [type(beta) for beta in config.optimiser.betas] == [float, float]
    assert (config.train.clip, config.optimiser.lr, config.optimiser.betas) == (1.0, 2.0, (0.0, 1.0))


def test_an_optional_setting_takes_none():
    assert read({"train": {"clip": None}}).train.clip is None
    assert read({"vocab_size": None, "d_head": None}, ModelConfig) == ModelConfig()


def test_what_the_class_refuses_names_the_file():
    assert refusal({"train": {"steps": 0}}) == "here.toml: train.steps must be at least 1, got 0"
    assert refusal({"n_layer": 0}, ModelConfig) == "here.toml: model.n_layer must be at least 1, got 0"


def test_errors_are_value_errors_that_a_user_can_mend():
    assert issubclass(ConfigError, TxlError)
    assert issubclass(TxlError, ValueError)


# Help


def test_describe_shows_names_defaults_and_docstrings():
    text = describe(Run)
    for line in (
        '  run_dir = "run"',
        "  train.steps = 100",
        "  train.clip = absent",
        "  train.bf16 = false",
        "  train.files = []",
        '  optimiser.name = "adam"',
        "  optimiser.lr = 0.001",
        "  optimiser.betas = [0.9, 0.999]",
    ):
        assert line in text.splitlines()
    joined = " ".join(text.split())
    for doc in ("Where to write.", "Number of updates.", "Which optimiser to use, over two lines.", "Peak learning"):
        assert doc in joined
    assert max(map(len, text.splitlines())) <= 80


def test_describe_has_words_for_every_setting_of_the_model():
    lines = describe(ModelConfig, "model").splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("  model.")]
    assert [lines[i].split()[0] for i in heads] == [f"model.{f.name}" for f in fields(ModelConfig)]
    for i in heads:
        assert lines[i + 1].startswith("      ")  # at least one line of the docstring below each
        assert len(lines[i + 1].split()) > 1
    assert "Standard deviation of the projections between d_embed and d_model." in " ".join(" ".join(lines).split())
