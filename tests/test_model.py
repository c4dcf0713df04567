"""The model's sizes, initial weights, loss, files, and what it refuses."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from txl.errors import CheckpointError, ConfigError
from txl.memory import Memory
from txl.model import ModelConfig, TransformerXL

V = 11


def config(**options):
    return ModelConfig(**({"vocab_size": V, "n_layer": 2, "n_head": 2, "d_model": 16, "d_inner": 24} | options))


def make(seed=0, **options):
    torch.manual_seed(seed)
    return TransformerXL(config(**({"init_std": 0.3, "proj_init_std": 0.3, "mem_len": 6} | options))).eval()


def tokens(B, L, seed=1):
    return torch.randint(V, (B, L), generator=torch.Generator().manual_seed(seed))


def count(model):
    return sum(p.numel() for p in model.parameters())


# Sizes

PUBLISHED = {
    "enwik8 base": {"n_layer": 12, "n_head": 8, "d_model": 512, "d_head": 64, "d_inner": 2048},
    "enwik8 large": {"n_layer": 24, "n_head": 8, "d_model": 1024, "d_head": 128, "d_inner": 3072},
}


@pytest.mark.parametrize(
    ("name", "vocab_size", "number"),
    [
        ("enwik8 base", 204, 41_055_436),
        ("enwik8 large", 204, 277_231_820),
        ("enwik8 base", 27, 40_964_635),
        ("enwik8 large", 27, 277_050_395),
    ],
)
def test_published_parameter_counts(name, vocab_size, number):
    with torch.device("meta"):
        assert count(TransformerXL(ModelConfig(vocab_size, **PUBLISHED[name]))) == number


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"untie_r": True}, (3 - 1) * 2 * 16),
        ({"tie_weight": False}, V * 16),
        ({"pre_lnorm": True}, 2 * 16),
        ({"pre_lnorm": True, "final_norm": False}, 0),
        ({"d_head": 9}, 3 * 5 * 16 * 2 + 2 * 2),
        ({"d_embed": 10}, V * (10 - 16) + 2 * 16 * 10),
        ({"d_embed": 10, "tie_weight": False}, V * (10 - 16) + 2 * 16 * 10 + V * 10),
        ({"d_inner": 25}, 3 * (2 * 16 + 1)),
        ({"vocab_size": V + 1}, 16 + 1),
        ({"mem_len": 1000, "clamp_len": 7, "same_length": True, "memory_init": "zeros", "dropout": 0.5}, 0),
    ],
)
def test_what_each_choice_costs(options, more):
    """Against 3 layers of 5 d^2 attention, 2 d d_inner + d_inner + d feed-forward, 4 d of norms; u, v, table, bias."""
    with torch.device("meta"):
        plain, changed = (TransformerXL(config(n_layer=3, **o)) for o in ({}, options))
    d, d_inner = 16, 24
    assert count(plain) == 3 * (5 * d**2 + 2 * d * d_inner + d_inner + d + 4 * d) + 2 * d + V * d + V
    assert count(changed) - count(plain) == more


# Initial weights


@pytest.mark.parametrize(
    "options", [{}, {"init_std": 0.1, "proj_init_std": 0.05}, {"untie_r": True, "pre_lnorm": True}]
)
def test_initial_weights(options):
    torch.manual_seed(0)
    settings = config(
        **({"vocab_size": 300, "d_model": 64, "n_layer": 3, "d_embed": 32, "tie_weight": False} | options)
    )
    model = TransformerXL(settings)
    kinds = set()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
            kinds.add("bias")
            continue
        kind = "gain" if "norm" in name else "proj" if name.endswith("proj") else "weight"
        kinds.add(kind)
        mean, std = (1.0 if kind == "gain" else 0.0), settings.proj_init_std if kind == "proj" else settings.init_std
        n = parameter.numel()
        assert abs(parameter.mean() - mean) < 5 * std / n**0.5, name
        assert abs(parameter.std() / std - 1) < 5 / (2 * n) ** 0.5, name
    assert kinds == {"bias", "gain", "proj", "weight"}


def test_initial_weights_follow_the_seed():
    same = [torch.equal(a, b) for a, b in zip(make(3).parameters(), make(3).parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(make(3).embedding.weight, make(4).embedding.weight)


# Loss


@pytest.mark.parametrize("options", [{}, {"tie_weight": False}, {"d_embed": 10}, {"d_embed": 10, "tie_weight": False}])
def test_nll_is_that_of_the_logits_in_token_order(options):
    model = make(**options).double()
    x, y = tokens(3, 5), tokens(3, 5, 2)
    wanted = -model(x).logits.log_softmax(-1).gather(-1, y[..., None])[..., 0]
    out = model(x, targets=y)
    assert out.nll.shape == (3, 5)
    torch.testing.assert_close(out.nll, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.loss, wanted.mean(), rtol=0, atol=1e-12)


def test_logits_or_loss_and_always_a_memory():
    model, x = make(), tokens(2, 4)
    out = model(x)
    assert out.logits.shape == (2, 4, V)
    assert out.nll is None
    assert out.loss is None
    scored = model(x, targets=x)
    assert scored.logits is None
    assert scored.loss.shape == ()
    assert all(torch.equal(a, b) for a, b in zip(out.memory.states, scored.memory.states, strict=True))


def test_ignored_targets_do_not_count():
    model = make().double()
    x, y = tokens(2, 4), tokens(2, 4, 2)
    every = model(x, targets=y).nll
    ignored = torch.tensor([[True, False, False, True], [True, True, False, True]])
    masked = y.masked_fill(ignored, -100)
    kept = masked.clone()
    out = model(x, targets=masked)
    assert (out.nll[ignored] == 0).all()
    assert torch.equal(out.nll[~ignored], every[~ignored])
    torch.testing.assert_close(out.loss, every[~ignored].mean())
    assert torch.equal(masked, kept)  # the caller's targets are left as they were


def test_no_target_that_counts_gives_zero_loss_and_gradients():
    model, x = make(), tokens(2, 4)
    loss = model(x, targets=torch.full_like(x, -100)).loss
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_nll_of_bfloat16_is_float32():
    model, x = make().bfloat16(), tokens(2, 4)
    out = model(x, targets=x)
    assert out.nll.dtype == out.loss.dtype == torch.float32
    wanted = torch.nn.functional.cross_entropy(model(x).logits.float().transpose(1, 2), x, reduction="none")
    torch.testing.assert_close(out.nll, wanted)


def test_every_parameter_learns():
    for options in ({}, {"untie_r": True, "d_embed": 10, "tie_weight": False}, {"pre_lnorm": True}):
        model, memory = make(**options), None
        for seed in (1, 2):
            out = model(tokens(2, 5, seed), memory, targets=tokens(2, 5, seed + 1))
            memory = out.memory
        out.loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name


def test_int32_tokens_are_tokens():
    model, x = make(), tokens(2, 4)
    assert torch.equal(model(x.int()).logits, model(x).logits)


# Files

SAVED = {
    "tied": {},
    "untied": {"tie_weight": False},
    "narrow embedding": {"d_embed": 10},
    "narrow embedding, untied": {"d_embed": 10, "tie_weight": False},
    "every choice": {
        "d_head": 5, "pre_lnorm": True, "untie_r": True, "clamp_len": 3, "same_length": True, "memory_init": "zeros",
        "dropout": 0.3, "dropatt": 0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_is_loaded_bitwise(name, tmp_path):
    model, x = make(**SAVED[name]), tokens(2, 4)
    model.save_pretrained(tmp_path / "new" / "folder")
    loaded = TransformerXL.from_pretrained(tmp_path / "new" / "folder")
    assert loaded.config == model.config
    assert not any(module.training for module in loaded.modules())
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    memory, other = (m(x).memory for m in (model, loaded))
    assert torch.equal(model(x, memory).logits, loaded(x, other).logits)


def test_saving_leaves_two_files_and_the_model_as_it_was(tmp_path):
    model = make().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_saving_again_replaces_both_files(tmp_path):
    make(0).save_pretrained(tmp_path)
    model = make(1, n_layer=3)
    model.save_pretrained(tmp_path)
    loaded = TransformerXL.from_pretrained(str(tmp_path))  # text serves as a path
    assert loaded.config.n_layer == 3
    assert torch.equal(loaded.embedding.weight, model.embedding.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_is_stored_once(tied, tmp_path):
    model = make(tie_weight=tied)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == count(model)
    assert sum(t.shape == (V, 16) for t in stored.values()) == (1 if tied else 2)


def test_a_tied_weight_stays_tied_after_loading(tmp_path):
    make().save_pretrained(tmp_path)
    loaded, x = TransformerXL.from_pretrained(tmp_path), tokens(1, 3)
    before = loaded(x).logits
    with torch.no_grad():
        loaded.embedding.weight[int(x[0, 0])] += 1.0
    after = loaded(x).logits
    absent = next(t for t in range(V) if t not in x)
    assert not torch.equal(before, after)
    with torch.no_grad():
        loaded.embedding.weight[absent] += 1.0
    changed = (loaded(x).logits != after).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == [absent]  # an input that does not occur, but an output that does


def refusal(folder, error=CheckpointError):
    """The one line with which loading is refused."""
    with pytest.raises(error) as caught:
        TransformerXL.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name, tmp_path):
    make().save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    assert f"no {name} in {tmp_path}" in refusal(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    assert f"in {tmp_path / 'absent'}" in refusal(tmp_path / "absent")


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_cut_file_is_damaged(kept, tmp_path):
    make().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} is damaged" in refusal(tmp_path)


@pytest.mark.parametrize("damage", [b"\x00" * 200, b"not a safetensors file, " * 20])
def test_another_kind_of_file_is_damaged(damage, tmp_path):
    make().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(damage)
    assert f"{tmp_path / 'model.safetensors'} is damaged" in refusal(tmp_path)


def test_weights_of_another_model_are_listed_in_full(tmp_path):
    make().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["softmax.bias"], weights["backbone.u"]
    weights["backbone.extra"] = torch.zeros(2)
    weights["another"] = torch.zeros(2)
    weights["embedding.weight"] = torch.zeros(V + 1, 16)
    weights["backbone.v"] = torch.zeros(3, 8)
    save_file(weights, path)
    message = refusal(tmp_path)
    assert message.startswith(f"{path} is of another model: ")
    for wrong in (
        "missing softmax.bias",
        "missing backbone.u",
        "unexpected backbone.extra",
        "unexpected another",
        f"embedding.weight is [{V + 1}, 16], expected [{V}, 16]",
        "backbone.v is [3, 8], expected [2, 8]",
    ):
        assert wrong in message


@pytest.mark.parametrize(
    ("saved", "claimed", "wrong"),
    [
        ({}, {"n_layer": 3}, "missing backbone.layers.2."),
        ({"n_layer": 3}, {"n_layer": 2}, "unexpected backbone.layers.2."),
        ({}, {"tie_weight": False}, "missing softmax.weight"),
        ({}, {"untie_r": True}, "unexpected backbone.u"),
        ({}, {"d_inner": 30}, "expected [30, 16]"),
    ],
)
def test_a_configuration_of_another_model(saved, claimed, wrong, tmp_path):
    make(**saved).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | claimed))
    assert wrong in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "not json", '{"n_layer": 2'])
def test_a_configuration_that_is_not_json(text, tmp_path):
    make().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert f"{tmp_path / 'config.json'} is not JSON" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["[1, 2]", "3", "null", '"text"'])
def test_a_configuration_that_is_not_an_object(text, tmp_path):
    make().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in refusal(tmp_path, (CheckpointError, ConfigError))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layr": 2}, "unknown setting n_layr; did you mean n_layer?"),
        ({"n_layer": "two"}, "n_layer must be a whole number, got 'two'"),
        ({"n_layer": 0}, "model.n_layer must be at least 1, got 0"),
        ({"d_model": 15, "d_head": 4}, "model.d_model must be even"),
    ],
)
def test_a_configuration_with_a_wrong_setting(change, words, tmp_path):
    make().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = refusal(tmp_path, ConfigError)
    assert words in message
    assert str(path) in message


def test_the_configuration_is_plain_json(tmp_path):
    model = make(d_embed=10)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == dataclasses.asdict(model.config)


# Inputs


@pytest.mark.parametrize(
    ("wrong", "number"), [((0, 2), V), ((1, 0), V + 300), ((1, 3), -1), ((0, 0), -100)], ids=lambda value: str(value)
)
def test_a_token_outside_the_vocabulary_is_named(wrong, number):
    x = tokens(2, 4)
    x[wrong] = number
    words = f"token id {number} at row {wrong[0]}, position {wrong[1]} is outside the vocabulary of {V}"
    with pytest.raises(ValueError, match=words):
        make()(x)


def test_a_target_outside_the_vocabulary_is_named():
    x, y = tokens(2, 4), tokens(2, 4)
    y[1, 2] = V
    with pytest.raises(ValueError, match=f"target id {V} at row 1, position 2 .* vocabulary of {V}"):
        make()(x, targets=y)


@pytest.mark.parametrize(
    ("shape", "targets", "words"),
    [
        ((4,), None, r"expected tokens \[batch, length >= 1\], got \[4\]"),
        ((2, 0), None, r"expected tokens \[batch, length >= 1\], got \[2, 0\]"),
        ((2, 4, 1), None, r"got \[2, 4, 1\]"),
        ((2, 4), (2, 3), r"expected targets \[2, 4\] like tokens, got \[2, 3\]"),
        ((2, 4), (8,), r"expected targets \[2, 4\] like tokens, got \[8\]"),
    ],
)
def test_shapes_of_tokens_and_targets(shape, targets, words):
    targets = None if targets is None else torch.zeros(targets, dtype=torch.int64)
    with pytest.raises(ValueError, match=words):
        make()(torch.zeros(shape, dtype=torch.int64), targets=targets)


@pytest.mark.parametrize(
    ("n_layer", "batch", "d_model", "found"),
    [
        (2, 3, 16, r"got 2 of \[3, 4, 16\]"),
        (2, 2, 12, r"got 2 of \[2, 4, 12\]"),
        (3, 2, 16, r"got 3 of \[2, 4, 16\]"),
        (1, 2, 16, r"got 1 of \[2, 4, 16\]"),
    ],
)
def test_a_memory_of_another_shape_is_refused(n_layer, batch, d_model, found):
    memory = Memory.new(n_layer, batch, d_model, 4, zeros=True)
    words = r"expected a memory of 2 layers of \[2, length, 16\], " + found + r": use init_memory\(2\)"
    with pytest.raises(ValueError, match=words):
        make()(tokens(2, 4), memory)


def test_an_empty_memory_of_another_batch_is_refused():
    model = make()
    with pytest.raises(ValueError, match=r"init_memory\(2\)"):
        model(tokens(2, 4), model.init_memory(3))


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 12), (2, 0, 16)])
def test_inputs_of_the_backbone(shape):
    with pytest.raises(ValueError, match=r"expected inputs \[batch, length >= 1, 16\]"):
        make().backbone(torch.zeros(shape))


def test_a_negative_mem_len_is_refused():
    with pytest.raises(ValueError, match="mem_len must be at least 0, got -1"):
        make().init_memory(2, -1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_head": 3}, "model.n_head 3 does not divide model.d_model 16: give model.d_head, or another model.n_head"),
        ({"dropout": 1.0}, "model.dropout must be in [0, 1), got 1.0"),
        ({"dropout": -0.1}, "model.dropout must be in [0, 1), got -0.1"),
        ({"dropatt": 1.5}, "model.dropatt must be in [0, 1), got 1.5"),
        ({"dropout": float("nan")}, "model.dropout must be in [0, 1), got nan"),
        ({"position": "rope"}, 'model.position must be "xl", got "rope"'),
        ({"memory_init": "ones"}, 'model.memory_init must be "empty" or "zeros", got "ones"'),
        ({"d_model": 15, "n_head": 3}, "model.d_model must be even for the sinusoids, got 15"),
        ({"n_layer": 0}, "model.n_layer must be at least 1, got 0"),
        ({"n_head": 0}, "model.n_head must be at least 1, got 0"),
        ({"d_head": 0}, "model.d_head must be at least 1, got 0"),
        ({"d_inner": -1}, "model.d_inner must be at least 1, got -1"),
        ({"d_embed": 0}, "model.d_embed must be at least 1, got 0"),
        ({"vocab_size": 0}, "model.vocab_size must be at least 1, got 0"),
        ({"mem_len": -1}, "model.mem_len must be at least 0, got -1"),
        ({"clamp_len": -1}, "model.clamp_len must be at least 0, got -1"),
        ({"init_std": -0.1}, "model.init_std must be at least 0, got -0.1"),
        ({"init_std": float("nan")}, "model.init_std must be at least 0, got nan"),
        ({"proj_init_std": -0.1}, "model.proj_init_std must be at least 0, got -0.1"),
    ],
)
def test_a_setting_that_cannot_be(options, words):
    with pytest.raises(ConfigError) as caught:
        config(**options)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    "options", [{"n_head": 3, "d_head": 4}, {"mem_len": 0}, {"dropout": 0.0}, {"init_std": 0.0}, {"d_embed": 1}]
)
def test_a_setting_at_its_edge_is_fine(options):
    model = make(**options)
    x = tokens(2, 3)
    assert model(x, model(x).memory).logits.isfinite().all()


def test_a_configuration_file_without_a_vocabulary(tmp_path):
    make().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(f'"vocab_size": {V}', '"vocab_size": null'))
    with pytest.raises(CheckpointError, match=r"config\.json: vocab_size is absent"):
        TransformerXL.from_pretrained(tmp_path)


def test_a_model_needs_a_vocabulary():
    with pytest.raises(ConfigError, match=r"model\.vocab_size is absent"):
        TransformerXL(ModelConfig())


def test_a_configuration_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().n_layer = 5
