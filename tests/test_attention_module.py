"""RelativeAttention with its own weights against explicit loops, and the sinusoids against math.sin and math.cos."""

import math

import pytest
import torch
from explicit import explicit_attention

from txl.attention import RelativeAttention, sinusoid

B, L, WIDTH = 2, 4, 6


def make(seed=0, std=0.5, **options):
    torch.manual_seed(seed)
    attention = RelativeAttention(WIDTH, **({"n_head": 2} | options)).double()
    attention.reset_parameters(std)
    return attention


def states(length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, length, WIDTH, dtype=torch.float64, generator=generator)


def table(distances):
    """R by the equation, one number at a time."""
    rows = []
    for t in distances:
        angles = [t / 10000 ** (2 * i / WIDTH) for i in range(WIDTH // 2)]
        rows.append([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    return torch.tensor(rows, dtype=torch.float64)


def explicit(attention, x, h, R, future=0, u=None, v=None, **options):
    """The equations with the weights of the module, for queries x and keys h."""

    def heads(states, weight):
        return (states @ weight.T).unflatten(-1, (attention.n_head, attention.d_head)).transpose(-3, -2)

    out = explicit_attention(
        heads(x, attention.w_q.weight),
        heads(h, attention.w_kE.weight),
        heads(h, attention.w_v.weight),
        heads(R, attention.w_kR.weight),
        attention.u if u is None else u,
        attention.v if v is None else v,
        future=future,
        causal=attention.causal,
        **options,
    )
    return out.transpose(1, 2).flatten(2) @ attention.w_o.weight.T


def assert_same(attention, out, wanted, *inputs):
    """Equal values, and equal gradients in every weight and input."""
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
    direction = torch.randn_like(wanted)
    variables = [*attention.parameters(), *inputs]
    ours = torch.autograd.grad((out * direction).sum(), variables)
    theirs = torch.autograd.grad((wanted * direction).sum(), variables)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clamp_len", [0, 1, 3, 50])
@pytest.mark.parametrize("M", [0, 1, 3, 7])
def test_equals_the_equations(M, clamp_len):
    attention = make(clamp_len=clamp_len)
    x, memory = states(L).requires_grad_(), states(M, 2)
    R = table(min(t, clamp_len or t) for t in range(M + L))
    out = attention(x, memory=memory)
    assert_same(attention, out, explicit(attention, x, torch.cat([memory, x], 1), R), x)


@pytest.mark.parametrize("options", [{"n_head": 1}, {"n_head": 3}, {"n_head": 4, "d_head": 5}, {"d_head": 1}])
def test_head_sizes(options):
    attention = make(**options)
    x, memory = states(L).requires_grad_(), states(3, 2)
    out = attention(x, memory=memory)
    assert out.shape == x.shape
    assert_same(attention, out, explicit(attention, x, torch.cat([memory, x], 1), table(range(L + 3))), x)


@pytest.mark.parametrize("S", [4, 5, 9])
def test_context_replaces_memory_and_segment(S):
    attention = make()
    x, context = states(L).requires_grad_(), states(S, 2).requires_grad_()
    out = attention(x, context=context)
    assert_same(attention, out, explicit(attention, x, context, table(range(S))), x, context)


@pytest.mark.parametrize("causal", [True, False])
def test_context_shorter_than_the_queries(causal):
    """The queries count as the last positions, so the first ones stand before every key; causally they see none."""
    attention = make(causal=causal)
    x, context = states(L), states(2, 2)
    R, future = (table(range(2)), 0) if causal else (table(range(1 - L, 2)), L - 1)
    wanted = explicit(attention, x, context, R, future)
    torch.testing.assert_close(attention(x, context=context), wanted, rtol=1e-10, atol=1e-12)


def test_context_of_memory_and_segment_is_the_memory_form():
    attention = make()
    x, memory = states(L), states(3, 2)
    torch.testing.assert_close(attention(x, context=torch.cat([memory, x], 1)), attention(x, memory=memory))


@pytest.mark.parametrize("clamp_len", [0, 2])
@pytest.mark.parametrize("M", [0, 3])
def test_bidirectional_takes_rows_of_negative_distances(M, clamp_len):
    attention = make(causal=False, clamp_len=clamp_len)
    x, memory = states(L).requires_grad_(), states(M, 2)
    R = table(min(t, clamp_len or t) for t in range(1 - L, M + L))
    out = attention(x, memory=memory)
    assert_same(attention, out, explicit(attention, x, torch.cat([memory, x], 1), R, future=L - 1), x)


def test_bidirectional_sees_the_future_and_causal_does_not():
    for causal in (True, False):
        attention, x = make(causal=causal), states(L)
        jacobian = torch.autograd.functional.jacobian(attention, x)
        depends = jacobian[0, :, :, 0].abs().sum((1, 3)) > 0
        every = torch.ones(L, L, dtype=torch.bool)
        assert torch.equal(depends, every.tril() if causal else every)


@pytest.mark.parametrize(
    "bounds", [{"window": 2}, {"window": (1, 3)}, {"key_start": [1, 4]}, {"key_end": [7, 5]}, {"key_start": [5, 0]}]
)
def test_visibility_arguments(bounds):
    attention = make()
    x, memory = states(L).requires_grad_(), states(3, 2)
    bounds = {name: torch.tensor(value) if name.startswith("key") else value for name, value in bounds.items()}
    out = attention(x, memory=memory, **bounds)
    assert_same(attention, out, explicit(attention, x, torch.cat([memory, x], 1), table(range(7)), **bounds), x)


def test_no_gradient_flows_into_the_memory():
    attention, x, memory = make(), states(L), states(3, 2).requires_grad_()
    attention(x.requires_grad_(), memory=memory).sum().backward()
    assert memory.grad is None
    assert x.grad.abs().sum() > 0
    assert attention.w_v.weight.grad.abs().sum() > 0


def test_the_memory_is_left_as_it_was():
    attention, x, memory = make(), states(L), states(3, 2)
    attention(x, memory=memory)
    assert torch.equal(memory, states(3, 2))


def test_biases_passed_in():
    attention = make(own_biases=False)
    assert sorted(attention.state_dict()) == [f"w_{name}.weight" for name in ("kE", "kR", "o", "q", "v")]
    x = states(L).requires_grad_()
    u, v = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = attention(x, u=u, v=v)
    assert_same(attention, out, explicit(attention, x, x, table(range(L)), u=u, v=v), x, u, v)


def test_biases_passed_in_win_over_own_ones():
    attention, x = make(), states(L)
    u, v = torch.randn(2, 2, 3, dtype=torch.float64)
    wanted = explicit(attention, x, x, table(range(L)), u=u, v=v)
    torch.testing.assert_close(attention(x, u=u, v=v), wanted, rtol=1e-10, atol=1e-12)


def test_own_biases_are_parameters():
    attention = make()
    assert {name: tuple(p.shape) for name, p in attention.named_parameters() if "w_" not in name} == {
        "u": (2, 3),
        "v": (2, 3),
    }


@pytest.mark.parametrize("N", [1, 3, 7, 9])
def test_rows_passed_in_and_the_last_one_stands_for_all_beyond(N):
    attention, memory = make(clamp_len=1), states(3, 2)
    x, R = states(L).requires_grad_(), torch.randn(N, WIDTH, dtype=torch.float64, requires_grad=True)
    out = attention(x, memory=memory, R=R)
    assert_same(attention, out, explicit(attention, x, torch.cat([memory, x], 1), R), x, R)


def test_dropout_falls_on_the_weights_of_training_only():
    attention, x = make(dropout=0.5), states(L)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))
    torch.testing.assert_close(attention(x), explicit(attention, x, x, table(range(L))), rtol=1e-10, atol=1e-12)


def test_initial_weights():
    torch.manual_seed(0)
    attention = RelativeAttention(128, 16)
    for name, weight in attention.named_parameters():
        n = weight.numel()
        assert abs(weight.mean()) < 5 * 0.02 / n**0.5, name
        assert abs(weight.std() / 0.02 - 1) < 5 / (2 * n) ** 0.5, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_head": 4}, "n_head 4 does not divide d_model 6"),
        ({"n_head": 2, "position": "rope"}, "position .*'rope'"),
    ],
)
def test_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        RelativeAttention(WIDTH, **options)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": zeros(B, 5, WIDTH), "memory": zeros(B, 5, WIDTH)}, "context or memory, not both"),
        ({"x": zeros(B, L, 7)}, r"expected x \[2, length, 6\], got \[2, 4, 7\]"),
        ({"x": zeros(L, WIDTH)}, r"expected x .* got \[4, 6\]"),
        ({"memory": zeros(3, 5, WIDTH)}, r"expected memory \[2, length, 6\], got \[3, 5, 6\]"),
        ({"memory": zeros(B, 5, 8)}, r"expected memory \[2, length, 6\], got \[2, 5, 8\]"),
        ({"context": zeros(B, WIDTH)}, r"expected context \[2, length, 6\], got \[2, 6\]"),
        ({"key_start": torch.tensor([0, 0, 0])}, r"expected key_start \[2\], got \[3\]"),
        ({"u": zeros(3, 2)}, r"expected u \[2, 3\], got \[3, 2\]"),
        ({"R": zeros(0, WIDTH)}, "at least one row"),
    ],
)
def test_errors_name_what_was_found(arguments, message):
    with pytest.raises(ValueError, match=message):
        make()(**({"x": states(L)} | arguments))


