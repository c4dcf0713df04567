"""Scoring: what is counted, that the way of counting changes nothing, and the table and picture of a sweep.

Unless a test says otherwise: float64, weights large enough that everything matters.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import english

from txl.data.corpus import DataConfig, prepare
from txl.data.shards import encode_shard
from txl.data.streams import boundaries
from txl.data.tokenizer import train_tokenizer
from txl.errors import ConfigError, DataError
from txl.evaluation import EvalConfig, Score, evaluate, picture, sweep, table
from txl.model import ModelConfig, TransformerXL

BYTES = train_tokenizer("byte", [])
TEXT = english(131)
CASES = [
    {},
    {"same_length": True},
    {"clamp_len": 4},
    {"memory_init": "zeros"},
    {"same_length": True, "clamp_len": 3, "memory_init": "zeros"},
    {"pre_lnorm": True, "untie_r": True},
]


def make(vocab_size=256, dtype=torch.float64, **options):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_inner": 24, "mem_len": 8, "init_std": 0.3}
    return TransformerXL(ModelConfig(vocab_size=vocab_size, **(sizes | options))).to(dtype).eval()


def shard_of(text, tokenizer=BYTES):
    return encode_shard(tokenizer, text.encode(), "text")


def explicit_sum(model, tokens, tgt_len, mem_len):
    """Nats of the tokens after the first: one stream, one segment after the other, from the logits."""
    tokens = torch.from_numpy(tokens.astype(np.int64))
    memory, total = model.init_memory(1, mem_len), 0.0
    for start in range(0, len(tokens) - 1, tgt_len):
        end = min(start + tgt_len, len(tokens) - 1)
        output = model(tokens[None, start:end], memory)
        memory = output.memory
        chosen = output.logits.log_softmax(-1)[0].gather(1, tokens[start + 1 : end + 1, None])
        total -= chosen.sum().item()
    return total


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("n_tokens, tgt_len", [(2, 5), (6, 5), (7, 5), (131, 5), (131, 1), (131, 200)])
def test_n_tokens_score_n_minus_1_like_one_explicit_stream(n_tokens, tgt_len, batch_size):
    model, shard = make(), shard_of(TEXT[:n_tokens])
    score = evaluate(model, shard, tgt_len=tgt_len, batch_size=batch_size)
    assert score.tokens == n_tokens - 1
    assert score.nll == pytest.approx(explicit_sum(model, shard.tokens, tgt_len, 8) / (n_tokens - 1), rel=1e-12)


@pytest.mark.parametrize("mem_len", [0, 3, 8, 10, 23])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_result_does_not_depend_on_the_batch_size(options, mem_len):
    model, shard = make(**options), shard_of(TEXT)
    wanted = explicit_sum(model, shard.tokens, 5, mem_len) / (len(shard) - 1)
    for batch_size in (1, 2, 3, 7):
        score = evaluate(model, shard, tgt_len=5, mem_len=mem_len, batch_size=batch_size)
        assert score.nll == pytest.approx(wanted, abs=1e-10), batch_size
        assert (score.tokens, score.mem_len, score.batch_size) == (len(shard) - 1, mem_len, batch_size)


def test_a_deep_model_with_a_memory_of_several_segments_is_warmed_up_through_all_layers():
    model, shard = make(n_layer=4), shard_of(TEXT)
    wanted = evaluate(model, shard, tgt_len=3, mem_len=8).nll
    assert evaluate(model, shard, tgt_len=3, mem_len=8, batch_size=2).nll == pytest.approx(wanted, abs=1e-10)


def test_cold_parts_lack_their_context():
    """The control of the tests above: without the warm-up the result does depend on the batch size."""
    model, shard = make(), shard_of(TEXT)
    warm = evaluate(model, shard, tgt_len=5, batch_size=3)
    cold = evaluate(model, shard, tgt_len=5, batch_size=3, cold=True)
    alone = evaluate(model, shard, tgt_len=5, batch_size=1, cold=True)
    assert abs(cold.nll - warm.nll) > 1e-4
    assert alone.nll == pytest.approx(warm.nll, abs=1e-10)
    assert (warm.cold, cold.cold, cold.tokens) == (False, True, warm.tokens)


def test_the_memory_matters():
    model, shard = make(), shard_of(TEXT)
    results = {evaluate(model, shard, tgt_len=5, mem_len=mem_len).nll for mem_len in (0, 4, 8, 16)}
    assert len(results) == 4


def test_one_token_at_a_time():
    """tgt_len 1 with a memory as long as the text: every token sees all before it, as in one forward pass."""
    model, shard = make(n_layer=1), shard_of(TEXT[:40])
    score = evaluate(model, shard, tgt_len=1, mem_len=40)
    assert score.nll * 39 == pytest.approx(explicit_sum(model, shard.tokens, 39, 0), rel=1e-12)


def test_more_parts_than_segments_are_not_made():
    score = evaluate(make(), shard_of(TEXT[:12]), tgt_len=5, batch_size=64)
    assert (score.batch_size, score.tokens) == (3, 11)


@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_with_cuts_each_document_is_scored_by_itself(batch_size, memory_init):
    """A document's pairs begin with its boundary as the first input; its last target is the next boundary."""
    model = make(memory_init=memory_init)
    shard = shard_of("before#" + TEXT[:17] + "#" + TEXT[40:47] + "##" + TEXT[50:90] + "#x")
    cuts = boundaries(shard.tokens, (ord("#"),))
    edges = [0, *cuts.tolist(), len(shard) - 1]
    assert len(edges) == 7
    alone = [explicit_sum(model, shard.tokens[a : b + 1], 5, 8) for a, b in itertools.pairwise(edges)]
    score = evaluate(model, shard, tgt_len=5, batch_size=batch_size, cuts=cuts)
    assert score.tokens == len(shard) - 1
    assert score.nll * score.tokens == pytest.approx(sum(alone), abs=1e-9)
    assert abs(evaluate(model, shard, tgt_len=5).nll * score.tokens - sum(alone)) > 1e-3  # the cuts matter


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe"])
def test_bits_and_perplexities_come_from_the_counts_of_the_text(kind):
    text = "Über den Dächern: naïve cafés, 1 € each.\n" * 8
    tokenizer = train_tokenizer(kind, [text.encode()], 280 if kind == "bpe" else 0)
    shard = shard_of(text, tokenizer)
    score = evaluate(make(tokenizer.vocab_size), shard, tgt_len=16)
    nats = score.nll * len(shard)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(text.encode()))
    assert score.bits_per_char == pytest.approx(nats / math.log(2) / len(text))
    assert score.ppl == pytest.approx(math.exp(score.nll))
    assert score.word_ppl == pytest.approx(
        math.exp(nats / len(text.split())) if nats / len(text.split()) < 700 else math.inf
    )
    if kind == "byte":
        assert score.bits_per_byte == pytest.approx(score.nll / math.log(2))
    if kind == "bpe":
        assert len(shard) < len(text)


