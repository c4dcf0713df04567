"""The functional form against explicit loops over (i, j), in float64: values and every gradient."""

import pytest
import torch
from explicit import explicit_attention

from txl.attention import relative_attention, relative_shift

B, H, D = 2, 2, 3

CASES = {  # L, M, rows of r, keyword arguments
    "no memory": (4, 0, 4, {}),
    "one query": (1, 5, 6, {}),
    "one query, no memory": (1, 0, 1, {}),
    "memory shorter than segment": (5, 2, 7, {}),
    "memory longer than segment": (3, 7, 10, {}),
    "more rows than distances": (3, 2, 9, {}),
    "rows end early (clamp_len)": (4, 5, 3, {}),
    "one row": (3, 2, 1, {}),
    "window": (4, 5, 9, {"window": 2}),
    "window 0 sees itself": (4, 3, 7, {"window": 0}),
    "window, rows end early": (4, 5, 2, {"window": 4}),
    "window of an interval": (4, 5, 9, {"window": (1, 3)}),
    "window that leaves rows empty": (4, 0, 4, {"window": (2, 3)}),
    "key_start": (4, 5, 9, {"key_start": [0, 5]}),
    "key_start beyond some queries": (4, 2, 6, {"key_start": [1, 4]}),
    "key_end": (4, 5, 9, {"key_end": [9, 6]}),
    "key range, window, clamp": (5, 6, 4, {"key_start": [2, 6], "key_end": [8, 11], "window": 5}),
    "bidirectional": (4, 2, 9, {"causal": False, "future": 3}),
    "bidirectional, clipped on both sides": (5, 3, 4, {"causal": False, "future": 2}),
    "bidirectional, window": (5, 3, 9, {"causal": False, "future": 4, "window": (-2, 1)}),
    "bidirectional, one bound": (5, 3, 9, {"causal": False, "future": 4, "window": 1}),
    "offset": (3, 4, 9, {"offset": 2}),
    "offset beyond the keys": (3, 2, 9, {"offset": 7}),
    "offset, bidirectional": (3, 4, 9, {"offset": 1, "causal": False, "future": 5}),
    "scale": (3, 2, 5, {"scale": 1.0}),
}


