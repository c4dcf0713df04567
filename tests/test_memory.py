"""Memory in isolation: what it keeps, where rows start, what reset forgets."""

import pytest
import torch

from txl.memory import Memory

N_LAYER, B, D = 2, 3, 4


def layer_inputs(L, first=0):
    """Recognisable inputs: layer n, row b, position p holds 1000 n + 100 b + p in every channel."""
    n, b, p = torch.arange(N_LAYER), torch.arange(B), torch.arange(first, first + L)
    values = 1000.0 * n[:, None, None] + 100.0 * b[:, None] + p
    return [x[..., None].repeat(1, 1, D) for x in values]


def positions(memory, layer=0, row=0):
    """The positions that a row of a layer holds, as layer_inputs numbers them."""
    return (memory.states[layer][row, :, 0] - 1000 * layer - 100 * row).tolist()


@pytest.mark.parametrize("mem_len", [0, 1, 5])
def test_new_is_empty(mem_len):
    memory = Memory.new(N_LAYER, B, D, mem_len)
    assert [m.shape for m in memory.states] == [(B, 0, D)] * N_LAYER
    assert memory.length == 0
    assert memory.mem_len == mem_len
    assert memory.start.tolist() == [0] * B
    assert memory.start.dtype == torch.int64
    assert not memory.zeros
    assert not memory.ragged


@pytest.mark.parametrize("mem_len", [0, 1, 5])
def test_new_of_zeros_holds_mem_len_positions(mem_len):
    memory = Memory.new(N_LAYER, B, D, mem_len, zeros=True)
    assert [m.shape for m in memory.states] == [(B, mem_len, D)] * N_LAYER
    assert all(not m.any() for m in memory.states)
    assert memory.length == mem_len
    assert memory.start.tolist() == [0] * B
    assert memory.zeros


def test_new_takes_dtype_and_device():
    memory = Memory.new(N_LAYER, B, D, 2, zeros=True, device="meta", dtype=torch.float64)
    assert {(m.device.type, m.dtype) for m in memory.states} == {("meta", torch.float64)}
    assert memory.start.device.type == "meta"


@pytest.mark.parametrize("lengths", [[1] * 9, [2, 2, 2], [3, 1, 4, 1, 5], [7], [1, 7], [9, 1]])
@pytest.mark.parametrize("mem_len", [0, 1, 2, 3, 7, 100])
def test_next_keeps_the_last_mem_len_positions(lengths, mem_len):
    memory, seen = Memory.new(N_LAYER, B, D, mem_len), 0
    for L in lengths:
        memory = memory.next(layer_inputs(L, seen))
        seen += L
        kept = min(seen, mem_len)
        assert memory.length == kept
        assert memory.mem_len == mem_len
        for layer in range(N_LAYER):
            for row in range(B):
                assert positions(memory, layer, row) == list(range(seen - kept, seen))


@pytest.mark.parametrize("lengths", [[1] * 9, [3, 1, 4], [7]])
@pytest.mark.parametrize("mem_len", [0, 1, 5])
def test_zeros_never_change_length_and_leave_oldest_first(lengths, mem_len):
    memory, seen = Memory.new(N_LAYER, B, D, mem_len, zeros=True), 0
    for L in lengths:
        memory = memory.next(layer_inputs(L, seen + 1))
        seen += L
        assert memory.length == mem_len
        assert memory.zeros
        assert positions(memory) == ([0.0] * mem_len + [float(p) for p in range(1, seen + 1)])[seen:]


def test_next_leaves_the_memory_before_it_alone():
    first = Memory.new(N_LAYER, B, D, 4).next(layer_inputs(3)).reset(torch.tensor([1]))
    states, start = [m.clone() for m in first.states], first.start.clone()
    first.next(layer_inputs(2, 3))
    assert first.length == 3
    assert all(torch.equal(m, s) for m, s in zip(first.states, states, strict=True))
    assert torch.equal(first.start, start)


@pytest.mark.parametrize(("mem_len", "L"), [(0, 3), (2, 3), (4, 3), (9, 3)])
def test_next_owns_its_storage(mem_len, L):
    """A slice of the segment would keep the whole segment alive, and follow changes made to it in place."""
    memory = Memory.new(N_LAYER, B, D, mem_len).next(layer_inputs(2))
    inputs = layer_inputs(L, 2)
    after = memory.next(inputs)
    states = [m.clone() for m in after.states]
    for tensor in (*inputs, *memory.states):
        tensor.fill_(-1)
    assert all(torch.equal(m, s) for m, s in zip(after.states, states, strict=True))
    for m in after.states:
        assert m.untyped_storage().nbytes() == m.numel() * m.element_size()