def test_a_perplexity_beyond_all_bounds_is_infinite():
    score = evaluate(make(init_std=5.0), shard_of("x" * 200), tgt_len=50)
    assert score.word_ppl == math.inf and math.isfinite(score.nll)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_comes_back(training):
    model, shard = make(dropout=0.5, dropatt=0.5), shard_of(TEXT)
    wanted = evaluate(model.eval(), shard, tgt_len=5).nll
    model.train(training)
    assert evaluate(model, shard, tgt_len=5).nll == wanted
    assert all(module.training == training for module in model.modules())


def test_the_model_is_left_as_it_was():
    model = make()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    evaluate(model, shard_of(TEXT), tgt_len=5, mem_len=30, batch_size=3)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_clamp_len_and_same_length_of_the_backbone_hold_and_are_reported():
    model, shard = make(), shard_of(TEXT)
    plain = evaluate(model, shard, tgt_len=5, mem_len=20)
    model.backbone.clamp_len = 4
    clamped = evaluate(model, shard, tgt_len=5, mem_len=20)
    model.backbone.clamp_len, model.backbone.same_length = 0, True
    same = evaluate(model, shard, tgt_len=5, mem_len=20)
    assert [(s.clamp_len, s.same_length) for s in (plain, clamped, same)] == [(0, False), (4, False), (0, True)]
    assert len({plain.nll, clamped.nll, same.nll}) == 3


