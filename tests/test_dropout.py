"""Our dropout has the distribution of torch's."""

import pytest
import torch
import torch.nn.functional as F

from txl.dropout import Dropout, dropout


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (64, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_elements_are_zero_or_scaled(p, shape, dtype):
    x = torch.ones(shape, dtype=dtype)
    y = dropout(x, p)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    kept = y[y != 0]
    torch.testing.assert_close(
        kept, torch.full_like(kept, 1 / (1 - p)), rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=0
    )
    assert torch.equal(x, torch.ones_like(x))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.75])
def test_the_share_of_zeros_is_p_wherever_one_looks(p):
    """Over all, and over each of the four elements that share a random number; 5 standard deviations."""
    torch.manual_seed(0)
    dropped = dropout(torch.ones(400_000), p) == 0
    for part in (dropped, *dropped.view(-1, 4).T):
        assert abs(part.double().mean() - p) < 5 * (p * (1 - p) / part.numel()) ** 0.5
    pairs = (dropped[:-1] & dropped[1:]).double().mean()  # neighbours are independent
    assert abs(pairs - p * p) < 5 * (p * p * (1 - p * p) / len(dropped)) ** 0.5 * 1.5


def test_the_gradient_is_the_mask():
    x = torch.randn(50, 20, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    y = dropout(x, 0.4)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(y, 1 / (1 - round(0.4 * 65536) / 65536)).masked_fill(y == 0, 0))


def test_seeds_hold_and_calls_differ():
    x = torch.ones(1000)
    torch.manual_seed(1)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(first, second)


def test_off_in_evaluation():
    module, x = Dropout(0.5), torch.randn(10)
    assert not torch.equal(module(x), x)
    assert module.eval()(x) is x


def test_views_that_are_not_contiguous():
    x = torch.randn(6, 8).T
    y = dropout(x, 0.5)
    assert torch.equal(y[y != 0], (x * 2)[y != 0])


def test_compiled_code_takes_torchs(monkeypatch):
    called = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(F, "dropout", lambda x, p: called.append(p) or x)
    dropout(torch.ones(3), 0.2)
    assert called == [0.2]


def test_the_ends_of_the_range():
    x = torch.randn(100_000)
    assert not dropout(x, 1.0).any()
    assert dropout(x, 0.0) is x
    for p in (-0.1, 1.1):
        with pytest.raises(ValueError, match="dropout must be in"):
            dropout(x, p)