def inputs(L, M, N, shared_rows=False, values=False):
    torch.manual_seed(L * 100 + M * 10 + N)

    def make(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    rows = (N, D) if shared_rows else (H, N, D)
    tensors = [make(B, H, L, D), make(B, H, L + M, D), make(B, H, L + M, D), make(*rows), make(H, D), make(H, D)]
    return [*tensors, make(*rows)] if values else tensors


def tensor_bounds(options):
    return {key: torch.tensor(value) if key.startswith("key_") else value for key, value in options.items()}


def assert_same(attend, explicit, tensors):
    """The same output, and the same gradient of a random projection of it with respect to every input."""
    ours, theirs = attend(*tensors), explicit(*tensors)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    direction = torch.randn_like(theirs)
    for mine, wanted in zip(
        torch.autograd.grad((ours * direction).sum(), tensors),
        torch.autograd.grad((theirs * direction).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_equation(name):
    L, M, N, options = CASES[name]
    options = tensor_bounds(options)
    assert_same(
        lambda *t: relative_attention(*t, **options), lambda *t: explicit_attention(*t, **options), inputs(L, M, N)
    )


@pytest.mark.parametrize("name", ["rows end early (clamp_len)", "bidirectional, clipped on both sides", "key_start"])
def test_shared_rows_and_value_rows(name):
    L, M, N, options = CASES[name]
    options = tensor_bounds(options)
    assert_same(
        lambda *t: relative_attention(*t[:6], values=t[6], **options),
        lambda *t: explicit_attention(*t[:6], values=t[6], **options),
        inputs(L, M, N, shared_rows=True, values=True),
    )


def test_without_the_biases():
    tensors = inputs(4, 3, 7)[:4]
    assert_same(relative_attention, explicit_attention, tensors)


def test_gradcheck():
    tensors = inputs(3, 2, 4)
    key_start = torch.tensor([0, 2])
    assert torch.autograd.gradcheck(lambda *t: relative_attention(*t, window=3, key_start=key_start), tensors)


def test_non_contiguous_inputs():
    tensors = inputs(4, 3, 7)
    strided = [t.detach().transpose(-2, -1).contiguous().transpose(-2, -1).requires_grad_() for t in tensors]
    torch.testing.assert_close(relative_attention(*strided), relative_attention(*tensors))


def test_dependence_is_exactly_causal():
    """Output i depends on every key j with j <= M + i, and on no later one."""
    L, M = 4, 3
    q, k, v, r, u, w = (t.detach() for t in inputs(L, M, L + M))
    for select in (lambda x: (k + x, v), lambda x: (k, v + x)):
        jacobian = torch.autograd.functional.jacobian(
            lambda x, select=select: relative_attention(q, *select(x), r, u, w), torch.zeros_like(k)
        )
        depends = jacobian.abs().sum((0, 1, 3, 4, 5, 7)) > 0  # [L, S]
        assert torch.equal(depends, torch.ones(L, L + M, dtype=torch.bool).tril(M))


def test_shift_worked_example():
    x = torch.tensor([[13, 12, 11, 10], [23, 22, 21, 20], [33, 32, 31, 30]])
    assert relative_shift(x).tolist() == [[11, 10, 0, 23], [22, 21, 20, 0], [33, 32, 31, 30]]


def test_shift_is_a_gather():
    x = torch.randn(2, 3, 5, 9)
    y = relative_shift(x)
    for i in range(5):
        seen = 9 - (4 - i)
        torch.testing.assert_close(y[..., i, :seen], x[..., i, 4 - i :])


def test_dropout_uses_the_generator_and_scales():
    q, k, v, r, u, w = (t.detach().float() for t in inputs(4, 60, 64))
    torch.manual_seed(0)
    first = relative_attention(q, k, v, r, u, w, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, relative_attention(q, k, v, r, u, w, dropout_p=0.5))
    assert not torch.equal(first, relative_attention(q, k, v, r, u, w, dropout_p=0.5))
    mean = torch.stack([relative_attention(q, k, v, r, u, w, dropout_p=0.5) for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, relative_attention(q, k, v, r, u, w), atol=0.06, rtol=0)


def test_bfloat16_against_float64():
    tensors = [t.detach() for t in inputs(8, 24, 32)]
    exact = relative_attention(*tensors)
    low = relative_attention(*(t.bfloat16() for t in tensors))
    assert low.dtype == torch.bfloat16
    assert (low.double() - exact).norm() / exact.norm() < 0.02


def test_a_masked_key_may_hold_anything():
    q, k, v, r, u, w = (t.detach() for t in inputs(3, 4, 7))
    key_start = torch.tensor([2, 4])
    wanted = relative_attention(q, k, v, r, u, w, key_start=key_start)
    for b, first in enumerate(key_start.tolist()):
        k[b, :, :first], v[b, :, :first] = 1e3, 1e3
    torch.testing.assert_close(relative_attention(q, k, v, r, u, w, key_start=key_start), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "fast"}, "backend"),
        ({"k": torch.zeros(2, 3, 7, 3)}, "expected q"),
        ({"v": torch.zeros(2, 2, 6, 3)}, "expected v"),
        ({"r": torch.zeros(2, 7, 4)}, "expected r"),
        ({"r": torch.zeros(2, 0, 3)}, "at least one row"),
        ({"u": torch.zeros(3)}, "expected u"),
        ({"window": -1}, "window"),
        ({"key_start": torch.zeros(3)}, "key_start"),
    ],
)
def test_errors_name_what_was_found(change, message):
    names = ("q", "k", "v", "r", "u", "w")
    arguments = dict(zip(names, (t.detach().float() for t in inputs(4, 3, 7)), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        relative_attention(**arguments)
