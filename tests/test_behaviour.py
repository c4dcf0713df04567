"""The language model and its backbone as a whole: what may depend on what, and what may not.

Unless a test says otherwise: evaluation mode, float64, weights large enough that everything matters.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from explicit import explicit_attention

from txl.attention import sinusoid
from txl.memory import Memory
from txl.model import Backbone, ModelConfig, TransformerXL

V, D = 13, 16


def make(seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    sizes = {"vocab_size": V, "n_layer": 2, "n_head": 2, "d_model": D, "d_inner": 24, "mem_len": 4}
    return TransformerXL(ModelConfig(**({"init_std": 0.3, "proj_init_std": 0.3} | sizes | options))).to(dtype).eval()


def tokens(B, L, seed=1):
    return torch.randint(V, (B, L), generator=torch.Generator().manual_seed(seed))


def vectors(B, L, seed=1):
    return torch.randn(B, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(model, text, lengths, memory=None):
    """Logits of a text in segments of these lengths, and the memory after it."""
    logits = []
    for segment in text.split(lengths, 1):
        out = model(segment, memory)
        memory = out.memory
        logits.append(out.logits)
    return torch.cat(logits, 1), memory


def close(ours, wanted, atol=1e-10):
    torch.testing.assert_close(ours, wanted, rtol=0, atol=atol)


def explicit_model(model, text, past, window=None, clamp_len=0):
    """Logits by loops over (i, j), straight from the equations, after `past`: for each layer its inputs [B, M, D]."""

    def heads(states, weight):
        return (states @ weight.T).unflatten(-1, (attention.n_head, attention.d_head)).transpose(-3, -2)

    def norm(states, layer_norm):
        centred = states - states.mean(-1, keepdim=True)
        variance = (centred**2).mean(-1, keepdim=True)
        return centred / (variance + layer_norm.eps).sqrt() * layer_norm.weight + layer_norm.bias

    backbone, pre = model.backbone, model.config.pre_lnorm
    h = model.embedding.weight[text]
    if model.embedding.proj is not None:
        h = h @ model.embedding.proj.T
    h = h * D**0.5
    L = text.shape[1]
    for layer, memory in zip(backbone.layers, past, strict=True):
        attention = layer.attention
        S = memory.shape[1] + L
        distances = torch.tensor([min(t, clamp_len) if clamp_len else t for t in range(S)])
        seen = torch.cat([memory.detach(), h], 1)
        seen = norm(seen, layer.attention_norm) if pre else seen
        out = explicit_attention(
            heads(seen[:, -L:], attention.w_q.weight),
            heads(seen, attention.w_kE.weight),
            heads(seen, attention.w_v.weight),
            heads(sinusoid(distances, D, h.dtype), attention.w_kR.weight),
            attention.u if backbone.u is None else backbone.u,
            attention.v if backbone.v is None else backbone.v,
            window=window,
        )
        out = h + out.transpose(1, 2).flatten(2) @ attention.w_o.weight.T
        h = out if pre else norm(out, layer.attention_norm)
        first, second = (m for m in layer.feed_forward if isinstance(m, torch.nn.Linear))
        inner = norm(h, layer.feed_forward_norm) if pre else h
        out = h + (inner @ first.weight.T + first.bias).clamp(min=0) @ second.weight.T + second.bias
        h = out if pre else norm(out, layer.feed_forward_norm)
    if pre and model.config.final_norm:
        h = norm(h, backbone.final_norm)
    if model.softmax.proj is not None:
        h = h @ model.softmax.proj
    weight = model.embedding.weight if model.softmax.weight is None else model.softmax.weight
    return h @ weight.T + model.softmax.bias


VARIANTS = {
    "post-LN": {},
    "pre-LN": {"pre_lnorm": True},
    "pre-LN, no final norm": {"pre_lnorm": True, "final_norm": False},
    "untie_r": {"untie_r": True},
    "clamp_len": {"clamp_len": 2},
    "pre-LN, untie_r, clamp_len": {"pre_lnorm": True, "untie_r": True, "clamp_len": 3},
}

# The equations


@pytest.mark.parametrize(
    "options",
    [*VARIANTS.values(), {"d_embed": 10}, {"d_embed": 10, "tie_weight": False}, {"d_head": 3}, {"same_length": True}],
    ids=str,
)
def test_equals_the_equations(options):
    """Values, and the gradient of every parameter, with a memory from segments before."""
    model = make(**options)
    memory = run(model, tokens(2, 5, 2), [2, 3])[1]
    text = tokens(2, 3)
    config = model.config
    window = config.mem_len - 1 if config.same_length else None
    ours = model(text, memory).logits
    theirs = explicit_model(model, text, memory.states, window, config.clamp_len)
    close(ours, theirs)
    direction = torch.randn_like(ours)
    ours = torch.autograd.grad((ours * direction).sum(), list(model.parameters()))
    theirs = torch.autograd.grad((theirs * direction).sum(), list(model.parameters()))
    for (name, _), mine, wanted in zip(model.named_parameters(), ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


# Segments

N = 11
SEGMENTS = {"1": [1] * N, "2": [2, 2, 2, 2, 2, 1], "3": [3, 3, 3, 2], "5": [5, 5, 1], "ragged": [4, 1, 3, 1, 2]}


@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_segments_that_fit_in_memory_equal_one_pass(name, lengths):
    model, text, targets = make(mem_len=N, **VARIANTS[name]), tokens(2, N), tokens(2, N, 2)
    whole = model(text)
    logits, memory = run(model, text, lengths)
    close(logits, whole.logits)
    for ours, wanted in zip(memory.states, whole.memory.states, strict=True):
        close(ours, wanted)

    nll, memory = [], None
    for segment, target in zip(text.split(lengths, 1), targets.split(lengths, 1), strict=True):
        out = model(segment, memory, target)
        memory = out.memory
        nll.append(out.nll)
    close(torch.cat(nll, 1), model(text, targets=targets).nll)


@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_segments_equal_one_pass_in_float32(name, lengths):
    model, text = make(dtype=torch.float32, mem_len=N, init_std=0.1, **VARIANTS[name]), tokens(2, N)
    close(run(model, text, lengths)[0], model(text).logits, 1e-5)


def test_a_memory_that_is_too_short_does_not_equal_one_pass():
    model, text = make(mem_len=3), tokens(2, N)
    assert (run(model, text, [2, 2, 2, 2, 3])[0] - model(text).logits).abs().max() > 1e-3


@pytest.mark.parametrize("mem_len", [0, 1, 2, 3, 7, 20])
@pytest.mark.parametrize("name", [*VARIANTS, "zeros"])
def test_same_length_makes_the_segmentation_irrelevant(name, mem_len):
    """From the first token on, so also while the memory still grows, and for texts longer than the memory."""
    options = VARIANTS.get(name, {"memory_init": "zeros"})
    model, text = make(mem_len=mem_len, same_length=True, **options), tokens(2, N)
    whole = model(text).logits
    assert whole.isfinite().all()
    for lengths in SEGMENTS.values():
        close(run(model, text, lengths)[0], whole)


def test_same_length_without_memory_sees_one_token_at_a_time():
    model, text = make(mem_len=0, same_length=True), tokens(2, 6)
    alone = torch.cat([model(token).logits for token in text.split(1, 1)], 1)
    close(model(text).logits, alone)


def test_without_memory_segments_are_on_their_own():
    model, text = make(mem_len=0), tokens(2, 8)
    logits, memory = run(model, text, [3, 5])
    assert memory.length == 0
    close(logits, torch.cat([model(text[:, :3]).logits, model(text[:, 3:]).logits], 1))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_longer_memory_than_in_training(name):
    model, text = make(mem_len=2, **VARIANTS[name]), tokens(2, N)
    memory = model.init_memory(2, mem_len=N)
    logits, memory = run(model, text, [1, 3, 2, 5], memory)
    assert memory.length == memory.mem_len == N
    close(logits, model(text).logits)


def test_the_mem_len_of_a_memory_holds_for_what_follows():
    model, text = make(mem_len=4), tokens(2, N)
    for mem_len in (0, 1, 3, 20):
        memory = run(model, text, [2, 3, 6], model.init_memory(2, mem_len))[1]
        assert memory.mem_len == mem_len
        assert memory.length == min(mem_len, N)
    same_length = make(mem_len=2, same_length=True)
    wanted = make(mem_len=5, same_length=True)  # the same weights
    close(run(same_length, text, [3, 8], same_length.init_memory(2, 5))[0], wanted(text).logits)


def test_an_absent_memory_is_a_new_one():
    for memory_init in ("empty", "zeros"):
        model, text = make(memory_init=memory_init), tokens(2, 5)
        assert torch.equal(model(text).logits, model(text, model.init_memory(2)).logits)


# What depends on what


def sees_inputs(backbone, h, memory=None):
    """[L, L] bool by the Jacobian: output i depends on input j of the segment. Row i in one random direction."""
    h = h.clone().requires_grad_()
    out = backbone(h, memory)[0] * vectors(*h.shape[:2], seed=99)
    gradients = [torch.autograd.grad(out[:, i].sum(), h, retain_graph=True)[0] for i in range(h.shape[1])]
    return torch.stack([gradient.any(-1).any(0) for gradient in gradients])


def sees_memory(backbone, h, memory):
    """[L, M] bool: output i is another one when position j of the memory is, in all layers."""
    wanted, columns = backbone(h, memory)[0], []
    for j in range(memory.length):
        states = tuple(m.clone() for m in memory.states)
        for m in states:
            m[:, j] = -m[:, j] + 1
        columns.append((backbone(h, dataclasses.replace(memory, states=states))[0] != wanted).any(-1).any(0))
    return torch.stack(columns, 1) if columns else torch.zeros(h.shape[1], 0, dtype=torch.bool)


def filled(backbone, M, mem_len, seed=7):
    """A memory of M random positions."""
    states = tuple(vectors(1, M, seed + n) for n in range(backbone.config.n_layer))
    return Memory(states, torch.zeros(1, dtype=torch.int64), mem_len)


@pytest.mark.parametrize("M", [0, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_output_depends_on_inputs_up_to_itself_and_on_the_memory(name, M):
    backbone, L = make(**VARIANTS[name]).backbone, 5
    memory = filled(backbone, M, 4)
    assert torch.equal(sees_inputs(backbone, vectors(1, L), memory), torch.ones(L, L, dtype=torch.bool).tril())
    assert sees_memory(backbone, vectors(1, L), memory).all()


def test_a_later_token_changes_no_earlier_logits():
    model, text = make(), tokens(2, 8)
    memory = run(model, tokens(2, 5, 2), [5])[1]
    wanted = model(text, memory).logits
    for i in range(8):
        changed = text.clone()
        changed[:, i] = (changed[:, i] + 1) % V
        differs = (model(changed, memory).logits != wanted).any(-1)
        assert not differs[:, :i].any()
        assert differs[:, i:].all()


@pytest.mark.parametrize("mem_len", [0, 1, 2, 3, 4, 6, 50])
@pytest.mark.parametrize("M", [0, 1, 3, 6])
def test_same_length_sees_exactly_mem_len_keys(M, mem_len):
    """min(mem_len, available) keys, itself among them and always the nearest; itself alone for mem_len 0."""
    backbone, L = make(n_layer=1, same_length=True).backbone, 5
    M = min(M, mem_len)
    memory = filled(backbone, M, mem_len)
    h = vectors(1, L)
    sees = torch.cat([sees_memory(backbone, h, memory), sees_inputs(backbone, h, memory)], 1)
    for i, row in enumerate(sees.tolist()):
        available = M + i + 1
        number = min(max(mem_len, 1), available)
        wanted = [available - number <= j < available for j in range(M + L)]
        assert row == wanted


def test_same_length_is_a_plain_attribute():
    model, text = make(mem_len=3), tokens(1, 8)
    model.backbone.same_length = True
    close(model(text).logits, make(mem_len=3, same_length=True)(text).logits)
    assert not torch.equal(model(text).logits, make(mem_len=3)(text).logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_gradient_reaches_the_memory(name):
    model = make(**VARIANTS[name])
    memory = run(model, tokens(2, 4, 2), [4])[1]
    states = tuple(m.clone().requires_grad_() for m in memory.states)
    model(tokens(2, 3), dataclasses.replace(memory, states=states), tokens(2, 3, 2)).loss.backward()
    assert all(m.grad is None or not m.grad.any() for m in states)


def test_no_gradient_crosses_segments():
    """The embedding of a token that occurs only in the segment before gets no gradient."""
    model = make(tie_weight=False)
    before, after = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    model(after, model(before).memory, after).loss.backward()
    assert model.embedding.weight.grad.any(1).nonzero().flatten().tolist() == [4, 5, 6]


def test_keys_and_values_learn_from_memory_positions():
    """Memory that lives in channels where the segment is zero: there W_kE and W_v learn from the memory only."""
    backbone, half = make(n_layer=1).backbone, D // 2
    h = vectors(1, 3)
    h[..., :half] = 0
    memory = filled(backbone, 4, 4)
    memory.states[0][..., half:] = 0
    gradients = {}
    for M in (0, 2, 4):
        backbone.zero_grad()
        held = dataclasses.replace(memory, states=(memory.states[0][:, 4 - M :],))
        (backbone(h, held)[0] * vectors(1, 3, 5)).sum().backward()
        for projection in ("w_kE", "w_v"):
            gradients[projection, M] = getattr(backbone.layers[0].attention, projection).weight.grad.clone()
    for projection in ("w_kE", "w_v"):
        assert not gradients[projection, 0][:, :half].any()
        assert gradients[projection, 2][:, :half].any(0).all()
        assert gradients[projection, 4][:, :half].any(0).all()
        assert not torch.allclose(gradients[projection, 2], gradients[projection, 4])
    assert not backbone.layers[0].attention.w_q.weight.grad[:, :half].any()  # no queries from the memory


# The memory that comes back


@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
@pytest.mark.parametrize("mem_len", [0, 1, 3, 20])
@pytest.mark.parametrize("name", ["post-LN", "pre-LN"])
def test_memory_is_the_last_positions_of_memory_and_layer_inputs(name, mem_len, memory_init):
    model = make(n_layer=3, mem_len=mem_len, memory_init=memory_init, **VARIANTS[name])
    layer_inputs = {}
    for n, layer in enumerate(model.backbone.layers):
        layer.register_forward_pre_hook(lambda _, args, n=n: layer_inputs.update({n: args[0].clone()}))
    memory, text = model.init_memory(2), tokens(2, N)
    for segment in text.split([2, 1, 5, 3], 1):
        states, start = [m.clone() for m in memory.states], memory.start.clone()
        after = model(segment, memory).memory
        assert all(torch.equal(m, s) for m, s in zip(memory.states, states, strict=True))
        assert torch.equal(memory.start, start)
        for n, m in enumerate(after.states):
            history = torch.cat([states[n], layer_inputs[n]], 1)
            assert torch.equal(m, history[:, max(history.shape[1] - mem_len, 0) :])
            assert m.shape[1] <= mem_len
            assert m.grad_fn is None
            assert not m.requires_grad
        memory = after


@pytest.mark.parametrize("options", [{}, {"d_embed": 10}])
@pytest.mark.parametrize("mem_len", [1, 4, 20])
def test_first_state_is_the_embedding_of_the_last_tokens(mem_len, options):
    model, text = make(mem_len=mem_len, **options), tokens(2, N)
    for lengths in SEGMENTS.values():
        memory = run(model, text, lengths)[1]
        close(memory.states[0], model.embedding(text[:, -mem_len:]))


def test_one_memory_can_be_continued_twice():
    model = make()
    memory = run(model, tokens(2, 5), [5])[1]
    first = model(tokens(2, 3, 2), memory)
    model(tokens(2, 9, 3), memory)
    again = model(tokens(2, 3, 2), memory)
    assert torch.equal(first.logits, again.logits)
    assert all(torch.equal(a, b) for a, b in zip(first.memory.states, again.memory.states, strict=True))


def test_changing_tokens_in_place_changes_no_memory():
    model, text = make(mem_len=20), tokens(2, 5)
    memory = model(text).memory
    states = [m.clone() for m in memory.states]
    text.fill_(0)
    model(text, memory)
    assert all(torch.equal(m, s) for m, s in zip(memory.states, states, strict=True))


def test_zeros_are_attended_to_and_keep_their_length():
    empty, zeros, text = make(), make(memory_init="zeros"), tokens(2, 9)
    memory = zeros.init_memory(2)
    assert memory.length == 4
    assert not torch.equal(empty(text).logits, zeros(text).logits)
    for segment in text.split([1, 2, 5, 1], 1):
        memory = zeros(segment, memory).memory
        assert memory.length == 4
    past = [torch.zeros(2, 4, D, dtype=torch.float64)] * 2
    close(zeros(text).logits, explicit_model(zeros, text, past))


# Rows of a batch


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_do_not_depend_on_each_other(name):
    model, text, other = make(**VARIANTS[name]), tokens(3, 9), tokens(3, 9, 2)
    changed = text.clone()
    changed[1] = other[1]
    ours, memory = run(model, text, [4, 2, 3])
    theirs, other_memory = run(model, changed, [4, 2, 3])
    assert torch.equal(ours[[0, 2]], theirs[[0, 2]])
    assert not torch.equal(ours[1], theirs[1])
    for m, n in zip(memory.states, other_memory.states, strict=True):
        assert torch.equal(m[[0, 2]], n[[0, 2]])


def test_permuted_rows_give_permuted_outputs():
    model, text, order = make(), tokens(4, 9), torch.tensor([2, 0, 3, 1])
    ours, memory = run(model, text, [4, 5])
    theirs, other_memory = run(model, text[order], [4, 5])
    close(theirs, ours[order])
    close(other_memory.states[1], memory.states[1][order])


def test_a_row_gives_the_same_alone_and_in_a_batch():
    model, text = make(), tokens(4, 9)
    close(run(model, text, [4, 5])[0][2:3], run(model, text[2:3], [4, 5])[0])


RESETS = {
    "empty": {},
    "zeros": {"memory_init": "zeros"},
    "empty, pre-LN, clamp_len": {"pre_lnorm": True, "clamp_len": 2},
    "empty, same_length": {"same_length": True},
    "zeros, same_length": {"memory_init": "zeros", "same_length": True},
    "empty, mem_len 0": {"mem_len": 0},
    "empty, mem_len 1": {"mem_len": 1},
    "empty, mem_len longer than the text": {"mem_len": 50},
}


@pytest.mark.parametrize("name", RESETS)
def test_a_reset_row_goes_on_as_from_a_new_memory(name):
    """In the segments after the reset too, with the memory full or growing, and after a second reset."""
    model = make(**RESETS[name])
    memory = run(model, tokens(3, 7, 2), [3, 4])[1]
    kept, reset, text = memory, memory.reset(torch.tensor([1])), tokens(3, 12, 3)
    fresh = model.init_memory(1)
    for k, segment in enumerate(text.split([2, 3, 1, 6], 1)):
        if k == 2:
            reset, fresh = reset.reset(torch.tensor([False, True, False])), model.init_memory(1)
        ours, other, alone = model(segment, reset), model(segment, kept), model(segment[1:2], fresh)
        close(ours.logits[1:2], alone.logits)
        close(ours.logits[[0, 2]], other.logits[[0, 2]], 1e-12)
        reset, kept, fresh = ours.memory, other.memory, alone.memory


def test_a_reset_row_forgets_and_the_others_remember():
    model, text = make(mem_len=8), tokens(2, 4)
    one, other = (run(model, tokens(2, 6, seed), [6])[1] for seed in (2, 3))
    logits = [model(text, memory.reset(torch.tensor([0]))).logits for memory in (one, other)]
    close(logits[0][0], logits[1][0])
    assert not torch.allclose(logits[0][1], logits[1][1])


@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
def test_reset_of_every_row_is_a_new_memory(memory_init):
    model, text = make(memory_init=memory_init), tokens(2, 9, 3)
    memory = run(model, tokens(2, 7), [7])[1].reset(torch.tensor([True, True]))
    close(run(model, text, [2, 4, 3], memory)[0], run(model, text, [2, 4, 3])[0])


def test_a_reset_row_has_finite_gradients():
    model = make()
    memory = run(model, tokens(2, 7), [7])[1].reset(torch.tensor([0]))
    model(tokens(2, 3), memory, tokens(2, 3, 2)).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# Positions


@pytest.mark.parametrize("clamp_len", [1, 2, 5])
def test_distances_beyond_clamp_len_count_as_clamp_len(clamp_len):
    model, text = make(mem_len=6), tokens(2, 4)
    memory = run(model, tokens(2, 6, 2), [6])[1]
    free = model(text, memory).logits
    model.backbone.clamp_len = clamp_len
    clamped = model(text, memory).logits
    close(clamped, explicit_model(model, text, memory.states, clamp_len=clamp_len))
    assert (clamped - free).abs().max() > 1e-3
    close(clamped, make(mem_len=6, clamp_len=clamp_len)(text, memory).logits)  # as by the configuration
    model.backbone.clamp_len = 0
    assert torch.equal(model(text, memory).logits, free)


def test_clamp_len_of_the_farthest_distance_is_no_clamp():
    model, text = make(mem_len=6), tokens(2, 4)
    memory = run(model, tokens(2, 6, 2), [6])[1]
    free = model(text, memory).logits
    for clamp_len, same in ((8, False), (9, True), (10, True), (1000, True)):
        model.backbone.clamp_len = clamp_len
        assert torch.allclose(model(text, memory).logits, free, rtol=0, atol=1e-12) is same


def record_R(model):
    """A list that gets the R of every layer at every step."""
    seen = []
    for layer in model.backbone.layers:
        layer.attention.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["R"]), with_kwargs=True, prepend=True
        )
    return seen


def test_dropout_of_R_is_one_mask_a_step_for_all_layers():
    model, p = make(n_layer=3, dropout=0.25).train(), 0.25
    seen = record_R(model)
    text = tokens(2, 8)
    model(text)
    model(text)
    assert len(seen) == 6
    assert seen[0] is seen[1] is seen[2]
    assert seen[3] is seen[4] is seen[5]
    assert not torch.equal(seen[0], seen[3])
    R = sinusoid(torch.arange(8), D, torch.float64)
    for masked in (seen[0], seen[3]):
        dropped = (masked == 0) & (R != 0)
        assert 0 < dropped.sum() < R.numel() / 2
        close(masked[~dropped], R[~dropped] / (1 - p))


def test_no_dropout_of_R_in_evaluation():
    model = make(dropout=0.5)
    seen = record_R(model)
    model(tokens(2, 8))
    for R in seen:
        assert torch.equal(R, sinusoid(torch.arange(8), D, torch.float64))


def test_evaluation_has_no_dropout_and_training_has():
    model, text = make(dropout=0.2, dropatt=0.2), tokens(2, 6)
    assert torch.equal(model(text).logits, model(text).logits)
    close(model(text).logits, make()(text).logits)
    model.train()
    assert not torch.equal(model(text).logits, model(text).logits)


def test_positions_stay_exact_in_bfloat16():
    model = make(d_head=8, memory_init="zeros", mem_len=1010, dtype=torch.bfloat16)
    seen = record_R(model)
    model(tokens(1, 2))
    exact = sinusoid(torch.arange(1012), D, torch.float32)
    for R in seen:
        assert R.dtype == torch.bfloat16
        assert torch.equal(R, exact.bfloat16())
        assert len({tuple(row) for row in R[1000:1011].tolist()}) == 11


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_is_near_float32(name):
    full, text = make(dtype=torch.float32, mem_len=16, init_std=0.1, **VARIANTS[name]), tokens(2, 24)
    half = make(dtype=torch.bfloat16, mem_len=16, init_std=0.1, **VARIANTS[name])
    wanted, (ours, memory) = run(full, text, [8, 16])[0], run(half, text, [8, 16])
    assert ours.dtype == torch.bfloat16
    assert {m.dtype for m in memory.states} == {torch.bfloat16}
    error = (ours.float() - wanted).norm() / wanted.norm()
    assert 0 < error < 0.05


# The backbone without tokens


def test_a_backbone_takes_vectors():
    model, text = make(), tokens(2, 5)
    h, memory = model.backbone(model.embedding(text))
    assert h.shape == (2, 5, D)
    out = model(text)
    assert torch.equal(model.softmax(h, model.embedding.weight), out.logits)
    assert all(torch.equal(a, b) for a, b in zip(memory.states, out.memory.states, strict=True))


def test_a_backbone_needs_no_vocabulary():
    backbone = Backbone(ModelConfig(n_layer=2, n_head=2, d_model=D, d_inner=24, mem_len=9)).double().eval()
    h, memory, outputs = vectors(2, 9), None, []
    for segment in h.split([4, 5], 1):
        out, memory = backbone(segment, memory)
        outputs.append(out)
    close(torch.cat(outputs, 1), backbone(h)[0])


# Every setting has an effect

KNOBS = {
    "vocab_size": (V, V + 1),
    "n_layer": (2, 3),
    "n_head": (2, 4),
    "d_model": (D, 2 * D),
    "d_head": (None, 5),
    "d_inner": (24, 25),
    "d_embed": (None, 10),
    "dropout": (0.0, 0.3),
    "dropatt": (0.0, 0.3),
    "mem_len": (4, 3),
    "clamp_len": (0, 3),
    "same_length": (False, True),
    "pre_lnorm": (False, True),
    "final_norm": (True, False),
    "untie_r": (False, True),
    "memory_init": ("empty", "zeros"),
    "tie_weight": (True, False),
    "init_std": (0.3, 0.2),
    "proj_init_std": (0.3, 0.2),
}
NEEDS = {"final_norm": {"pre_lnorm": True}, "proj_init_std": {"d_embed": 10}}
SAME_PARAMETERS = {"dropout", "dropatt", "mem_len", "clamp_len", "same_length", "memory_init"}


def trained_output(**options):
    """Parameters, and the outputs of three segments in training mode, all from one seed."""
    model = make(**options).train()
    torch.manual_seed(1)
    logits = run(model, tokens(2, 9), [4, 3, 2])[0].detach()
    return dict(model.named_parameters()), logits


def test_every_setting_is_among_the_knobs():
    assert KNOBS.keys() | {"position"} == {f.name for f in dataclasses.fields(ModelConfig)}  # position has one value


@pytest.mark.parametrize("name", KNOBS)
def test_every_setting_changes_something(name):
    needs = {"dropout": 0.0} | NEEDS.get(name, {})
    (parameters, logits), (_, same), (others, changed) = (
        trained_output(**(needs | {name: value})) for value in (KNOBS[name][0], *KNOBS[name])
    )
    assert torch.equal(logits, same)  # nothing but the setting makes a difference
    equal_parameters = parameters.keys() == others.keys() and all(
        torch.equal(parameters[key], others[key]) for key in parameters
    )
    assert equal_parameters is (name in SAME_PARAMETERS)
    if logits.shape == changed.shape:
        assert (logits - changed).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["dropout", "dropatt"])
def test_dropout_settings_change_nothing_in_evaluation(name):
    close(make(**{name: 0.5})(tokens(2, 5)).logits, make(**{name: 0.0})(tokens(2, 5)).logits, 0)


@pytest.mark.parametrize("pre_lnorm", [False, True])
def test_dropout_falls_on_input_blocks_and_output(pre_lnorm):
    """As published: on the embeddings, after the attention, inside and after the feed-forward block, at the end."""
    p, seen = 0.25, {}
    model = make(n_layer=1, dropout=p, pre_lnorm=pre_lnorm).train()
    layer = model.backbone.layers[0]
    linear = [m for m in layer.feed_forward if isinstance(m, torch.nn.Linear)]

    def keep_input(module, name):
        module.register_forward_pre_hook(lambda _, args: seen.update({name: args[0].detach().clone()}))

    def keep_output(module, name):
        module.register_forward_hook(lambda _, args, out: seen.update({name: out.detach().clone()}))

    keep_input(layer, "layer input")
    keep_input(layer.feed_forward_norm if pre_lnorm else layer.attention_norm, "after attention")
    keep_output(layer.attention, "attention")
    keep_output(linear[0], "inner")
    keep_input(linear[1], "dropped inner")
    keep_output(linear[1], "feed-forward")
    keep_output(layer.feed_forward, "dropped feed-forward")
    keep_output(layer, "layer output")
    text = tokens(8, 20)
    h = model.embedding(text).detach()
    out = model.backbone(h.clone())[0]
    before = model.backbone.final_norm(seen["layer output"])
    for wanted, dropped in (
        (h, seen["layer input"]),
        (seen["attention"], seen["after attention"] - seen["layer input"]),
        (seen["inner"].clamp(min=0), seen["dropped inner"]),
        (seen["feed-forward"], seen["dropped feed-forward"]),
        (before, out),
    ):
        gone = (dropped.abs() < 1e-12) & (wanted != 0)
        assert 0.2 < gone.sum() / (wanted != 0).sum() < 0.3
        close(dropped[~gone], wanted[~gone] / (1 - p))


def test_dropatt_falls_on_attention_weights():
    """Dropped weights of a single key: the head's output is either nothing or scaled by 1 / (1 - p)."""
    model = make(n_layer=1, n_head=1, mem_len=0, dropout=0.0, dropatt=0.5).train()
    outputs = []
    model.backbone.layers[0].attention.register_forward_hook(lambda _, args, out: outputs.append(out.detach()))
    for _ in range(20):
        model(torch.tensor([[3]]))
    model.eval()(torch.tensor([[3]]))
    kept = [bool(out.any()) for out in outputs[:-1]]
    assert any(kept)
    assert not all(kept)
    for out, was_kept in zip(outputs[:-1], kept, strict=True):
        close(out, 2 * outputs[-1] if was_kept else 0 * out)


def test_the_input_is_scaled_by_the_root_of_the_width():
    model, text = make(), tokens(2, 5)
    close(model(text).memory.states[0][:, -4:], F.embedding(text, model.embedding.weight)[:, -4:] * D**0.5)