def test_rows_passed_in_are_for_causal_attention():
    with pytest.raises(ValueError, match="causal attention only"):
        make(causal=False)(states(L), R=table(range(L)))


@pytest.mark.parametrize("d_model", [2, 6, 10])
def test_sinusoid_rows(d_model):
    distances = [0, 1, 2, 7, 100, 1001, -1, -3]
    R = sinusoid(torch.tensor(distances), d_model, torch.float64)
    assert R.shape == (len(distances), d_model)
    half = d_model // 2
    for row, t in zip(R.tolist(), distances, strict=True):
        for i in range(half):
            angle = t / 10000 ** (2 * i / d_model)
            assert row[i] == pytest.approx(math.sin(angle), abs=1e-12)
            assert row[half + i] == pytest.approx(math.cos(angle), abs=1e-12)


def test_sinusoid_of_distance_zero_is_zeros_then_ones():
    assert sinusoid(torch.tensor([0]), 6).tolist() == [[0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize("d_model", [1, 5])
def test_an_odd_width_is_refused(d_model):
    with pytest.raises(ValueError, match=f"even d_model, got {d_model}"):
        sinusoid(torch.arange(3), d_model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_only_a_rounding(dtype):
    distances = torch.arange(2000, 2100)
    R = sinusoid(distances, 32, dtype)
    assert R.dtype == dtype
    assert torch.equal(R, sinusoid(distances, 32).to(dtype))
    assert len({tuple(row) for row in R.tolist()}) == 100


def test_float64_is_not_computed_in_float32():
    distances = torch.tensor([12345])
    exact = math.sin(12345 / 10000 ** (2 / 8))
    assert float(sinusoid(distances, 8, torch.float64)[0, 1]) == pytest.approx(exact, abs=1e-11)
