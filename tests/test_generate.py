"""Generation: what the memory makes of it, what the choice depends on, and what is refused."""

import pytest
import torch

from txl.generate import generate
from txl.model import ModelConfig, TransformerXL

V = 17


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def make(**options):
    torch.manual_seed(3)
    sizes = {
        "n_layer": 2,
        "n_head": 2,
        "d_model": 16,
        "d_inner": 24,
        "tie_weight": False,
        "mem_len": 40,
        "init_std": 0.5,
    }
    return TransformerXL(ModelConfig(vocab_size=V, **(sizes | options))).double().eval()


def prompt(B=1, L=5, seed=1):
    return torch.randint(V, (B, L), generator=torch.Generator().manual_seed(seed))


def greedy_by_full_forward(model, tokens, n):
    for _ in range(n):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens


@pytest.mark.parametrize("options", [{}, {"clamp_len": 3}, {"pre_lnorm": True}], ids=str)
@pytest.mark.parametrize("length", [1, 5, 17])
def test_greedy_with_memory_is_the_argmax_of_the_whole_text(length, options):
    model = make(**options)
    text = generate(model, prompt(2, length), 20, temperature=0)
    assert text.shape == (2, length + 20)
    assert torch.equal(text, greedy_by_full_forward(model, prompt(2, length), 20))
    assert len(text[0].unique()) > 2  # not one token over and over


def test_a_prompt_longer_than_the_memory_is_read_in_segments():
    model, text = make(mem_len=6), prompt(2, 20)
    memory = model.init_memory(2)
    for segment in text.split(6, 1):
        output = model(segment, memory)
        memory = output.memory
    wanted = text
    for _ in range(10):
        wanted = torch.cat([wanted, output.logits[:, -1:].argmax(-1)], 1)
        output = model(wanted[:, -1:], memory)
        memory = output.memory
    assert torch.equal(generate(model, text, 10, temperature=0), wanted)


def test_the_start_of_a_long_prompt_is_seen_through_the_memory():
    model, text = make(mem_len=6), prompt(1, 14)
    other = text.clone()
    other[0, 3] = (other[0, 3] + 1) % V
    draws = [generate(model, t.expand(200, -1), 4, seed=3)[:, 14:] for t in (text, other)]
    assert not torch.equal(*draws)
    forgotten = [generate(model, t.expand(200, -1), 4, seed=3, mem_len=0)[:, 14:] for t in (text, other)]
    assert torch.equal(*forgotten)


def test_mem_len_replaces_the_models():
    model, text = make(mem_len=6), prompt(1, 20)
    assert torch.equal(
        generate(model, text, 20, temperature=0, mem_len=40),
        greedy_by_full_forward(make(mem_len=40), text, 20),
    )
    assert not torch.equal(
        generate(model, text, 20, temperature=0, mem_len=1), generate(model, text, 20, temperature=0)
    )


def test_without_memory_only_the_last_token_is_seen():
    model = make(mem_len=0)
    text = generate(model, prompt(1, 9), 12, temperature=0)
    for at in range(8, 20):
        assert text[0, at + 1] == model(text[:, at : at + 1]).logits[0, 0].argmax()


def test_a_seed_decides_the_choice():
    model = make(init_std=0.1)
    draws = [generate(model, prompt(), 30, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_seed_leaves_the_default_generator_alone_and_without_one_that_is_used():
    model = make(init_std=0.1)
    before = torch.get_rng_state()
    generate(model, prompt(), 5, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    first = generate(model, prompt(), 30)
    assert not torch.equal(generate(model, prompt(), 30), first)
    torch.set_rng_state(before)
    assert torch.equal(generate(model, prompt(), 30), first)


def test_the_likeliest_of_one_is_the_likeliest():
    model = make()
    assert torch.equal(
        generate(model, prompt(2), 25, top_k=1, temperature=3.0, seed=1), generate(model, prompt(2), 25, temperature=0)
    )


def test_top_k_keeps_to_the_likeliest():
    model, text = make(init_std=0.1), prompt(400, 1)
    text[:] = 3
    allowed = model(text[:1]).logits[0, -1].topk(3).indices
    drawn = generate(model, text, 1, top_k=3, temperature=5.0, seed=1)[:, -1].unique()
    assert torch.equal(drawn, allowed.sort().values)
    assert len(generate(model, text, 1, top_k=V + 5, temperature=5.0, seed=1)[:, -1].unique()) > 10


def test_temperature_flattens_and_sharpens():
    model, text = make(), torch.full((2000, 1), 3)
    logits = model(text[:1]).logits[0, -1]
    for temperature in (0.5, 1.0, 2.0):
        drawn = generate(model, text, 1, temperature=temperature, seed=1)[:, -1]
        found = torch.bincount(drawn, minlength=V) / 2000
        torch.testing.assert_close(found.double(), (logits / temperature).softmax(-1), rtol=0, atol=0.04)


def test_rows_do_not_see_each_other():
    model, text = make(), prompt(3, 7)
    together = generate(model, text, 20, temperature=0)
    for row in range(3):
        assert torch.equal(together[row : row + 1], generate(model, text[row : row + 1], 20, temperature=0))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_comes_back(training):
    model = make(dropout=0.5)
    wanted = generate(model, prompt(), 20, temperature=0)
    model.train(training)
    assert torch.equal(generate(model, prompt(), 20, temperature=0), wanted)
    assert all(module.training == training for module in model.modules())


def test_what_is_generated_can_be_trained_on():
    model = make().train()
    text = generate(model, prompt(), 5, seed=1)
    with torch.enable_grad():
        model(text, targets=text).loss.backward()
    assert model.embedding.weight.grad.abs().sum() > 0


def test_nothing_to_add_is_the_prompt():
    assert torch.equal(generate(make(), prompt(2, 5), 0), prompt(2, 5))


@pytest.mark.parametrize(
    "text, options, fragment",
    [
        (torch.zeros(1, 0, dtype=torch.int64), {}, "length >= 1"),
        (torch.zeros(4, dtype=torch.int64), {}, r"\[batch, length"),
        (prompt(), {"temperature": -0.1}, "temperature"),
        (prompt(), {"top_k": -1}, "top_k"),
        (prompt(), {"n_tokens": -1}, "n_tokens"),
        (prompt(), {"mem_len": -1}, "mem_len"),
        (torch.tensor([[1, V]]), {}, f"outside the vocabulary of {V}"),
    ],
)
def test_bad_arguments_are_refused(text, options, fragment):
    with pytest.raises(ValueError, match=fragment):
        generate(make(), text, **({"n_tokens": 3} | options))


@pytest.mark.parametrize("temperature", [1e-42, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature):
    torch.manual_seed(0)
    model = TransformerXL(ModelConfig(vocab_size=9, n_layer=1, n_head=2, d_model=8, d_inner=8, mem_len=4, init_std=0.5))
    prompt = torch.tensor([[1, 2]])
    assert torch.equal(generate(model, prompt, 6, temperature=temperature), generate(model, prompt, 6, temperature=0))