@pytest.mark.parametrize("mem_len", [0, 2, 9])
def test_next_is_detached(mem_len):
    inputs = [x.requires_grad_() * 2 for x in layer_inputs(3)]
    memory = Memory.new(N_LAYER, B, D, mem_len).next(inputs)
    assert all(m.grad_fn is None and not m.requires_grad for m in memory.states)


def test_next_wants_the_inputs_of_every_layer():
    with pytest.raises(ValueError, match=r"zip\(\)"):
        Memory.new(N_LAYER, B, D, 4).next(layer_inputs(3)[:1])


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        (torch.tensor([1]), [1]),
        (torch.tensor([2, 0]), [0, 2]),
        (torch.tensor([False, True, True]), [1, 2]),
        (torch.tensor([False, False, False]), []),
        (torch.tensor([], dtype=torch.int64), []),
    ],
)
def test_reset_of_an_empty_memory_moves_the_start(rows, chosen):
    memory = Memory.new(N_LAYER, B, D, 5).next(layer_inputs(4))
    after = memory.reset(rows)
    assert after.start.tolist() == [4 if row in chosen else 0 for row in range(B)]
    assert after.length == 4
    assert all(torch.equal(m, s) for m, s in zip(after.states, memory.states, strict=True))
    assert memory.start.tolist() == [0] * B  # a value: the one before is as it was
    assert not memory.ragged


def test_reset_makes_the_memory_ragged_and_next_keeps_it_so():
    memory = Memory.new(N_LAYER, B, D, 5).next(layer_inputs(4)).reset(torch.tensor([1]))
    assert memory.ragged
    assert memory.next(layer_inputs(1, 4)).ragged


@pytest.mark.parametrize("mem_len", [0, 1, 3, 4, 6, 20])
def test_start_follows_what_is_dropped_and_stops_at_zero(mem_len):
    """After a reset, the valid positions of a row are exactly those since the reset."""
    memory, seen = Memory.new(N_LAYER, B, D, mem_len), 0
    born = [0] * B  # first position each row may still see
    for L, rows in [(2, []), (3, [1]), (1, []), (2, [0]), (1, [1]), (4, []), (9, [])]:
        memory = memory.reset(torch.tensor(rows, dtype=torch.int64))
        for row in rows:
            born[row] = seen
        memory = memory.next(layer_inputs(L, seen))
        seen += L
        assert (memory.start >= 0).all()
        for row in range(B):
            wanted = list(range(max(born[row], seen - mem_len), seen))
            assert positions(memory, row=row)[int(memory.start[row]) :] == wanted


def test_two_resets_without_a_segment_between():
    memory = Memory.new(N_LAYER, B, D, 5).next(layer_inputs(3))
    after = memory.reset(torch.tensor([0])).reset(torch.tensor([2]))
    assert after.start.tolist() == [3, 0, 3]


def test_reset_of_zeros_puts_zeros_back():
    memory = Memory.new(N_LAYER, B, D, 3, zeros=True).next(layer_inputs(5, 1))
    states = [m.clone() for m in memory.states]
    after = memory.reset(torch.tensor([1]))
    assert after.start.tolist() == [0] * B  # zeros are attended to
    assert after.length == 3
    for m, before, was in zip(after.states, memory.states, states, strict=True):
        assert not m[1].any()
        assert torch.equal(m[[0, 2]], was[[0, 2]])
        assert torch.equal(before, was)


def test_reset_before_the_first_segment_changes_nothing():
    memory = Memory.new(N_LAYER, B, D, 3).reset(torch.tensor([0, 1]))
    assert memory.start.tolist() == [0] * B
    assert memory.next(layer_inputs(2)).start.tolist() == [0] * B


def test_a_row_that_does_not_exist_is_refused():
    with pytest.raises(IndexError):
        Memory.new(N_LAYER, B, D, 3).reset(torch.tensor([B]))


@pytest.mark.parametrize("L", [1, 9])
def test_the_dtype_of_the_memory_stays(L):
    memory = Memory.new(N_LAYER, B, D, 4, dtype=torch.float64).next(layer_inputs(2)).next(layer_inputs(L))
    assert {m.dtype for m in memory.states} == {torch.float64}