def test_progress_is_told_step_by_step():
    seen = []
    evaluate(make(), shard_of(TEXT[:21]), tgt_len=5, on_segment=lambda done, steps: seen.append((done, steps)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_text_of_one_token_has_nothing_to_score():
    with pytest.raises(DataError, match="at least 2 tokens"):
        evaluate(make(), shard_of("x"), tgt_len=5)


def test_autocast_around_it_changes_nothing():
    model, shard = make(dtype=torch.float32), shard_of(TEXT)
    wanted = evaluate(model, shard, tgt_len=5).nll
    with torch.autocast("cpu", torch.bfloat16):
        assert evaluate(model, shard, tgt_len=5).nll == wanted


@pytest.mark.parametrize(
    "options, fragment",
    [
        ({"every": -1}, "eval.every"),
        ({"batch_size": 0}, "eval.batch_size"),
        ({"tgt_len": 0}, "eval.tgt_len"),
        ({"mem_len": -1}, "eval.mem_len"),
        ({"tokens": -5}, "eval.tokens"),
        ({"tokens": 1}, "eval.tokens"),
        ({"mem_lens": ()}, "eval.mem_lens"),
        ({"mem_lens": (4, -1)}, "eval.mem_lens"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, fragment):
    with pytest.raises(ConfigError, match=fragment):
        EvalConfig(**options)


def test_the_first_tokens_of_a_split_are_scored_with_their_own_counts(tmp_path):
    (tmp_path / "text").write_text("naïve café\n" * 50, encoding="utf-8")
    tokenizer, shards = prepare(DataConfig(train=str(tmp_path / "text"), tokenizer="char"))
    head = shards["train"].head(22, tokenizer)
    score = evaluate(make(tokenizer.vocab_size), head, tgt_len=4)
    assert score.tokens == 21
    assert score.bits_per_byte == pytest.approx(score.nll * 22 / math.log(2) / 26)


# the sweep


@pytest.mark.parametrize("trained, wanted", [(8, [0, 8, 16, 32, 64]), (0, [0])])
def test_a_sweep_tries_multiples_of_the_trained_length(trained, wanted, capsys):
    scores = sweep(make(mem_len=trained), shard_of(TEXT), tgt_len=5)
    assert [s.mem_len for s in scores] == wanted
    assert len({s.nll for s in scores}) == len(scores)
    assert capsys.readouterr().err == ""  # no bar outside a terminal


def test_a_sweep_is_one_evaluation_a_length():
    model, shard = make(), shard_of(TEXT)
    for score in sweep(model, shard, [4, 0], tgt_len=5, batch_size=2):
        alone = evaluate(model, shard, tgt_len=5, mem_len=score.mem_len, batch_size=2)
        timeless = {"seconds": 0.0, "tokens_per_s": 0.0}
        assert dataclasses.replace(score, **timeless) == dataclasses.replace(alone, **timeless)


def made_up(mem_len, nll):
    numbers = {"bits_per_byte": nll / 2, "bits_per_char": nll / 3, "ppl": 7.5, "word_ppl": 812.25}
    settings = {"tgt_len": 4, "clamp_len": 0, "same_length": False, "batch_size": 1, "cold": False}
    return Score(mem_len=mem_len, tokens=99, nll=nll, seconds=2.0, tokens_per_s=1234.5, **settings, **numbers)


def test_the_table_has_aligned_columns_and_compares_with_the_first_row():
    lines = table([made_up(0, 2.0), made_up(64, 1.5), made_up(1024, 2.25)], 128).split("\n")
    assert len({len(line) for line in lines}) == 1
    assert [" ".join(line.split()) for line in lines] == [
        "memory nats/token change bits/byte bits/char perplexity ppl/word tokens/s",
        "0 0x 2.0000 1.0000 0.6667 7.500 812.2 1,234",
        "64 0.5x 1.5000 -25.00 % 0.7500 0.5000 7.500 812.2 1,234",
        "1024 8x 2.2500 +12.50 % 1.1250 0.7500 7.500 812.2 1,234",
    ]


def test_the_table_of_a_word_model_does_not_say_the_same_twice():
    assert "ppl/word" not in table([made_up(0, 2.0)], 0, word_level=True)
    assert "0x" not in table([made_up(0, 2.0)], 0)  # no trained memory to be a multiple of


def test_the_picture_is_a_png(tmp_path):
    path = tmp_path / "memory.png"
    picture([made_up(8, 2.0), made_up(0, 3.0)], 8, "title", path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in data[-16:]


@pytest.mark.parametrize("given", [{"clamp_len": 3}, {"same_length": True}, {"clamp_len": 2, "same_length": True}])
def test_settings_of_the_evaluation_are_those_of_such_a_model_and_leave_it_as_it_was(given):
    model, wanted = make(), make(**given)  # the same weights
    score = evaluate(model, shard_of(TEXT), tgt_len=5, **given)
    assert score.nll == evaluate(wanted, shard_of(TEXT), tgt_len=5).nll
    assert score.nll != evaluate(model, shard_of(TEXT), tgt_len=5).nll
    assert (score.clamp_len, score.same_length) == (given.get("clamp_len", 0), given.get("same_length", False))
    assert (model.backbone.clamp_len, model.backbone.same_length) == (0, False)


def test_a_trained_setting_can_be_turned_off():
    model = make(clamp_len=2, same_length=True)
    assert evaluate(model, shard_of(TEXT), tgt_len=5, clamp_len=0, same_length=False).nll == (
        evaluate(make(), shard_of(TEXT), tgt_len=5).nll
    )
